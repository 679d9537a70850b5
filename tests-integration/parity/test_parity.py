"""Short scripts come to the same here as with the original, but for what docs/explanation/differences.md tells.

What the original came to is recorded; `nox -s parity` plays the scripts with it again and compares.
"""

from __future__ import annotations

import json
import os
import re
import sys
from functools import cache
from pathlib import Path

import pytest

from parity import RECORDED, Outcomes, alike, played, topics

DOCUMENT = Path(__file__).resolve().parents[2] / "docs" / "explanation" / "differences.md"
ORIGINAL = os.environ.get("ACCEL_ORIGINAL_PYTHON")

KNOWN: dict[str, Outcomes] = json.loads(RECORDED.read_text(encoding="utf-8"))
CASES = [(int(count), name) for count, outcomes in KNOWN.items() for name in outcomes]

pytestmark = pytest.mark.timeout(700)


@cache
def ours(processes: int) -> Outcomes:
    return played(sys.executable, processes)


def documented() -> dict[str, set[int]]:
    """The cases that the document tells of, and with how many processes they differ."""
    rows = re.findall(r"^\| `(\w+\.\w+)` \| ([\d, ]+) \|", DOCUMENT.read_text(encoding="utf-8"), re.MULTILINE)
    return {name: {int(count) for count in counts.split(",")} for name, counts in rows}


@pytest.mark.parametrize(("processes", "name"), CASES, ids=lambda value: str(value))
def test_it_comes_to_the_same_unless_told(processes: int, name: str) -> None:
    here, original = ours(processes).get(name), KNOWN[str(processes)][name]
    if processes in documented().get(name, ()):
        assert not alike(here, original), "it is the same by now: take it out of the document"
    else:
        assert alike(here, original), f"here: {here}\nin the original: {original}"


def test_every_script_is_recorded_and_every_difference_is_one_of_a_script() -> None:
    names = {name for _, name in CASES}
    assert set(ours(1)) == set(ours(2)) == names
    assert set(documented()) <= names
    assert len(names) >= 60
    assert {name.partition(".")[0] for name in names} == set(topics())


@pytest.mark.skipif(ORIGINAL is None, reason="ACCEL_ORIGINAL_PYTHON names no Python that has the original library")
@pytest.mark.parametrize("processes", [1, 2])
def test_the_original_still_comes_to_what_is_recorded(processes: int) -> None:
    assert ORIGINAL is not None
    now = played(ORIGINAL, processes)
    different = [name for name, outcomes in KNOWN[str(processes)].items() if not alike(outcomes, now.get(name))]
    assert different == []


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        (1, 1.00001, True),
        (1, 1.1, False),
        (True, 1, False),
        ([1, [2.0]], [1, [2.0000001]], True),
        ([1], [1, 2], False),
        ({"a": 1}, {"a": 2}, False),
        ({"a": 1}, {"b": 1}, False),
        ({"raises": "ValueError"}, {"raises": "ValueError"}, True),
        ("a", "b", False),
        (None, False, False),
    ],
)
def test_how_outcomes_are_compared(one: object, other: object, same: bool) -> None:
    assert alike(one, other) is same
