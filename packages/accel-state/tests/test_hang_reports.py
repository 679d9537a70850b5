"""The statuses of ranks, the log of calls, and the sentences of a hang report."""

from __future__ import annotations

import importlib
import os
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest

from accel_state import library
from accel_state.plugins import Plugin
from accel_state.watch.calls import CallLog, Location, format_ranks, locate
from accel_state.watch.report import describe_ranks
from accel_state.watch.status import RankStatus, capture_status

IN_GATHER = RankStatus(17, "gather", "eval.py:88", True, "", "")
IN_REDUCE = RankStatus(17, "reduce", "train.py:41", True, "", "")
BETWEEN = RankStatus(16, "gather", "eval.py:88", False, "train.py:5", "")
IN_TORCH = RankStatus(16, "gather", "eval.py:88", False, "train.py:5", "all_reduce")
NOWHERE = RankStatus(0, "", "", False, "train.py:2", "")


def described_now(seen: dict[int, RankStatus], world_size: int) -> str:
    """The sentence for statuses that were captured just now."""
    return describe_ranks({rank: replace(status, time=time.monotonic()) for rank, status in seen.items()}, world_size)


def test_ranks_at_one_position_share_a_sentence_and_the_smallest_group_comes_first() -> None:
    seen = {0: IN_REDUCE, 1: IN_REDUCE, 2: IN_REDUCE, 3: IN_GATHER}
    assert described_now(seen, 4) == (
        "rank 3 is in gather() at eval.py:88 (call 17); ranks 0-2 are in reduce() at train.py:41 (call 17)"
    )


@pytest.mark.parametrize(
    ("status", "words"),
    [
        (BETWEEN, "rank 0 is at train.py:5, after gather() at eval.py:88 (call 16)"),
        (IN_TORCH, "rank 0 is in all_reduce() at train.py:5, after gather() at eval.py:88 (call 16)"),
        (NOWHERE, "rank 0 is at train.py:2, before any collective"),
        (replace(BETWEEN, main_thread_at=""), "rank 0 is after gather() at eval.py:88 (call 16)"),
        (
            replace(BETWEEN, left="without an exception"),
            "rank 0 is no longer there: it has left the run without an exception, after gather() at eval.py:88",
        ),
        (
            replace(IN_GATHER, time=1.0e9, host="elsewhere"),
            "rank 0 is silent for 60 s; it was last seen in gather() at eval.py:88 (call 17)",
        ),
        (
            replace(IN_GATHER, time=1.0e9),
            "rank 0 is alive (process {pid}) but silent for 60 s; it was last seen in gather() at eval.py:88",
        ),
    ],
)
def test_the_report_describes_each_process_state(status: RankStatus, words: str) -> None:
    told = describe_ranks({0: status}, 1, {0: 60.0 if status.time == 1.0e9 else 0.0})
    # Names of tests must be the same in every process that collects them.
    assert told.startswith(words.replace("{pid}", str(os.getpid())))


def test_names_for_a_terminal_are_escaped() -> None:
    place = "a\x1b[2Jb.py:1"
    statuses = {
        0: replace(IN_GATHER, called_at=place, operation="x\x07", group="g\r"),
        1: replace(IN_TORCH, main_thread_at=place, main_thread_in="f\x9b"),
        2: replace(IN_GATHER, left="with \x1b]0;title\x07"),
    }
    assert described_now(statuses, 3).isprintable()
    assert r"a\x1b[2Jb.py:1" in described_now(statuses, 3)


def test_a_process_that_never_published_is_unknown() -> None:
    assert described_now({0: IN_GATHER}, 3) == "rank 0 is in gather() at eval.py:88 (call 17); ranks 1-2 are unknown"


def test_a_process_that_is_stopped_is_named_so() -> None:
    sleeping = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    try:
        os.kill(sleeping.pid, signal.SIGSTOP)
        seen = replace(IN_GATHER, pid=sleeping.pid)
        deadline = time.monotonic() + 250
        while "stopped" not in described_now({0: seen}, 1):
            assert time.monotonic() < deadline
        assert described_now({0: seen}, 1) == (
            f"rank 0 is stopped (process {sleeping.pid}, by SIGSTOP or a debugger); "
            "it was last seen in gather() at eval.py:88 (call 17)"
        )
    finally:
        sleeping.kill()
        sleeping.wait()


def test_text_that_no_status_wrote_is_ignored() -> None:
    for text in ("", "[]", '{"number": 1}', IN_GATHER.to_json().replace("17", '"17"'), "[" * 100_000):
        assert RankStatus.from_json(text) is None


def test_a_process_that_has_ended_is_gone_even_before_its_parent_waits_for_it() -> None:
    ended = subprocess.Popen([sys.executable, "-c", "pass"])
    try:
        ended_pid = ended.pid
        deadline = time.monotonic() + 250
        while "gone" not in describe_ranks({0: replace(IN_GATHER, pid=ended_pid)}, 1):
            assert time.monotonic() < deadline
    finally:
        ended.wait()
    told = described_now({0: replace(IN_GATHER, pid=ended_pid)}, 1)
    assert told.startswith(f"rank 0 is gone (process {ended_pid} has ended); it was last seen in gather()")


def test_a_process_of_another_machine_is_not_looked_up_here() -> None:
    assert "gone" not in describe_ranks({0: replace(IN_GATHER, pid=2**22 + 1, host="elsewhere")}, 1)


def test_the_report_counts_positions_beyond_the_limit() -> None:
    seen = {rank: replace(IN_GATHER, number=rank + 1) for rank in range(100)}
    told = described_now(seen, 100)
    assert told.endswith("and 84 other places")
    assert told.count(";") == 16


@pytest.mark.parametrize(
    ("members", "words"),
    [([3], "rank 3"), ([0, 1, 2], "ranks 0-2"), ([5, 0, 2, 1], "ranks 0-2, 5"), ([1, 3], "ranks 1, 3")],
)
def test_format_ranks(members: list[int], words: str) -> None:
    assert format_ranks(members) == words


def test_a_status_is_read_back_from_json() -> None:
    assert RankStatus.from_json(IN_TORCH.to_json()) == IN_TORCH


def test_a_status_has_the_active_call_or_else_the_last_one() -> None:
    log = CallLog()
    assert capture_status(log).number == 0
    log.enter("gather")
    line = sys._getframe().f_lineno - 1
    first = capture_status(log, stack=True)
    assert first.active
    assert first.called_at.endswith(f"test_hang_reports.py:{line}")
    assert first.main_thread_at.endswith(f"test_hang_reports.py:{line + 2}")
    log.leave()
    second = capture_status(log)
    assert not second.active
    assert second.main_thread_at == ""
    assert (second.number, second.operation) == (1, "gather")
    assert second.pid == os.getpid()
    assert first.since > 0
    assert second.since == 0


def test_a_status_never_has_a_completed_call_as_active() -> None:
    log, ended = CallLog(), threading.Event()

    def call() -> None:
        while not ended.is_set():
            log.enter("gather")
            log.leave()

    calling = threading.Thread(target=call)
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    calling.start()
    try:
        for _ in range(2000):
            completed = next((done.number for done in log.recent(1)), 0)
            seen = capture_status(log)
            assert not seen.active or seen.number > completed
    finally:
        ended.set()
        calling.join()
        sys.setswitchinterval(interval)


def test_the_log_keeps_the_newest_calls() -> None:
    log = CallLog(length=3)
    for number in range(5):
        log.enter(f"call{number}")
        log.fingerprint = number
        log.leave()
    assert [call.operation for call in log.recent()] == ["call2", "call3", "call4"]
    assert [call.number for call in log.recent(2)] == [4, 5]
    assert log.recent(1)[0].fingerprint == 4
    assert log.recent(1)[0].seconds >= 0


def test_lines_are_named_from_the_working_directory(tmp_path: object, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(str(tmp_path))
    assert locate(f"{tmp_path}/sub/eval.py", 3) == Location("sub/eval.py", 3)
    assert str(locate("/elsewhere/eval.py", 3)) == "/elsewhere/eval.py:3"


def test_lines_of_a_loaded_plugin_are_not_the_users(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "foreign_backend.py").write_text("def call(log):\n    log.enter('gather')\n    log.leave()\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(library, "_libraries", set(library._libraries))
    log = CallLog()
    importlib.import_module("foreign_backend").call(log)
    assert log.last().location.path.endswith("foreign_backend.py")
    Plugin("accel.backends", "foreign", "foreign_backend:call", "foreign 1.0").load()(log)
    assert log.last().location.path.endswith("test_hang_reports.py")
    sys.modules.pop("foreign_backend")
