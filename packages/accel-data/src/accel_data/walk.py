"""Sharding where a sampler or batch sampler has to be walked: all indices are read, this process's are kept."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import chain, cycle, islice
from typing import TypeVar

from accel_data.padding import Padding
from accel_data.plan import ShardPlan, shortage
from accel_state.errors import DataError

__all__ = ("walk_batches", "walk_samples", "walk_split_batches")

T = TypeVar("T")

Step = tuple[list[T], Padding | None]


def walk_samples(
    samples: Iterable[T], plan: ShardPlan, begun: list[T] | None = None, for_all: bool = False
) -> Iterator[Step[T]]:
    """This process's batches of a sequence of unknown length, with the padding of each step.

    Args:
        samples: indices or samples of all processes.
        plan: how they are divided; its length is not used.
        begun: the samples of the first step, when `samples` begin later; the plan's start is not used then.
        for_all: refuse, on all of them, what has no sample for some process.

    Raises:
        DataError: see `for_all`.
    """
    source = iter(samples)
    if begun is not None:
        head, remaining = begun, source
    else:
        head = list(islice(source, plan.step_size))
        remaining = chain(head[plan.start :], islice(source, max(plan.start - len(head), 0), None))
    if for_all:
        _check_enough(len(head), plan)
    first = plan.index * plan.batch_size
    while len(chunk := list(islice(remaining, plan.step_size))) == plan.step_size:
        yield chunk[first : first + plan.batch_size], None
    last = ShardPlan(len(chunk), plan.batch_size, plan.processes, plan.index, plan.even, plan.drop_last)
    if last.has_tail:
        filled = [*chunk, *islice(cycle(head), plan.step_size - len(chunk))] if plan.even else chunk
        yield filled[first : first + plan.batch_size], last.padding()


def _check_enough(count: int, plan: ShardPlan) -> None:
    obstacle = shortage(count, plan.processes, plan.even and not plan.drop_last)
    if obstacle is not None:
        raise DataError(
            "An epoch was to be divided between the processes.",
            obstacle,
            "Use fewer processes, or leave even_batches on and drop_last off.",
        )


def walk_batches(
    batches: Iterable[Sequence[int]],
    processes: int,
    index: int,
    even: bool,
    drop_last: bool,
    batch_size: int | None,
    skip: int = 0,
) -> Iterator[Step[int]]:
    """This process's batches of a custom batch sampler: of each round of one batch per process, its own.

    Batches keep the sizes that the sampler gave them. With `even`, a round that lacks batches is completed with batches
    of samples from the beginning, and a short batch at the very end is filled up when the sampler has a batch size.

    Args:
        batches: of all processes.
        processes: how many.
        index: which of them is asked for.
        even: complete the last round.
        drop_last: leave out an incomplete last round.
        batch_size: of the sampler; None when it has none.
        skip: rounds that are gone already.
    """
    source = iter(batches)
    head: list[int] = []
    upcoming = [list(batch) for batch in islice(source, processes)]
    while upcoming:
        whole, upcoming = upcoming, [list(batch) for batch in islice(source, processes)]
        wanted = batch_size or len(whole[0])
        head.extend(chain.from_iterable(whole[: max(0, wanted * processes - len(head))]))
        if skip:
            skip -= 1
        elif upcoming:
            yield whole[index], None
        elif even and not drop_last:
            yield _fill_round(whole, head, processes, wanted, batch_size is not None)[index]
        elif len(whole) == processes or (index < len(whole) and not drop_last):
            yield whole[index], _short_round(whole, processes, batch_size)


def _short_round(whole: list[list[int]], processes: int, batch_size: int | None) -> Padding | None:
    """What results have too much that a script filled up to the sampler's batch size, where nothing was added here."""
    counts = [len(batch) for batch in whole]
    if batch_size is None or len(whole) < processes or all(count >= batch_size for count in counts):
        return None
    # The length of the data does not tell how many samples come last, so there is no total to compare with it.
    return Padding(-1, batch_size, processes, tuple(counts))


def _fill_round(
    whole: list[list[int]], head: Sequence[int], processes: int, wanted: int, fill_short: bool
) -> list[Step[int]]:
    filler = cycle(head)
    filled = [*whole, *([] for _ in range(processes - len(whole)))]
    counts = [len(batch) for batch in filled]
    for position, batch in enumerate(filled):
        last_real = position == len(whole) - 1
        if position >= len(whole) or (last_real and fill_short):
            batch.extend(islice(filler, max(wanted - len(batch), 0)))
    sizes = {len(batch) for batch in filled}
    padding = None
    if counts != [len(batch) for batch in filled]:
        padding = Padding.by_process(counts, sizes.pop() if len(sizes) == 1 else 0)
    return [(batch, padding) for batch in filled]


def walk_split_batches(batches: Iterable[Sequence[int]], plan: ShardPlan, skip: int = 0) -> Iterator[Step[int]]:
    """This process's part of each batch of a custom batch sampler.

    Args:
        batches: of all processes together.
        plan: how each is divided; its length is not used.
        skip: batches that are gone already.

    Raises:
        DataError: a batch is larger than the sampler's batch size.
    """
    head: list[int] = []
    for number, whole in enumerate(batches):
        if len(whole) > plan.step_size:
            raise DataError(
                f"split_batches=True: batch {number} was to be cut into {plan.processes} parts of {plan.batch_size}.",
                f"The batch sampler gave {len(whole)} indices, more than the {plan.step_size} of its batch_size.",
                "Let the batch sampler's batch_size be its largest batch, or leave split_batches off.",
            )
        if len(head) < plan.step_size:
            head.extend(whole)
        if number < skip:
            continue
        part = ShardPlan(len(whole), plan.batch_size, plan.processes, plan.index, plan.even)
        first = part.first
        if part.full_steps:
            yield list(whole[first : first + plan.batch_size]), None
        elif part.has_tail:
            filled = [*whole, *islice(cycle(head), plan.step_size - len(whole))] if plan.even else list(whole)
            yield filled[first : first + plan.batch_size], part.padding()
