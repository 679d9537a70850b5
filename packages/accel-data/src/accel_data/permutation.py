"""Shuffling by arithmetic: the place of one sample, without drawing the order of all others."""

from __future__ import annotations

from hashlib import blake2b
from typing import Final

__all__ = ("Permutation",)

_ROUNDS: Final = 4
_MORE_ROUNDS: Final = 6
"""For numbers of less than ten bits, which a round mixes less."""


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
        for number in range(_MORE_ROUNDS if bits < 10 else _ROUNDS):
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
