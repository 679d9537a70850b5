"""A command that a test runs does not outlive a test whose time limit interrupts the wait for it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from accel_testing.processes import run_command


class Interrupted(Exception):
    """Raised in the middle of a wait, as a signal's handler does it."""


def test_an_interrupted_wait_leaves_no_command_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    communicate = subprocess.Popen.communicate
    told: list[int] = []

    def interrupted(process: subprocess.Popen[bytes], *args: Any, **options: Any) -> Any:
        if told:
            return communicate(process, *args, **options)
        told.append(int(fifo.read_text()))
        raise Interrupted

    monkeypatch.setattr(subprocess.Popen, "communicate", interrupted)
    with pytest.raises(Interrupted):
        run_command(["sh", "-c", f"echo $$ > {fifo}; exec sleep 600"])
    with pytest.raises(ProcessLookupError):
        os.kill(told[0], 0)


LAUNCHER = """
import signal, subprocess, sys

# A signal that comes while the worker starts is handled when its process is known.
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
worker = subprocess.Popen(["sleep", "600"], start_new_session=True)
signal.signal(signal.SIGTERM, lambda *_: worker.kill())
signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGTERM])
with open(sys.argv[1], "w") as fifo:
    fifo.write(str(worker.pid))
worker.wait()
"""


def test_workers_in_sessions_of_their_own_end_with_a_command_that_takes_too_long(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    communicate = subprocess.Popen.communicate
    workers: list[int] = []

    def takes_too_long(process: subprocess.Popen[bytes], *args: Any, **options: Any) -> Any:
        if workers:
            return communicate(process, *args, **options)
        workers.append(int(fifo.read_text()))
        raise subprocess.TimeoutExpired(process.args, options["timeout"])

    monkeypatch.setattr(subprocess.Popen, "communicate", takes_too_long)
    with pytest.raises(AssertionError, match="was still running after 250"):
        run_command([sys.executable, "-c", LAUNCHER, str(fifo)], timeout=250)
    with pytest.raises(ProcessLookupError):
        os.kill(workers[0], 0)
