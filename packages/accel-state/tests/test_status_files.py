"""Status records: what a launcher reads of the processes of its machine, while they run and after they were killed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from accel_state import PartialState
from accel_state.process import wait_for_everyone
from accel_state.watch.record import STARTED, STATUS_FOLDER, RecordContent, StatusRecord
from accel_state.watch.report import describe_ranks
from accel_state.watch.status import RankStatus, read_records, read_statuses, request_stacks
from accel_testing.processes import Processes

HERE = Path(__file__).name


def until(text: str, folder: Path) -> str:
    """The sentence for the files, as soon as it contains a text."""
    deadline = time.monotonic() + 250
    while text not in (said := describe_ranks(read_statuses(str(folder)), 2)):
        assert time.monotonic() < deadline, said
        time.sleep(0.05)
    return said


def one_waits(folder: Path) -> str:
    state = PartialState(cpu=True)
    wait_for_everyone()
    said = ""
    if state.process_index == 0:
        request_stacks(str(folder))
        said = until("rank 1 is in wait_for_everyone() at ", folder)
        seen = read_statuses(str(folder))[1]
        assert seen.active
        assert time.monotonic() - 60 < seen.since <= time.monotonic()
        said = until("rank 0 is at ", folder)
    wait_for_everyone()
    return said


def test_a_launcher_reads_where_each_process_is(two: Processes, tmp_path: Path) -> None:
    said, _ = two.run(one_waits, tmp_path, environment={STATUS_FOLDER: str(tmp_path)})
    assert said.count(f"{HERE}:") >= 2, said


def one_is_stopped(folder: Path) -> str:
    state = PartialState(cpu=True)
    wait_for_everyone()
    said = ""
    if state.process_index == 0:
        until("ranks 0-1 are after", folder)
        other = read_statuses(str(folder))[1].pid
        os.kill(other, signal.SIGSTOP)
        try:
            said = until("rank 1 is stopped (process ", folder)
        finally:
            os.kill(other, signal.SIGCONT)
    (folder / f"done{state.process_index}").touch()
    while not (folder / "done0").exists():
        time.sleep(0.05)
    return said


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_stopped_process_is_named(two: Processes, tmp_path: Path) -> None:
    said, _ = two.run(one_is_stopped, tmp_path, environment={STATUS_FOLDER: str(tmp_path)})
    assert "rank 1 is stopped" in said


def record_of(folder: Path, rank: int) -> RecordContent:
    (content,) = [one for one in read_records(str(folder)) if one.rank == rank]
    return content


KILLED = """
import os, signal, sys
from accel_state.watch.record import LOADED, STATUS_RECORD, STEPS
STATUS_RECORD.open(sys.argv[1], 3)
STATUS_RECORD.went_back_to(40)
for step in range(1, 8):
    STATUS_RECORD.cells[STEPS] = STATUS_RECORD.steps = step
STATUS_RECORD.write_samples('["8", "9"]')
STATUS_RECORD.publish('{"first": 1}')
STATUS_RECORD.publish('{"second": 2}')
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.skipif(os.name != "posix", reason="SIGKILL")
def test_a_killed_process_leaves_its_record(tmp_path: Path) -> None:
    killed = subprocess.run([sys.executable, "-c", KILLED, str(tmp_path)], check=False, timeout=250)
    assert killed.returncode == -signal.SIGKILL
    content = record_of(tmp_path, 3)
    assert (content.run_step, content.samples, content.text) == (47, ["8", "9"], b'{"second": 2}')
    assert not content.is_alive


@pytest.fixture
def record(tmp_path: Path) -> StatusRecord:
    record = StatusRecord()
    record.open(str(tmp_path), 0)
    assert record.status_folder == str(tmp_path)
    return record


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_later_process_with_the_same_pid_is_told_by_its_start_time(record: StatusRecord, tmp_path: Path) -> None:
    assert record_of(tmp_path, 0).is_alive
    record.cells[STARTED] += 1
    assert not record_of(tmp_path, 0).is_alive
    status = RankStatus(1, "gather", "a.py:1", True, "", "", started=int(record.cells[STARTED]))
    assert "rank 0 is gone" in describe_ranks({0: status}, 1)


def test_only_the_user_can_read_a_record_and_links_are_not_followed(record: StatusRecord, tmp_path: Path) -> None:
    (path,) = tmp_path.iterdir()
    assert path.stat().st_mode & 0o777 == 0o600
    (tmp_path / "elsewhere").write_bytes(path.read_bytes())
    path.unlink()
    path.symlink_to(tmp_path / "elsewhere")
    assert list(read_records(str(tmp_path))) == []


def test_a_long_text_and_a_long_list_of_samples_leave_the_ones_before(record: StatusRecord, tmp_path: Path) -> None:
    for text in ("short", "l" * 10**6):
        record.publish(text)
        record.write_samples(f'["{text}"]')
    assert (record_of(tmp_path, 0).text, record_of(tmp_path, 0).samples) == (b"short", ["short"])


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_forked_process_does_not_write_the_record_of_its_parent(tmp_path: Path) -> None:
    code = """if True:
        import os, sys
        from accel_state.watch.record import STATUS_RECORD, STEPS
        STATUS_RECORD.open(sys.argv[1], 0)
        STATUS_RECORD.cells[STEPS] = STATUS_RECORD.steps = 5
        child = os.fork()
        if child == 0:
            STATUS_RECORD.cells[STEPS] = STATUS_RECORD.steps = 99
            STATUS_RECORD.publish("of the child")
            os._exit(0)
        os.waitpid(child, 0)
    """
    subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=True, timeout=250)
    assert (record_of(tmp_path, 0).run_step, record_of(tmp_path, 0).text) == (5, b"")


@pytest.mark.skipif(sys.platform != "linux", reason="limits of the size of files")
def test_without_room_for_the_record_the_process_goes_on(tmp_path: Path) -> None:
    code = """if True:
        import resource, sys
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))
        from accel_state.watch.record import STATUS_RECORD, STEPS
        STATUS_RECORD.open(sys.argv[1], 0)
        STATUS_RECORD.cells[STEPS] = STATUS_RECORD.steps = 5
        STATUS_RECORD.publish("lost")
        print(STATUS_RECORD.run_step, repr(STATUS_RECORD.status_folder))
    """
    command = [sys.executable, "-c", code, str(tmp_path)]
    done = subprocess.run(command, check=True, timeout=250, capture_output=True, text=True)
    assert done.stdout == "5 ''\n"
    assert list(tmp_path.iterdir()) == []


def test_files_with_other_contents_are_ignored(record: StatusRecord, tmp_path: Path) -> None:
    (path,) = tmp_path.iterdir()
    sound = path.read_bytes()
    broken = [b"", b"accel-1\n", sound[:-1], b"accel-2\n" + sound[8:], sound[:8] + b"\xff" * (len(sound) - 8)]
    for number, content in enumerate(broken, 1):
        (tmp_path / f"rank{number}.77.status").write_bytes(content)
    (tmp_path / "rank9.78.status").write_bytes(sound)
    (tmp_path / "notes.txt").write_text("{}")
    assert [one.rank for one in read_records(str(tmp_path))] == [0]
    record.publish('{"number": "many"}')
    assert read_statuses(str(tmp_path)) == {}
    assert read_statuses(str(tmp_path / "absent")) == {}


def test_reading_needs_no_torch() -> None:
    code = "import sys, accel_state.watch.status; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
