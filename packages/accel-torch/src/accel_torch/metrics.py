"""Collecting the results of an evaluation from all processes, each sample once."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from accel_data import Padding, PreparedLoader, drop_padding
from accel_data.mesh import coordinates
from accel_data.sharding import StepCounts
from accel_ops.collectives import gather
from accel_ops.objects import gather_object, is_list_of_items
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
    if use_gather_object or not any(isinstance(leaf, torch.Tensor) for _, leaf in leaves_with_paths(input_data)):
        return _gathered_objects(gradient, input_data, mesh)
    loader = _loader(gradient)
    counts = loader.progress.padding if isinstance(loader, PreparedLoader) else None
    if isinstance(counts, StepCounts) and current.process().world_size > 1:
        return _gathered_in_own_sizes(input_data, counts, loader.source.index, mesh)
    gathered = gather(input_data)
    if mesh is not None:
        chosen, processes = _one_of_each(mesh)
        gathered = recursively_apply(
            lambda tensor: tensor.unflatten(0, (processes, -1))[chosen].flatten(0, 1), gathered
        )
    if not isinstance(loader, PreparedLoader):
        return recursively_apply(_first_samples, gathered, loader)
    padding, full_batch = _padding(loader, mesh)
    return drop_padding(gathered, padding, full_batch)


def _gathered_in_own_sizes(data: Any, counts: StepCounts, index: int, mesh: DeviceMesh | None) -> Any:
    """Gather the results of a step in which each process has another number of samples, or only a stand-in.

    Tensors have rows for samples, equally many for each sample, or one row for the whole batch.
    """
    tensors = [leaf for _, leaf in leaves_with_paths(data) if isinstance(leaf, torch.Tensor)]
    everyones = gather_object([[tensor.shape[0] if tensor.ndim else 1 for tensor in tensors]])
    chosen = list(range(len(everyones))) if mesh is None else _one_of_each(mesh)[0]
    kept = iter([_kept_rows([everyones[process][leaf] for process in chosen], counts) for leaf in range(len(tensors))])

    def gathered(tensor: torch.Tensor) -> torch.Tensor:
        rows = next(kept)
        own = tensor[None] if tensor.ndim == 0 else tensor
        own = own[: rows[index]]
        padded = torch.cat([own, own.new_zeros(max(rows) - own.shape[0], *own.shape[1:])])
        pieces = gather(padded).unflatten(0, (len(everyones), -1))
        return torch.cat([pieces[process][:count] for process, count in zip(chosen, rows, strict=True)])

    return recursively_apply(gathered, data)


def _kept_rows(rows: list[int], counts: StepCounts) -> list[int]:
    """The rows of each process's tensor that belong to real samples."""
    samples = [counts.of(process) or 0 for process in range(counts.processes)]
    pairs = [(own, count) for own, count in zip(rows, samples, strict=True) if count]
    if all(own == 1 for own, _ in pairs):
        return [min(count, 1) for count in samples]
    per_sample = pairs[0][0] // pairs[0][1]
    if all(own == per_sample * count for own, count in pairs):
        return [per_sample * count for count in samples]
    # These rows are not samples.
    return [own if count else 0 for own, count in zip(rows, samples, strict=True)]


def _loader(gradient: GradientState) -> Any:
    """The loader that yielded the batch, or None."""
    return gradient.left if gradient.active_dataloader is None else gradient.active_dataloader


def _first_samples(gathered: Any, loader: Any) -> Any:
    """The real samples of a step of another library's loader, which has only a remainder: they come first."""
    if loader is None or not loader.end_of_dataloader or loader.remainder <= 0:
        return gathered
    has_samples = isinstance(gathered, (list, tuple)) or getattr(gathered, "ndim", 0) > 0
    return gathered[: loader.remainder] if has_samples else gathered


def _gathered_objects(gradient: GradientState, objects: Any, mesh: DeviceMesh | None) -> Any:
    """The objects of all processes, without those of added samples."""
    loader = _loader(gradient)
    is_ours = isinstance(loader, PreparedLoader)
    padding = _padding(loader, mesh)[0] if is_ours else None
    if current.process().world_size == 1:
        gathered = _without_added(gather_object(objects), padding)
        return gathered if is_ours else _first_samples(gathered, loader)
    if not is_list_of_items(objects):
        # Raises the error.
        return gather_object(objects)
    # In a list for each process, because lengths may differ.
    by_process = gather_object([list(objects)])
    if mesh is not None:
        by_process = [by_process[process] for process in _one_of_each(mesh)[0]]
    gathered = _real_objects(by_process, padding)
    return gathered if is_ours else _first_samples(gathered, loader)


def _without_added(objects: Any, padding: Padding | None) -> Any:
    """The objects of the only process: sliced if they are one for each sample of a padded batch, else unchanged."""
    count = None if padding is None else padding.of(0)
    # A tensor or an array has dimensions.
    is_sequence = isinstance(objects, (list, tuple)) or getattr(objects, "ndim", 0) > 0
    if padding is None or count is None or not is_sequence or len(objects) != padding.batch_size:
        return objects
    return objects[:count]


def _padding(loader: PreparedLoader, mesh: DeviceMesh | None) -> tuple[Padding | None, int | None]:
    """The padding of the current step, and the samples of one process in a full step, if they are known."""
    padding, full_batch = loader.progress.padding, _full_batch(loader, mesh)
    if padding is None and full_batch and loader.progress.end_of_dataloader and loader.progress.remainder > 0:
        padding = Padding(loader.progress.remainder, full_batch, _readers(mesh))
    return padding, full_batch


def _full_batch(loader: PreparedLoader, mesh: DeviceMesh | None) -> int | None:
    """Samples of one process in a full step; None if batches have no size."""
    size: int | None = loader.source.step_size
    return None if size is None else size // _readers(mesh)


def _readers(mesh: DeviceMesh | None) -> int:
    """The number of processes that read different samples."""
    return current.process().world_size if mesh is None else len(set(coordinates(mesh, mesh.size())))


def _one_of_each(mesh: DeviceMesh) -> tuple[list[int], int]:
    """One of each group of processes that read the same samples, and the number of all processes."""
    parts = coordinates(mesh, mesh.size())
    return [parts.index(part) for part in range(max(parts) + 1)], len(parts)


def _real_objects(by_process: list[list[Any]], padding: Padding | None) -> list[Any]:
    """The objects of real samples: one for each sample of the batch, or one for the whole batch."""
    return [item for process, items in enumerate(by_process) for item in _real(items, process, padding)]


def _real(items: list[Any], process: int, padding: Padding | None) -> list[Any]:
    """The objects of real samples among those of one process."""
    count = padding.of(process) if padding else None
    if padding is None or count is None:
        return items
    if isinstance(padding, StepCounts):
        return items if count else []
    # Unbatched samples are entirely real or entirely added.
    if len(items) == (padding.batch_size or len(items)):
        return items[:count]
    return items if count or len(items) > 1 else []
