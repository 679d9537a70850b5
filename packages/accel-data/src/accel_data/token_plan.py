"""Which samples are one batch, and which batches are one step, when batches are limited by their tokens.

Samples are sorted by length, and samples whose lengths differ by less than 1 % are one bucket. The plan counts each
sample as long as the longest of its bucket. So the plan is the same in every epoch, and with it the number of batches:
an epoch only draws which samples of a bucket take which places, and the order of the steps.

Padded batches are runs of the sorted samples. Their costs differ, since samples do not divide the limit evenly, so a
step is made of batches of neighbouring costs. Where there are no neighbours, batches of the shortest samples, which can
have nearly any cost, complete the step. Batches that are not padded are packed by best fit, to equal sums.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left, insort
from collections.abc import Callable, Sequence
from heapq import heapreplace
from itertools import pairwise
from numbers import Integral
from typing import Any, Final, Literal, NamedTuple

import torch
from torch import Tensor

from accel_data.order import permutation
from accel_state.errors import SettingError

__all__ = ("Buckets", "Cost", "TokenPlan", "as_lengths", "best_fit", "cost_function", "plan_steps")

Cost = Literal["tokens", "attention"] | Callable[[Sequence[int]], float]
"""What is to be equal among the batches of a step: a name, or a function of the lengths in a batch."""

_BUCKETS_PER_LENGTH: Final = 100
"""A bucket's longest length is at most 1/100 above its shortest."""
_SHORT_DIVISOR: Final = 30
"""Samples of at most 1/30 of the limit complete steps: batches of them have nearly any cost."""
_ROOM_DIVISOR: Final = 500
"""Packed batches keep 1/500 of their limit empty."""
_MAX_COST_RATIO: Final = 1.03
"""The largest cost of a step over its mean, above which short samples complete it."""


def as_lengths(lengths: Any, max_tokens: int) -> Tensor:
    """Lengths as a tensor; a sample without tokens counts as one token.

    Raises:
        SettingError: the limit is not a positive integer, a length is not an integer, negative, or above the limit.
    """
    if not isinstance(max_tokens, Integral) or max_tokens < 1:
        raise SettingError(
            f"Cannot fill batches up to max_tokens={max_tokens!r}.",
            "It must be an integer of at least 1.",
            "Give the number of tokens that fit into a batch.",
        )
    try:
        tokens = torch.as_tensor(lengths)
        obstacle = f"The lengths are of shape {tuple(tokens.shape)} and of type {tokens.dtype}."
    except (TypeError, ValueError, RuntimeError) as error:
        tokens, obstacle = torch.zeros(()), f"The lengths are of type {type(lengths).__name__}: {error}."
    if tokens.ndim != 1 or (tokens.numel() and tokens.is_floating_point()):
        raise SettingError(
            "Cannot plan batches by tokens.",
            obstacle,
            "Give a list, an array or a tensor with one integer for each sample.",
        )
    tokens = tokens.to("cpu", torch.int64)
    wrong = ((tokens > max_tokens) | (tokens < 0)).nonzero().flatten()
    if wrong.numel():
        index = int(wrong[0])
        raise SettingError(
            f"Cannot plan batches of at most {max_tokens} tokens.",
            f"Sample {index} has a length of {int(tokens[index])}.",
            "Truncate or remove the sample, or raise max_tokens.",
        )
    return tokens.clamp(min=1)


def cost_function(cost: Cost) -> Callable[[Sequence[int]], float]:
    """The function of a cost.

    Raises:
        SettingError: it is unknown.
    """
    if callable(cost):
        return cost
    if cost not in _COST_FUNCTIONS:
        raise SettingError(
            f"Cannot balance batches by cost={cost!r}.",
            "It must be 'tokens', 'attention' or a function of the lengths in a batch.",
            "Use 'tokens', the default.",
        )
    return _COST_FUNCTIONS[cost]


def _squares(lengths: Sequence[int]) -> int:
    return sum(length * length for length in lengths)


_COST_FUNCTIONS: Final[dict[str, Callable[[Sequence[int]], float]]] = {"tokens": sum, "attention": _squares}


class Buckets:
    """Samples, longest first, in buckets of nearly equal length.

    Args:
        lengths: the tokens of each sample, at least 1.

    Attributes:
        places: for each place, from the longest sample to the shortest, the length with which a sample counts there.
    """

    def __init__(self, lengths: Tensor) -> None:
        edges, edge, longest = [], 1, int(lengths.max()) if lengths.numel() else 0
        while edge <= longest:
            edges.append(edge)
            edge += max(edge // _BUCKETS_PER_LENGTH, 1)
        self._bucket = torch.bucketize(lengths, torch.tensor(edges, dtype=torch.int64), out_int32=True)
        self._sorted = torch.argsort(lengths, descending=True, stable=True)
        self.places = lengths[self._sorted]
        if longest:
            _, sizes = torch.unique_consecutive(self._bucket[self._sorted], return_counts=True)
            self.places = self.places[sizes.cumsum(0) - sizes].repeat_interleave(sizes)

    def samples(self, generator: torch.Generator | None) -> Tensor:
        """The sample at each place: drawn within each bucket, or by length and index without a generator."""
        if generator is None:
            return self._sorted
        drawn = permutation(self.places.numel(), generator).long()
        return drawn[torch.argsort(self._bucket[drawn], descending=True, stable=True)]


class TokenPlan(NamedTuple):
    """The batches of an epoch by step.

    Args:
        places: the places of the samples, batch by batch.
        starts: where in `places` each batch begins, and the end of the last one.
        steps: for each step, one batch of each process; a batch of -1 is missing.
    """

    places: Tensor
    starts: list[int]
    steps: list[list[int]]

    def batch(self, number: int) -> Tensor:
        """The places of a batch; none for a missing one."""
        return self.places[self.starts[number] : self.starts[number + 1]] if number >= 0 else self.places[:0]


def plan_steps(
    lengths: Tensor, max_tokens: int, processes: int, *, padded: bool, cost: Cost, drop_last: bool = False
) -> TokenPlan:
    """Divide samples into batches, and batches into steps of one batch for each process.

    Args:
        lengths: the tokens of the samples, longest first.
        max_tokens: the tokens of a batch at most, with padding if it is padded.
        processes: batches of a step. A step lacks batches only if there are fewer samples than places.
        padded: whether the samples of a batch are padded to its longest.
        cost: what is to be equal in a step.
        drop_last: leave samples out that fill no complete step.
    """
    if not lengths.numel():
        return TokenPlan(torch.arange(0), [0], [])
    ranges: list[tuple[int, int]]
    steps: list[list[int]] = []
    if padded:
        places = torch.arange(lengths.numel())
        cutter = _Cutter(lengths.tolist(), max_tokens, processes, cost)
        ranges, steps = cutter.ranges, cutter.steps
    else:
        places, ranges = _packed(lengths, max_tokens, processes)
    complete = {number for step in steps for number in step}
    loose = [number for number in range(len(ranges)) if number not in complete]
    if not drop_last:
        _split(ranges, loose, processes)
        while steps and len(loose) % processes:
            # Batches of complete steps can be halved as well.
            loose += steps.pop()
            _split(ranges, loose, processes)
    costs = _costs(cost_function(cost), lengths[places].tolist(), [ranges[number] for number in loose], padded)
    loose = [number for _, number in sorted(zip(costs, loose, strict=True), key=lambda pair: -pair[0])]
    steps += [loose[first : first + processes] for first in range(0, len(loose), processes)]
    if steps and len(steps[-1]) < processes:
        last = steps.pop()
        if not drop_last:
            steps.append(last + [-1] * (processes - len(last)))
    return _arranged(places, ranges, steps)


def _costs(
    cost: Callable[[Sequence[int]], float], lengths: list[int], ranges: list[tuple[int, int]], padded: bool
) -> list[float]:
    """The costs of batches; a padded sample counts as long as the longest of its batch, which comes first."""
    if padded:
        return [cost([lengths[start]] * (stop - start)) for start, stop in ranges]
    return [cost(lengths[start:stop]) for start, stop in ranges]


def _packed(lengths: Tensor, max_tokens: int, processes: int) -> tuple[Tensor, list[tuple[int, int]]]:
    """Batches of nearly equal sums that fill whole steps, if that is possible."""
    # Sums cannot be equal if the batches are entirely full.
    fewest = -(-int(lengths.sum()) * (1 + _ROOM_DIVISOR) // (max_tokens * _ROOM_DIVISOR))
    wanted = -(-fewest // processes) * processes
    for bins in (wanted, wanted + processes):
        even, sums = _longest_first(lengths.tolist(), bins)
        if bins <= lengths.numel() and max(sums) <= max_tokens:
            places, starts = _by_bin(even, bins)
            break
    else:
        places, starts = best_fit(lengths, max_tokens)
    return places, list(pairwise(starts))


def _longest_first(lengths: list[int], bins: int) -> tuple[array[int], list[int]]:
    """The bin of each sample, if each is put into the emptiest bin, and the sums of the bins."""
    # An integer for the sum and the number of a bin is compared faster than a tuple.
    heap = list(range(bins))
    bin_of_place = array("i", bytes(4 * len(lengths)))
    for place, length in enumerate(lengths):
        emptiest = heap[0]
        bin_of_place[place] = emptiest % bins
        heapreplace(heap, emptiest + length * bins)
    return bin_of_place, [filled // bins for filled in heap]


def _by_bin(bin_of_place: array[int], bins: int) -> tuple[Tensor, list[int]]:
    """The places bin by bin, and where in them each bin begins, with the end of the last one."""
    if not bins:
        return torch.arange(0), [0]
    of_place = torch.frombuffer(bin_of_place, dtype=torch.int32)
    starts = torch.bincount(of_place, minlength=bins).cumsum(0).tolist()
    return torch.argsort(of_place, stable=True), [0, *starts]


def best_fit(lengths: Tensor, capacity: int) -> tuple[Tensor, list[int]]:
    """Pack samples into bins: each, the longest first, into the fullest bin that has room for it.

    All samples of one length and all bins of one room are handled at once.

    Args:
        lengths: the tokens of the samples, longest first.
        capacity: the tokens of a bin at most.

    Returns:
        The places of the samples bin by bin, and where in them each bin begins, with the end of the last one.
    """
    values, counts = torch.unique_consecutive(lengths, return_counts=True)
    bins_by_room: dict[int, list[int]] = {}
    rooms: list[int] = []
    bin_of_place = array("i")
    bins = 0
    for length, count in zip(values.tolist(), counts.tolist(), strict=True):
        while count:
            index = bisect_left(rooms, length)
            if index == len(rooms):
                opened = -(-count // (capacity // length))
                bins_by_room[capacity] = list(range(bins, bins + opened))
                rooms.append(capacity)
                bins += opened
            room = rooms[index]
            waiting = bins_by_room[room]
            filled = waiting[-count:]
            del waiting[-count:]
            if not waiting:
                del rooms[index], bins_by_room[room]
            bin_of_place.extend(filled)
            count -= len(filled)
            left = room - length
            if left and left not in bins_by_room:
                insort(rooms, left)
                bins_by_room[left] = []
            if left:
                bins_by_room[left] += filled
    return _by_bin(bin_of_place, bins)


def _arranged(places: Tensor, ranges: Sequence[tuple[int, int]], steps: list[list[int]]) -> TokenPlan:
    """The plan with its batches in the order of the steps."""
    if not steps:
        return TokenPlan(places[:0].int(), [0], [])
    used = [ranges[number] for step in steps for number in step if number >= 0]
    sizes = torch.tensor([stop - start for start, stop in used])
    first = torch.tensor([start for start, _ in used])
    ends = sizes.cumsum(0)
    within = torch.arange(int(ends[-1])) - (ends - sizes).repeat_interleave(sizes)
    numbers = iter(range(len(used)))
    renumbered = [[next(numbers) if number >= 0 else -1 for number in step] for step in steps]
    return TokenPlan(places[first.repeat_interleave(sizes) + within].int(), [0, *ends.tolist()], renumbered)


def _split(ranges: list[tuple[int, int]], loose: list[int], processes: int) -> None:
    """Halve the batches with most samples until the loose ones fill whole steps, or no batch can be halved."""
    while len(loose) % processes:
        largest = max(loose, key=lambda number: ranges[number][1] - ranges[number][0])
        start, stop = ranges[largest]
        if stop - start < 2:
            return
        middle = (start + stop) // 2
        ranges[largest] = start, middle
        loose.append(len(ranges))
        ranges.append((middle, stop))


class _Cutter:
    """Cuts sorted samples into padded batches, which are runs of them.

    Attributes:
        ranges: the first place of each batch, and the place behind it.
        steps: complete steps of batches; the other batches are still to be divided into steps.
    """

    def __init__(self, lengths: list[int], max_tokens: int, processes: int, cost: Cost) -> None:
        self._lengths, self._max_tokens, self._processes = lengths, max_tokens, processes
        self.ranges: list[tuple[int, int]] = []
        self.steps: list[list[int]] = []
        # Other costs of short samples are too small to complete a step of long ones.
        short = max_tokens // _SHORT_DIVISOR if cost == "tokens" else 0
        # The first place of those of the short samples that are in no batch yet.
        self._short = bisect_left(lengths, -short, key=lambda length: -length)
        self.ranges += self._cut(0, self._short, max_tokens)
        self._short = self.ranges[-1][1] if self.ranges else 0
        if cost == "tokens":
            self._complete_steps()
            self._cut_evenly()

    def _cut(self, start: int, stop: int, limit: int) -> list[tuple[int, int]]:
        """Batches of consecutive samples of at most `limit` tokens; the last one may end behind `stop`."""
        ranges = []
        while start < stop:
            end = min(start + (limit // self._lengths[start] or 1), len(self._lengths))
            ranges.append((start, end))
            start = end
        return ranges

    def _complete_steps(self) -> None:
        """Make steps of batches of neighbouring cost, completed with batches of short samples where there are none."""
        costs = [(stop - start) * self._lengths[start] for start, stop in self.ranges]
        numbers = sorted(range(len(costs)), key=lambda number: -costs[number])
        done = 0
        while done < len(numbers):
            step = numbers[done : done + self._processes]
            largest = costs[step[0]]
            near = [number for number in step if costs[number] * _MAX_COST_RATIO >= largest]
            is_even = largest * self._processes <= _MAX_COST_RATIO * sum(costs[number] for number in step)
            added = [] if is_even else self._short_batches(self._processes - len(near), largest)
            if added:
                step = [*near, *range(len(self.ranges), len(self.ranges) + len(added))]
                done += len(near)
                self.ranges += added
                self._short = added[-1][1]
            elif len(step) == self._processes:
                done += len(step)
            else:
                # These batches stay loose.
                return
            self.steps.append(step)

    def _short_batches(self, count: int, limit: int) -> list[tuple[int, int]]:
        """Batches of short samples of nearly `limit` tokens each; none if the samples do not suffice for all."""
        ranges: list[tuple[int, int]] = []
        start, end = self._short, len(self._lengths)
        while len(ranges) < count and start < end:
            length = self._lengths[start]
            # A little above the limit is nearer to it than a sample less.
            size = min((4 * limit + length) // (4 * length), self._max_tokens // length)
            stop = start + size
            ranges.append((start, stop))
            start = stop
        return ranges if len(ranges) == count and start <= end else []

    def _cut_evenly(self) -> None:
        """Divide the short samples that are left into batches of one cost, which fill whole steps."""
        start, stop = self._short, len(self._lengths)
        if start == stop:
            return
        loose = len(self.ranges) - sum(map(len, self.steps))
        fewest = len(self._cut(start, stop, self._max_tokens))
        wanted = -(-(loose + fewest) // self._processes) * self._processes - loose

        def cut(limit: int) -> list[tuple[int, int]]:
            return self._cut(start, stop, limit)

        # With the smallest limit that gives so few batches, the last one is nearly full, too.
        limits = range(self._lengths[start], self._max_tokens + 1)
        limit = limits[bisect_left(limits, -wanted, key=lambda limit: -len(cut(limit)))]
        batches = cut(limit)

        def partly_below(count: int) -> list[tuple[int, int]]:
            """As many batches with this limit, and the others with one token less."""
            first = batches[:count]
            return first + self._cut(first[-1][1] if first else start, stop, limit - 1)

        if limit > limits[0]:
            counts = range(len(batches))
            at = bisect_left(counts, -wanted, key=lambda count: -len(partly_below(count)))
            batches = partly_below(at)
        self.ranges += batches
