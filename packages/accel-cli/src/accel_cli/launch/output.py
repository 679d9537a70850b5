"""Passing on what a process prints, each line with a prefix."""

from __future__ import annotations

import subprocess
import sys
import threading
from typing import IO, Final

__all__ = ("Relay",)

_CHUNK: Final = 65536
_LINE_ENDS: Final = (b"\n", b"\r")


class Relay:
    """Copies the output and the errors of a process line by line; a progress bar's `\\r` ends a line as well.

    Args:
        process: started with pipes.
        prefix: what each line begins with.
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
        pending = b""
        try:
            while chunk := source.read1(_CHUNK):  # type: ignore[attr-defined]
                pieces = (pending + chunk).splitlines(keepends=True)
                pending = b"" if pieces[-1].endswith(_LINE_ENDS) else pieces.pop()
                self._write(target, pieces)
            if pending:
                self._write(target, [pending + b"\n"])
        except (OSError, ValueError):
            # The reader of the launcher's own output has gone.
            source.close()

    def _write(self, target: IO[bytes], lines: list[bytes]) -> None:
        target.write(b"".join(self._prefix + line for line in lines))
        target.flush()
