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
    """What all processes computed for the batch given out last, without the samples that were added for evenness.

    Args:
        gradient: knows the loader in iteration, or that was left at its last batch.
        input_data: tensors in any nesting, or objects.
        use_gather_object: gather as objects even if there are tensors; for tensors of different shapes.
        mesh: where processes that differ in no data axis read the same samples, of which one is kept.
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
    """Samples of one process in a full step; None where batches have no size of their own."""
    size: int | None = loader.source.step_size
    return None if size is None else size // _readers(mesh)


def _readers(mesh: DeviceMesh | None) -> int:
    """How many processes read different samples."""
    return current.process().world_size if mesh is None else len(set(coordinates(mesh, mesh.size())))


def _one_of_each(gathered: Any, mesh: DeviceMesh, tensors: bool) -> Any:
    """What was gathered, from one of the processes that read the same samples each."""
    parts = coordinates(mesh, mesh.size())
    chosen = [parts.index(part) for part in range(max(parts) + 1)]
    if not tensors:
        size = len(gathered) // len(parts)
        return [item for rank in chosen for item in gathered[rank * size : (rank + 1) * size]]
    return recursively_apply(lambda tensor: tensor.unflatten(0, (len(parts), -1))[chosen].flatten(0, 1), gathered)


def _real_objects(gathered: list[Any], padding: Padding | None) -> list[Any]:
    """Objects of real samples, where each process gave one for every sample of its batch."""
    if not padding:
        return gathered
    # Samples that are not batched are real as a whole or not at all, so every process gave as many objects.
    size = padding.batch_size or len(gathered) // padding.processes
    if len(gathered) != size * padding.processes:
        return gathered
    return [
        item
        for process in range(padding.processes)
        for item in gathered[process * size : (process + 1) * size][: padding.of(process)]
    ]
