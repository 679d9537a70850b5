"""The command as users run it, in a process of its own, and scripts for it to start."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from accel_state.testing.processes import Finished, run_command

ENTRY = (sys.executable, "-m", "accel_cli.main")

# What says something to a launch, and is not to come from whoever runs the tests.
TELLING = ("ACCEL", "RANK", "WORLD_SIZE", "LOCAL_", "MASTER_", "NODE_RANK", "OMP_", "TORCHELASTIC_", "SLURM_", "PET_")


@pytest.fixture(autouse=True)
def own_variables(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in [name for name in os.environ if name.startswith(TELLING)]:
        monkeypatch.delenv(name)
    # Unbuffered processes write their lines in pieces, which mix.
    monkeypatch.delenv("PYTHONUNBUFFERED", raising=False)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))


@pytest.fixture
def accel(tmp_path: Path) -> Callable[..., Finished]:
    """Run `accel` with arguments and return how it ended."""

    def run(*arguments: object, env: dict[str, str] | None = None, timeout: float = 60.0) -> Finished:
        return run_command([*ENTRY, *map(str, arguments)], timeout=timeout, env=env, cwd=tmp_path)

    return run


@pytest.fixture
def script(tmp_path: Path) -> Callable[..., Path]:
    """Write a script and return its path."""

    def write(body: str, name: str = "job.py") -> Path:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(textwrap.dedent(body), encoding="utf-8")
        return path

    return write


class Background:
    """`accel` running in the background."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self.process = process
        self.output = b""

    def lines(self, count: int, timeout: float = 30.0) -> list[str]:
        """The first lines of its output, as soon as they are there."""
        assert self.process.stdout is not None
        deadline = time.monotonic() + timeout
        while self.output.count(b"\n") < count:
            ready, _, _ = select.select([self.process.stdout], [], [], max(deadline - time.monotonic(), 0))
            chunk = os.read(self.process.stdout.fileno(), 65536) if ready else b""
            assert chunk, f"only {self.output!r} came in {timeout} s"
            self.output += chunk
        return self.output.decode().splitlines()[:count]

    def end(self, timeout: float = 30.0) -> Finished:
        """Wait for the end."""
        stdout, stderr = self.process.communicate(timeout=timeout)
        return Finished(self.process.returncode, (self.output + stdout).decode(), stderr.decode())


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Background]]:
    """Start `accel` in the background; whatever is left of it ends with the test."""
    started: list[Background] = []

    def run(*arguments: object, env: dict[str, str] | None = None) -> Background:
        process = subprocess.Popen(
            [*ENTRY, *map(str, arguments)],
            env={**os.environ, **(env or {})},
            cwd=tmp_path,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )
        started.append(Background(process))
        return started[-1]

    yield run
    for background in started:
        if background.process.poll() is None:
            os.killpg(background.process.pid, signal.SIGKILL)
            background.process.communicate(timeout=30)
        for pipe in (background.process.stdout, background.process.stderr):
            if pipe is not None:
                pipe.close()


@pytest.fixture
def gone() -> Callable[[int], bool]:
    """Whether a process ends within a bounded time."""

    def wait(pid: int, timeout: float = 20.0) -> bool:
        try:
            watched = os.pidfd_open(pid)
        except ProcessLookupError:
            return True
        try:
            return bool(select.select([watched], [], [], timeout)[0])
        finally:
            os.close(watched)

    return wait
