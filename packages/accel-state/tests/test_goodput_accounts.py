"""Accounts of time: what their files hold when a process ends or is killed, and what the summary makes of them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time

import pytest

from accel_state.errors import NotFound, SettingError
from accel_state.watch.goodput import LauncherLines, read_goodput
from accel_state.watch.record import CATEGORIES, StatusRecord
from accel_state.watch.seconds import (
    DATA,
    EVALUATION,
    SAVING,
    STEP,
    WAITING,
    TimeAccount,
    account_line,
    close_accounts,
)


def lines_of(folder, name="rank_0.jsonl"):
    return [json.loads(line) for line in (folder / name).read_text().splitlines()]


def write(folder, *lines, name="rank_0.jsonl"):
    (folder / "goodput").mkdir(parents=True, exist_ok=True)
    with (folder / "goodput" / name).open("a") as file:
        for line in lines:
            file.write((line if isinstance(line, str) else json.dumps(line)) + "\n")


def seconds(**given):
    return dict.fromkeys(CATEGORIES, 0.0) | {name.replace("_", " "): value for name, value in given.items()}


def start(began, attempt=0):
    return {"event": "start", "time": began + 1, "began": began, "attempt": attempt}


def so_far(began, moment, event="so far", reached=0, **given):
    return {"event": event, "time": moment, "began": began, "step": reached, "seconds": seconds(**given)}


@pytest.fixture
def account(tmp_path):
    return TimeAccount(StatusRecord(), str(tmp_path / "goodput" / "rank_0.jsonl"))


def test_an_account_adds_up_to_the_time_of_its_process(account, tmp_path):
    account.enter(DATA)
    account.enter(STEP)
    with account.on(SAVING), account.on(WAITING):
        assert account.doing == SAVING
    assert account.doing == STEP
    account.reach(7)
    account.append_if_due()
    account.close()
    first, middle, last = lines_of(tmp_path / "goodput")
    assert [line["event"] for line in (first, middle, last)] == ["start", "so far", "end"]
    assert last["step"] == 7
    for line in (middle, last):
        spent = line["seconds"]
        assert set(spent) == set(CATEGORIES)
        assert sum(spent.values()) == pytest.approx(line["time"] - line["began"], abs=1e-3)
        assert min(spent["waiting for data"], spent["step"], spent["checkpoint stall"], spent["start-up"]) > 0
        assert spent["waiting for other processes"] == 0


def test_undecided_time_counts_as_the_likely_category_until_it_is_decided(account):
    account.enter(STEP, decided=False)
    with account.on(WAITING):
        pass
    time.sleep(0.01)
    so_far = account_line(account.record.cells, time.monotonic())["seconds"]
    assert so_far["step"] >= 0.01
    account.decide(EVALUATION)
    account.enter(DATA)
    spent = account_line(account.record.cells)["seconds"]
    assert spent["step"] == 0
    assert spent["evaluation"] >= so_far["step"]
    assert spent["waiting for other processes"] > 0


def test_only_the_thread_of_an_account_is_charged(account):
    import threading

    def other():
        with account.on(SAVING):
            assert account.doing != SAVING

    thread = threading.Thread(target=other)
    thread.start()
    thread.join()


KILLED = """
import os, signal, sys
from accel_state.watch.calls import CallLog
from accel_state.watch.record import STATUS_RECORD
from accel_state.watch.seconds import STEP, SAVING, TimeAccount, close_accounts
from accel_state.watch.status import capture_status
STATUS_RECORD.open(sys.argv[2], 3)
close_accounts(sys.argv[2], 3)
account = TimeAccount(STATUS_RECORD, sys.argv[1])
STATUS_RECORD.publish(capture_status(CallLog()).to_json())
account.enter(STEP)
account.reach(5)
account.enter(SAVING if len(sys.argv) < 4 else STEP)
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.skipif(os.name != "posix", reason="SIGKILL")
def test_a_killed_process_leaves_its_account(tmp_path):
    status, path = tmp_path / "status", tmp_path / "goodput" / "rank_3.jsonl"
    status.mkdir()
    command = [sys.executable, "-c", KILLED, str(path), str(status)]

    def kill(*more):
        assert subprocess.run([*command, *more], check=False, timeout=250).returncode == -9

    def events():
        return [(line["event"], line.get("doing")) for line in lines_of(path.parent, path.name)]

    kill()
    assert events() == [("start", None)]
    # The launcher writes the last line, once.
    for _ in range(2):
        close_accounts(str(status))
    assert events() == [("start", None), ("left", "checkpoint stall")]
    one = read_goodput(tmp_path).ranks[0]
    assert (one.rank, one.step) == (3, 5)
    assert one.seconds["step"] > 0
    # Without a launcher that does, the next process of that rank writes it, and knows how far the run was.
    kill()
    kill("in a step")
    assert [event for event, _ in events()] == ["start", "left", "start", "left", "start"]
    assert read_goodput(tmp_path).restarts == 2
    # A step that was begun counts as made, since the next start repeats it.
    close_accounts(str(status))
    assert TimeAccount(StatusRecord(), str(path)).before == 6


def test_a_project_folder_that_is_full_read_only_or_of_another_run_costs_lines_only(tmp_path):
    full, folder = tmp_path / "full", tmp_path / "goodput"
    full.mkdir()
    (full / "rank_0.jsonl").symlink_to("/dev/full")
    (tmp_path / "file").write_text("")
    for path in (full / "rank_0.jsonl", tmp_path / "file" / "goodput" / "rank_0.jsonl"):
        account = TimeAccount(StatusRecord(), str(path))
        account.enter(STEP)
        account.append_if_due()
        account.close()
    first, second = (TimeAccount(StatusRecord(), str(folder / "rank_0.jsonl")) for _ in range(2))
    first.enter(STEP)
    os.truncate(folder / "rank_0.jsonl", 10)
    for account in (first, second):
        account.append_if_due()
        account.close()
    assert [line.partition('"event": ')[2][:6] for line in (folder / "rank_0.jsonl").read_text().splitlines()]


def test_time_between_two_starts_is_down(tmp_path):
    write(tmp_path, start(100), so_far(100, 130, reached=9, step=30.0))
    write(tmp_path, start(145, 1), so_far(145, 160, "end", 12, step=15.0))
    launcher = {"event": "launch", "time": 98.0, "pid": 1, "attempt": 0}
    ended = {"event": "ended", "time": 134.0, "rank": 0}
    over = {"event": "over", "time": 162.0, "code": 0}
    write(tmp_path, launcher, ended, {**launcher, "time": 144.0, "attempt": 1}, over, name="launcher_0.jsonl")
    summary = read_goodput(tmp_path)
    assert (summary.wall, summary.restarts, summary.running) == (64.0, 1, False)
    (one,) = summary.ranks
    # From the last line to the end that the launcher saw, the process went on with what it did.
    assert one.seconds["start-up"] == pytest.approx(2.0 + 4.0)
    assert one.seconds["step"] == pytest.approx(45.0)
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


def test_a_launcher_continues_if_its_goodput_folder_is_not_writable(tmp_path):
    (tmp_path / "file").write_text("")
    assert isinstance(LauncherLines(str(tmp_path / "file")).launch(0), OSError)
    launcher = LauncherLines(str(tmp_path / "run"))
    launcher.launch(0)
    launcher.ended(1, 5.0)
    launcher.over(-9)
    found = lines_of(tmp_path / "run" / "goodput", "launcher_0.jsonl")
    assert [line["event"] for line in found] == ["launch", "ended", "over"]
