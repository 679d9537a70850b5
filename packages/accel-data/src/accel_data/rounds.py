"""What the main process reads for a step of all processes, and the part of it that goes to each."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch

from accel_data.padding import Padding
from accel_data.slicing import cut, join, samples_in
from accel_ops.tree import recursively_apply

__all__ = ("Round", "rounds")

SliceFunction = Callable[..., Any]
"""`f(batch, slice, process_index=, num_processes=)` gives the samples of a slice."""


@dataclass
class Round:
    """One step.

    Args:
        parts: one for each process.
        padding: of a step that was cut at the end of the epoch or to which samples were added, else None.
        base: what torchdata needs to continue after it; None where a position is enough.
    """

    parts: list[Any]
    padding: Padding | None = None
    base: dict[str, Any] | None = None


def rounds(
    batches: Iterator[Any],
    processes: int,
    split: bool,
    drop_last: bool,
    slice_fn: SliceFunction | None = None,
    first: list[Any] | None = None,
    base_state: Callable[[], dict[str, Any] | None] = lambda: None,
) -> Iterator[Round]:
    """Steps out of the batches of a loader.

    A step takes one batch for each process, or one batch that is cut. Whole batches are handed out as they are. The
    last step is put together, filled up from the beginning of the epoch until the processes can have equal parts, and
    cut.

    Args:
        batches: what the loader gives.
        processes: how many parts a step has.
        split: cut each batch, instead of taking one for each process.
        drop_last: leave out a last step that lacks batches.
        slice_fn: cuts a batch, instead of `accel_data.slicing.cut`.
        first: the batches of the first step of the epoch; those of `batches` when None.
        base_state: what torchdata needs to continue after the batch that was read last.
    """
    per_step = 1 if split else processes
    head: Any = _first_samples(first, processes) if first else None
    upcoming, failure = _take(batches, per_step)
    while upcoming and failure is None:
        base = base_state()
        taken, (upcoming, failure) = upcoming, _take(batches, per_step)
        if head is None:
            head = _first_samples(taken, processes)
        incomplete = len(taken) < per_step
        if incomplete and drop_last:
            return
        ends = not upcoming and failure is None
        sizes = {samples_in(batch) for batch in taken} if ends else {None}
        cuts = split or slice_fn is not None or incomplete or len(sizes) > 1
        step = _cut_round(taken, head, processes, slice_fn, ends) if cuts else Round(taken)
        step.base = base
        yield step
    if failure is not None:
        raise failure


def _take(batches: Iterator[Any], count: int) -> tuple[list[Any], Exception | None]:
    """The next batches; what went wrong is kept until the step before was handed out."""
    taken: list[Any] = []
    try:
        for batch in islice(batches, count):
            taken.append(batch)  # noqa: PERF402 - those before the failure count
    except Exception as error:
        return taken, error
    return taken, None


def _first_samples(taken: list[Any], processes: int) -> Any:
    first = taken[0]
    size = samples_in(first)
    if size is None:
        return first
    whole = join(taken) if size < processes - 1 else first
    # Copies, so that the whole first step is not kept alive for the epoch.
    return recursively_apply(torch.clone, cut(whole, 0, max(processes - 1, 1)))


def _cut_round(taken: list[Any], head: Any, processes: int, slice_fn: SliceFunction | None, ends: bool) -> Round:
    if samples_in(taken[0]) is None:
        return _single(taken, head, processes)
    whole = join(taken)
    total = samples_in(whole) or 0
    missing = -total % processes
    filler = [head] * (missing // max(samples_in(head) or 1, 1) + 1)
    filled = join([whole, cut(join(filler), 0, missing)]) if missing else whole
    width = (total + missing) // processes
    parts = [_part(filled, index, width, processes, slice_fn) for index in range(processes)]
    return Round(parts, Padding(total, width, processes) if missing or ends else None)


def _part(whole: Any, index: int, width: int, processes: int, slice_fn: SliceFunction | None) -> Any:
    start, stop = index * width, (index + 1) * width
    if slice_fn is None:
        return cut(whole, start, stop)
    return slice_fn(whole, slice(start, stop), process_index=index, num_processes=processes)


def _single(taken: list[Any], head: Any, processes: int) -> Round:
    """Samples that are not batched: one for each process, the first one again where there are too few."""
    padding = Padding(len(taken), 1, processes).of_single() if len(taken) < processes else None
    return Round([*taken, *[head] * (processes - len(taken))], padding)
