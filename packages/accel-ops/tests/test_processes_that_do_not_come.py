"""A process that is killed, sleeps, or is elsewhere: every other one says where all of them are, within the timeout."""

from __future__ import annotations

import os
import signal
import sys
import textwrap
import threading
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from accel_ops import gather, reduce, where_is_everyone
from accel_state import PartialState, current
from accel_state.errors import CollectiveError
from accel_state.testing.processes import Outcome, Processes, run_command
from accel_state.transport.torch_dist import TorchDistTransport

HERE = Path(__file__).name
TIMEOUT = 4.0
LATEST = TIMEOUT + 30.0


@pytest.fixture(scope="module")
def three() -> Iterator[Processes]:
    with Processes(3, timeout=60) as group:
        yield group


def line_of(function: object, text: str) -> int:
    """The number of the line of a function of this file that holds a text."""
    code = function.__code__  # type: ignore[attr-defined]
    lines = Path(__file__).read_text(encoding="utf-8").splitlines()
    return next(n for n in range(code.co_firstlineno, len(lines)) if text in lines[n - 1])


def failed(call: object) -> tuple[str, float]:
    """The message of the error that a call must end with, and the seconds until then."""
    start = time.monotonic()
    with pytest.raises(CollectiveError) as caught:
        call()  # type: ignore[operator]
    assert isinstance(caught.value, RuntimeError)
    assert all((caught.value.asked, caught.value.obstacle, caught.value.remedy))
    return str(caught.value), time.monotonic() - start


def gather_one() -> None:
    gather(torch.ones(1))


def store() -> dist.Store:
    found = current.process().transport.store()
    assert found is not None
    return found


def waits_elsewhere() -> tuple[str, float]:
    state = PartialState(cpu=True, timeout=TIMEOUT)
    gather_one()
    if state.process_index != 2:
        found = failed(gather_one)
        store().add("seen", 1)
        return found
    while store().add("seen", 0) < 2:  # busy with something else
        time.sleep(0.05)
    return "", 0.0


def test_a_process_that_is_busy_elsewhere_is_named_with_its_line(three: Processes) -> None:
    lines = [line_of(waits_elsewhere, text) for text in ("while store()", "time.sleep")]
    for message, seconds in three.run(waits_elsewhere)[:2]:
        assert seconds < LATEST
        assert message.splitlines()[1].strip().startswith("Rank 2 is at ")
        assert any(f"{HERE}:{line}, after gather() at " in message for line in lines), message
        assert "ranks 0-1 are in gather() at " in message
        assert "(call 2)" in message


def raw_collective() -> tuple[str, float]:
    state = PartialState(cpu=True, timeout=60.0)
    process = current.process()
    ours = TorchDistTransport(process.device, timedelta(seconds=TIMEOUT), process.transport.store())
    with current.replace_process(process._replace(transport=ours)):
        gather_one()
        if state.process_index == 1:
            with pytest.raises(RuntimeError):  # when the others have given up and leave
                dist.all_reduce(torch.ones(1))
            return "", 0.0
        return failed(lambda: reduce(torch.ones(1)))


def test_a_process_inside_of_a_collective_that_is_not_ours_is_named_too(three: Processes) -> None:
    line = line_of(raw_collective, "dist.all_reduce")
    for message, seconds in three.run(raw_collective)[::2]:
        assert seconds < LATEST
        assert "Rank 1 is in all_reduce() at " in message
        assert f"{HERE}:{line}" in message
        assert "ranks 0, 2 are in reduce() at " in message


def dies(rank: int) -> tuple[str, float]:
    state = PartialState(cpu=True, timeout=60.0)
    gather_one()
    # The others must have been seen once before the process that hosts the store can die.
    watcher = threading.Event()
    while where_is_everyone().count("gather()") == 0 or "unknown" in where_is_everyone():
        watcher.wait(0.05)
    state.wait_for_everyone()
    if state.process_index == rank:
        os.kill(os.getpid(), signal.SIGKILL)
    return failed(gather_one)


def survivors(outcomes: list[Outcome], died: int) -> list[tuple[str, float]]:
    assert outcomes[died].exitcode == -signal.SIGKILL
    alive = [outcome for outcome in outcomes if outcome.rank != died]
    assert all(outcome.ok for outcome in alive), "\n".join(map(str, outcomes))
    return [outcome.value for outcome in alive]


def test_a_killed_process_is_noticed_at_once_and_named(three: Processes) -> None:
    for message, seconds in survivors(three.outcomes(dies, 2), 2):
        assert seconds < 20.0
        assert "Rank 2 is gone (process " in message
        assert "cannot be reached" not in message


def test_without_the_process_that_hosts_the_store_the_last_picture_is_shown(three: Processes) -> None:
    for message, seconds in survivors(three.outcomes(dies, 0), 0):
        assert seconds < 20.0
        assert "Rank 0 is gone (process " in message
        assert "The process that hosts the store cannot be reached" in message


def comes_late() -> list[str]:
    """A process that comes after the others gave up gets a named error as well, and so does every later call."""
    state = PartialState(cpu=True, timeout=8.0)
    gather_one()
    if state.process_index == 2:
        while store().add("gave up", 0) < 2:
            time.sleep(0.05)
    messages = [failed(gather_one)[0]]
    store().add("gave up", 1)
    messages.append(failed(lambda: reduce(torch.ones(1)))[0])
    return messages


def test_the_late_process_and_later_calls_get_named_errors_too(three: Processes) -> None:
    for first, second in three.run(comes_late):
        assert "gather() at " in first
        assert "reduce() at " in second


def interrupted() -> str:
    """Ctrl-C reaches a process that waits for the others."""
    state = PartialState(cpu=True, timeout=60.0)
    gather_one()
    if state.process_index != 0:
        while not store().check(["interrupted"]):
            time.sleep(0.05)
        return ""
    threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT)).start()
    with pytest.raises(KeyboardInterrupt):
        gather_one()
    store().set("interrupted", "yes")
    return "interrupted"


def test_a_waiting_process_can_be_interrupted(three: Processes) -> None:
    assert three.run(interrupted) == ["interrupted", "", ""]


SCRIPT = """
import os, signal
import torch
from accel_ops import gather, where_is_everyone
from accel_state import PartialState

state = PartialState(cpu=True)
gather(torch.ones(1))
while "unknown" in where_is_everyone():
    pass
state.wait_for_everyone()
if state.process_index == 1:
    os.kill(os.getpid(), signal.SIGKILL)
gather(torch.ones(1))
"""


def test_a_launcher_that_ends_the_survivors_lets_them_report_first(tmp_path: Path) -> None:
    script = tmp_path / "eval.py"
    script.write_text(textwrap.dedent(SCRIPT), encoding="utf-8")
    launch = ["-m", "torch.distributed.run", "--nproc-per-node=3", "--rdzv-backend=c10d", "--rdzv-endpoint=localhost:0"]
    environment = {"OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR", "PYTHONPATH": os.pathsep.join(sys.path)}
    ended = run_command([sys.executable, *launch, str(script)], timeout=100, env=environment)
    assert ended.returncode != 0
    reports = [line for line in ended.stderr.splitlines() if "rank 1 is gone" in line.lower()]
    assert len(reports) >= 2, ended.stderr
    assert "eval.py:" in ended.stderr
