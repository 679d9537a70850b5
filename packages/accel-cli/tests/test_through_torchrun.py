"""Launches through torch.distributed.run: restarts, failures, exit codes, and nothing left behind."""

from __future__ import annotations

import os
import signal
import sys

import pytest

pytestmark = pytest.mark.usefixtures("preloaded_python")


def test_two_processes_run_and_agree_on_their_world(accel, script):
    body = script("import os; print(os.environ['RANK'], os.environ['WORLD_SIZE'], os.environ['ACCELERATE_USE_CPU'])")
    finished = accel("launch", "--launcher", "torchrun", "--cpu", "--num_processes", "2", body)
    assert finished.returncode == 0, finished.stderr
    assert sorted(finished.stdout.splitlines()) == ["0 2 true", "1 2 true"]


def test_a_failure_after_a_restart_is_shown_last_with_its_exit_code(accel, script, tmp_path):
    os.mkfifo(tmp_path / "fifo")
    body = """
        import os, sys, time
        print("attempt", os.environ["TORCHELASTIC_RESTART_COUNT"], flush=True)
        # Both have printed before one fails and the other is ended.
        open("fifo", "r" if os.environ["RANK"] == "1" else "w").close()
        if os.environ["RANK"] == "1":
            raise ValueError("the cause") if os.environ["TORCHELASTIC_RESTART_COUNT"] == "1" else SystemExit(4)
        time.sleep(60)
    """
    finished = accel("launch", "--max_restarts", "1", "--num_processes", "2", script(body))
    assert sorted(finished.stdout.split()) == ["0", "0", "1", "1", *["attempt"] * 4]
    assert finished.returncode == 1
    assert "Process 1 of 2 failed first" in finished.stderr
    assert finished.stderr.count("Traceback") == 1
    assert finished.stderr.endswith("ValueError: the cause\n")


def test_a_death_by_signal_keeps_its_exit_code(accel, script):
    body = script("import os; os.kill(os.getpid(), 9)")
    finished = accel("launch", "--launcher", "torchrun", "--num_processes", "1", body)
    assert finished.returncode == 137
    assert "killed by signal 9 (SIGKILL)" in finished.stderr


WAIT = "import os, time; print(os.getpid(), flush=True); time.sleep(600)"


@pytest.mark.usefixtures("new_python")
def test_asked_to_end_it_ends_its_processes(start, script, gone):
    background = start("launch", "--launcher", "torchrun", "--num_processes", "2", script(WAIT))
    pids = list(map(int, background.lines(2)))
    background.process.send_signal(signal.SIGTERM)
    finished = background.end()
    assert finished.returncode == 143
    assert "accel launch: ended by SIGTERM." in finished.stderr
    assert "Traceback" not in finished.stderr
    assert all(map(gone, pids))


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="only Linux ends the children of a killed process")
@pytest.mark.usefixtures("new_python")
def test_no_process_outlives_a_killed_agent(start, script, gone):
    background = start("launch", "--launcher", "torchrun", "--num_processes", "2", script(WAIT))
    pids = list(map(int, background.lines(2)))
    background.process.kill()
    assert all(map(gone, pids))
