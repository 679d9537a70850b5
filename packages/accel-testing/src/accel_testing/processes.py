"""Real processes for tests: started once, used for many calls, with a timeout and every rank's output on failure.

For example:

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
from accel_testing.fork_server import Forked, ForkServer

try:
    import fcntl
except ImportError:
    # Windows: ports are chosen at random, without a lock.
    fcntl = None  # type: ignore[assignment]

__all__ = (
    "Finished",
    "Processes",
    "ProcessesFailed",
    "RankOutcome",
    "ReservedPort",
    "fork_server_of",
    "free_port",
    "run_command",
)

_GRACE = 5.0
_END = 60.0
"""Seconds within which a killed process ends, even on a busy machine."""

_NO_NAME_SERVER = {"RES_OPTIONS": "attempts:0"}
"""Prevents the C library from querying a name server.

torch resolves the name of every peer, and if an answer is lost, the process waits for five seconds. Names that the
machine itself resolves, such as localhost, still work.
"""


@dataclass(frozen=True)
class RankOutcome:
    """The result of a call on one rank.

    Args:
        rank: the rank.
        value: the return value of the function.
        error: the traceback as text, or None.
        exitcode: exit code of a process that died (negative for a signal), else None.
        output: its output during the call.
        hung: whether it was still busy at the timeout.
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
    """Raised when a rank raised, died or hung; the message contains the output of every rank."""

    def __init__(self, outcomes: Sequence[RankOutcome]) -> None:
        super().__init__("\n".join(str(outcome) for outcome in outcomes))
        self.outcomes = tuple(outcomes)


@dataclass(frozen=True)
class Finished:
    """The result of a command."""

    returncode: int
    stdout: str
    stderr: str


class Processes:
    """A group of real processes that have imported torch and call functions.

    Each call has a clean state and its own rendezvous. After a rank died or hung, the next call starts new processes.

    Args:
        count: number of processes.
        timeout: timeout of a call in seconds.
    """

    def __init__(self, count: int, timeout: float = 250.0) -> None:
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
        """Call a function on every rank and return the values of all ranks.

        Args:
            function: a module-level function; the processes import it by its file and name.
            args: its arguments, pickled.
            timeout: timeout in seconds; by default that of the group.
            environment: variables to set during the call.

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
    ) -> list[RankOutcome]:
        """Like `run`, but returns failures instead of raising."""
        if any(member.process.poll() is not None for member in self._members):
            self.close()
        if not self._members:
            self._start()
        module = sys.modules[function.__module__]
        place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(self._port.reserve()), **(environment or {})}
        call = (module.__name__, module.__file__, function.__qualname__, args, place)
        for member in self._members:
            member.send(call)
        deadline = time.monotonic() + (timeout or self.timeout)
        found = [member.receive(deadline) for member in self._members]
        if any(outcome.hung or outcome.exitcode is not None for outcome in found):
            self.close()
        return found

    def _start(self) -> None:
        try:
            for rank in range(self.count):
                self._members.append(_Member(rank, self.count))
        except BaseException:
            # The timeout of the test itself, or an interrupt: an incomplete group cannot serve calls.
            self.close()
            raise

    def close(self) -> None:
        """End the processes; if an interrupt ended a first call, a second one continues there."""
        for member in self._members:
            member.dismiss()
        while self._members:
            self._members[0].end()
            del self._members[0]
        self._port.release()


class _Member:
    """One process of a group, with a pipe for calls, a pipe for answers, and a file for its output."""

    def __init__(self, rank: int, count: int) -> None:
        self.rank = rank
        self.output: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 - closed by `end`
        answers, their_answers = os.pipe()
        their_calls, calls = os.pipe()
        self._calls = os.fdopen(calls, "wb")
        self._answers = os.fdopen(answers, "rb")
        try:
            self.process = _start(rank, their_calls, their_answers, self.output.fileno(), _environment(rank, count))
        except BaseException:
            for file in (self._calls, self._answers, self.output):
                file.close()
            raise
        finally:
            os.close(their_calls)
            os.close(their_answers)
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

    def receive(self, deadline: float) -> RankOutcome:
        assert self._reader is not None
        self._reader.join(max(0.0, deadline - time.monotonic()))
        if self._answer is not None:
            value, error = self._answer
            return RankOutcome(self.rank, value, error, output=self._printed())
        if self._reader.is_alive():
            return RankOutcome(self.rank, output=self._printed(), hung=True)
        return RankOutcome(self.rank, exitcode=self.process.wait(_END), output=self._printed())

    def _printed(self) -> str:
        self.output.seek(self._seen)
        return self.output.read().decode(errors="replace")

    def dismiss(self) -> None:
        """Tell the process that there are no more calls.

        Closing the pipe is not enough if a process that the tests forked has the pipe open too.
        """
        if self._calls.closed:
            return
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
_SERVERS: Final = 2
"""Ranks take turns at servers of different hash seeds, so that tests detect code that depends on the order of sets."""


def _start(
    rank: int, calls: int, answers: int, output: int, environment: dict[str, str]
) -> Forked | subprocess.Popen[bytes]:
    """Start a process that serves calls, in a new session."""
    if not sys.platform.startswith("linux"):
        return subprocess.Popen(
            [sys.executable, "-m", "accel_testing.fork_server", str(calls), str(answers)],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            env=environment,
            pass_fds=(calls, answers),
            start_new_session=True,
        )
    return fork_server_of(rank).fork(calls, answers, output, environment)


def fork_server_of(rank: int) -> ForkServer:
    """The server that forks the processes of a rank; it starts with the first call."""
    with _starting:
        number = rank % _SERVERS
        if number not in _servers or not _servers[number].alive:
            _servers[number] = ForkServer()
        return _servers[number]


def run_command(
    argv: Sequence[str],
    timeout: float = 250.0,
    env: Mapping[str, str] | None = None,
    cwd: str | os.PathLike[str] | None = None,
) -> Finished:
    """Run a command, and end its process group at the timeout.

    Args:
        argv: the command.
        timeout: timeout in seconds.
        env: variables in addition to those of this process.
        cwd: its working directory.

    Raises:
        AssertionError: the command was still running at the timeout; the message has its output.
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
        # The timeout of the test itself, or an interrupt: end the command and close its pipes.
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

    Launchers start workers in separate sessions, and end them on SIGTERM. A surviving worker would keep the pipes open,
    and reading from them would never end.
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
"""Ports below those that operating systems assign to connections, which may be in use a moment later."""

_TRIES: Final = 1000
_random: Final = random.SystemRandom()


class ReservedPort:
    """A port that no other `ReservedPort` of this machine has at the same time."""

    def __init__(self) -> None:
        self._lock: IO[str] | None = None

    def reserve(self) -> int:
        """Reserve a port on which no program listens, and release the previous one.

        Raises:
            OSError: there is no free port.
        """
        self.release()
        for _ in range(_TRIES):
            port = _random.randint(*_PORTS)
            if self._take(port) and _can_be_listened_on(port):
                return port
            self.release()
        raise OSError(f"no free port between {_PORTS[0]} and {_PORTS[1]}")

    def release(self) -> None:
        """Let other objects reserve the port."""
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
