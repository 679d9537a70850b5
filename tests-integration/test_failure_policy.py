"""The restart policy against the catalogue of failures: the action, the rank, the samples, and how soon it decided.

An entry is what has to become of a run; `MISSES` lists those that the policy gets wrong.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

import pytest
from catalogues.failures import CATALOGUE, Action, Failure

from accel_state.watch.runs import PLACES, PREFIX
from accel_testing.preloaded import PreloadedPython
from accel_testing.processes import Finished, run_command

pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="reads /proc"),
]

MISSES: Final[Mapping[str, str]] = {}
"""By name, what the policy does instead."""

QUICK: Final = (
    "killed_twice_with_progress",
    "exception_at_rank_1",
    "host_out_of_memory",
    "sample_that_kills",
    "same_sample_in_another_step",
)
"""Entries that every run of the tests takes."""

MOST_RESTARTS: Final = 20


@pytest.fixture(scope="module", autouse=True)
def preloaded() -> Iterator[None]:
    with PreloadedPython(("accel_torch.accelerator",)):
        yield


def launched(failure: Failure, folder: Path) -> Finished:
    """A run of its script, under the policy."""
    script = folder / "train.py"
    script.write_text(failure.script, encoding="utf-8")
    project = folder / "output" / "run"
    options = ["--cpu", "--num_processes", "2", "--restart_policy", "auto", "--project_dir", str(project)]
    if "--max_restarts" not in failure.options:
        options += ["--max_restarts", str(MOST_RESTARTS)]
    command = [sys.executable, "-m", "accel_cli.main", "launch", *options, *failure.options]
    environment = {**failure.environment, "TMPDIR": str(folder), "OMP_NUM_THREADS": "1"}
    return run_command([*command, str(script), str(folder / "output")], timeout=280, env=environment, cwd=folder)


def failures_of(folder: Path) -> list[dict[str, Any]]:
    path = folder / "output" / "run" / "failures.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def starts_of(folder: Path) -> int:
    """How often a process was started, at most."""
    return max((len(list((folder / "output" / f"starts_{rank}").glob("*"))) for rank in (0, 1)), default=0)


def wrong_action(failure: Failure, finished: Finished, folder: Path) -> str:
    """What is wrong with what became of the run; empty where nothing is."""
    starts, well = starts_of(folder), finished.returncode == 0
    if starts > failure.starts:
        return f"started {starts} times, at most {failure.starts} are allowed"
    if well != (failure.action in (Action.FINISH, Action.RESTART)):
        return f"ended with exit code {finished.returncode}"
    if failure.action is Action.RESTART and starts < 2:
        return "was not started again"
    if failure.action is Action.STOP_WITH_BUDGET and starts < failure.starts:
        return f"was started {starts} times, which leaves restarts unused"
    if failure.action is Action.STOP_WITH_MEMORY and re.search(r"\d+(\.\d+)? GiB", finished.stderr) is None:
        return "says nothing of memory"
    said = finished.stderr.rpartition("Not started again: ")[2]
    named = re.findall(r"\d+", said.partition("samples")[2])
    if failure.action is Action.STOP_AND_NAME_SAMPLES and not {str(one) for one in failure.samples} & set(named):
        return f"names the samples {named}"
    return ""


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(
            name,
            marks=[
                *([] if name in QUICK else [pytest.mark.slow]),
                *([pytest.mark.xfail(reason=MISSES[name], strict=True)] if name in MISSES else []),
            ],
        )
        for name in CATALOGUE
    ],
)
def test_the_policy_does_what_has_to_be_done(name: str, tmp_path: Path) -> None:
    failure = CATALOGUE[name]
    finished = launched(failure, tmp_path)
    assert not wrong_action(failure, finished, tmp_path), finished.stderr
    lines = failures_of(tmp_path)
    assert bool(lines) == (failure.action is not Action.FINISH)
    if failure.culprit is not None:
        assert {line["rank"] for line in lines} == {failure.culprit}, finished.stderr
    assert all(line["decided_after"] < 1 for line in lines)
    assert len(lines) <= MOST_RESTARTS + 1
    assert str(tmp_path) not in set(folders_of_launchers())


def folders_of_launchers() -> Iterator[str]:
    """Where the launchers were started whose folders exist; others than this one may end meanwhile."""
    for path in (path for place in PLACES for path in Path(place).glob(f"{PREFIX}*/status/run.json")):
        with suppress(OSError, ValueError):
            yield json.loads(path.read_text())["folder"]
