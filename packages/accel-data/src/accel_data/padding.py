"""Padding information in a batch, with which metrics remove exactly the padding samples.

Padding samples are always the last ones in a process's batch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from accel_data.sharding import Padding, StepCounts
from accel_ops.tree import recursively_apply

__all__ = ("CountingCollate", "PaddedBatch", "PaddingCollate", "PaddingMarker", "drop_padding")


def drop_padding(gathered: Any, padding: Padding | None, full_batch: int | None = None) -> Any:
    """The values gathered from all processes at one step, without padding samples.

    Tensors have the rows of all processes in their first dimension. One row for a batch of several samples, such as a
    mean, is dropped if the whole batch is padding. Other tensors whose rows per process are not a multiple of the batch
    size are unchanged, since their rows are not samples.

    Args:
        gathered: a pytree of tensors.
        padding: the padding of the step, or None.
        full_batch: samples of one process in a full step. A script may repeat a value for each of them also in a
            shorter step, as the Trainer of transformers does with a loss; such rows count as often as the process has
            real samples.
    """
    shortened = padding is not None and bool(full_batch) and padding.batch_size not in (0, full_batch)
    if padding is None or not (padding or shortened):
        return gathered
    return recursively_apply(_drop, gathered, padding, full_batch if shortened else None)


def _drop(tensor: torch.Tensor, padding: Padding, full_batch: int | None) -> torch.Tensor:
    if tensor.ndim == 0 or tensor.shape[0] % padding.processes:
        return tensor
    rows = tensor.shape[0] // padding.processes
    size = padding.batch_size
    if full_batch and rows and rows % full_batch == 0:
        size = full_batch
    elif not padding:
        return tensor
    kept = [padding.of(process) for process in range(padding.processes)]
    if rows == 1 and size > 1:
        # One value for the whole batch.
        kept, size = [count if count is None else min(count, 1) for count in kept], 1
    if rows == 0 or (size and rows % size):
        return tensor
    per_sample = rows // size if size else 1
    if all(count is None or count * per_sample >= rows for count in kept):
        return tensor
    split = torch.split(tensor, rows)
    return torch.cat(
        [own if count is None else own[: count * per_sample] for own, count in zip(split, kept, strict=True)]
    )


class PaddingMarker:
    """The last sample of a process's batch in a padded step, on its way to the collate function.

    Args:
        sample: the sample.
        padding: of the step.
    """

    __slots__ = ("padding", "sample")

    def __init__(self, sample: Any, padding: Padding) -> None:
        self.sample = sample
        self.padding = padding


class PaddedBatch:
    """A batch with its padding and the loader's state, on its way to the loop.

    Args:
        batch: the batch.
        padding: of its step.
        base: torchdata's state after it.
    """

    __slots__ = ("base", "batch", "padding")

    def __init__(self, batch: Any, padding: Padding | None, base: dict[str, Any] | None = None) -> None:
        self.batch = batch
        self.padding = padding
        self.base = base

    def pin_memory(self, *device: Any) -> PaddedBatch:
        """Copy the batch into pinned memory and keep its padding; torch's loader calls this."""
        return PaddedBatch(_pinned(self.batch, *device), self.padding)


def _pinned(batch: Any, *device: Any) -> Any:
    from torch.utils.data._utils.pin_memory import pin_memory

    return pin_memory(batch, *device)  # type: ignore[no-untyped-call]


class CountingCollate:
    """A collate function that keeps the number of samples with the batch.

    Args:
        collate: the loader's own.
    """

    def __init__(self, collate: Callable[[Any], Any]) -> None:
        self.collate = collate

    def __call__(self, samples: Any) -> PaddedBatch:
        count = len(samples) if type(samples) is list else 1
        return PaddedBatch(self.collate(samples), StepCounts.each([count]))


class PaddingCollate:
    """A collate function that moves the marker of the last sample to the batch.

    Args:
        collate: the loader's own.
    """

    def __init__(self, collate: Callable[[Any], Any]) -> None:
        self.collate = collate

    def __call__(self, samples: Any) -> Any:
        if type(samples) is PaddingMarker:
            return PaddedBatch(self.collate(samples.sample), samples.padding.of_single())
        if type(samples) is not list or not samples or type(samples[-1]) is not PaddingMarker:
            return self.collate(samples)
        last = samples.pop()
        return PaddedBatch(self.collate([*samples, last.sample]), last.padding)
