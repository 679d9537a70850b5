"""Models that arrive distributed: with parameters that are DTensors, or sharded by `fully_shard`, before `prepare`.

They are not sharded again. Their own meshes tell who reads which samples: a process reads the same samples as another
one if they are neighbours along an axis over which parameters are sharded, other than those of `fully_shard`. Gradients
that the model does not reduce over the others are averaged here.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final, NamedTuple

import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn import Module, Parameter
from torch.utils.weak import WeakIdKeyDictionary

from accel_ops.dtensors import with_shard
from accel_ops.objects import gather_object
from accel_plugins.shards import Shards
from accel_plugins.unreduced import UnreducedGradients
from accel_state.current import Process
from accel_state.errors import Conflict

__all__ = ("ArrivedGradients", "ArrivedLayout", "arrived_layout", "arrives_distributed", "parameter_groups")

_logger: Final = logging.getLogger(__name__)

Ranks = tuple[int, ...]


class ArrivedLayout(NamedTuple):
    """How the processes share a model that arrived distributed.

    Args:
        batch_shard: the shard of each batch that this process reads.
        averaged_over: for each parameter, in the order of the model, the processes over which its gradient is still to
            be averaged; empty if there are none.
        groups: all such groups of processes of the run, in an order that is equal on all processes.
    """

    batch_shard: Shards
    averaged_over: tuple[Ranks, ...]
    groups: tuple[Ranks, ...]


def parameter_groups(module: FSDPModule) -> Iterable[Any]:
    """Torch's objects that gather the parameters of one module and reduce their gradients."""
    state: Any = module._get_fsdp_state()
    if hasattr(state, "_fsdp_param_groups"):
        groups: list[Any] = state._fsdp_param_groups
        return groups
    # An older torch, in which a module has one or none.
    return () if state._fsdp_param_group is None else (state._fsdp_param_group,)


def _axes(mesh: DeviceMesh) -> list[Ranks]:
    """The processes along each axis of a mesh, from this process."""
    return [tuple(dist.get_process_group_ranks(mesh.get_group(index))) for index in range(mesh.ndim)]


class _Part(NamedTuple):
    """What a process has of one parameter.

    Args:
        place: its place along each axis over which the parameter is sharded; equal for replicas of the same part.
        reduced: the processes over which `fully_shard` averages the gradient.
    """

    place: tuple[tuple[int, int], ...]
    reduced: Ranks


def arrives_distributed(model: Module) -> bool:
    """Whether a model has parameters that are DTensors, or modules that `fully_shard` has sharded."""
    return any(isinstance(module, FSDPModule) for module in model.modules()) or any(
        isinstance(parameter, DTensor) for parameter in model.parameters()
    )


def arrived_layout(model: Module, process: Process) -> ArrivedLayout:
    """Find how the processes share a model that arrived distributed; called on every process.

    Raises:
        Conflict: the axes give some samples to more processes than others.
    """
    sharded = [module for module in model.modules() if isinstance(module, FSDPModule)]
    meshes = [group.mesh_info.mesh for module in sharded for group in parameter_groups(module)]
    over = {ranks: tuple(mesh.mesh.flatten().tolist()) for mesh in meshes for ranks in _axes(mesh)}
    parts, model_axes = list[_Part](), set[Ranks]()
    for parameter in model.parameters():
        axes = _sharded_axes(parameter)
        model_axes |= {ranks for _, ranks, _ in axes if ranks not in over}
        reduced = sorted({rank for _, ranks, _ in axes for rank in over.get(ranks, ())})
        parts.append(_Part(tuple((index, place) for index, _, place in axes), tuple(reduced)))
    everyones: list[tuple[list[Ranks], list[_Part]]] = gather_object([(sorted(model_axes), parts)])
    readers = _readers([axes for axes, _ in everyones])
    shards = sorted(set(readers))
    if len({len(together) for together in shards}) > 1:
        raise Conflict(
            f"Cannot prepare {type(model).__name__}.",
            f"By its meshes, these processes read the same samples: {shards}. Some samples would count more.",
            "Shard the model over all processes, in groups of the same size.",
        )
    averaged_over, groups = list[Ranks](), set[Ranks]()
    for index in range(len(parts)):
        replicas = dict[Any, list[int]]()
        for rank, (_, theirs) in enumerate(everyones):
            replicas.setdefault(theirs[index].place, []).append(rank)
        wanting = {
            tuple(ranks)
            for ranks in replicas.values()
            if not set(ranks) <= set(everyones[ranks[0]][1][index].reduced or readers[ranks[0]])
        }
        groups |= wanting
        averaged_over.append(next((ranks for ranks in wanting if process.rank in ranks), ()))
    own = Shards(len(shards), shards.index(readers[process.rank]))
    _log(model, own, over, model_axes)
    return ArrivedLayout(own, tuple(averaged_over), tuple(sorted(groups)))


def _sharded_axes(parameter: Any) -> list[tuple[int, Ranks, int]]:
    """The axes over which a parameter is sharded: index in its mesh, processes, and the place of this process."""
    if not isinstance(parameter, DTensor):
        return []
    mesh = parameter.device_mesh
    return [
        (index, ranks, mesh.get_local_rank(index))
        for index, (ranks, placement) in enumerate(zip(_axes(mesh), parameter.placements, strict=True))
        if not placement.is_replicate()
    ]


def _readers(axes: Sequence[Sequence[Ranks]]) -> list[Ranks]:
    """For each process, those that read the same samples: its neighbours along the given axes, and theirs."""
    together = [{rank} for rank in range(len(axes))]
    for ranks in (ranks for own in axes for ranks in own):
        joined = set().union(*(together[rank] for rank in ranks))
        for rank in joined:
            together[rank] = joined
    return [tuple(sorted(ranks)) for ranks in together]


def _log(model: Module, shards: Shards, data_axes: Iterable[Ranks], model_axes: Iterable[Ranks]) -> None:
    _logger.info(
        "%s arrives distributed and is not sharded again. Data axes: %s of fully_shard, and all processes beside %s "
        "over which parameters are sharded; this process reads shard %d of %d of each batch.",
        type(model).__name__,
        sorted(data_axes) or "none",
        sorted(model_axes) or "none",
        shards.index,
        shards.count,
    )


class ArrivedGradients(UnreducedGradients):
    """Averages the gradients that a model which arrived distributed does not reduce itself.

    Args:
        model: the model.
        layout: how the processes share it.
        process: this process.
        reduces: whether backward reduces gradients now.
    """

    def __init__(self, model: Module, layout: ArrivedLayout, process: Process, reduces: Callable[[], bool]) -> None:
        groups = {ranks: self._group(ranks, process.world_size) for ranks in layout.groups}
        self._groups: Any = WeakIdKeyDictionary()
        own = list(zip(model.parameters(), layout.averaged_over, strict=True))
        for parameter, ranks in own:
            if ranks:
                self._groups[parameter] = groups[ranks]
        wanting = [parameter for parameter, ranks in own if ranks]
        super().__init__(model, wanting, process.transport, reduces, replaces=True)

    @staticmethod
    def _group(ranks: Ranks, world_size: int) -> Any:
        return dist.group.WORLD if len(ranks) == world_size else dist.new_group(list(ranks))

    def _add(self, parameter: Parameter) -> None:
        self._parameters[parameter] = None

    def _average_alike(self, parameters: list[Tensor]) -> None:
        by_group: dict[Any, list[Tensor]] = {}
        for parameter in parameters:
            by_group.setdefault(self._groups.get(parameter, dist.group.WORLD), []).append(parameter)
        for group, alike in by_group.items():
            # The parts of this process, with gradients that share memory with those of the parameters.
            parts = [_part_of(parameter) for parameter in alike]
            self._average_parts(parts, lambda flat, group=group: _mean(flat, group))  # type: ignore[misc]
            for parameter, part in zip(alike, parts, strict=True):
                if parameter.grad is None and part.grad is not None:
                    arrived = isinstance(parameter, DTensor)
                    parameter.grad = with_shard(parameter, part.grad) if arrived else part.grad


def _part_of(parameter: Any) -> Tensor:
    """This process's part of a parameter, with its part of the gradient."""
    if isinstance(parameter.grad, DTensor) and parameter.grad.placements != parameter.placements:
        # Torch leaves gradients as its operations return them, perhaps whole.
        parameter.grad = parameter.grad.redistribute(placements=parameter.placements)
    detached, gradient = parameter.detach(), parameter.grad
    part: Tensor = detached.to_local() if isinstance(detached, DTensor) else detached
    if gradient is not None:
        part.grad = gradient.to_local() if isinstance(gradient, DTensor) else gradient
    return part


def _mean(flat: Tensor, group: Any) -> Tensor:
    dist.all_reduce(flat, group=group)
    return flat / dist.get_world_size(group)
