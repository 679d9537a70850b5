"""The command as users run it, in a process of its own, and scripts for it to start."""

from __future__ import annotations

import fcntl
import os
import pty
import select
import signal
import struct
import subprocess
import sys
import termios
import textwrap
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from accel_testing.processes import Finished, run_command

ENTRY = (sys.executable, "-m", "accel_cli.main")

# Seconds within which anything happens, even on a busy machine.
PATIENT = 250.0

# What says something to a launch, and is not to come from whoever runs the tests.
TELLING = ("ACCEL", "RANK", "WORLD_SIZE", "LOCAL_", "MASTER_", "NODE_RANK", "OMP_", "TORCHELASTIC_", "SLURM_", "PET_")

# Whoever runs the tests in the background may ignore interrupts, and processes started here would inherit that.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(autouse=True)
def own_variables(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    for name in [name for name in os.environ if name.startswith(TELLING)]:
        monkeypatch.delenv(name)
    # Unbuffered processes write their lines in pieces, which mix.
    monkeypatch.delenv("PYTHONUNBUFFERED", raising=False)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))
    # A launcher that a test kills cannot remove its folder.
    monkeypatch.setenv("TMPDIR", str(tmp_path_factory.mktemp("temporary")))


@pytest.fixture
def accel(tmp_path: Path) -> Callable[..., Finished]:
    """Run `accel` with arguments and return how it ended."""

    def run(*arguments: object, env: dict[str, str] | None = None, timeout: float = PATIENT) -> Finished:
        variables = dict(env or {})
        if "PYTHONPATH" in variables:
            # The sources under test may be found by this variable only.
            searched = (variables["PYTHONPATH"], os.environ.get("PYTHONPATH"))
            variables["PYTHONPATH"] = os.pathsep.join(filter(None, searched))
        return run_command([*ENTRY, *map(str, arguments)], timeout=timeout, env=variables, cwd=tmp_path)

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
        self.errors = b""

    def lines(self, count: int, timeout: float = PATIENT) -> list[str]:
        """The first lines of its output, as soon as they are there."""
        assert self.process.stdout is not None
        deadline = time.monotonic() + timeout
        while self.output.count(b"\n") < count:
            ready, _, _ = select.select([self.process.stdout], [], [], max(deadline - time.monotonic(), 0))
            chunk = os.read(self.process.stdout.fileno(), 65536) if ready else b""
            assert chunk, f"only {self.output!r} came in {timeout} s"
            self.output += chunk
        return self.output.decode().splitlines()[:count]

    def errors_until(self, text: str, timeout: float = PATIENT) -> str:
        """Its standard error until it has this text."""
        assert self.process.stderr is not None
        deadline = time.monotonic() + timeout
        while text.encode() not in self.errors:
            ready, _, _ = select.select([self.process.stderr], [], [], max(deadline - time.monotonic(), 0))
            chunk = os.read(self.process.stderr.fileno(), 65536) if ready else b""
            assert chunk, f"{text!r} did not come in {timeout} s, only {self.errors!r}"
            self.errors += chunk
        return self.errors.decode()

    def end(self, timeout: float = PATIENT) -> Finished:
        """Wait for the end."""
        stdout, stderr = self.process.communicate(timeout=timeout)
        return Finished(self.process.returncode, (self.output + stdout).decode(), (self.errors + stderr).decode())


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
            background.process.communicate(timeout=PATIENT)
        for pipe in (background.process.stdout, background.process.stderr):
            if pipe is not None:
                pipe.close()


@pytest.fixture
def gone() -> Callable[[int], bool]:
    """Whether a process ends within a bounded time."""

    def wait(pid: int, timeout: float = PATIENT) -> bool:
        try:
            watched = os.pidfd_open(pid)
        except ProcessLookupError:
            return True
        try:
            return bool(select.select([watched], [], [], timeout)[0])
        finally:
            os.close(watched)

    return wait


class Terminal:
    """`accel` with a terminal of its own."""

    def __init__(self, arguments: tuple[object, ...], folder: Path, stdin: str) -> None:
        self.pid, self.master = pty.fork()
        if self.pid == 0:
            if stdin == "file":
                os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
            elif stdin == "pipe":
                os.dup2(os.pipe()[0], 0)
            # Here and not in the parent: the program may look at the size before the parent goes on.
            fcntl.ioctl(1, termios.TIOCSWINSZ, struct.pack("HHHH", 40, 160, 0, 0))
            try:
                os.chdir(folder)
                os.execv(sys.executable, [sys.executable, "-m", "accel_cli.main", *map(str, arguments)])
            finally:
                os._exit(1)
        self.seen = b""
        self.read = 0

    def until(self, text: str, timeout: float = PATIENT) -> None:
        """Read until a text was printed, after what was read before."""
        deadline = time.monotonic() + timeout
        while text.encode() not in self.seen[self.read :]:
            ready, _, _ = select.select([self.master], [], [], max(deadline - time.monotonic(), 0))
            chunk = self._read() if ready else b""
            assert chunk, f"{text!r} did not come, only {self.seen!r}"
            self.seen += chunk
        self.read = self.seen.index(text.encode(), self.read) + len(text.encode())

    def type(self, text: str) -> None:
        """Press keys."""
        os.write(self.master, text.encode())

    def end(self) -> tuple[int, str]:
        """The exit code, and all that was printed."""
        while chunk := self._read():
            self.seen += chunk
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1]), self.seen.decode().replace("\r\n", "\n")

    def _read(self) -> bytes:
        try:
            return os.read(self.master, 65536)
        except OSError:
            # How Linux says that the other side has gone.
            return b""


@pytest.fixture
def terminal(tmp_path: Path) -> Iterator[Callable[..., Terminal]]:
    """Start `accel` in a terminal of its own."""
    opened: list[Terminal] = []

    def open_terminal(*arguments: object, stdin: str = "terminal") -> Terminal:
        opened.append(Terminal(arguments, tmp_path, stdin))
        return opened[-1]

    yield open_terminal
    for one in opened:
        os.close(one.master)
