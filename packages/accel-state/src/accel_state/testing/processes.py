"""Real processes for tests: started once, used for many calls, bounded in time, with every rank's output on failure.

@pytest.fixture(scope="module")
def two():
    with Processes(2) as group:
        yield group

def total(start):
    return PartialState().process_index + start

def test_ranks(two):
    assert two.run(total, 10) == [10, 11]
"""

from __future__ import annotations

import contextlib
import os
import pickle
import random
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Final

from accel_state.network import get_free_port as free_port
from accel_state.testing.fork_server import Forked, ForkServer

try:
    import fcntl
except ImportError:
    # Windows: ports are chosen at random, without a lock.
    fcntl = None  # type: ignore[assignment]

__all__ = ("Finished", "Outcome", "Processes", "ProcessesFailed", "ReservedPort", "free_port", "run_command")

_GRACE = 5.0
_END = 60.0
"""Seconds until a process that was killed, or has closed its pipe, has ended even on a busy machine."""

_NO_NAME_SERVER = {"RES_OPTIONS": "attempts:0"}
"""What keeps the C library from asking a name server.

torch asks it for the name of every peer, and where its answer is lost a process stands still for five seconds. Names
that the machine knows by itself, such as localhost, are found all the same.
"""


@dataclass(frozen=True)
class Outcome:
    """What one rank did with a call.

    Args:
        rank: which one.
        value: what the function returned.
        error: the traceback as text, or None.
        exitcode: exit code of a process that died (negative for a signal), else None.
        output: what it printed meanwhile.
        hung: whether it was still busy when time was up.
    """

    rank: int
    value: Any = None
    error: str | None = None
    exitcode: int | None = None
    output: str = ""
    hung: bool = False

    @property
    def ok(self) -> bool:
        """Whether the function returned."""
        return self.error is None and self.exitcode is None and not self.hung

    def __str__(self) -> str:
        what = "returned" if self.ok else "was still busy" if self.hung else "raised" if self.error else "died"
        code = "" if self.exitcode is None else f" (exit code {self.exitcode})"
        return f"--- rank {self.rank} {what}{code} ---\n{self.output}{self.error or ''}"


class ProcessesFailed(AssertionError):
    """Raised when a rank raised, died or hung; the message shows what every rank printed."""

    def __init__(self, outcomes: Sequence[Outcome]) -> None:
        super().__init__("\n".join(str(outcome) for outcome in outcomes))
        self.outcomes = tuple(outcomes)


@dataclass(frozen=True)
class Finished:
    """A command that ended."""

    returncode: int
    stdout: str
    stderr: str


class Processes:
    """A group of real processes that have imported torch and take calls.

    Each call starts from a clean state and a rendezvous of its own. After a rank died or hung the group is started anew
    at the next call.

    Args:
        count: number of processes.
        timeout: seconds a call may take.
    """

    def __init__(self, count: int, timeout: float = 100.0) -> None:
        self.count = count
        self.timeout = timeout
        self._members: list[_Member] = []
        self._port = ReservedPort()

    def __enter__(self) -> Processes:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def run(
        self,
        function: Callable[..., Any],
        *args: Any,
        timeout: float | None = None,
        environment: Mapping[str, str] | None = None,
    ) -> list[Any]:
        """Call a function on every rank and return each rank's value.

        Args:
            function: a module-level function; sent by the file and name it stands under.
            args: what it is called with; pickled.
            timeout: seconds, instead of the group's.
            environment: variables set during the call.

        Raises:
            ProcessesFailed: a rank raised, died or hung.
        """
        outcomes = self.outcomes(function, *args, timeout=timeout, environment=environment)
        if not all(outcome.ok for outcome in outcomes):
            raise ProcessesFailed(outcomes)
        return [outcome.value for outcome in outcomes]

    def outcomes(
        self,
        function: Callable[..., Any],
        *args: Any,
        timeout: float | None = None,
        environment: Mapping[str, str] | None = None,
    ) -> list[Outcome]:
        """Like `run`, but what went wrong is returned, not raised."""
        if any(member.process.poll() is not None for member in self._members):
            self.close()
        if not self._members:
            self._members = [_Member(rank, self.count) for rank in range(self.count)]
        module = sys.modules[function.__module__]
        place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(self._port.another()), **(environment or {})}
        call = (module.__name__, module.__file__, function.__qualname__, args, place)
        for member in self._members:
            member.send(call)
        deadline = time.monotonic() + (timeout or self.timeout)
        found = [member.receive(deadline) for member in self._members]
        if any(outcome.hung or outcome.exitcode is not None for outcome in found):
            self.close()
        return found

    def close(self) -> None:
        """End the processes."""
        for member in self._members:
            member.dismiss()
        for member in self._members:
            member.end()
        self._members = []
        self._port.give_back()


class _Member:
    """One process of a group: calls go in through a pipe, answers come back through another, output goes to a file."""

    def __init__(self, rank: int, count: int) -> None:
        self.rank = rank
        self.output: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 - closed by `end`
        answers, their_answers = os.pipe()
        their_calls, calls = os.pipe()
        self.process = _start(rank, their_calls, their_answers, self.output.fileno(), _environment(rank, count))
        os.close(their_calls)
        os.close(their_answers)
        self._calls = os.fdopen(calls, "wb")
        self._answers = os.fdopen(answers, "rb")
        self._reader: threading.Thread | None = None

    def send(self, call: tuple[Any, ...]) -> None:
        self._seen = self.output.seek(0, os.SEEK_END)
        self._answer: tuple[Any, str | None] | None = None
        self._reader = threading.Thread(target=self._read, daemon=True)
        with contextlib.suppress(BrokenPipeError):
            pickle.dump(call, self._calls)
            self._calls.flush()
        self._reader.start()

    def _read(self) -> None:
        try:
            self._answer = pickle.load(self._answers)
        except (EOFError, OSError, ValueError):
            self._answer = None

    def receive(self, deadline: float) -> Outcome:
        assert self._reader is not None
        self._reader.join(max(0.0, deadline - time.monotonic()))
        if self._answer is not None:
            value, error = self._answer
            return Outcome(self.rank, value, error, output=self._printed())
        if self._reader.is_alive():
            return Outcome(self.rank, output=self._printed(), hung=True)
        return Outcome(self.rank, exitcode=self.process.wait(_END), output=self._printed())

    def _printed(self) -> str:
        self.output.seek(self._seen)
        return self.output.read().decode(errors="replace")

    def dismiss(self) -> None:
        """Tell it that no call follows.

        It cannot learn that from the pipe's end where a process that the tests forked holds the pipe as well.
        """
        with contextlib.suppress(BrokenPipeError):
            pickle.dump(None, self._calls)
            self._calls.flush()
        with contextlib.suppress(BrokenPipeError):
            self._calls.close()

    def end(self) -> None:
        try:
            self.process.wait(_GRACE if self._idle() else 0)
        except subprocess.TimeoutExpired:
            _kill(self.process)
        if self._reader is not None:
            self._reader.join(_GRACE)
        self._answers.close()
        self.output.close()

    def _idle(self) -> bool:
        return self._reader is None or not self._reader.is_alive()


_starting = threading.Lock()
_servers: dict[int, ForkServer] = {}
"""A server for each rank: strings hash differently in each, so that tests see what depends on the order of a set."""


def _start(
    rank: int, calls: int, answers: int, output: int, environment: dict[str, str]
) -> Forked | subprocess.Popen[bytes]:
    """Start a process that serves calls, in a session of its own."""
    if not sys.platform.startswith("linux"):
        return subprocess.Popen(
            [sys.executable, "-m", "accel_state.testing.fork_server", str(calls), str(answers)],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            env=environment,
            pass_fds=(calls, answers),
            start_new_session=True,
        )
    with _starting:
        if rank not in _servers or not _servers[rank].alive:
            _servers[rank] = ForkServer()
    return _servers[rank].fork(calls, answers, output, environment)


def run_command(
    argv: Sequence[str],
    timeout: float = 120.0,
    env: Mapping[str, str] | None = None,
    cwd: str | os.PathLike[str] | None = None,
) -> Finished:
    """Run a command and return how it ended; its whole process group is ended when time is up.

    Args:
        argv: the command.
        timeout: seconds it may take.
        env: variables in addition to those of this process.
        cwd: folder to run it in.

    Raises:
        AssertionError: it was still running when time was up; the message shows what it printed.
    """
    process = subprocess.Popen(
        list(argv),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        stdin=subprocess.DEVNULL,
        env={**os.environ, **(env or {})},
        cwd=cwd,
        start_new_session=True,
    )
    try:
        stdout, stderr = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        _end(process)
        stdout, stderr = process.communicate()
        shown = stdout.decode(errors="replace") + stderr.decode(errors="replace")
        raise AssertionError(f"{' '.join(argv)} was still running after {timeout} s:\n{shown}") from None
    except BaseException:
        # The time limit of the test itself, or an interrupt: neither the command nor its pipes live on.
        _end(process)
        process.communicate()
        raise
    return Finished(process.returncode, stdout.decode(errors="replace"), stderr.decode(errors="replace"))


def _environment(rank: int, count: int) -> dict[str, str]:
    return {
        **os.environ,
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(count),
        "LOCAL_WORLD_SIZE": str(count),
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": os.environ.get("GLOO_SOCKET_IFNAME", _loopback()),
        "TORCH_CPP_LOG_LEVEL": "ERROR",
        **_NO_NAME_SERVER,
        "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
    }


def _loopback() -> str:
    return next((name for _, name in socket.if_nameindex() if name.startswith("lo")), "lo")


def _end(process: subprocess.Popen[bytes]) -> None:
    """End a command and its group.

    Launchers start workers in sessions of their own, and end them when SIGTERM comes. A worker that lives on would hold
    the pipes open, and reading them would never end.
    """
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGTERM)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(_END)
    _kill(process)


def _kill(process: Forked | subprocess.Popen[bytes]) -> None:
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except (ProcessLookupError, PermissionError):
        process.kill()
    process.wait(_END)


_PORTS: Final = (20000, 31999)
"""Below the ports that systems give to connections: one that was free a moment ago may be taken by now."""

_TRIES: Final = 1000
_random: Final = random.SystemRandom()


class ReservedPort:
    """One port at a time, of which no other `ReservedPort` of this machine has the same."""

    def __init__(self) -> None:
        self._lock: IO[str] | None = None

    def another(self) -> int:
        """A port on which nobody listens; the one before is given back.

        Raises:
            OSError: none was found.
        """
        self.give_back()
        for _ in range(_TRIES):
            port = _random.randint(*_PORTS)
            if self._take(port) and _can_be_listened_on(port):
                return port
            self.give_back()
        raise OSError(f"no free port between {_PORTS[0]} and {_PORTS[1]}")

    def give_back(self) -> None:
        """Let others have the port."""
        if self._lock is not None:
            self._lock.close()
            self._lock = None

    def _take(self, port: int) -> bool:
        if fcntl is None:
            return True
        folder = Path(tempfile.gettempdir()) / f"accel-ports-{os.getuid()}"
        folder.mkdir(exist_ok=True)
        self._lock = (folder / str(port)).open("w")
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            return False
        return True


def _can_be_listened_on(port: int) -> bool:
    with socket.socket() as probe, contextlib.suppress(OSError):
        probe.bind(("127.0.0.1", port))
        return True
    return False
