"""Accounts of time: what their files hold when a process ends or is killed, and what the summary makes of them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time

import pytest

from accel_state.errors import NotFound, SettingError
from accel_state.watch.calls import CallLog
from accel_state.watch.goodput import (
    account_line,
    append_line,
    close_account,
    close_accounts,
    keep_account,
    launcher_line,
    read_goodput,
)
from accel_state.watch.monitor import HangMonitor
from accel_state.watch.record import (
    BEFORE,
    CATEGORIES,
    DATA,
    EVALUATION,
    LIKELY,
    SAVING,
    START_UP,
    STEP,
    UNDECIDED,
    WAITING,
    StatusRecord,
)


def lines_of(folder, name="rank_0.jsonl"):
    return [json.loads(line) for line in (folder / name).read_text().splitlines()]


def write(folder, *lines, name="rank_0.jsonl"):
    (folder / "goodput").mkdir(parents=True, exist_ok=True)
    with (folder / "goodput" / name).open("a") as file:
        for line in lines:
            file.write((line if isinstance(line, str) else json.dumps(line)) + "\n")


def seconds(**given):
    return dict.fromkeys(CATEGORIES, 0.0) | {
        name.replace("start_up", "start-up"): value for name, value in given.items()
    }


def so_far(began, moment, event="so far", reached=0, doing="step", **given):
    spent = {"doing": doing, "step": reached, "begun": reached, "seconds": seconds(**given)}
    return {"event": event, "time": moment, "began": began, **spent}


def start(began):
    return so_far(began, began + 1, doing="start-up", start_up=1.0)


@pytest.fixture
def account(monkeypatch):
    """The record of this process, with an account that begins now."""
    record = StatusRecord()
    for module in ("goodput", "monitor", "status"):
        monkeypatch.setattr(f"accel_state.watch.{module}.STATUS_RECORD", record)
    record.begin_account()
    return record


def test_an_account_adds_up_to_the_time_of_its_process(account, tmp_path):
    keep_account(str(tmp_path / "rank_0.jsonl"))
    account.enter(DATA)
    account.enter(STEP)
    assert account.begin(SAVING) == STEP
    assert account.begin(WAITING) is None
    assert account.doing == SAVING
    account.enter(STEP)
    account.steps = account.cells[3] = 7
    monitor = HangMonitor(CallLog(), None, 0, 1)
    monitor.start()
    while len(lines_of(tmp_path)) < 2:
        time.sleep(0.01)
    monitor.stop()
    close_account()
    *most, last = lines_of(tmp_path)
    assert {line["event"] for line in most} == {"so far"}
    assert (last["event"], last["step"]) == ("end", 7)
    for line in (*most, last):
        assert set(line["seconds"]) == set(CATEGORIES)
        assert sum(line["seconds"].values()) == pytest.approx(line["time"] - line["began"], abs=1e-3)
    spent = last["seconds"]
    assert min(spent["waiting for data"], spent["step"], spent["checkpoint stall"], spent["start-up"]) > 0
    assert spent["waiting for other processes"] == 0


def test_undecided_time_counts_as_the_likely_category_until_it_is_decided(account):
    account.cells[LIKELY] = STEP
    account.enter(UNDECIDED)
    assert account.begin(WAITING) == UNDECIDED
    account.enter(UNDECIDED)
    time.sleep(0.01)
    so_far = account_line(account.cells, "left", time.monotonic())["seconds"]
    assert so_far["step"] >= 0.01
    account.enter(DATA, decided=EVALUATION)
    spent = account_line(account.cells, "left")["seconds"]
    assert spent["step"] == 0
    assert spent["evaluation"] >= so_far["step"]
    assert spent["waiting for other processes"] > 0


def test_a_process_that_is_killed_while_it_waits_in_a_step_charges_both(account):
    account.cells[LIKELY] = STEP
    account.enter(UNDECIDED)
    time.sleep(0.01)
    account.enter(WAITING)
    line = account_line(account.cells, "left", time.monotonic() + 5)
    assert line["doing"] == "waiting for other processes"
    assert 0.01 <= line["seconds"]["step"] < 5 <= line["seconds"]["waiting for other processes"]


def test_numbers_add_up_after_every_store(account):
    """A process may be killed between any two of them: the sum of the seconds is the time of the last change."""

    class Watched:
        def __init__(self, cells):
            self.cells, self.seen = cells, []

        def __getitem__(self, position):
            return self.cells[position]

        def __setitem__(self, position, value):
            self.cells[position] = value
            self.seen.append(account_line(tuple(self.cells), "left"))

    account.cells = watched = Watched(account.cells)
    watched.cells[LIKELY] = STEP
    begun = time.time()
    for category in (UNDECIDED, DATA, UNDECIDED, WAITING):
        account.enter(category)
    account.enter(UNDECIDED)
    account.enter(DATA, decided=EVALUATION)
    assert len(watched.seen) == 2 * 5 + 4
    for line in watched.seen:
        assert sum(line["seconds"].values()) == pytest.approx(line["time"] - line["began"], abs=1e-3)
        assert line["time"] <= time.time() + 1e-3
    assert [line["time"] for line in watched.seen if line["time"] < begun - 60] == []


def test_only_the_thread_of_an_account_is_charged(account):
    import threading

    def other():
        seen.append(account.begin(SAVING))

    seen = []
    thread = threading.Thread(target=other)
    thread.start()
    thread.join()
    assert (seen, account.doing) == ([None], START_UP)


def test_a_collective_is_charged_to_waiting(account, monkeypatch):
    monkeypatch.setattr("accel_state.watch.calls.STATUS_RECORD", account)
    log = CallLog()
    account.enter(STEP)
    log.enter("gather")
    assert account.doing == WAITING
    log.leave()
    assert account.doing == STEP


KILLED = """
import os, signal, sys
from accel_state.watch.calls import CallLog
from accel_state.watch.goodput import close_accounts, keep_account
from accel_state.watch.record import SAVING, STATUS_RECORD, STEP, STEPS, UNDECIDED, UNDER_WAY
from accel_state.watch.status import capture_status
STATUS_RECORD.open(sys.argv[2], 3)
close_accounts(sys.argv[2], rank=3)
STATUS_RECORD.begin_account()
keep_account(sys.argv[1])
STATUS_RECORD.publish(capture_status(CallLog()).to_json())
STATUS_RECORD.enter(STEP)
STATUS_RECORD.cells[STEPS] = 5
STATUS_RECORD.cells[UNDER_WAY] = 6
STATUS_RECORD.enter(SAVING if len(sys.argv) < 4 else UNDECIDED)
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.skipif(os.name != "posix", reason="SIGKILL")
def test_a_killed_process_leaves_its_account(account, tmp_path):
    status, path = tmp_path / "status", tmp_path / "goodput" / "rank_3.jsonl"
    status.mkdir()
    command = [sys.executable, "-c", KILLED, str(path), str(status)]

    def kill(*more):
        assert subprocess.run([*command, *more], check=False, timeout=250).returncode == -9

    def events():
        return [(line["event"], line["doing"]) for line in lines_of(path.parent, path.name)]

    kill()
    ended = time.time()
    assert events() == [("so far", "start-up")]
    # The launcher writes the last line, once, up to the end that it saw.
    for _ in range(2):
        close_accounts(str(status), {3: ended})
    assert events() == [("so far", "start-up"), ("left", "checkpoint stall")]
    assert lines_of(path.parent, path.name)[-1]["time"] == pytest.approx(ended, abs=1e-3)
    one = read_goodput(tmp_path).ranks[0]
    assert (one.rank, one.step) == (3, 5)
    assert one.seconds["step"] > 0
    assert one.unattributed == pytest.approx(0.0, abs=1e-3)
    # Without a launcher that does, the next process of that rank writes it, and knows how far the run was.
    kill()
    kill("in a step")
    assert [event for event, _ in events()] == ["so far", "left", "so far", "left", "so far"]
    assert read_goodput(tmp_path).restarts == 2
    # A step that was begun counts as made, since the next start repeats it.
    close_accounts(str(status))
    keep_account(str(path))
    assert account.cells[BEFORE] == 6


def test_a_project_folder_that_is_full_read_only_or_of_another_run_costs_lines_only(account, tmp_path):
    full, folder = tmp_path / "full", tmp_path / "goodput"
    full.mkdir()
    (full / "rank_0.jsonl").symlink_to("/dev/full")
    (tmp_path / "file").write_text("")
    for path in (full / "rank_0.jsonl", tmp_path / "file" / "goodput" / "rank_0.jsonl"):
        keep_account(str(path))
        account.enter(STEP)
        assert isinstance(append_line(str(path), {}), OSError)
        close_account()
        account.begin_account()
    for _ in range(2):
        keep_account(str(folder / "rank_0.jsonl"))
        os.truncate(folder / "rank_0.jsonl", 10)
    # The next line follows what is left of the last one; both are lost.
    keep_account(str(folder / "rank_0.jsonl"))
    close_account()
    assert read_goodput(tmp_path / "goodput").damaged_lines == 1


def test_time_between_two_starts_is_down(tmp_path):
    write(tmp_path, start(100), so_far(100, 130, reached=9, step=30.0), so_far(100, 134, "left", reached=9, step=34.0))
    write(tmp_path, start(145), so_far(145, 160, "end", 12, step=15.0))
    launcher = {"event": "launch", "time": 98.0, "pid": 1}
    over = {"event": "over", "time": 162.0, "pid": 1}
    write(tmp_path, launcher, {**launcher, "time": 144.0}, over, name="launcher_0.jsonl")
    summary = read_goodput(tmp_path)
    assert (summary.wall, summary.restarts, summary.running) == (64.0, 1, False)
    (one,) = summary.ranks
    assert one.seconds["start-up"] == pytest.approx(2.0)
    assert one.seconds["step"] == pytest.approx(49.0)
    assert one.seconds["down"] == pytest.approx(11.0)
    # The end of a process after its script is nothing that went wrong.
    assert one.unattributed == pytest.approx(2.0)
    assert sum(one.seconds.values()) + one.unattributed == pytest.approx(summary.wall)


def test_damaged_lines_are_counted_and_left_out(tmp_path):
    good = so_far(100, 110, "end", 1, step=10.0)
    bad = ["{", "[]", '{"event": "end"}', '{"event": "else", "time": 1}', json.dumps(good | {"step": -1}), "\x00" * 9]
    write(tmp_path, start(100), *bad, good, '{"event": "so far", "ti')
    summary = read_goodput(tmp_path)
    assert summary.damaged_lines == 7
    assert summary.ranks[0].seconds["step"] == 10.0


def test_runs_without_accounts_are_refused(tmp_path):
    with pytest.raises(NotFound, match="There is no such folder"):
        read_goodput(tmp_path / "none")
    with pytest.raises(NotFound, match="accel launch --project_dir"):
        read_goodput(tmp_path)
    write(tmp_path, "{", "nothing")
    with pytest.raises(SettingError, match="2 lines are damaged"):
        read_goodput(tmp_path)


def test_a_process_that_was_killed_is_down_until_the_end_of_its_run(tmp_path):
    write(tmp_path, start(100), so_far(100, 130, "left", 9, step=30.0))
    write(tmp_path, start(100), so_far(100, 140, "end", 9, step=40.0), name="rank_1.jsonl")
    killed, ended = read_goodput(tmp_path).ranks
    assert (killed.seconds["down"], killed.unattributed) == (10.0, 0.0)
    assert (ended.seconds["down"], ended.unattributed) == (0.0, 0.0)


def test_a_running_process_goes_on_with_what_it_did(tmp_path):
    began = time.time() - 100
    write(tmp_path, so_far(began, began + 10, doing="evaluation", step=10.0))
    write(tmp_path, {"event": "launch", "time": began, "pid": os.getpid()}, name="launcher_0.jsonl")
    summary = read_goodput(tmp_path)
    assert summary.running
    assert summary.ranks[0].seconds["evaluation"] == pytest.approx(90, abs=20)


def test_a_launcher_continues_if_its_goodput_folder_is_not_writable(tmp_path):
    (tmp_path / "file").write_text("")
    assert isinstance(launcher_line(str(tmp_path / "file"), "launch"), OSError)
    for event in ("launch", "over"):
        assert launcher_line(str(tmp_path / "run"), event) is None
    found = lines_of(tmp_path / "run" / "goodput", "launcher_0.jsonl")
    assert [line["event"] for line in found] == ["launch", "over"]
