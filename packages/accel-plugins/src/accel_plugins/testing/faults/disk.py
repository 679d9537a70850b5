"""What a machine that lost its power finds on its disk: a model of a file system that forgets what was not flushed.

Contents last once their file was flushed, names once their folder was. What was not flushed may be there or not, so
each moment has several outcomes.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path

from accel_plugins.testing.faults.operations import Operation
from accel_state.errors import NotOffered

__all__ = ("Outcome", "crashes")


class Outcome(str, Enum):
    """What became of that which was not flushed."""

    NOTHING = "nothing that was not flushed is there"
    NAMES = "names are there, contents are not"
    LENGTHS = "names and lengths are there, contents are zeros"
    EVERYTHING = "everything is there"


@dataclass
class _File:
    """A file, or a symlink when it has a target."""

    data: bytearray = field(default_factory=bytearray)
    lasting: bytes = b""
    target: Path | None = None

    def found(self, outcome: Outcome) -> bytes:
        if outcome is Outcome.EVERYTHING:
            return bytes(self.data)
        if outcome is Outcome.LENGTHS:
            return self.lasting[: len(self.data)].ljust(len(self.data), b"\0")
        return self.lasting


@dataclass
class _Folder:
    entries: dict[str, _File | _Folder] = field(default_factory=dict)
    lasting: dict[str, _File | _Folder] = field(default_factory=dict)

    def found(self, outcome: Outcome) -> dict[str, _File | _Folder]:
        return self.lasting if outcome is Outcome.NOTHING else self.entries


class _Disk:
    """A folder and all below it, as memory and as the disk have it."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.top = _read(root)

    def apply(self, operation: Operation) -> None:
        """Do what a process did."""
        kind, path, other = operation.kind, operation.path, operation.other
        if kind in ("write", "truncate", "copy"):
            self._change(self._file(path), operation)
        elif kind == "fsync":
            self._flush(path)
        elif kind in ("rename", "exchange", "link"):
            assert other is not None
            self._move(kind, path, other)
        elif kind in ("unlink", "rmdir"):
            del self._folder(path.parent).entries[path.name]
        else:
            made = _Folder() if kind == "mkdir" else _File(target=other)
            self._folder(path.parent).entries[path.name] = made

    def _change(self, file: _File, operation: Operation) -> None:
        if operation.kind == "copy":
            file.data[:] = operation.data
        elif operation.kind == "truncate":
            file.data[:] = file.data[: operation.offset].ljust(operation.offset, b"\0")
        else:
            end = operation.offset + len(operation.data)
            file.data[:] = file.data.ljust(operation.offset, b"\0")
            file.data[operation.offset : end] = operation.data

    def _flush(self, path: Path) -> None:
        found = self._at(path)
        if isinstance(found, _Folder):
            found.lasting = dict(found.entries)
        else:
            found.lasting = bytes(found.data)

    def _move(self, kind: str, path: Path, other: Path) -> None:
        source, target = self._folder(path.parent).entries, self._folder(other.parent).entries
        if kind == "exchange":
            source[path.name], target[other.name] = target[other.name], source[path.name]
            return
        target[other.name] = source[path.name]
        if kind == "rename":
            del source[path.name]

    def _at(self, path: Path) -> _File | _Folder:
        found: _File | _Folder = self.top
        for name in path.relative_to(self.root).parts:
            assert isinstance(found, _Folder)
            found = found.entries[name]
        return found

    def _folder(self, path: Path) -> _Folder:
        found = self._at(path)
        assert isinstance(found, _Folder)
        return found

    def _file(self, path: Path) -> _File:
        found = self._at(path)
        assert isinstance(found, _File)
        return found


def _read(path: Path) -> _Folder:
    """A folder as it is now, all of it lasting."""
    entries: dict[str, _File | _Folder] = {}
    for entry in path.iterdir():
        if entry.is_symlink():
            entries[entry.name] = _File(target=Path(os.readlink(entry)))
        elif entry.is_dir():
            entries[entry.name] = _read(entry)
        else:
            data = entry.read_bytes()
            entries[entry.name] = _File(bytearray(data), data)
    return _Folder(entries, dict(entries))


def _write(folder: _Folder, path: Path, outcome: Outcome) -> None:
    path.mkdir(parents=True)
    for name, item in folder.found(outcome).items():
        if isinstance(item, _Folder):
            _write(item, path / name, outcome)
        elif item.target is not None:
            (path / name).symlink_to(item.target)
        else:
            (path / name).write_bytes(item.found(outcome))


def crashes(
    before: Path,
    root: Path,
    operations: Sequence[Operation],
    scratch: Path,
    outcomes: Iterable[Outcome] = tuple(Outcome),
) -> Iterator[tuple[int, Outcome, Path]]:
    """What is found when power is lost after each number of operations, with each outcome.

    Args:
        before: a copy of the folder as it was, all of it flushed.
        root: the folder itself, whose paths are in the operations.
        operations: what was done, in order.
        scratch: where what is found is laid out; removed before the next.

    Yields:
        How many operations were done, what became of what was not flushed, and the folder that is found.

    Raises:
        NotOffered: an operation reaches outside of the folder.
    """
    chosen = tuple(outcomes)
    disk = _Disk(before)
    disk.root = root.resolve()
    for done in range(len(operations) + 1):
        if done:
            _check_inside(operations[done - 1], disk.root)
            disk.apply(operations[done - 1])
        for outcome in chosen:
            shutil.rmtree(scratch, ignore_errors=True)
            _write(disk.top, scratch, outcome)
            yield done, outcome, scratch
    shutil.rmtree(scratch, ignore_errors=True)


def _check_inside(operation: Operation, root: Path) -> None:
    others = [operation.other] if operation.other is not None and operation.kind != "symlink" else []
    for path in (operation.path, *others):
        if root != path and root not in path.parents:
            raise NotOffered(
                f"Cannot simulate a loss of power after {operation.kind} of {operation.path}.",
                f"{path} is outside of {root}.",
                "Record below a folder that holds everything that is written.",
            )
