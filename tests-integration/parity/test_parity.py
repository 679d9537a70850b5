"""Short scripts come to the same here as with the original, but for what docs/explanation/differences.md tells.

What the original came to is recorded; `nox -s parity` plays the scripts with it again and compares.
"""

from __future__ import annotations

import json
import os
import re
import sys
import textwrap
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cache
from pathlib import Path

import pytest

from parity import COUNTS, RECORDED, Outcomes, PlayFailed, alike, played, topics

DOCUMENT = Path(__file__).resolve().parents[2] / "docs" / "explanation" / "differences.md"
ORIGINAL = os.environ.get("ACCEL_ORIGINAL_PYTHON")

IN_THE_ORIGINAL: dict[str, Outcomes] = json.loads(RECORDED.read_text(encoding="utf-8"))
CASES = [(int(count), name) for count, outcomes in IN_THE_ORIGINAL.items() for name in outcomes]

pytestmark = pytest.mark.timeout(700)


@cache
def plays() -> dict[int, Future[Outcomes]]:
    """The runs on each number of processes; they wait for each other's processes most of the time, so side by side."""
    pool = ThreadPoolExecutor(len(COUNTS))
    runs = {processes: pool.submit(played, sys.executable, processes) for processes in COUNTS}
    pool.shutdown(wait=False)
    return runs


def ours(processes: int) -> Outcomes:
    """The outcomes here; fails with the output of the processes in every test that needs a run that failed."""
    run = plays()[processes]
    error = run.exception()
    if error is not None:
        pytest.fail(f"{type(error).__name__} on {processes} processes:\n{error}", pytrace=False)
    return run.result()


def documented() -> dict[str, set[int]]:
    """The cases that the document tells of, and with how many processes they differ."""
    rows = re.findall(r"^\| `(\w+\.\w+)` \| ([\d, ]+) \|", DOCUMENT.read_text(encoding="utf-8"), re.MULTILINE)
    return {name: {int(count) for count in counts.split(",")} for name, counts in rows}


@pytest.mark.parametrize(("processes", "name"), CASES, ids=lambda value: str(value))
def test_it_comes_to_the_same_unless_told(processes: int, name: str) -> None:
    here, original = ours(processes).get(name), IN_THE_ORIGINAL[str(processes)][name]
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
    recorded = IN_THE_ORIGINAL[str(processes)]
    different = [name for name, outcomes in recorded.items() if not alike(outcomes, now.get(name))]
    assert different == []


def test_a_run_that_fails_shows_the_exit_code_and_the_last_output_of_every_rank(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    player = """
        import os, signal
        print("the last words of rank", os.environ["RANK"], flush=True)
        os._exit(3) if os.environ["RANK"] == "0" else os.kill(os.getpid(), signal.SIGKILL)
    """
    (tmp_path / "play.py").write_text(textwrap.dedent(player), encoding="utf-8")
    monkeypatch.setattr("parity.FOLDER", tmp_path)
    with pytest.raises(PlayFailed) as failure:
        played(sys.executable, 2, ["collectives"])
    assert str(failure.value).splitlines() == [
        *("--- rank 0 ended with exit code 3 ---", "the last words of rank 0", ""),
        *("--- rank 1 ended with exit code -9 ---", "the last words of rank 1"),
    ]


def test_a_run_that_hangs_shows_which_rank_was_busy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "play.py").write_text("import time\ntime.sleep(600)", encoding="utf-8")
    monkeypatch.setattr("parity.FOLDER", tmp_path)
    with pytest.raises(PlayFailed, match="rank 0 was still busy"):
        played(sys.executable, 1, ["collectives"], timeout=0)


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
