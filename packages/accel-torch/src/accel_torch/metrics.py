"""Collecting the results of an evaluation from all processes, each sample once."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from accel_data import Padding, drop_padding
from accel_data.mesh import coordinates
from accel_ops.collectives import gather
from accel_ops.objects import gather_object
from accel_ops.tree import leaves_with_paths, recursively_apply
from accel_state import current

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from accel_state.gradient import GradientState

__all__ = ("gather_for_metrics",)


def gather_for_metrics(
    gradient: GradientState, input_data: Any, use_gather_object: bool = False, mesh: DeviceMesh | None = None
) -> Any:
    """Gather the results of all processes for the current batch, without the samples that `even_batches` added.

    Args:
        gradient: has the active loader, or the one that yielded its last batch.
        input_data: a pytree of tensors, or picklable objects.
        use_gather_object: pickle tensors too, which allows different shapes.
        mesh: the device mesh; of processes that read the same samples, one is kept.
    """
    tensors = not use_gather_object and any(isinstance(leaf, torch.Tensor) for _, leaf in leaves_with_paths(input_data))
    gathered = gather(input_data) if tensors else gather_object(input_data)
    if mesh is not None:
        gathered = _one_of_each(gathered, mesh, tensors)
    loader: Any = gradient.left if gradient.active_dataloader is None else gradient.active_dataloader
    if loader is None:
        return gathered
    padding, full_batch = loader.progress.padding, _full_batch(loader, mesh)
    if padding is None and full_batch and loader.progress.end_of_dataloader and loader.progress.remainder > 0:
        padding = Padding(loader.progress.remainder, full_batch, _readers(mesh))
    return drop_padding(gathered, padding, full_batch) if tensors else _real_objects(gathered, padding)


def _full_batch(loader: Any, mesh: DeviceMesh | None) -> int | None:
    """Samples of one process in a full step; None if batches have no size."""
    size: int | None = loader.source.step_size
    return None if size is None else size // _readers(mesh)


def _readers(mesh: DeviceMesh | None) -> int:
    """The number of processes that read different samples."""
    return current.process().world_size if mesh is None else len(set(coordinates(mesh, mesh.size())))


def _one_of_each(gathered: Any, mesh: DeviceMesh, tensors: bool) -> Any:
    """The gathered values, from one of each group of processes that read the same samples."""
    parts = coordinates(mesh, mesh.size())
    chosen = [parts.index(part) for part in range(max(parts) + 1)]
    if not tensors:
        size = len(gathered) // len(parts)
        return [item for rank in chosen for item in gathered[rank * size : (rank + 1) * size]]
    return recursively_apply(lambda tensor: tensor.unflatten(0, (len(parts), -1))[chosen].flatten(0, 1), gathered)


def _real_objects(gathered: list[Any], padding: Padding | None) -> list[Any]:
    """The objects of real samples, if each process gave one object for each sample of its batch."""
    if not padding:
        return gathered
    # Unbatched samples are entirely real or entirely added, so every process gave equally many objects.
    size = padding.batch_size or len(gathered) // padding.processes
    if len(gathered) != size * padding.processes:
        return gathered
    return [
        item
        for process in range(padding.processes)
        for item in gathered[process * size : (process + 1) * size][: padding.of(process)]
    ]
