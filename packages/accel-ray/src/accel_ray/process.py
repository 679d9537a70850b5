"""The actor that starts one process of a run on its node. Imports Ray only to find its node."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from typing import IO, Any, Final, NamedTuple

from accel_cli.launch.failures import read_record
from accel_cli.launch.interface import RUNNER
from accel_cli.launch.run_script import PARENT_VARIABLE
from accel_state.network import get_free_port

__all__ = ("Place", "ProcessUpdate", "RankProcess")

_CHUNK_BYTES: Final = 65536
_MAX_BUFFERED_CHUNKS: Final = 64
"""Chunks of output buffered for the launcher; after that, the process blocks as with a full pipe."""

_OUTPUT_TIMEOUT_S: Final = 2.0
"""Seconds to wait for the rest of the output if a child process still has the pipe open."""


class Place(NamedTuple):
    """The node of an actor.

    Args:
        node: Ray's name of the node.
        address: address of the node, for other nodes.
        port: a free port on it.
        devices: numbers of the GPUs that Ray assigned to this actor.
    """

    node: str
    address: str
    port: int
    devices: tuple[str, ...]


class ProcessUpdate(NamedTuple):
    """News of a process since the launcher's last request.

    Args:
        output: pieces of output, each with 1 for the standard output or 2 for errors, in their order.
        seen: number of pieces so far, which the next request confirms.
        code: exit code, negative for a signal; None while it runs or has output left.
        record: the error that it recorded, or None.
    """

    output: tuple[tuple[int, bytes], ...]
    seen: int
    code: int | None
    record: dict[str, Any] | None


class RankProcess:
    """Starts one process of a run, and buffers its output and exit code for the launcher.

    The process dies when its actor dies: the thread that starts it lives as long as it does, because Linux signals the
    end of that thread (`accel_cli.launch.run_script`).
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._pieces: deque[tuple[int, bytes]] = deque()
        self._first = 0
        self._popen: subprocess.Popen[bytes] | None = None
        self._refused: OSError | None = None
        self._code: int | None = None
        self._open = 2
        self._last = 0.0
        self._folder = ""

    def place(self) -> Place:
        """The node of this actor."""
        import ray

        context = ray.get_runtime_context()
        devices = tuple(map(str, context.get_accelerator_ids().get("GPU", ())))
        return Place(context.get_node_id(), ray.util.get_node_ip_address(), get_free_port(), devices)

    def start(self, program: Sequence[str], environment: Mapping[str, str], folder: str) -> None:
        """Start the process.

        Args:
            program: arguments for the runner of `accel launch`.
            environment: variables in addition to those of the actor.
            folder: the working directory.

        Raises:
            OSError: the node does not have the folder, or cannot start the process.
        """
        self._folder = tempfile.mkdtemp(prefix="accel-ray-")
        variables = {**os.environ, **environment, PARENT_VARIABLE: str(os.getpid())}
        variables["TORCHELASTIC_ERROR_FILE"] = os.path.join(self._folder, "error.json")
        words = [sys.executable, RUNNER, *program]
        threading.Thread(target=self._own, args=(words, variables, folder), daemon=True).start()
        with self._changed:
            self._changed.wait_for(lambda: self._popen is not None or self._refused is not None)
        if self._refused is not None:
            raise self._refused

    def _own(self, words: Sequence[str], environment: Mapping[str, str], folder: str) -> None:
        """Start the process and wait until it has ended and its output is read."""
        try:
            popen = subprocess.Popen(
                words,
                env=environment,
                cwd=folder,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                start_new_session=True,
            )
        except OSError as error:
            with self._changed:
                self._refused = error
                self._changed.notify_all()
            return
        readers = [
            threading.Thread(target=self._read, args=(stream, source), daemon=True)
            for stream, source in ((1, popen.stdout), (2, popen.stderr))
        ]
        for reader in readers:
            reader.start()
        with self._changed:
            self._popen = popen
            self._changed.notify_all()
        code = popen.wait()
        with self._changed:
            self._code, self._last = code, time.monotonic()
            self._changed.notify_all()

    def _read(self, stream: int, source: IO[bytes]) -> None:
        with source:
            while chunk := source.read1(_CHUNK_BYTES):  # type: ignore[attr-defined]
                with self._changed:
                    self._changed.wait_for(lambda: len(self._pieces) < _MAX_BUFFERED_CHUNKS)
                    self._pieces.append((stream, chunk))
                    self._last = time.monotonic()
                    self._changed.notify_all()
        with self._changed:
            self._open -= 1
            self._changed.notify_all()

    def _ended(self) -> bool:
        """Whether the process has ended, and its output with it."""
        late = time.monotonic() - self._last > _OUTPUT_TIMEOUT_S
        return self._code is not None and (self._open == 0 or (late and not self._pieces))

    def follow(self, seen: int, seconds: float) -> ProcessUpdate:
        """The news of the process after `seen` pieces of output.

        Pieces are buffered until the next request confirms them, so that a request may be repeated.

        Args:
            seen: number of pieces that the launcher has.
            seconds: how long to wait for news.
        """
        with self._changed:
            while self._first < seen:
                self._pieces.popleft()
                self._first += 1
            self._changed.notify_all()
            self._changed.wait_for(lambda: bool(self._pieces) or self._ended(), seconds)
            # Before the pieces: the launcher does not ask again once it has the exit code.
            code = self._code if self._ended() else None
            pieces = tuple(self._pieces)
            record = read_record(os.path.join(self._folder, "error.json"))
            return ProcessUpdate(pieces, self._first + len(pieces), code, record)

    def signal(self, number: int) -> None:
        """Signal the process and its child processes."""
        if self._popen is not None:
            try:
                os.killpg(self._popen.pid, number)
            except (ProcessLookupError, PermissionError):
                # The process group is empty.
                return

    def close(self, kill: bool) -> None:
        """Delete this actor's files on the node; with `kill`, also kill the process and its child processes."""
        if kill:
            self.signal(signal.SIGKILL)
        with self._changed:
            self._changed.wait_for(lambda: self._code is not None or self._popen is None, 5 * _OUTPUT_TIMEOUT_S)
        shutil.rmtree(self._folder, ignore_errors=True)
