"""Training runs of the built-in backends with every combination of axes that four processes can have."""

from __future__ import annotations

import dataclasses
from typing import Any, Final

from torch import Tensor, nn

from accel_plugins.ddp.manifest import MANIFEST as DDP
from accel_plugins.fsdp.config import FullyShardedDataParallelPlugin
from accel_plugins.fsdp.manifest import FSDP1, FSDP2
from accel_plugins.manifest import Axis, Manifest
from accel_plugins.mesh import PERMITTED, takes
from accel_plugins.testing import Case
from accel_plugins.testing.sequences import PLAN, sequences
from accel_plugins.transform import Transform
from accel_plugins.transforms.tensor_parallel import TensorParallel
from accel_state.mesh import ParallelismConfig

__all__ = ("BY_BLOCK", "COMBINATIONS", "case_of", "data", "loss_of", "name_of")

SAMPLES, STEPS = 4, 3
BY_BLOCK = FullyShardedDataParallelPlugin(
    2, auto_wrap_policy="TRANSFORMER_BASED_WRAP", transformer_cls_names_to_wrap=["AttentionBlock"]
)
"""Each block is sharded by itself."""
_CONFIGS: Final = {"fsdp1": dataclasses.replace(BY_BLOCK, fsdp_version=1), "fsdp2": BY_BLOCK}

COMBINATIONS: list[tuple[Manifest, frozenset[Axis]]] = [
    (manifest, combination.axes)
    for combination in PERMITTED
    for manifest in (DDP, FSDP1, FSDP2)
    if takes(manifest, combination.axes) and len(combination.axes) <= 2
]
"""Every backend with every combination that it takes and that four processes can have."""


def data() -> list[tuple[Tensor, Tensor]]:
    """Global batches."""
    inputs, targets = sequences(SAMPLES * STEPS)
    return list(zip(inputs.chunk(STEPS), targets.chunk(STEPS), strict=True))


def loss_of(model: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
    """Mean of squares."""
    return nn.functional.mse_loss(model(inputs), targets)


def case_of(manifest: Manifest, axes: frozenset[Axis], *more: Transform) -> Case:
    """A run of four processes, or of eight with three axes."""
    sizes: dict[str, Any] = {f"{axis.value}_size": 4 if len(axes) == 1 else 2 for axis in axes}
    if Axis.SEQUENCE in axes:
        sizes["sp_backend"] = "torch"
    transforms = (TensorParallel(PLAN), *more) if Axis.TENSOR in axes else more
    parallelism_config = ParallelismConfig(**sizes) if sizes else None
    return Case(manifest, _CONFIGS.get(manifest.name), parallelism_config=parallelism_config, transforms=transforms)


def name_of(value: object) -> str | None:
    """How a combination is called among the names of tests."""
    if isinstance(value, Manifest):
        return value.name
    if isinstance(value, frozenset):
        return "-".join(sorted(axis.value for axis in value)) or "plain"
    return None
