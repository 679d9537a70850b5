"""Files in which a launcher reads where the processes of its machine are."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from accel_state import PartialState
from accel_state.hang_report.progress import STATUS_FOLDER
from accel_state.hang_report.rank_status import read_statuses, request_stacks
from accel_state.hang_report.report import describe_ranks
from accel_state.process import wait_for_everyone
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
        assert time.time() - 60 < seen.since <= time.time()
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


def test_files_with_other_contents_are_ignored(tmp_path: Path) -> None:
    (tmp_path / "rank0.json").write_text("{")
    (tmp_path / "rank1.json").write_text('{"number": "many"}')
    (tmp_path / "notes.txt").write_text("{}")
    assert read_statuses(str(tmp_path)) == {}
    assert read_statuses(str(tmp_path / "absent")) == {}


def test_reading_needs_no_torch() -> None:
    code = "import sys, accel_state.hang_report.rank_status; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
