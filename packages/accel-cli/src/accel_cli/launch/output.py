"""The output of several processes in one terminal: whole lines, each with a prefix."""

from __future__ import annotations

import subprocess
import sys
import threading
from typing import IO, Final

__all__ = ("PrefixedLines", "Relay")

_CHUNK_BYTES: Final = 65536
_MAX_LINE_BYTES: Final = 65536
"""Largest number of bytes of an incomplete line in memory; a longer line is forwarded in parts of about this length."""

_LINE_ENDS: Final = (b"\n", b"\r")


class Relay:
    """Copies the output and the errors of a process line by line; a progress bar's `\\r` ends a line as well.

    A line of more than 64 KiB is split into several. With the prefix `[rank 0] `, the parts after the first begin with
    `[rank 0]+`, because lines of other processes may be printed between them.

    Args:
        process: started with pipes.
        prefix: prefix of each line; a continuation replaces its last character.
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
        """Wait for the rest of the output, at most this number of seconds for each stream."""
        for thread in self._threads:
            thread.join(deadline_seconds)

    def _copy(self, source: IO[bytes], target: IO[bytes]) -> None:
        lines = PrefixedLines(self._prefix)
        try:
            while chunk := source.read1(_CHUNK_BYTES):  # type: ignore[attr-defined]
                _write(target, lines.take(chunk))
            _write(target, lines.rest())
        except (OSError, ValueError):
            # The reader of the launcher's own output has closed it.
            source.close()


class PrefixedLines:
    """The lines of one stream: complete lines with prefixes, and the start of the next line.

    Args:
        prefix: prefix of each line; a continuation replaces its last character.
    """

    def __init__(self, prefix: bytes) -> None:
        self._first = self._prefix = prefix
        self._further = prefix[:-1] + b"+"
        self._start = bytearray()
        self._after_return = False

    def take(self, chunk: bytes) -> bytes:
        """The text that can be written after a chunk has arrived."""
        ended: list[bytes] = []
        for piece in chunk.splitlines(keepends=True):
            if piece == b"\n" and self._after_return and not self._start:
                # The second character of a line end; the first one was written with its line.
                ended.append(piece)
                self._after_return = False
                continue
            self._start += piece
            self._after_return = piece.endswith(b"\r")
            if piece.endswith(_LINE_ENDS):
                ended.append(self._line())
                self._prefix = self._first
            elif len(self._start) >= _MAX_LINE_BYTES:
                ended.append(self._line() + b"\n")
                self._prefix = self._further
        return b"".join(ended)

    def rest(self) -> bytes:
        """A last line without a line end."""
        return self._line() + b"\n" if self._start else b""

    def _line(self) -> bytes:
        line = self._prefix + self._start
        self._start.clear()
        return line


def _write(target: IO[bytes], lines: bytes) -> None:
    if lines:
        target.write(lines)
        target.flush()
