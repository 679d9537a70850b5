"""What a launch says of processes that wait in a collective for ever, and how it ends them."""

from __future__ import annotations

import os
import signal
import time

import pytest

from accel_cli.launch import hangs
from accel_cli.launch.hangs import HangWatch
from accel_state.hang_report.call_log import IMPORT
from accel_state.hang_report.progress import STATUS_FOLDER
from accel_state.hang_report.rank_status import RankStatus, StatusFile

WAITS = """
    import os, time
    from accel_state.process import PartialState
    state = PartialState(cpu=True)
    state.wait_for_everyone()
    print("going", flush=True)
    if state.process_index == 0:
        state.wait_for_everyone()
    {other}
"""
LOOPS = "else:\n        while True:\n            time.sleep(0.05)"


def launched(launcher, *more):
    words = ("launch", "--launcher", launcher, "--cpu", "--num_processes", "2", "--grace_period", "2")
    return (*words, "--hang_report_after", "10", *more)


@pytest.mark.parametrize("launcher", ["local", pytest.param("torchrun", marks=pytest.mark.slow)])
def test_a_collective_that_is_waited_for_too_long_is_reported_and_ends_the_run(accel, script, launcher):
    job = script(WAITS.format(other=LOOPS))
    finished = accel(*launched(launcher, "--hang_timeout", "14"), job)
    assert finished.returncode == 1
    reports = finished.stderr.split("Processes have waited in a collective for ")[1:]
    assert reports, finished.stderr
    for report in reports:
        assert "rank 0 is in wait_for_everyone() at job.py:8" in report
        assert "rank 1 is at job.py:11, after wait_for_everyone() at job.py:5" in report
    assert "The run was ended after 14 s in one collective (hang_timeout)." in finished.stderr


def test_a_process_that_ends_while_the_others_wait_ends_the_run(accel, script):
    job = script(
        """
        import os, sys
        if os.environ["RANK"] == "1":
            sys.exit(0)
        from accel_state.process import PartialState
        PartialState(cpu=True)
        """
    )
    finished = accel("launch", "--cpu", "--num_processes", "3", "--grace_period", "5", job)
    assert finished.returncode == 1
    assert finished.stderr.splitlines()[-1] == (
        "accel launch: Process 1 has ended (exit code 0) while the others wait for all processes."
    )


def reported(background, timeout=250.0):
    """What was printed to standard error until a report came."""
    text, deadline = "", time.monotonic() + timeout
    os.set_blocking(background.process.stderr.fileno(), False)
    while "have waited in a collective" not in text or not text.endswith("\n"):
        assert time.monotonic() < deadline, text
        text += (background.process.stderr.read() or b"").decode()
        time.sleep(0.1)
    os.set_blocking(background.process.stderr.fileno(), True)
    return text


@pytest.mark.slow
@pytest.mark.parametrize("launcher", ["local", "torchrun"])
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_to_the_launcher_tells_where_the_processes_are(start, script, launcher, number):
    background = start(*launched(launcher), script(WAITS.format(other=LOOPS)))
    first = reported(background)
    assert "rank 0 is in wait_for_everyone()" in first
    background.process.send_signal(number)
    finished = background.end()
    assert finished.returncode == 128 + number
    assert "rank 0 is in wait_for_everyone() at job.py:8" in finished.stderr
    assert f"ended by {number.name}" in finished.stderr


BACKWARD = """
    import time
    import torch
    from accel_torch import Accelerator
    accelerator = Accelerator(cpu=True, check_replicas_every=0)
    model = accelerator.prepare(torch.nn.Linear(2, 1))
    for _ in range(3):
        accelerator.backward(model(torch.ones(1, 2)).sum())
    if accelerator.process_index == 1:
        while True:
            time.sleep(0.2)
    accelerator.backward(model(torch.ones(1, 2)).sum())
"""


@pytest.mark.slow
def test_a_backward_that_waits_for_another_process_is_reported_and_ends_the_run(accel, script):
    finished = accel(*launched("local", "--hang_timeout", "25"), script(BACKWARD))
    assert finished.returncode == 1
    assert "rank 0 is in backward() at job.py:12, before any collective" in finished.stderr
    assert "rank 1 is at job.py:11, before any collective" in finished.stderr
    assert "The run was ended after 25 s in one collective (hang_timeout)." in finished.stderr


def stay(watch, write, seen, monkeypatch, used, seconds):
    """Look once a second at a process that has used so much processor time by then."""
    clock = time.time()
    for second in range(seconds):
        monkeypatch.setattr(hangs, "_processor_seconds", lambda pid, second=second: used(second))
        monkeypatch.setattr(time, "time", lambda second=second: clock + second)
        write(0, seen(second))
        watch.look()
    monkeypatch.undo()


def in_place(line, inside):
    return RankStatus(2, "gather", "job.py:3", False, line, inside, has_stack=True)


@pytest.mark.parametrize(
    ("seen", "used", "reports"),
    [
        (lambda second: in_place("job.py:7", "backward"), lambda second: 1.0, True),
        (lambda second: in_place("job.py:7", "backward"), lambda second: 0.5 * second, False),
        (lambda second: in_place(f"job.py:{second}", "backward"), lambda second: 1.0, False),
        (lambda second: in_place("job.py:7", ""), lambda second: 1.0, False),
        (lambda second: in_place("job.py:7", "__next__"), lambda second: 1.0, False),
        (lambda second: in_place("job.py:7", IMPORT), lambda second: 1.0, False),
    ],
    ids=["waits in backward", "computes in backward", "goes on", "sleeps by itself", "waits for its data", "imports"],
)
def test_a_process_without_processor_time_in_a_library_waits(watched, capsys, monkeypatch, seen, used, reports):
    watch, write = watched()
    stay(watch, write, seen, monkeypatch, used, 20)
    assert ("have waited in a collective" in capsys.readouterr().err) == reports


def stop_the_clock(monkeypatch):
    """Waits have the length that a test writes, however slow the machine is."""
    now = time.time()
    monkeypatch.setattr(time, "time", lambda: now)


def status(number, active, since):
    return RankStatus(number, "gather", "job.py:3", active, "", "", since=since)


@pytest.fixture
def watched(tmp_path):
    """A watch, and a function that writes where a process is."""

    def make(report_after=10.0, timeout=None, codes=dict):
        watch = HangWatch(str(tmp_path), report_after, timeout, 2, codes)
        folder = watch.variables[STATUS_FOLDER]
        return watch, lambda rank, seen: StatusFile(folder, rank).write(seen)

    return make


def test_a_hang_is_reported_once_in_each_period_and_the_next_one_anew(watched, capsys, monkeypatch):
    stop_the_clock(monkeypatch)
    watch, write = watched()
    total = 0
    for waited, reports in ((9.0, 0), (11.0, 1), (15.0, 1), (21.0, 2), (30.0, 2), (41.0, 3)):
        write(0, status(2, True, time.time() - waited))
        assert not watch.look()
        text = capsys.readouterr().err
        total += text.count("have waited in a collective")
        assert total == reports, (waited, text)
    write(0, status(3, True, time.time() - 12.0))
    watch.look()
    assert "rank 0 is in gather() at job.py:3 (call 3)" in capsys.readouterr().err


def test_processes_that_do_not_wait_are_not_reported(watched, capsys):
    watch, write = watched(timeout=10.0)
    write(0, status(2, False, 0.0))
    assert not watch.look()
    watch.tell()
    assert (capsys.readouterr().err, watch.waited) == ("", 0.0)


def test_zero_seconds_switch_the_report_off_and_a_signal_still_tells(watched, capsys, monkeypatch):
    stop_the_clock(monkeypatch)
    watch, write = watched(report_after=0.0)
    write(0, status(2, True, time.time() - 500.0))
    assert not watch.look()
    assert capsys.readouterr().err == ""
    watch.tell()
    assert "for 500 s" in capsys.readouterr().err


def test_the_exit_codes_of_ended_processes_and_silent_ranks_are_told(watched, capsys):
    watch, write = watched(codes=lambda: {1: 0})
    write(0, status(2, True, time.time() - 11.0))
    watch.look()
    text = capsys.readouterr().err
    assert "rank 1 is unknown" in text
    assert "Process 1 ended with exit code 0." in text


@pytest.mark.parametrize("words", [("--hang_report_after", "-1"), ("--hang_timeout", "soon")])
def test_seconds_that_are_none_are_refused(accel, script, words):
    finished = accel("launch", *words, script("print('ran')"))
    assert (finished.returncode, finished.stdout) == (2, "")
    assert f"({words[0]})" in finished.stderr
