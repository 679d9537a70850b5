"""A process that is killed, sleeps, or is elsewhere: every other one says where all of them are, within the timeout."""

from __future__ import annotations

import os
import re
import signal
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from accel_ops import gather, gather_object, reduce, where_is_everyone
from accel_state import PartialState, current
from accel_state.errors import CollectiveError
from accel_state.process import wait_for_everyone
from accel_state.transport.torch_dist import TorchDistTransport
from accel_testing.processes import Processes, RankOutcome, run_command

HERE = Path(__file__).name
TIMEOUT = 20.0
LATEST = TIMEOUT + 60.0
SOON = 80.0


Cases = Mapping[Callable[..., Any], "Future[list[RankOutcome]]"]


@pytest.fixture(scope="module")
def cases(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cases]:
    """Every case on three processes of its own, at the same time: most of them wait for their timeout."""
    calls: list[tuple[Callable[..., Any], tuple[Any, ...]]] = [
        *((waits_elsewhere, ()), (raw_collective, ()), (dies, (2,)), (host_dies, ())),
        *((host_is_stopped, (tmp_path_factory.mktemp("stopped"),)), (comes_late, ()), (interrupted, ())),
    ]
    with ThreadPoolExecutor(len(calls)) as pool:
        yield {function: pool.submit(on_three, function, *arguments) for function, arguments in calls}


def on_three(function: Callable[..., Any], *arguments: Any) -> list[RankOutcome]:
    with Processes(3) as group:
        # They have started and loaded all they need, so that they meet within a short timeout.
        group.run(has_met)
        return group.outcomes(function, *arguments)


def returned(cases: Cases, function: Callable[..., Any]) -> list[Any]:
    """What the function returned on each process."""
    outcomes = cases[function].result()
    assert all(outcome.ok for outcome in outcomes), "\n".join(map(str, outcomes))
    return [outcome.value for outcome in outcomes]


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
    assert all((caught.value.failure, caught.value.obstacle, caught.value.remedy))
    return str(caught.value), time.monotonic() - start


def gather_one() -> None:
    gather(torch.ones(1))


def store() -> dist.Store:
    found = current.process().transport.store()
    assert found is not None
    return found


def told(event: str, count: int) -> None:
    """Return when so many processes have told of an event."""
    while store().add(event, 0) < count:
        time.sleep(0.05)


def leave_together(count: int = 3) -> None:
    """Process 0 hosts the store, so it is the last of those that still use it to go."""
    store().add("leaves", 1)
    if PartialState().is_main_process:
        told("leaves", count)


def has_met() -> None:
    PartialState(cpu=True)
    gather_one()


def waits_elsewhere() -> tuple[str, float]:
    state = PartialState(cpu=True, timeout=TIMEOUT)
    gather_one()
    found, shared = ("", 0.0), store()
    if state.process_index != 2:
        found = failed(gather_one)
        shared.add("seen", 1)
    else:
        while shared.add("seen", 0) < 2:  # busy with something else
            time.sleep(0.05)
    leave_together()
    return found


def test_a_process_that_is_busy_elsewhere_is_named_with_its_line(cases: Cases) -> None:
    lines = [line_of(waits_elsewhere, text) for text in ("while shared.add", "time.sleep")]
    messages = []
    for message, seconds in returned(cases, waits_elsewhere)[:2]:
        assert seconds < LATEST
        assert any(f"{HERE}:{line}, after gather() at " in message for line in lines), message
        assert "rank 2 is at " in message.lower()
        assert "(call 2)" in message
        messages.append(message)
    # The one that reports last may see that the other has left the call.
    first = next(message for message in messages if "ranks 0-1 are in gather() at " in message)
    assert first.splitlines()[1].strip().startswith("Rank 2 is at ")


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
        found = failed(lambda: reduce(torch.ones(1)))
        # Process 1 notices when one of them goes, so none goes before both have reported.
        store().add("given up", 1)
        told("given up", 2)
        leave_together(2)
        return found


def test_a_process_inside_of_a_collective_that_is_not_ours_is_named_too(cases: Cases) -> None:
    line = line_of(raw_collective, "dist.all_reduce")
    messages = []
    for message, seconds in returned(cases, raw_collective)[::2]:
        assert seconds < LATEST
        assert re.search(rf"rank 1 is in all_reduce\(\) at \S*{HERE}:{line}", message, re.IGNORECASE), message
        messages.append(message)
    # The one that reports last may see that the other has left the call.
    assert any("ranks 0, 2 are in reduce() at " in message for message in messages), messages


def dies(rank: int) -> tuple[str, float]:
    state = PartialState(cpu=True, timeout=100.0)
    gather_one()
    # The others must have been seen once before the process that hosts the store can die.
    watcher = threading.Event()
    while where_is_everyone().count("gather()") == 0 or "unknown" in where_is_everyone():
        watcher.wait(0.05)
    store().add("ready to see it die", 1)
    if state.process_index == rank:
        told("ready to see it die", 3)
        os.kill(os.getpid(), signal.SIGKILL)
    found = failed(gather_one)
    if rank != 0:
        leave_together(2)
    return found


def host_dies() -> tuple[str, float]:
    return dies(0)


def survivors(outcomes: list[RankOutcome], died: int) -> list[tuple[str, float]]:
    assert outcomes[died].exitcode == -signal.SIGKILL
    alive = [outcome for outcome in outcomes if outcome.rank != died]
    assert all(outcome.ok for outcome in alive), "\n".join(map(str, outcomes))
    return [outcome.value for outcome in alive]


def test_a_killed_process_is_noticed_at_once_and_named(cases: Cases) -> None:
    for message, seconds in survivors(cases[dies].result(), 2):
        assert seconds < SOON
        assert "rank 2 is gone (process " in message.lower()
        assert "cannot be reached" not in message


def test_without_the_host_of_the_store_the_last_statuses_are_shown(cases: Cases) -> None:
    for message, seconds in survivors(cases[host_dies].result(), 0):
        assert seconds < SOON
        assert "Rank 0 is gone (process " in message
        assert "The process that hosts the store cannot be reached" in message


def host_is_stopped(folder: Path) -> tuple[str, float, str]:
    """Rank 1 stops rank 0, which hosts the store, and lets it go on when the others have reported."""
    state = PartialState(cpu=True, timeout=TIMEOUT)
    pids = gather_object([os.getpid()])
    while "unknown" in where_is_everyone():
        time.sleep(0.05)
    wait_for_everyone()
    (folder / f"passed{state.process_index}").touch()
    if state.is_main_process:
        while not (folder / "reported1").exists():  # it is stopped meanwhile
            time.sleep(0.05)
        return "", 0.0, ""
    if state.process_index == 1:
        # Whoever has passed a barrier may have done so before others, to which the stopped one would still send.
        while not ((folder / "passed0").exists() and (folder / "passed2").exists()):
            time.sleep(0.05)
        os.kill(pids[0], signal.SIGSTOP)
    try:
        message, seconds = failed(gather_one)
        asked = where_is_everyone()
        (folder / f"reported{state.process_index}").touch()
    finally:
        if state.process_index == 1:
            limit = time.monotonic() + 120
            while not (folder / "reported2").exists() and time.monotonic() < limit:
                time.sleep(0.05)
            os.kill(pids[0], signal.SIGCONT)
    return message, seconds, asked


def test_with_the_host_of_the_store_stopped_the_others_report_within_the_deadline(cases: Cases) -> None:
    for message, seconds, asked in returned(cases, host_is_stopped)[1:]:
        assert seconds < LATEST
        assert "rank 0 is stopped (process " in message.lower(), message
        assert "rank 0 is stopped (process " in asked.lower(), asked


def comes_late() -> list[str]:
    """A process that comes after the others gave up gets a named error as well, and so does every later call."""
    state = PartialState(cpu=True, timeout=TIMEOUT)
    gather_one()
    if state.process_index == 2:
        told("gave up", 2)
    messages = [failed(gather_one)[0]]
    store().add("gave up", 1)
    messages.append(failed(lambda: reduce(torch.ones(1)))[0])
    leave_together()
    return messages


def test_the_late_process_and_later_calls_get_named_errors_too(cases: Cases) -> None:
    for first, second in returned(cases, comes_late):
        assert "gather() at " in first
        assert "reduce() at " in second


def interrupted() -> str:
    """Ctrl-C reaches a process that waits for the others."""
    state = PartialState(cpu=True, timeout=60.0)
    gather_one()
    if state.process_index != 0:
        told("interrupted", 1)
        leave_together()
        return ""

    def interrupt() -> None:
        while "(call 2)" not in where_is_everyone():
            time.sleep(0.05)
        time.sleep(0.3)
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=interrupt, daemon=True).start()
    with pytest.raises(KeyboardInterrupt):
        gather_one()
    store().add("interrupted", 1)
    leave_together()
    return "interrupted"


def test_a_waiting_process_can_be_interrupted(cases: Cases) -> None:
    assert returned(cases, interrupted) == ["interrupted", "", ""]


SCRIPT = """
import ctypes, os, signal, sys, threading, time
from pathlib import Path

here, rank = Path(__file__).parent, int(os.environ["RANK"])
if rank == 1 and (child := os.fork()):
    # The launcher learns of the death when the survivors are reporting; before, they could be ended without a word.
    os.waitpid(child, 0)
    limit = time.monotonic() + 200
    while len(list(here.glob("reporting*"))) < 2 and time.monotonic() < limit:
        time.sleep(0.05)
    sys.exit(1)

import torch
from accel_ops import gather, where_is_everyone
from accel_state import PartialState, current

PartialState(cpu=True)
gather(torch.ones(1))
store = current.process().transport.store()
while "unknown" in where_is_everyone():
    time.sleep(0.05)
store.add("known", 1)
while store.add("known", 0) < 4:
    time.sleep(0.05)
if rank == 3:
    # Says nothing any more, not even where it is, so that the reports are still waiting for it when the launcher acts.
    hold = ctypes.PyDLL(None).sleep
    store.add("ready", 1)
    hold(200)
    sys.exit()
store.add("ready", 1)
if rank == 1:
    while store.add("ready", 0) < 4:
        time.sleep(0.05)
    os.kill(os.getpid(), signal.SIGKILL)

def tell():
    while signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
        time.sleep(0.01)
    (here / f"reporting{rank}").touch()

threading.Thread(target=tell, daemon=True).start()
gather(torch.ones(1))
"""


@pytest.mark.usefixtures("preloaded_python")
def test_a_launcher_that_ends_the_survivors_lets_them_report_first(tmp_path: Path) -> None:
    script = tmp_path / "eval.py"
    script.write_text(textwrap.dedent(SCRIPT), encoding="utf-8")
    launch = ["-m", "torch.distributed.run", "--nproc-per-node=4", "--rdzv-backend=c10d", "--rdzv-endpoint=localhost:0"]
    environment = {"OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR", "PYTHONPATH": os.pathsep.join(sys.path)}
    ended = run_command([sys.executable, *launch, str(script)], env=environment)
    assert ended.returncode != 0
    assert {path.name for path in tmp_path.glob("reporting*")} == {"reporting0", "reporting2"}, ended.stderr
    reports = [line for line in ended.stderr.splitlines() if "rank 1 is gone" in line.lower()]
    assert len(reports) >= 2, ended.stderr
    assert "eval.py:" in ended.stderr
