"""Errors that gloo raises outside of our calls: they end with where every process was."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from accel_state import PartialState
from accel_state.process import wait_for_everyone
from accel_state.uncaught import explain_backend_error
from accel_testing.processes import Processes, ReservedPort

HERE = Path(__file__).name
TIMEOUT = 10.0


def has_met() -> None:
    PartialState(cpu=True)
    wait_for_everyone()


def one_reduces(folder: Path) -> str:
    state = PartialState(cpu=True, timeout=TIMEOUT)
    wait_for_everyone()
    if state.process_index == 1:
        while not (folder / "failed").exists():  # busy with something else
            time.sleep(0.05)
        return ""
    try:
        with pytest.raises(RuntimeError) as caught:
            dist.all_reduce(torch.ones(1))
        explain_backend_error(caught.value)
    finally:
        (folder / "failed").touch()
    before = str(caught.value)
    explain_backend_error(caught.value)
    assert str(caught.value) == before
    return before


def test_an_error_in_a_call_of_torch_says_where_every_process_was(two: Processes, tmp_path: Path) -> None:
    two.run(has_met)
    message, _ = two.run(one_reduces, tmp_path)
    assert "Timed out waiting" in message
    assert "rank 0 is in all_reduce() at " in message.lower(), message
    assert "rank 1 is at " in message.lower(), message
    assert message.count(HERE) >= 2, message


class CompletesWhenItsWaitEnds:
    """Work whose first wait times out at the moment at which the work completes."""

    def __init__(self, work: Any) -> None:
        self._work = work
        self._waits = 0

    def wait(self, timeout: Any = None) -> Any:
        self._waits += 1
        done = self._work.wait()
        if self._waits == 1:
            raise RuntimeError("Operation timed out!")
        return done

    def is_completed(self) -> bool:
        return bool(self._work.is_completed())


def meets_at_the_end_of_a_wait() -> int:
    state = PartialState(cpu=True)
    wait_for_everyone()
    transport = state._process.transport
    if state.process_index == 1:
        all_gather = transport.all_gather
        transport.all_gather = lambda *args, **named: CompletesWhenItsWaitEnds(all_gather(*args, **named))  # type: ignore[method-assign]
    wait_for_everyone()
    return state.process_index


def test_a_call_that_completes_as_a_wait_for_it_times_out_succeeds(two: Processes) -> None:
    assert two.run(meets_at_the_end_of_a_wait) == [0, 1]


def other_errors() -> list[str]:
    PartialState(cpu=True)
    found = []
    for error in (ValueError("gloo/ is not it"), RuntimeError("shapes differ"), KeyboardInterrupt()):
        before = str(error)
        explain_backend_error(error)
        found.append(str(error).replace(before, "", 1))
    return found


def test_explain_backend_error_leaves_other_errors_unchanged(two: Processes) -> None:
    assert two.run(other_errors) == [["", "", ""]] * 2


SCRIPT = """
import os, sys, time
from datetime import timedelta

import torch
import torch.distributed as dist
from accel_state import PartialState
from accel_state.process import wait_for_everyone

state = PartialState(cpu=True, timeout=60.0)
wait_for_everyone()
if state.process_index == 1:
    sys.exit(0)
dist.all_reduce(torch.ones(1))
"""


@pytest.mark.usefixtures("preloaded_python")
def test_an_error_that_nobody_catches_names_the_process_that_has_left(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(textwrap.dedent(SCRIPT), encoding="utf-8")
    port = ReservedPort()
    place = {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port.reserve()),
        "WORLD_SIZE": "2",
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join(sys.path),
        "RES_OPTIONS": "attempts:0",
    }
    started = [
        subprocess.Popen(
            [sys.executable, str(script)],
            env={**os.environ, **place, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in (0, 1)
    ]
    try:
        said = [process.communicate(timeout=250)[1] for process in started]
    finally:
        for process in started:
            process.kill()
        port.release()
    assert [process.returncode for process in started] == [1, 0], said
    assert "train.py" in said[0]
    assert "rank 0 is in all_reduce() at " in said[0].lower(), said[0]
    assert "rank 1 is no longer there: it has left the run without an exception" in said[0].lower() or (
        "rank 1 is gone (process " in said[0].lower()
    ), said[0]
