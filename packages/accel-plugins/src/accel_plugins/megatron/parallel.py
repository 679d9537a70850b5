"""Process groups over which Megatron-LM shards a model, reductions over them, and its modules, imported on first use.

So engines, train steps and placeholders can be imported where Megatron-LM is not installed.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import Any, Final, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from accel_plugins.megatron.config import MegatronLMPlugin
from accel_plugins.megatron.manifest import REQUIREMENT
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
        name: the module's.

    Raises:
        Missing: Megatron-LM is not installed.
    """

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, attribute: str) -> Any:
        if attribute.startswith("__"):
            raise AttributeError(attribute)
        REQUIREMENT.demand(f"Cannot use {self._name}.{attribute}.")
        found = getattr(importlib.import_module(self._name), attribute)
        vars(self)[attribute] = found
        return found


parallel_state: Final[Any] = _Module("megatron.core.parallel_state")
tensor_parallel: Final[Any] = _Module("megatron.core.tensor_parallel")
pipeline_parallel: Final[Any] = _Module("megatron.core.pipeline_parallel")
dist_checkpointing: Final[Any] = _Module("megatron.core.dist_checkpointing")
mapping: Final[Any] = _Module("megatron.core.dist_checkpointing.mapping")
tools: Final[Any] = _Module("megatron.core.utils")


_DEFAULT_SEED: Final = 1234


class MegatronContext(NamedTuple):
    """What a train step may ask of the run, by the names that scripts use of an Accelerator.

    Args:
        megatron_lm_plugin: the settings.
        device: where this process computes.
    """

    megatron_lm_plugin: MegatronLMPlugin
    device: torch.device

    @property
    def state(self) -> MegatronContext:
        """Itself: scripts read `accelerator.state.megatron_lm_plugin`."""
        return self


def demand_cuda() -> None:
    """Refuse a process without CUDA: Megatron-LM would fail in the middle of the first step.

    Raises:
        NotOffered: there is no CUDA device.
    """
    if not torch.cuda.is_available():
        raise NotOffered(
            "Cannot use Megatron-LM.",
            "Its layers, its optimizer and its pipeline compute on CUDA devices only, and this process has none.",
            "Start on machines with NVIDIA GPUs, or use the backend 'fsdp2', with tensor parallelism where needed.",
        )


def size_of_one_model(plugin: MegatronLMPlugin) -> int:
    """Processes that hold one copy of the model together."""
    return plugin.tp_degree * plugin.pp_degree * plugin.context_parallel_size


def create_groups(plugin: MegatronLMPlugin) -> None:
    """Make the groups of processes; called on every process, once. Existing groups of the same sizes are kept.

    Raises:
        SettingError: the number of processes is not a multiple of the model's.
        Conflict: groups of other sizes exist already.
    """
    megatron_args, processes = plugin.megatron_lm_default_args, dist.get_world_size()
    if processes % size_of_one_model(plugin):
        raise SettingError(
            f"Cannot use Megatron-LM with tp_degree={plugin.tp_degree}, pp_degree={plugin.pp_degree} and "
            f"context_parallel_size={plugin.context_parallel_size}.",
            f"One model takes {size_of_one_model(plugin)} processes, and {processes} is not a multiple of that.",
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
    asked = (
        plugin.tp_degree,
        plugin.pp_degree,
        plugin.context_parallel_size,
        plugin.expert_model_parallel_size,
    )
    if existing != asked:
        raise Conflict(
            f"Cannot use the degrees {asked} of Megatron-LM (tensor, pipeline, context, expert).",
            f"Process groups of the degrees {existing} exist already.",
            "Use the same degrees, or end the other run first.",
        )


def seed(plugin: MegatronLMPlugin) -> None:
    """Seed the generators, so that parts of a tensor are dropped differently and copies of it alike.

    The settings may say the seed: `other_megatron_args={"seed": 1}`.
    """
    number = int(plugin.megatron_lm_default_args.get("seed", _DEFAULT_SEED))
    # Stages of a pipeline hold different layers; those of equal sizes must not begin with equal weights.
    torch.manual_seed(number + 100 * parallel_state.get_pipeline_model_parallel_rank())
    tensor_parallel.model_parallel_cuda_manual_seed(number + 100 * parallel_state.get_pipeline_model_parallel_rank())


def avg_losses_across_data_parallel_group(losses: Sequence[Tensor]) -> Tensor:
    """Mean of each loss over the processes that see different samples.

    Args:
        losses: scalars.

    Returns:
        As many numbers, in one tensor.
    """
    together = torch.cat([loss.detach().clone().view(1) for loss in losses])
    group = parallel_state.get_data_parallel_group()
    dist.all_reduce(together, group=group)
    return together / dist.get_world_size(group)


def gather_across_data_parallel_groups(tensor: Any) -> Any:
    """The tensors of all processes that see different samples, joined along their first dimension.

    Args:
        tensor: a tensor with one dimension at least, or a nested container of those; of equal shapes everywhere.
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
    """A tensor as the last stage of the pipeline has it; the others bring one of the same shape to be filled."""
    if parallel_state.get_pipeline_model_parallel_world_size() > 1:
        source = parallel_state.get_pipeline_model_parallel_last_rank()
        dist.broadcast(tensor, src=source, group=parallel_state.get_pipeline_model_parallel_group())
    return tensor
