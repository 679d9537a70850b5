"""Which samples of a step were added to make the processes even, so that metrics can leave exactly those out.

Added samples always stand at the end of a process's batch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from accel_ops.tree import recursively_apply

__all__ = ("LastOfStep", "Marked", "MarkingCollate", "Padding", "drop_padding")


@dataclass(frozen=True)
class Padding:
    """How many samples of one global step are real, by process.

    Args:
        total: real samples of all processes together; -1 when batches are counted, not samples.
        batch_size: samples of one process, with those that were added.
        processes: number of processes.
        counts: real samples by process, None in it for a process whose batch is real as a whole; None when the real
            samples are the first `total` ones of the step.
    """

    total: int
    batch_size: int
    processes: int
    counts: tuple[int | None, ...] | None = None

    @classmethod
    def by_process(cls, counts: Sequence[int | None], batch_size: int) -> Padding:
        """From the number of real samples of each process."""
        total = -1 if None in counts else sum(count or 0 for count in counts)
        return cls(total, batch_size, len(counts), tuple(counts))

    def of(self, process: int) -> int | None:
        """Real samples of one process; None means all of its batch."""
        if self.counts is not None:
            return self.counts[process]
        return min(max(self.total - process * self.batch_size, 0), self.batch_size)

    def of_single(self) -> Padding:
        """The same for loaders that do not batch: what each process has is real as a whole, or not at all."""
        return self.by_process([None if self.of(process) else 0 for process in range(self.processes)], 0)

    def __bool__(self) -> bool:
        return self.counts is not None or self.total < self.batch_size * self.processes


def drop_padding(gathered: Any, padding: Padding | None, full_batch: int | None = None) -> Any:
    """What was gathered from all processes at one step, without the samples that were added.

    Tensors hold the processes' parts one after another in their first dimension; those whose parts are no multiple of
    the batch are left as they are, since their rows are no samples.

    Args:
        gathered: tensors in any nesting.
        padding: of the step; None when nothing was added.
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
    part = tensor.shape[0] // padding.processes
    size = padding.batch_size
    if full_batch and part and part % full_batch == 0:
        size = full_batch
    elif not padding:
        return tensor
    if part == 0 or (size and part % size):
        return tensor
    rows = part // size if size else 1
    kept = [padding.of(process) for process in range(padding.processes)]
    if all(count is None or count * rows >= part for count in kept):
        return tensor
    parts = torch.split(tensor, part)
    return torch.cat([own if count is None else own[: count * rows] for own, count in zip(parts, kept, strict=True)])


class LastOfStep:
    """The last sample of a process's batch in a step that was filled up, on its way to the collate function.

    Args:
        sample: the sample.
        padding: of the step.
    """

    __slots__ = ("padding", "sample")

    def __init__(self, sample: Any, padding: Padding) -> None:
        self.sample = sample
        self.padding = padding


class Marked:
    """A batch with what belongs to it, on its way to the loop.

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

    def pin_memory(self, *device: Any) -> Marked:
        """The same with its tensors in pinned memory; torch's loader calls this."""
        return Marked(_pinned(self.batch, *device), self.padding)


def _pinned(batch: Any, *device: Any) -> Any:
    from torch.utils.data._utils.pin_memory import pin_memory

    return pin_memory(batch, *device)  # type: ignore[no-untyped-call]


class MarkingCollate:
    """A collate function that takes the mark off the last sample and puts it on the batch.

    Args:
        collate: the loader's own.
    """

    def __init__(self, collate: Callable[[Any], Any]) -> None:
        self.collate = collate

    def __call__(self, samples: Any) -> Any:
        if type(samples) is LastOfStep:
            return Marked(self.collate(samples.sample), samples.padding.of_single())
        if type(samples) is not list or not samples or type(samples[-1]) is not LastOfStep:
            return self.collate(samples)
        last = samples.pop()
        return Marked(self.collate([*samples, last.sample]), last.padding)
