"""Accounts of time: what their files hold when a process ends or is killed, and what the summary makes of them."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from accel_state.errors import NotFound, SettingError
from accel_state.goodput.account import CATEGORIES, DATA, SAVING, STEP, LiveAccount, TimeAccount
from accel_state.goodput.summary import LauncherLines, read_goodput


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


def test_an_account_adds_up_to_the_time_of_its_process(tmp_path):
    account = TimeAccount(tmp_path, 0)
    account.enter(DATA)
    account.enter(STEP)
    with account.on("saving"), account.on("waiting"):
        assert account.doing == SAVING
    assert account.doing == STEP
    account.step = 7
    account.close()
    first, last = lines_of(tmp_path)
    assert (first["event"], last["event"], last["step"]) == ("start", "end", 7)
    spent = last["seconds"]
    assert set(spent) == set(CATEGORIES)
    assert sum(spent.values()) == pytest.approx(last["time"] - last["began"], abs=0.02)
    assert min(spent["waiting for data"], spent["step"], spent["checkpoint stall"], spent["start-up"]) > 0
    assert spent["waiting for other processes"] == 0


def test_only_the_thread_of_an_account_is_charged(tmp_path):
    import threading

    account = TimeAccount(tmp_path, 0)

    def other():
        with account.on("saving"):
            assert account.doing != SAVING

    thread = threading.Thread(target=other)
    thread.start()
    thread.join()


KILLED = """
import os, signal, sys
from accel_state.goodput.account import STEP, SAVING, TimeAccount
account = TimeAccount(sys.argv[1], 3)
account.enter(STEP)
account.step = 5
account.enter(SAVING if len(sys.argv) < 3 else STEP)
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.skipif(os.name != "posix", reason="SIGKILL")
def test_a_killed_process_leaves_its_account(tmp_path):
    command = [sys.executable, "-c", KILLED, str(tmp_path / "goodput")]
    assert subprocess.run(command, check=False, timeout=250).returncode == -9
    live = LiveAccount.read(tmp_path / "goodput" / "rank_3.live")
    assert live is not None
    assert (CATEGORIES[live.doing], live.step) == ("checkpoint stall", 5)
    assert [line["event"] for line in lines_of(tmp_path / "goodput", "rank_3.jsonl")] == ["start"]
    one = read_goodput(tmp_path).ranks[0]
    assert (one.rank, one.step) == (3, 5)
    assert one.seconds["step"] > 0
    # The next process of that rank keeps it as a line, and knows how far the run was.
    assert subprocess.run(command, check=False, timeout=250).returncode == -9
    events = [(line["event"], line.get("doing")) for line in lines_of(tmp_path / "goodput", "rank_3.jsonl")]
    assert events == [("start", None), ("left", "checkpoint stall"), ("start", None)]
    assert LiveAccount.read(tmp_path / "goodput" / "rank_3.live").before == 5
    assert read_goodput(tmp_path).restarts == 1
    # A step that was begun counts as made, since the next start repeats it.
    for _ in range(2):
        assert subprocess.run([*command, "in a step"], check=False, timeout=250).returncode == -9
    assert LiveAccount.read(tmp_path / "goodput" / "rank_3.live").before == 6


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
    assert one.seconds["down"] == pytest.approx(11.0 + 2.0)
    assert sum(one.seconds.values()) + one.unattributed == pytest.approx(summary.wall)


def test_damaged_lines_are_counted_and_left_out(tmp_path):
    good = so_far(100, 110, "end", 1, step=10.0)
    bad = ["{", "[]", '{"event": "end"}', '{"event": "else", "time": 1}', json.dumps(good | {"step": -1}), "\x00" * 9]
    write(tmp_path, start(100), *bad, good, '{"event": "so far", "ti')
    summary = read_goodput(tmp_path)
    assert summary.damaged == 7
    assert summary.ranks[0].seconds["step"] == 10.0


def test_runs_without_accounts_are_refused(tmp_path):
    with pytest.raises(NotFound, match="There is no such folder"):
        read_goodput(tmp_path / "none")
    with pytest.raises(NotFound, match="accel launch --project_dir"):
        read_goodput(tmp_path)
    write(tmp_path, "{", "nothing")
    with pytest.raises(SettingError, match="2 lines are damaged"):
        read_goodput(tmp_path)


def test_a_live_file_of_something_else_is_ignored(tmp_path):
    path = tmp_path / "rank_0.live"
    for content in (b"", b"text", b"\xff" * 112, b"\x00" * 112):
        path.write_bytes(content)
        assert LiveAccount.read(path) is None


def test_a_launcher_continues_if_its_goodput_folder_is_not_writable(tmp_path):
    (tmp_path / "file").write_text("")
    assert isinstance(LauncherLines(str(tmp_path / "file")).launch(0), OSError)
    launcher = LauncherLines(str(tmp_path / "run"))
    launcher.launch(0)
    launcher.ended(1, 5.0)
    launcher.over(-9)
    found = lines_of(tmp_path / "run" / "goodput", "launcher_0.jsonl")
    assert [line["event"] for line in found] == ["launch", "ended", "over"]
