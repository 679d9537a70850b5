"""Cases for tests of options that are combined."""

from __future__ import annotations

import multiprocessing
import random
from collections.abc import Callable, Mapping, Sequence
from itertools import combinations
from typing import Any

import pytest

# Where DataLoader workers are not forked from this one (Python 3.14 and newer), each would import it anew.
multiprocessing.set_forkserver_preload(["torch"])

Case = dict[str, Any]
Place = tuple[tuple[str, int], ...]


def meeting_pairs(options: Mapping[str, Sequence[Any]], possible: Callable[[Case], bool]) -> list[Case]:
    """Few cases in which every value of an option meets every value of every other, as far as some case allows it.

    Args:
        options: the values of each; the first ones are those of a case that is possible.
        possible: whether the values of a case go together.
    """
    chance = random.Random(0)
    names = list(options)

    def filled(wanted: Place) -> list[dict[str, int]]:
        """Possible cases, in places of values, that have the wanted ones."""
        plain = [dict.fromkeys(names, 0) | {option: place} for option in names for place in range(len(options[option]))]
        drawn = [{name: chance.randrange(len(options[name])) for name in names} for _ in range(200)]
        cases = [case | dict(wanted) for case in [*drawn, *plain]]
        return [case for case in cases if possible(valued(case))]

    def valued(case: Mapping[str, int]) -> Case:
        return {name: options[name][place] for name, place in case.items()}

    pairs = combinations(names, 2)
    unmet: dict[Place, None] = dict.fromkeys(
        ((one, i), (other, j))
        for one, other in pairs
        for i in range(len(options[one]))
        for j in range(len(options[other]))
    )
    found = []
    while unmet:
        wanted = next(iter(unmet))
        candidates = filled(wanted)
        if not candidates:
            del unmet[wanted]
            continue
        met = [[pair for pair in combinations(case.items(), 2) if pair in unmet] for case in candidates]
        best = max(range(len(met)), key=lambda number: len(met[number]))
        found.append(valued(candidates[best]))
        for pair in met[best]:
            del unmet[pair]
    return found


@pytest.fixture(scope="session")
def covering() -> Callable[[Mapping[str, Sequence[Any]], Callable[[Case], bool]], list[Case]]:
    """Makes the cases; see `meeting_pairs`."""
    return meeting_pairs
