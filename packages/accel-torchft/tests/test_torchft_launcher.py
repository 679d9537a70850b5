"""The launcher starts replicas, looks after them, and leaves nobody behind."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torchft")

from accel_testing.launchers import LauncherSuite

DIES_ONCE = """
import os, pathlib, signal, sys, time
folder = pathlib.Path(sys.argv[1])
number = os.environ["REPLICA_GROUP_ID"]
(folder / f"seen-{number}-{os.getpid()}").touch()
if number == "1" and len(list(folder.glob("seen-1-*"))) <= int(sys.argv[2]):
    os.kill(os.getpid(), signal.SIGKILL)
while len(list(folder.glob("seen-1-*"))) <= int(sys.argv[2]):
    time.sleep(0.1)
"""


class TestLauncher(LauncherSuite):
    launcher = "torchft"
    options = ("--cpu", "--num_processes=2", "--replica_groups=1")


def launch(tmp_path: Path, script: str, *arguments: str, options: tuple[str, ...] = ()) -> tuple[int, str]:
    (tmp_path / "script.py").write_text(script, encoding="utf-8")
    words = ["--launcher=torchft", "--cpu", "--replica_groups=2", *options, "script.py", str(tmp_path), *arguments]
    argv = [sys.executable, "-m", "accel_cli.main", "launch", *words]
    done = subprocess.run(argv, cwd=tmp_path, capture_output=True, text=True, timeout=200, check=False)
    return done.returncode, done.stdout + done.stderr


def test_a_killed_replica_is_started_again(tmp_path: Path) -> None:
    code, output = launch(tmp_path, DIES_ONCE, "1")
    assert code == 0, output
    assert "Replica 1 was killed by signal 9" in output
    assert len(list(tmp_path.glob("seen-1-*"))) == 2


def test_a_replica_that_dies_when_another_has_finished_is_not_started_again(tmp_path: Path) -> None:
    script = """
import os, pathlib, signal, sys, time
if os.environ["REPLICA_GROUP_ID"] == "1":
    time.sleep(3)
    os.kill(os.getpid(), signal.SIGKILL)
pathlib.Path(os.environ["ACCEL_TORCHFT_JOINED"]).touch()
"""
    code, output = launch(tmp_path, script)
    assert code == 0, output


def test_a_replica_that_dies_again_and_again_before_a_step_ends_the_run(tmp_path: Path) -> None:
    code, output = launch(tmp_path, DIES_ONCE, "100")
    assert code == 128 + signal.SIGKILL, output
    assert "3 times in a row before it made a step" in output


def test_the_budget_of_restarts_is_kept(tmp_path: Path) -> None:
    code, output = launch(tmp_path, DIES_ONCE, "100", options=("--torchft_restarts=1",))
    assert code == 128 + signal.SIGKILL, output
    assert "has used its 1 restarts" in output


def test_a_lighthouse_that_dies_is_named_and_ends_the_run(tmp_path: Path) -> None:
    script = """
import os, signal, sys, time
port = os.environ["TORCHFT_LIGHTHOUSE"].rpartition(":")[2]
if os.environ["REPLICA_GROUP_ID"] == "0":
    for entry in os.listdir("/proc"):
        try:
            words = open(f"/proc/{entry}/cmdline", "rb").read().split(b"\\0")
            environment = open(f"/proc/{entry}/environ", "rb").read()
        except (OSError, ValueError):
            continue
        if b"accel_torchft.lighthouse" in words and sys.argv[2].encode() in environment:
            os.kill(int(entry), signal.SIGKILL)
time.sleep(600)
"""
    mark = f"of-{os.getpid()}-{tmp_path.name}"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MARK_OF_THE_TEST", mark)
        code, output = launch(tmp_path, script, mark)
    assert code == 2, output
    lines = output.splitlines()
    where = lines.index("accel: Cannot continue a run of replicas without its lighthouse.")
    assert re.match(r"  It was killed by signal 9.*no replica can begin another step", lines[where + 1])
    assert "newest" in lines[where + 2]
