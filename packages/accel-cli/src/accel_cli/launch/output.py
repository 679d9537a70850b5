"""Passing on what a process prints, each line with a prefix."""

from __future__ import annotations

import subprocess
import sys
import threading
from typing import IO, Final

__all__ = ("Relay",)

_CHUNK: Final = 65536
_LONGEST: Final = 65536
"""Bytes of a line that are kept until it ends; a longer one is passed on in parts of about this length."""

_LINE_ENDS: Final = (b"\n", b"\r")


class Relay:
    """Copies the output and the errors of a process line by line; a progress bar's `\\r` ends a line as well.

    A line of more than 64 KiB comes out as several: those after the first begin with `[rank 0]+` where the prefix is
    `[rank 0] `, so that lines of other processes come between and nothing is kept in memory.

    Args:
        process: started with pipes.
        prefix: what each line begins with; its last character is the one that a continuation replaces.
    """

    def __init__(self, process: subprocess.Popen[bytes], prefix: str) -> None:
        self._prefix = prefix.encode()
        pairs = ((process.stdout, sys.stdout), (process.stderr, sys.stderr))
        self._threads = [
            threading.Thread(target=self._copy, args=(source, target.buffer), daemon=True)
            for source, target in pairs
            if source is not None
        ]
        for thread in self._threads:
            thread.start()

    def finish(self, deadline_seconds: float) -> None:
        """Wait for the rest of the output, at most so long for each stream."""
        for thread in self._threads:
            thread.join(deadline_seconds)

    def _copy(self, source: IO[bytes], target: IO[bytes]) -> None:
        lines = _Lines(self._prefix)
        try:
            while chunk := source.read1(_CHUNK):  # type: ignore[attr-defined]
                _write(target, lines.take(chunk))
            _write(target, lines.rest())
        except (OSError, ValueError):
            # The reader of the launcher's own output has gone.
            source.close()


class _Lines:
    """The lines of one stream: those that have ended, with prefixes, and the start of the next one."""

    def __init__(self, prefix: bytes) -> None:
        self._first = self._prefix = prefix
        self._further = prefix[:-1] + b"+"
        self._start = bytearray()
        self._after_return = False

    def take(self, chunk: bytes) -> bytes:
        """What can be written once a chunk has come."""
        ended: list[bytes] = []
        for piece in chunk.splitlines(keepends=True):
            if piece == b"\n" and self._after_return and not self._start:
                # The second half of a line end whose first half was written with its line.
                ended.append(piece)
                self._after_return = False
                continue
            self._start += piece
            self._after_return = piece.endswith(b"\r")
            if piece.endswith(_LINE_ENDS):
                ended.append(self._line())
                self._prefix = self._first
            elif len(self._start) >= _LONGEST:
                ended.append(self._line() + b"\n")
                self._prefix = self._further
        return b"".join(ended)

    def rest(self) -> bytes:
        """A last line that nothing ended."""
        return self._line() + b"\n" if self._start else b""

    def _line(self) -> bytes:
        line = self._prefix + self._start
        self._start.clear()
        return line


def _write(target: IO[bytes], lines: bytes) -> None:
    if lines:
        target.write(lines)
        target.flush()
