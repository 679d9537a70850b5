"""A process that has imported torch once, and from which the processes of tests are forked.

Importing torch takes seconds, forking takes milliseconds. Only systems with `os.fork` and open file descriptors that
can be passed (Linux) have it; elsewhere each process of a test is a new interpreter.
"""

from __future__ import annotations

import array
import atexit
import contextlib
import gc
import importlib
import os
import pickle
import select
import signal
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from typing import IO, Any

__all__ = ("ForkServer", "Forked", "main")

_REQUEST_BYTES = 1 << 20
"""The largest request: environment and path of a process, and names of modules."""

_PRELOADED = ("torch.", "accel_")
"""Modules of these packages are imported before the fork, once the process of the tests has imported them."""

_NOT_PRELOADED = ("torch._inductor", "accel_state.testing.simulated_")
"""Modules that start threads, which forked processes would lack, or that register a device with torch."""

_STATUS = struct.Struct("i")


class Forked:
    """A process that the server forked, with the part of `subprocess.Popen` that the tests use.

    Args:
        pid: its process id; it leads a session of its own.
        status: a pipe from which its exit code can be read when it has ended.
    """

    def __init__(self, pid: int, status: int) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self._status: IO[bytes] | None = os.fdopen(status, "rb", buffering=0)

    def poll(self) -> int | None:
        """Its exit code (negative for a signal), or None while it runs."""
        return self._read(0)

    def wait(self, timeout: float | None = None) -> int:
        """Wait until it has ended, and return its exit code.

        Raises:
            subprocess.TimeoutExpired: it still runs after so many seconds.
        """
        found = self._read(timeout)
        if found is None:
            raise subprocess.TimeoutExpired(f"process {self.pid}", timeout or 0.0)
        return found

    def kill(self) -> None:
        """Send it SIGKILL, if it still runs."""
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)

    def _read(self, timeout: float | None) -> int | None:
        if self._status is not None and select.select([self._status], [], [], timeout)[0]:
            answer = self._status.read(_STATUS.size)
            # Without an answer the server itself has been killed, and its processes with it.
            self.returncode = _STATUS.unpack(answer)[0] if answer else -signal.SIGKILL
            self._status.close()
            self._status = None
        return self.returncode


class ForkServer:
    """Starts the process that has imported torch, and lets it fork others. It ends with the process that made it."""

    def __init__(self) -> None:
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        for end in (self._socket, theirs):
            end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _REQUEST_BYTES)
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "accel_state.testing.fork_server", str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                env={**os.environ, "OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR"}
                | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
                pass_fds=(theirs.fileno(),),
                start_new_session=True,
            )
        self._owner = os.getpid()
        self._one_request = threading.Lock()
        self._preloaded: set[str] = set()
        atexit.register(self.close)

    @property
    def alive(self) -> bool:
        """Whether it can be asked, by this process."""
        return self._owner == os.getpid() and self._process.poll() is None

    def fork(self, calls: int, answers: int, output: int, environment: Mapping[str, str]) -> Forked:
        """Fork a process that serves calls, see `accel_state.testing.member`.

        Args:
            calls: the descriptor that it reads calls from.
            answers: the descriptor that it writes answers to.
            output: the descriptor that its standard output and error go to.
            environment: its variables.
        """
        status, theirs = os.pipe()
        fds = array.array("i", (calls, answers, output, theirs))
        with self._one_request:
            request = pickle.dumps((dict(environment), sys.path, os.getcwd(), self._to_preload()))
            self._socket.sendmsg([request], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, fds)])
            pid = _STATUS.unpack(self._socket.recv(_STATUS.size))[0]
        os.close(theirs)
        return Forked(pid, status)

    def _to_preload(self) -> list[str]:
        """Modules that this process has imported since the last request, in the order in which it began with them."""
        names = [name for name in list(sys.modules) if name not in self._preloaded and _can_preload(name)]
        self._preloaded.update(names)
        return names

    def close(self) -> None:
        """End it; processes that it forked live on until their pipes are closed."""
        if self.alive:
            self._socket.close()
            self._process.wait()


def main() -> None:
    """Fork a process for each request until the other end of the socket is closed."""
    from accel_state.testing import member

    requests = socket.socket(fileno=int(sys.argv[1]))
    requests.set_inheritable(False)
    awake, wake = os.pipe()
    os.set_blocking(wake, False)
    signal.set_wakeup_fd(wake)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    children: dict[int, int] = {}
    while True:
        readable = select.select([requests.fileno(), awake], [], [])[0]
        if awake in readable:
            os.read(awake, 4096)
            _report_ended(children)
        if requests.fileno() in readable:
            received = _receive(requests)
            if received is None:
                os._exit(0)
            (environment, path, folder, modules), (calls, answers, output, status) = received
            _preload(modules)
            pid = os.fork()
            if pid == 0:
                for fd in (requests.detach(), awake, wake, status, *children.values()):
                    os.close(fd)
                _become_member(output, environment, path, folder)
                member.serve(calls, answers)
            for fd in (calls, answers, output):
                os.close(fd)
            children[pid] = status
            requests.send(_STATUS.pack(pid))


def _receive(requests: socket.socket) -> tuple[Any, Sequence[int]] | None:
    """A request and its descriptors, or None where the other end is closed."""
    message, fds, _, _ = socket.recv_fds(requests, _REQUEST_BYTES, 4)
    return (pickle.loads(message), fds) if message else None


def _can_preload(module: str) -> bool:
    return module.startswith(_PRELOADED) and not module.startswith(_NOT_PRELOADED)


def _preload(modules: Sequence[str]) -> None:
    """Import modules, as far as this process finds them, and spare the forked processes their garbage collection."""
    for module in modules:
        with contextlib.suppress(Exception):
            importlib.import_module(module)
    if modules:
        gc.collect()
        gc.freeze()


def _report_ended(children: dict[int, int]) -> None:
    """Tell the owner of each process that has ended how it ended."""
    while children:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid == 0:
            return
        pipe = children.pop(pid)
        with contextlib.suppress(BrokenPipeError):
            os.write(pipe, _STATUS.pack(os.waitstatus_to_exitcode(status)))
        os.close(pipe)


def _become_member(output: int, environment: Mapping[str, str], path: list[str], folder: str) -> None:
    """Make a forked process what a new interpreter would be."""
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    os.setsid()
    sys.stdout.flush()
    sys.stderr.flush()
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.close(output)
    os.environ.clear()
    os.environ.update(environment)
    sys.path[:] = path
    os.chdir(folder)


if __name__ == "__main__":
    main()
