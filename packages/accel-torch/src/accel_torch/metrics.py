"""Collecting the results of an evaluation from all processes, each sample once."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from accel_data.padding import Padding, drop_padding
from accel_ops import gather, gather_object
from accel_ops.tree import leaves_with_paths

if TYPE_CHECKING:
    from accel_state.gradient import GradientState

__all__ = ("gather_for_metrics",)


def gather_for_metrics(gradient: GradientState, input_data: Any, use_gather_object: bool = False) -> Any:
    """What all processes computed for the batch given out last, without the samples that were added for evenness.

    Args:
        gradient: knows the loader in iteration.
        input_data: tensors in any nesting, or objects.
        use_gather_object: gather as objects even if there are tensors; for tensors of different shapes.
    """
    tensors = not use_gather_object and any(isinstance(leaf, torch.Tensor) for _, leaf in leaves_with_paths(input_data))
    gathered = gather(input_data) if tensors else gather_object(input_data)
    loader: Any = gradient.active_dataloader
    if loader is None:
        return gathered
    padding = loader.progress.padding
    return drop_padding(gathered, padding) if tensors else _real_objects(gathered, padding)


def _real_objects(gathered: list[Any], padding: Padding | None) -> list[Any]:
    """Objects of real samples, where each process gave one for every sample of its batch."""
    if not padding or len(gathered) != padding.batch_size * padding.processes:
        return gathered
    size = padding.batch_size
    return [
        item
        for process in range(padding.processes)
        for item in gathered[process * size : (process + 1) * size][: padding.of(process)]
    ]
