"""Harm to the files of a folder: shortened, changed by one bit, gone, or joined by one that does not belong there."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

__all__ = ("Damage", "damages")


class Damage(NamedTuple):
    """What was done to a file.

    Args:
        kind: "truncated", "emptied", "bit flipped", "missing" or "extra file".
        path: which one.
        serious: whether the checkpoint is incomplete now.
    """

    kind: str
    path: Path
    serious: bool = True


def damages(folder: Path) -> Iterator[Damage]:
    """Damage each file below a folder in each way, one at a time; the next iteration first restores the file."""
    for path in sorted(entry for entry in folder.rglob("*") if entry.is_file()):
        content = path.read_bytes()
        for kind, changed in _versions(content):
            if changed is None:
                path.unlink()
            else:
                path.write_bytes(changed)
            yield Damage(kind, path)
            path.write_bytes(content)
    extra = folder / "extra file"
    extra.write_bytes(b"it was not here")
    yield Damage("extra file", extra, serious=False)
    extra.unlink()


def _versions(content: bytes) -> Iterator[tuple[str, bytes | None]]:
    yield "missing", None
    if content:
        yield "emptied", b""
        yield "truncated", content[: len(content) // 2]
        for place in sorted({0, len(content) // 2, len(content) - 1}):
            yield "bit flipped", content[:place] + bytes([content[place] ^ 4]) + content[place + 1 :]
