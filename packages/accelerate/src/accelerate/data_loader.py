"""What is found at the old address `accelerate.data_loader`.

Written by tools/gen_alias.py from accelerate/names: change that table, not this file.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from accelerate.address import serve

if TYPE_CHECKING:
    from accel_data.adapter import DataLoaderAdapter
    from accel_data.dispatcher import DataLoaderDispatcher
    from accel_data.iterable import IterableDatasetShard
    from accel_data.loader import DataLoaderShard
    from accel_data.prepare import get_sampler, prepare_data_loader
    from accel_data.prepared import DataLoaderStateMixin
    from accel_data.samplers import BatchSamplerShard, SeedableRandomSampler, SkipBatchSampler
    from accel_data.skip import SkipDataLoader, skip_first_batches
    from accel_ops.collectives import broadcast as broadcast
    from accel_ops.measure import find_batch_size as find_batch_size
    from accel_ops.measure import get_data_structure as get_data_structure
    from accel_ops.measure import initialize_tensors as initialize_tensors
    from accel_ops.move import send_to_device as send_to_device
    from accel_ops.objects import broadcast_object_list as broadcast_object_list
    from accel_ops.rng import synchronize_rng_states as synchronize_rng_states
    from accel_ops.shape import concatenate as concatenate
    from accel_ops.shape import slice_tensors as slice_tensors
    from accel_state.availability import is_datasets_available as is_datasets_available
    from accel_state.availability import is_torch_xla_available as is_torch_xla_available
    from accel_state.availability import (
        is_torchdata_stateful_dataloader_available as is_torchdata_stateful_dataloader_available,
    )
    from accel_state.gradient import GradientState as GradientState
    from accel_state.labels import DistributedType as DistributedType
    from accel_state.labels import RNGType as RNGType
    from accel_state.logging import get_logger as get_logger
    from accel_state.process import PartialState as PartialState
    from accel_state.settings.versions import compare_versions as compare_versions
    from accel_state.settings.versions import is_torch_version as is_torch_version

__all__ = (
    "BatchSamplerShard",
    "DataLoaderAdapter",
    "DataLoaderDispatcher",
    "DataLoaderShard",
    "DataLoaderStateMixin",
    "IterableDatasetShard",
    "SeedableRandomSampler",
    "SkipBatchSampler",
    "SkipDataLoader",
    "get_sampler",
    "prepare_data_loader",
    "skip_first_batches",
)

serve(__name__)
