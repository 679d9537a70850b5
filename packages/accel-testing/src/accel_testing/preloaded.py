"""Starts the scripts of tests in processes that have already imported torch.

A new interpreter needs seconds to import torch, and a launched script starts one for each of its processes. Inside
`PreloadedPython`, an interpreter that is started with a script passes the script to a process that was forked from a
`ForkServer`, before it imports anything:

    with PreloadedPython():
        run_command(["accel", "launch", "--cpu", "--num_processes", "2", "train.py"])

The forked process has the open files, environment, folder, processors and ignored signals of the interpreter, and runs
the script as `__main__`. The interpreter forwards signals to it, and ends with its exit code or signal. Only the
process id, the parent and the session differ. Commands (`-c`) that name torch or a package that imports it, and
`-m torch.distributed.run`, are passed on too. Everything else starts as usual: other modules, programs such as `accel`,
and interpreters with options. Do not use it in a test for which the difference matters.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import select
import shutil
import signal
import socket
import struct
import sys
import tempfile
import threading
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType

from accel_testing.fork_server import REQUEST_BYTES, Forked, Start
from accel_testing.processes import fork_server_of

__all__ = ("PreloadedPython",)

_AT_START = str(Path(__file__).with_name("at_start"))
_STATUS = struct.Struct("i")
_MOST_FILES = 64


class PreloadedPython:
    """Run scripts that are started inside the block in processes that have already imported torch.

    Args:
        modules: further modules to import in these processes, such as `("accel_torch.accelerator",)`.
    """

    def __init__(self, modules: Sequence[str] = ()) -> None:
        self._modules = tuple(modules)
        self._threads: list[threading.Thread] = []

    def __enter__(self) -> PreloadedPython:
        self._folder = tempfile.mkdtemp(prefix="preloaded-", dir="/tmp")
        self._before = {name: os.environ.get(name) for name in ("PYTHONPATH", "PRELOADED_PYTHON")}
        self._listening = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._listening.bind(f"{self._folder}/socket")
        self._listening.listen(64)
        self._awake, self._wake = os.pipe()
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (_AT_START, self._before["PYTHONPATH"])))
        # Tests also pass on the paths of this process.
        sys.path.insert(0, _AT_START)
        os.environ["PRELOADED_PYTHON"] = f"{self._folder}/socket|{sys.prefix}"
        self._start_thread(self._listen)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        for name, value in self._before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
        sys.path.remove(_AT_START)
        os.close(self._wake)
        # The first one starts the others.
        while self._threads:
            self._threads.pop(0).join()
        os.close(self._awake)
        self._listening.close()
        shutil.rmtree(self._folder)

    def _start_thread(self, function: object, *arguments: object) -> None:
        self._threads = [thread for thread in self._threads if thread.is_alive()]
        thread = threading.Thread(target=function, args=arguments, daemon=True)  # type: ignore[arg-type]
        self._threads.append(thread)
        thread.start()

    def _listen(self) -> None:
        while True:
            ready, _, _ = select.select([self._listening.fileno(), self._awake], [], [])
            if self._awake in ready:
                return
            connection, _ = self._listening.accept()
            self._start_thread(self._serve, connection)

    def _serve(self, connection: socket.socket) -> None:
        """Fork the process of an interpreter, and wait until one of the two has ended."""
        with connection:
            message, files, _, _ = socket.recv_fds(connection, REQUEST_BYTES, _MOST_FILES)
            if not message:
                return
            start: Start = pickle.loads(message)
            rank = start["environment"].get("RANK", "0")
            server = fork_server_of(int(rank) if rank.isdigit() else 0)
            forked = server.run(start, files, self._modules)
            for file in files:
                os.close(file)
            self._accompany(connection, forked)

    def _accompany(self, connection: socket.socket, forked: Forked) -> None:
        while forked.poll() is None:
            ready, _, _ = select.select([connection.fileno(), forked.fileno(), self._awake], [], [])
            if connection.fileno() in ready and (asked := connection.recv(_STATUS.size)):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(forked.pid, _STATUS.unpack(asked)[0])
            elif forked.fileno() not in ready:
                # The interpreter was killed, or the tests end: no process of the script may remain.
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(forked.pid, signal.SIGKILL)
                forked.wait()
        with contextlib.suppress(OSError):
            connection.send(_STATUS.pack(forked.wait()))
            # Closing the connection while it contains a late signal would discard the answer.
            while connection.fileno() in select.select([connection.fileno(), self._awake], [], [])[0]:
                if not connection.recv(_STATUS.size):
                    return
