"""The order of a mixture, computed by arithmetic: the source of sample n, and the place of a sample in its source.

The sources are the leaves of a balanced binary tree. A node that gives r samples lets its left child give
`floor(r v + phase)` of them, where v is the child's share of the node's weight: the choices of a node are a Sturmian
word, the most even sequence of two letters with given frequencies (M. Lothaire, Algebraic Combinatorics on Words,
chapter 2). Sample n is found by one division per level of the tree, whatever n is.

When the weights change, a new segment begins. Its phases carry over how far each child is ahead or behind: a child that
is ahead waits, and one that is behind gets every sample of its node until it has caught up. So a source whose
weight becomes 0 may still give the samples by which it is behind: none with up to two sources, one with up to four.

**Every source stays within K samples of its share, at every prefix and for any schedule of K sources.** Call the
deviation of a node the samples that its sources gave, less their share of all samples so far. With e = (deviation of
the left child) - v (deviation of the node), the phase is chosen such that the left child gets a sample only where e is
at most 1/2 afterwards, and the right child only where -e is less than 1/2 afterwards. So

1. the deviation of a child that has just received a sample is at most 1/2 more than that of its node (or 1/2, if the
   node is behind); a node at depth d, the root having depth 0 and deviation 0, is therefore at most d/2 ahead then. It
   falls until the node receives the next sample. Hence no node is ever more than d/2 ahead.
2. The deviation of a child is that of its node less that of its sibling. By 1 it is at most (d/2 + that of its node)
   behind, so no node of depth d is more than 1/2 + 2/2 + ... + d/2 = d (d + 1) / 4 behind.

A tree of K leaves has the depth d = ceil(log2 K), and d (d + 1) / 4 < K. Deviations are kept in units of 2**-64, and
phases in units of 2**-32; what that rounds off is less than 2**-30 for a million segments.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from fractions import Fraction
from hashlib import blake2b
from math import gcd
from typing import Any, Final

__all__ = ("Interleaving", "Permutation")

_DEVIATION_BITS: Final = 64
"""Fractional bits of a deviation."""
_PHASE_BITS: Final = 32
"""Fractional bits of a phase."""

_MIX_ROUNDS: Final = 4
_MIX_ROUNDS_OF_SMALL_NUMBERS: Final = 6
"""For numbers of less than ten bits, which a round mixes less."""

_Node = Any
"""The number of a source, or (numerator, denominator, phase, left child, right child) of a pair of nodes."""


class _Segment:
    """A range of samples with the same weights.

    Attributes:
        start: the first sample.
        end: the sample after the last one; None of the last segment.
        weights: the weights of the sources, as integers.
        counts: samples that each source gave before the segment.
        root: the root of the tree.
    """

    __slots__ = ("_deviations", "counts", "end", "root", "start", "total", "weights")

    def __init__(self, start: int, weights: Sequence[int], counts: Sequence[int], deviations: Sequence[int]) -> None:
        self.start = start
        self.end: int | None = None
        self.weights, self.total = tuple(weights), sum(weights)
        self.counts = tuple(counts)
        self._deviations = tuple(deviations)
        self.root = self._node(0, len(weights))

    def _node(self, first: int, last: int) -> _Node:
        if last - first == 1:
            return first
        middle = (first + last + 1) // 2
        share, whole = sum(self.weights[first:middle]), sum(self.weights[first:last])
        if not whole:
            # Such a node gives only the samples by which its sources are behind.
            share, whole = 1, 2
        behind = sum(self._deviations[first:last]) * share // whole - sum(self._deviations[first:middle])
        phase = (1 << (_PHASE_BITS - 1)) + (behind >> (_DEVIATION_BITS - _PHASE_BITS))
        terms = share << _PHASE_BITS, whole << _PHASE_BITS, phase * whole
        common = gcd(*terms)
        return *(term // common for term in terms), self._node(first, middle), self._node(middle, last)

    def locate(self, n: int) -> tuple[int, int]:
        """The source of sample n, and how many samples that source gave before."""
        preceding, node = n - self.start, self.root
        while type(node) is tuple:
            share, whole, phase, left, right = node
            exact = preceding * share + phase
            before, after = exact // whole, (exact + share) // whole
            # A child that is ahead or behind is corrected before the even sequence begins.
            before = 0 if before < 0 else preceding if before > preceding else before
            if after > before:
                preceding, node = before, left
            else:
                preceding, node = preceding - before, right
        return node, self.counts[node] + preceding

    def counted(self, n: int) -> list[int]:
        """Samples that each source gave before sample n."""
        counts = list(self.counts)
        waiting: list[tuple[_Node, int]] = [(self.root, n - self.start)]
        while waiting:
            node, samples = waiting.pop()
            if type(node) is not tuple:
                counts[node] += samples
                continue
            share, whole, phase, left, right = node
            first = min(max((samples * share + phase) // whole, 0), samples)
            waiting += [(left, first), (right, samples - first)]
        return counts

    def deviations(self, n: int) -> list[int]:
        """How far each source is ahead of its share before sample n."""
        length = n - self.start
        return [
            before + ((now - then) << _DEVIATION_BITS) - (length * weight << _DEVIATION_BITS) // self.total
            for before, now, then, weight in zip(
                self._deviations, self.counted(n), self.counts, self.weights, strict=True
            )
        ]


class Interleaving:
    """The source of each sample in an infinite sequence.

    Args:
        weights: the weights of the sources from sample 0 on; integers of at least 0, not all 0.

    Example:
        >>> order = Interleaving([2, 1])
        >>> [order.locate(n) for n in range(6)]
        [(0, 0), (1, 0), (0, 1), (0, 2), (1, 1), (0, 3)]
        >>> order.counts(10**30 + 2)[0] == 2 * order.counts(10**30 + 2)[1]
        True
    """

    def __init__(self, weights: Sequence[int]) -> None:
        zeros = [0] * len(weights)
        self._segments = [_Segment(0, weights, zeros, zeros)]
        self._starts = [0]

    def change(self, start: int, weights: Sequence[int]) -> None:
        """Use other weights from a sample on; weights that began there or later are dropped."""
        if start <= 0:
            self.__init__(weights)  # type: ignore[misc]
            return
        keep = bisect_left(self._starts, start)
        del self._segments[keep:], self._starts[keep:]
        last = self._segments[-1]
        last.end = start
        self._segments.append(_Segment(start, weights, last.counted(start), last.deviations(start)))
        self._starts.append(start)

    def _segment(self, n: int) -> _Segment:
        return self._segments[bisect_right(self._starts, n) - 1]

    def locate(self, n: int) -> tuple[int, int]:
        """The source of sample n, and how many samples that source gave before."""
        return self._segment(n).locate(n)

    def located(self, samples: Sequence[int]) -> list[tuple[int, int]]:
        """`locate` of each of some samples."""
        first = self._segment(samples[0]) if samples else self._segments[0]
        start, end, locate = first.start, first.end, first.locate
        return [locate(n) if start <= n and (end is None or n < end) else self._segment(n).locate(n) for n in samples]

    def counts(self, n: int) -> list[int]:
        """Samples that each source gave before sample n."""
        return self._segment(n).counted(n)

    def shares(self, n: int) -> list[Fraction]:
        """The share of each source before sample n by its weights, in samples."""
        shares = [Fraction(0)] * len(self._segments[0].weights)
        for segment in self._segments:
            length = min(n, n if segment.end is None else segment.end) - segment.start
            if length > 0:
                for source, weight in enumerate(segment.weights):
                    shares[source] += Fraction(length * weight, segment.total)
        return shares

    def first_exhausted(self, start: int, sizes: Sequence[int]) -> int:
        """The first sample from `start` on whose source has given all of its `sizes` samples since `start`.

        If other weights begin at that sample, the earlier weights decide.
        """
        limits = [count + size for count, size in zip(self.counts(start), sizes, strict=True)]

        def exceeds(counts: Sequence[int]) -> bool:
            return any(count > limit for count, limit in zip(counts, limits, strict=True))

        # An upper bound: more samples than all sources have.
        return self._first(start, start + sum(sizes) + 1, exceeds, 1) - 1

    def all_exhausted(self, start: int, sizes: Sequence[int]) -> int | None:
        """The first sample before which every source has given its `sizes` samples since `start`.

        None if the last weights exclude a source that has not.
        """
        limits = [count + size for count, size in zip(self.counts(start), sizes, strict=True)]
        last = self._segments[-1]
        end = max(start, last.start)
        for weight, limit, count, before in zip(last.weights, limits, self.counts(end), last.counts, strict=True):
            if count < limit and not weight:
                return None
            if count < limit:
                # A source is always less than K samples ahead of its share or behind it.
                samples = limit - before + 2 * len(limits)
                end = max(end, last.start + -(-samples * last.total // weight))
        return self._first(start, end, lambda counts: all(map(int.__ge__, counts, limits)))

    def _first(self, start: int, end: int, reached: Callable[[Sequence[int]], bool], beyond: int = 0) -> int:
        """The least n in (start, end] with `reached(counts(n))`, which stays true from there on.

        Args:
            beyond: how many samples each segment is continued beyond its end.
        """
        for segment in self._segments:
            high = end if segment.end is None else min(segment.end + beyond, end)
            low = max(start, segment.start)
            if low >= high or not reached(segment.counted(high)):
                continue
            while high - low > 1:
                middle = (low + high) // 2
                low, high = (low, middle) if reached(segment.counted(middle)) else (middle, high)
            return high
        raise AssertionError("the end was chosen such that it is reached")


class Permutation:
    """A pseudo-random order of `0 .. size - 1`, the same for the same key, of which any place is computed in O(1).

    A number of b bits, the least b that suffice, is mixed in rounds of an affine map with an odd factor and an
    exclusive or with its own upper half; both are bijections of b bits (as in the finalisers of MurmurHash3 and
    SplitMix64), and their constants are drawn from the key. A result that is not below `size` is mixed again until it
    is ("cycle walking": J. Black and P. Rogaway, Ciphers with Arbitrary Finite Domains, 2002), which takes less than
    two passes on average. That is enough to shuffle data; it is not a cipher.

    Args:
        size: at least 1.
        key: what the order is drawn from.

    Example:
        >>> order = Permutation(5, "seed 0")
        >>> sorted(order(place) for place in range(5))
        [0, 1, 2, 3, 4]
    """

    __slots__ = ("_constants", "_mask", "_shift", "_size")

    def __init__(self, size: int, key: str) -> None:
        bits = max((size - 1).bit_length(), 1)
        self._size, self._mask, self._shift = size, (1 << bits) - 1, (bits + 1) // 2
        constants = []
        for number in range(_MIX_ROUNDS_OF_SMALL_NUMBERS if bits < 10 else _MIX_ROUNDS):
            drawn = int.from_bytes(blake2b(f"{key}/{number}".encode(), digest_size=32).digest(), "little")
            constants.append((drawn & self._mask | 1, drawn >> 128 & self._mask))
        self._constants = tuple(constants)

    def __call__(self, place: int) -> int:
        """The number at a place."""
        mask, shift = self._mask, self._shift
        while True:
            for factor, term in self._constants:
                place = (place * factor + term) & mask
                place ^= place >> shift
            if place < self._size:
                return place
