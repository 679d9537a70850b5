"""What a launch says of processes that wait in a collective for ever, and how it ends them."""

from __future__ import annotations

import os
import signal
import time

import pytest

from accel_cli.launch import hangs
from accel_cli.launch.hangs import HangWatch
from accel_state.watch.record import StatusRecord
from accel_state.watch.status import RankStatus

pytestmark = pytest.mark.usefixtures("preloaded_python")

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


@pytest.mark.parametrize(
    ("waited", "group", "code", "expected"),
    [(10.0, "", 0, [1]), (0.0, "", 0, []), (10.0, "tp of ranks 0, 2", 0, []), (10.0, "", 1, [])],
    ids=["in a collective of all", "not for long", "in a collective of others", "after a failure"],
)
def test_a_run_ends_early_only_if_a_collective_of_all_cannot_end(watched, waited, group, code, expected):
    watch, write = watched()
    since = time.monotonic() - waited
    write(0, RankStatus(2, "gather", "job.py:8", True, "job.py:8", "", since=since, group=group))
    watch.look()
    assert watch.ended_early({1: code}) == expected


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
    """Look once a second at a process that, with its children, has used so much processor time by then."""
    clock = time.monotonic()
    for second in range(seconds):
        monkeypatch.setattr(hangs, "processor_seconds", lambda pid, second=second: used(second))
        monkeypatch.setattr(time, "monotonic", lambda second=second: clock + second)
        write(0, seen(second))
        watch.look()
    monkeypatch.undo()


def in_place(line, inside, waits=True, steps=0):
    return RankStatus(2, "gather", "job.py:3", False, line, inside, has_stack=True, waits_for_others=waits, steps=steps)


@pytest.mark.parametrize(
    ("seen", "used", "reports"),
    [
        (lambda second: in_place("job.py:7", "backward"), 0.0, True),
        (lambda second: in_place("job.py:7", "backward"), 0.5, False),
        (lambda second: in_place(f"job.py:{second}", "backward"), 0.0, False),
        (lambda second: in_place("job.py:7", "backward", steps=second), 0.0, False),
        (lambda second: in_place("job.py:7", "load_inline", waits=False), 0.0, False),
    ],
    ids=["waits", "computes", "goes on", "makes steps", "waits for something else"],
)
def test_a_process_in_a_collective_of_torch_waits_if_nothing_computes(
    watched, capsys, monkeypatch, seen, used, reports
):
    watch, write = watched()
    stay(watch, write, seen, monkeypatch, lambda second: 1.0 + used * second, 20)
    assert ("have waited in a collective" in capsys.readouterr().err) == reports


def stop_the_clock(monkeypatch):
    """Waits have the length that a test writes, however slow the machine is."""
    now = time.monotonic()
    monkeypatch.setattr(time, "monotonic", lambda: now)


def status(number, active, since):
    return RankStatus(number, "gather", "job.py:3", active, "", "", since=since)


@pytest.fixture
def watched(tmp_path):
    """A watch, and a function that writes where a process is."""

    def make(report_after=10.0, timeout=None, codes=dict):
        watch = HangWatch(str(tmp_path), report_after, timeout, 2, codes)
        records = {}

        def write(rank, seen):
            if rank not in records:
                records[rank] = StatusRecord()
                records[rank].open(watch.folder, rank)
            records[rank].publish(seen.to_json())

        return watch, write

    return make


def test_a_hang_is_reported_once_in_each_period_and_the_next_one_anew(watched, capsys, monkeypatch):
    stop_the_clock(monkeypatch)
    watch, write = watched()
    total = 0
    for waited, reports in ((9.0, 0), (11.0, 1), (15.0, 1), (21.0, 2), (30.0, 2), (41.0, 3)):
        write(0, status(2, True, time.monotonic() - waited))
        assert not watch.look()
        text = capsys.readouterr().err
        total += text.count("have waited in a collective")
        assert total == reports, (waited, text)
    write(0, status(3, True, time.monotonic() - 12.0))
    watch.look()
    assert "rank 0 is in gather() at job.py:3 (call 3)" in capsys.readouterr().err


def test_a_step_of_the_wall_clock_is_no_wait(watched, capsys, monkeypatch):
    watch, write = watched(timeout=10.0)
    write(0, status(2, True, time.monotonic() - 1.0))
    for step in (-3600.0, 3600.0):
        wall = time.time()
        monkeypatch.setattr(time, "time", lambda wall=wall, step=step: wall + step)
        assert not watch.look()
    assert capsys.readouterr().err == ""


def test_processes_that_do_not_wait_are_not_reported(watched, capsys):
    watch, write = watched(timeout=10.0)
    write(0, status(2, False, 0.0))
    assert not watch.look()
    watch.tell()
    assert (capsys.readouterr().err, watch.waited) == ("", 0.0)


def test_zero_seconds_switch_the_report_off_and_a_signal_still_tells(watched, capsys, monkeypatch):
    stop_the_clock(monkeypatch)
    watch, write = watched(report_after=0.0)
    write(0, status(2, True, time.monotonic() - 500.0))
    assert not watch.look()
    assert capsys.readouterr().err == ""
    watch.tell()
    assert "for 500 s" in capsys.readouterr().err


def test_the_exit_codes_of_ended_processes_and_silent_ranks_are_told(watched, capsys):
    watch, write = watched(codes=lambda: {1: 0})
    write(0, status(2, True, time.monotonic() - 11.0))
    watch.look()
    text = capsys.readouterr().err
    assert "rank 1 is unknown" in text
    assert "Process 1 ended with exit code 0." in text


@pytest.mark.parametrize("words", [("--hang_report_after", "-1"), ("--hang_timeout", "soon")])
def test_seconds_that_are_none_are_refused(accel, script, words):
    finished = accel("launch", *words, script("print('ran')"))
    assert (finished.returncode, finished.stdout) == (2, "")
    assert f"({words[0]})" in finished.stderr


HEALTHY = """
    import os, queue, sys, threading, time
    import torch
    from accel_state.process import PartialState
    state = PartialState(cpu=True)
    state.wait_for_everyone()
    began, how = time.monotonic(), sys.argv[1]
    if how == "queue":
        try:
            queue.Queue().get(timeout=14)
        except queue.Empty:
            pass
    elif how == "file":
        # A function of torch that waits, for a file that somebody else writes.
        os.mkfifo(f"weights{state.process_index}")
        threading.Timer(14, lambda: torch.save(1, f"weights{state.process_index}")).start()
        try:
            torch.load(f"weights{state.process_index}")
        except (OSError, ValueError):
            # A pipe has no positions.
            pass
    elif how == "clock":
        # The wall clock is an hour back, and then two hours ahead.
        real = time.time
        while time.monotonic() < began + 14:
            for hours in (-1, 1):
                time.time = lambda: real() + 3600 * hours
                state.wait_for_everyone()
                time.sleep(0.5)
    state.wait_for_everyone()
    print("done", flush=True)
"""


@pytest.mark.slow
@pytest.mark.parametrize("how", ["queue", "file", "clock"])
def test_a_healthy_process_is_neither_reported_nor_ended(accel, script, how):
    job = script(HEALTHY)
    options = ("--hang_report_after", "9", "--hang_timeout", "10")
    finished = accel("launch", "--cpu", "--num_processes", "2", *options, job, how)
    assert (finished.returncode, finished.stdout) == (0, "done\ndone\n"), finished.stderr
    assert "have waited" not in finished.stderr


@pytest.mark.slow
def test_an_all_reduce_of_the_script_that_waits_is_reported_and_ends_the_run(accel, script):
    job = script(
        """
        import time
        import torch
        import torch.distributed as dist
        from accel_state.process import PartialState
        state = PartialState(cpu=True)
        while state.process_index == 1:
            time.sleep(0.2)
        dist.all_reduce(torch.ones(1))
        """
    )
    finished = accel(*launched("local", "--hang_timeout", "14"), job)
    assert finished.returncode == 1
    assert "rank 0 is in all_reduce() at job.py:9, before any collective" in finished.stderr
    assert "The run was ended after 14 s in one collective (hang_timeout)." in finished.stderr


POLLS = """
    import time
    import torch
    import torch.distributed as dist
    from accel_state.process import PartialState
    state = PartialState(cpu=True)
    while state.process_index == 1:
        time.sleep(0.2)
    work = dist.all_reduce(torch.ones(1), async_op=True)
    while not work.is_completed():
        time.sleep(1.0)
"""


@pytest.mark.slow
def test_a_collective_in_torchs_flight_recorder_is_one_also_where_the_main_thread_is_elsewhere(accel, script):
    environment = {"TORCH_FR_BUFFER_SIZE": "100"}
    finished = accel(*launched("local", "--hang_timeout", "14"), script(POLLS), env=environment)
    assert finished.returncode == 1
    waits = "rank 0 is at job.py:11, before any collective, while gloo:all_reduce of default_pg (number 1) is pending"
    assert waits in finished.stderr
    assert "The run was ended after 14 s in one collective (hang_timeout)." in finished.stderr
