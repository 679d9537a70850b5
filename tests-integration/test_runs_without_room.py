"""Runs on full, read-only and shared disks: what records a run loses its lines there, and the run goes on.

The disks are small file systems in memory, in a namespace of mounts of their own.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import textwrap
import threading
from functools import cache
from pathlib import Path

import pytest

from accel_state.watch.goodput import read_goodput
from accel_testing.processes import Finished, run_command

ACCEL = (sys.executable, "-m", "accel_cli.main")
NAMESPACE = ("unshare", *(() if hasattr(os, "geteuid") and os.geteuid() == 0 else ("-r",)), "-m", "sh", "-ec")

JOB = """
    import os, sys, time
    import torch
    from accel_torch import Accelerator

    accelerator = Accelerator(cpu=True)
    model = torch.nn.Linear(1, 1)
    data = torch.utils.data.DataLoader(torch.ones(30, 1))
    model, optimizer, loader = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), data)

    def fill(folder):
        try:
            with open(f"{folder}/filled", "wb") as file:
                while True:
                    file.write(bytes(4096))
                    file.flush()
        except OSError:
            pass

    for number, batch in enumerate(loader):
        accelerator.backward(model(batch).sum())
        optimizer.step()
        optimizer.zero_grad()
        # The monitor appends lines meanwhile.
        time.sleep(0.1)
        if number == 9 and "fill" in sys.argv:
            fill("run")
            for path in os.listdir("run/goodput"):
                os.truncate(f"run/goodput/{path}", 0)
    print("done", optimizer.optimizer.param_groups[0]["lr"], flush=True)
"""


@cache
def can_mount() -> bool:
    if shutil.which("unshare") is None:
        return False
    return subprocess.run([*NAMESPACE, "mount -t tmpfs none /mnt"], check=False, capture_output=True).returncode == 0


mounts = pytest.mark.skipif(sys.platform != "linux" or not can_mount(), reason="needs a namespace of mounts")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "job.py").write_text(textwrap.dedent(JOB), encoding="utf-8")
    (tmp_path / "run").mkdir()
    return tmp_path


def launched(folder: Path, *mounting: str, arguments: tuple[str, ...] = ()) -> Finished:
    """A run of one process in the folder, with `run` as its project folder."""
    launch = [*ACCEL, "launch", "--cpu", "--num_processes", "1", "--project_dir", "run", "job.py", *arguments]
    environment = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    if not mounting:
        return run_command(launch, timeout=280, env=environment, cwd=folder)
    # Through another path, because a mount may hide this one.
    script = "\n".join((f"mount --bind {folder} /mnt", "cd /mnt", *mounting, 'exec "$@"'))
    return run_command([*NAMESPACE, script, "sh", *launch], timeout=280, env=environment, cwd=folder)


def is_done(finished: Finished) -> bool:
    return (finished.returncode, finished.stdout) == (0, "done 0.1\n")


@mounts
def test_a_run_starts_and_ends_where_no_temporary_folder_has_room(folder: Path) -> None:
    fill = [
        f"mount -t tmpfs -o size=64k none {place}; cat /dev/zero > {place}/x || true" for place in ("/dev/shm", "/tmp")
    ]
    finished = launched(folder, *fill)
    assert is_done(finished), finished.stderr
    assert "Errors and hangs of this run are not recorded." in finished.stderr
    assert read_goodput(folder / "run").ranks[0].step == 30


@mounts
def test_a_disk_that_fills_up_and_files_that_become_shorter_end_no_run(folder: Path) -> None:
    finished = launched(folder, "mount -t tmpfs -o size=128k none run", arguments=("fill",))
    assert is_done(finished), finished.stderr
    assert "Traceback" not in finished.stderr


@mounts
def test_a_read_only_project_folder_costs_the_records_alone(folder: Path) -> None:
    finished = launched(folder, "mount -t tmpfs -o ro none run")
    assert is_done(finished), finished.stderr
    # The first line of every launch, and this.
    assert finished.stderr.count("\n") == 2
    assert "Cannot write to the run's folder: " in finished.stderr


def test_two_runs_in_one_folder_end_both(folder: Path) -> None:
    runs: list[Finished] = []
    threads = [threading.Thread(target=lambda: runs.append(launched(folder))) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert list(map(is_done, runs)) == [True, True], [run.stderr for run in runs]
    assert read_goodput(folder / "run").ranks[0].step == 30
