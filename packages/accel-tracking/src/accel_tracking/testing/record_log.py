"""Reads the files into which wandb and swanlab write offline runs, for tests that look at what was kept.

Both use the log format of LevelDB (https://github.com/google/leveldb/blob/main/doc/log_format.md) after seven bytes of
their own: blocks of 32 KiB with records, each with checksum, length and type; a record may go on in the next block.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

__all__ = ("read_records",)

_OWN_HEADER = 7
_BLOCK = 32 * 1024
_RECORD_HEADER = 7
_FULL, _FIRST, _MIDDLE, _LAST = 1, 2, 3, 4


def read_records(path: Path) -> Iterator[bytes]:
    """The records of a file, each as the bytes of one message."""
    content = path.read_bytes()
    position = _OWN_HEADER
    message = b""
    while position + _RECORD_HEADER <= len(content):
        if _BLOCK - position % _BLOCK < _RECORD_HEADER:
            position += _BLOCK - position % _BLOCK
            continue
        length = int.from_bytes(content[position + 4 : position + 6], "little")
        kind = content[position + 6]
        position += _RECORD_HEADER
        message = (message if kind in (_MIDDLE, _LAST) else b"") + content[position : position + length]
        position += length
        if kind in (_FULL, _LAST):
            yield message
