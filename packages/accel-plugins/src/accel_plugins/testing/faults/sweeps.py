"""Faults at every place where they can happen, and what is found after each: death, full disks, lost power, damage.

A machine that loses its power forgets what was not flushed: contents last once their file was flushed, names once their
folder was. What was not flushed may be there or not, so each moment has several outcomes.
"""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any, NamedTuple

from accel_plugins.testing.faults.tracing import Fault, Operation, run
from accel_state.errors import NotOffered

__all__ = (
    "Check",
    "Damage",
    "Outcome",
    "Tally",
    "Workload",
    "crashes",
    "damages",
    "fail_everywhere",
    "harm_everything",
    "kill_everywhere",
    "lose_power",
)


# ------------------------------------------------------------------------------------------------------ loss of power


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


# ------------------------------------------------------------------------------------------------------------- damage


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


# ------------------------------------------------------------------------------------------------------------- sweeps

Save = Callable[[], Any]
Check = Callable[[Path], "str | None"]
"""Looks at a folder after a fault, and says what is wrong with what is found there; None when all is well."""

_FILLING = ("create", "write", "mkdir", "link", "copy", "symlink")
_WRITING = (*_FILLING, "rename", "exchange", "fsync", "truncate")


@dataclass
class Tally:
    """What a sweep found.

    Attributes:
        kind: which faults.
        injected: how many of them struck.
        survived: after how many all was well.
        lost: what was wrong after the others.
    """

    kind: str
    injected: int = 0
    survived: int = 0
    lost: list[str] = field(default_factory=list)

    def count(self, what: str, wrong: str | None) -> None:
        """Add one fault and what was found after it."""
        self.injected += 1
        if wrong is None:
            self.survived += 1
        else:
            self.lost.append(f"{what}: {wrong}")


@dataclass
class Workload:
    """What is hit by faults.

    Args:
        folder: holds good checkpoints; each fault finds it as it is now.
        save: saves one more below it; called in a forked child.
        check: called after each fault with the folder.
        companion: what a second process of the same run does, which must not hang.
        prepare: called before each pair of them is forked.
        timeout: seconds that the children may take.
    """

    folder: Path
    save: Save
    check: Check
    companion: Save | None = None
    prepare: Callable[[], Any] = lambda: None
    timeout: float = 60.0


def kill_everywhere(workload: Workload, *, every: int = 1) -> Tally:
    """Kill (SIGKILL) a process that saves, before every `every`-th of its file operations."""
    return _strike_everywhere("SIGKILL before a file operation", workload, every, None)


def fail_everywhere(workload: Workload, error: int, *, every: int = 1) -> Tally:
    """Let every `every`-th operation that writes fail with an error.

    Args:
        workload: what is hit.
        error: its number. After `errno.ENOSPC` whatever needs room fails too; others strike once.
        every: number of operations between two faults.
    """
    full = error == errno.ENOSPC
    kind = "disk full from an operation on" if full else f"{errno.errorcode[error]} from an operation that writes"
    return _strike_everywhere(kind, workload, every, error)


def _strike_everywhere(kind: str, workload: Workload, every: int, error: int | None) -> Tally:
    tally, at = Tally(kind), 0
    full = error == errno.ENOSPC
    only = () if error is None else _FILLING if full else _WRITING
    with _Kept(workload.folder) as kept:
        while True:
            kept.put_back()
            workload.prepare()
            ended = run(
                workload.save,
                workload.folder,
                Fault(at, error, only, lasting=full),
                companion=workload.companion,
                timeout=workload.timeout,
                log=kept.beside / "output",
            )
            if ended.hit is None:
                return tally
            wrong = "a process hung" if ended.hung else workload.check(workload.folder)
            tally.count(f"{_told(ended.hit, workload.folder)} (operation {at})", wrong)
            at += every


def lose_power(workload: Workload, *, every: int = 1) -> Tally:
    """Record one save, and look at what is found when power is lost after every `every`-th of its operations.

    The workload's `check` is called with a folder of the same contents at another place.
    """
    tally = Tally("loss of power after a file operation, unflushed writes lost")
    with _Kept(workload.folder) as kept:
        workload.prepare()
        ended = run(workload.save, workload.folder, companion=workload.companion, timeout=workload.timeout)
        if ended.code != 0:
            raise AssertionError(f"The undisturbed save ended with exit code {ended.code}.")
        for done, outcome, path in crashes(kept.copy, workload.folder, ended.operations, kept.beside / "found"):
            if done % every == 0 or done == len(ended.operations):
                tally.count(f"after {done} operations, {outcome.value}", workload.check(path))
    return tally


def harm_everything(folder: Path, check: Callable[[bool, Path], str | None]) -> Tally:
    """Harm each file of a checkpoint in each way.

    Args:
        folder: the checkpoint.
        check: given whether the harm is serious and which file it struck, says what is wrong with what happens then.
    """
    tally = Tally("file truncated, emptied, changed by a bit, missing or extra")
    for damage in damages(folder):
        tally.count(f"{damage.path.name} {damage.kind}", check(damage.serious, damage.path))
    return tally


def _told(operation: Operation, folder: Path) -> str:
    path = operation.path
    return f"{operation.kind} of {path.relative_to(folder.resolve()) if folder.resolve() in path.parents else path}"


class _Kept:
    """A folder that can be put back as it was."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.beside = folder.with_name(f"{folder.name}-kept-{os.getpid()}")
        self.copy = self.beside / "before"

    def __enter__(self) -> _Kept:
        self.beside.mkdir()
        shutil.copytree(self._folder, self.copy, symlinks=True)
        return self

    def put_back(self) -> None:
        shutil.rmtree(self._folder)
        shutil.copytree(self.copy, self._folder, symlinks=True)

    def __exit__(self, *_: object) -> None:
        self.put_back()
        shutil.rmtree(self.beside)
