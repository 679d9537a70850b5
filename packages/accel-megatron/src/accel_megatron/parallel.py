"""Megatron-LM's process groups, reductions over them, and its modules, which are imported on first use.

Engines, train steps and placeholders can thus be imported without Megatron-LM.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import Any, Final, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from accel_megatron.config import MegatronLMPlugin
from accel_megatron.manifest import REQUIREMENT
from accel_state.errors import Conflict, NotOffered, SettingError

__all__ = (
    "MegatronContext",
    "avg_losses_across_data_parallel_group",
    "create_groups",
    "demand_cuda",
    "dist_checkpointing",
    "from_last_stage",
    "gather_across_data_parallel_groups",
    "mapping",
    "parallel_state",
    "pipeline_parallel",
    "seed",
    "size_of_one_model",
    "tensor_parallel",
    "tools",
)


class _Module:
    """A placeholder for a module until the first access to an attribute.

    Args:
        name: name of the module.

    Raises:
        Missing: Megatron-LM is not installed.
    """

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, attribute: str) -> Any:
        if attribute.startswith("__"):
            raise AttributeError(attribute)
        REQUIREMENT.demand(f"Cannot use {self._name}.{attribute}.")
        value = getattr(importlib.import_module(self._name), attribute)
        vars(self)[attribute] = value
        return value


parallel_state: Final[Any] = _Module("megatron.core.parallel_state")
tensor_parallel: Final[Any] = _Module("megatron.core.tensor_parallel")
pipeline_parallel: Final[Any] = _Module("megatron.core.pipeline_parallel")
dist_checkpointing: Final[Any] = _Module("megatron.core.dist_checkpointing")
mapping: Final[Any] = _Module("megatron.core.dist_checkpointing.mapping")
tools: Final[Any] = _Module("megatron.core.utils")


_DEFAULT_SEED: Final = 1234


class MegatronContext(NamedTuple):
    """The data of the run that a train step may use, with the names of an Accelerator's attributes.

    Args:
        megatron_lm_plugin: the settings.
        device: the device of this process.
    """

    megatron_lm_plugin: MegatronLMPlugin
    device: torch.device

    @property
    def state(self) -> MegatronContext:
        """This object: scripts read `accelerator.state.megatron_lm_plugin`."""
        return self


def demand_cuda() -> None:
    """Raise without CUDA, because Megatron-LM would fail in the middle of the first step.

    Raises:
        NotOffered: there is no CUDA device.
    """
    if not torch.cuda.is_available():
        raise NotOffered(
            "Cannot use Megatron-LM.",
            "Its layers, optimizer and pipeline support only CUDA devices, and this process has none.",
            "Start on machines with NVIDIA GPUs, or use the backend 'fsdp2', with tensor parallelism where needed.",
        )


def size_of_one_model(plugin: MegatronLMPlugin) -> int:
    """Number of processes that together have one copy of the model."""
    return plugin.tp_degree * plugin.pp_degree * plugin.context_parallel_size


def create_groups(plugin: MegatronLMPlugin) -> None:
    """Create the process groups; called once on every process. Existing groups of the same sizes are reused.

    Raises:
        SettingError: the number of processes is not a multiple of that of one model.
        Conflict: groups of other sizes exist already.
    """
    megatron_args, processes = plugin.megatron_lm_default_args, dist.get_world_size()
    if processes % size_of_one_model(plugin):
        raise SettingError(
            f"Cannot use Megatron-LM with tp_degree={plugin.tp_degree}, pp_degree={plugin.pp_degree} and "
            f"context_parallel_size={plugin.context_parallel_size}.",
            f"One model needs {size_of_one_model(plugin)} processes, and {processes} is not a multiple of that.",
            "Change the degrees or the number of processes.",
        )
    if parallel_state.model_parallel_is_initialized():
        _check_same(plugin)
        return
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=plugin.tp_degree,
        pipeline_model_parallel_size=plugin.pp_degree,
        context_parallel_size=plugin.context_parallel_size,
        expert_model_parallel_size=plugin.expert_model_parallel_size,
        expert_tensor_parallel_size=plugin.expert_tensor_parallel_size,
        distributed_timeout_minutes=megatron_args.get("distributed_timeout_minutes", 30),
    )


def _check_same(plugin: MegatronLMPlugin) -> None:
    existing = (
        parallel_state.get_tensor_model_parallel_world_size(),
        parallel_state.get_pipeline_model_parallel_world_size(),
        parallel_state.get_context_parallel_world_size(),
        parallel_state.get_expert_model_parallel_world_size(),
    )
    configured = (
        plugin.tp_degree,
        plugin.pp_degree,
        plugin.context_parallel_size,
        plugin.expert_model_parallel_size,
    )
    if existing != configured:
        raise Conflict(
            f"Cannot use the degrees {configured} of Megatron-LM (tensor, pipeline, context, expert).",
            f"Process groups of the degrees {existing} exist already.",
            "Use the same degrees, or end the other run first.",
        )


def seed(plugin: MegatronLMPlugin) -> None:
    """Seed the generators, so that dropout differs between shards of a tensor and is equal for its replicas.

    The settings may contain the seed: `other_megatron_args={"seed": 1}`.
    """
    number = int(plugin.megatron_lm_default_args.get("seed", _DEFAULT_SEED))
    # Pipeline stages have different layers; layers of equal sizes must not have equal initial weights.
    torch.manual_seed(number + 100 * parallel_state.get_pipeline_model_parallel_rank())
    tensor_parallel.model_parallel_cuda_manual_seed(number + 100 * parallel_state.get_pipeline_model_parallel_rank())


def avg_losses_across_data_parallel_group(losses: Sequence[Tensor]) -> Tensor:
    """The mean of each loss over the data-parallel processes.

    Args:
        losses: scalar tensors.

    Returns:
        One tensor with the means, in the same order.
    """
    together = torch.cat([loss.detach().clone().view(1) for loss in losses])
    group = parallel_state.get_data_parallel_group()
    dist.all_reduce(together, group=group)
    return together / dist.get_world_size(group)


def gather_across_data_parallel_groups(tensor: Any) -> Any:
    """The tensors of all data-parallel processes, concatenated along the first dimension.

    Args:
        tensor: a tensor with at least one dimension, or a nested container of them; with equal shapes on all processes.
    """
    from accel_ops import recursively_apply

    group = parallel_state.get_data_parallel_group()

    def gather(one: Tensor) -> Tensor:
        rows = one.view(1) if one.ndim == 0 else one
        everyones = [torch.empty_like(rows) for _ in range(dist.get_world_size(group))]
        dist.all_gather(everyones, rows.contiguous(), group=group)
        return torch.cat(everyones)

    return recursively_apply(gather, tensor, error_on_other_type=True)


def from_last_stage(tensor: Tensor) -> Tensor:
    """Broadcast a tensor of the last pipeline stage; other stages pass a tensor of the same shape, which is filled."""
    if parallel_state.get_pipeline_model_parallel_world_size() > 1:
        source = parallel_state.get_pipeline_model_parallel_last_rank()
        dist.broadcast(tensor, src=source, group=parallel_state.get_pipeline_model_parallel_group())
    return tensor
