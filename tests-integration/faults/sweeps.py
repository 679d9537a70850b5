"""Inject kills, full disks, power losses and damage at every possible place, and check the folder after each.

After a power loss, data that was not flushed may be lost: contents are safe after an fsync of the file, names after an
fsync of the folder. Unflushed data may or may not be on disk, so each moment has several outcomes.
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

from accel_state.errors import NotOffered
from faults.tracing import Fault, Operation, run

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


# --------------------------------------------------------------------------------------------------------- power loss


class Outcome(str, Enum):
    """What a power loss leaves of data that was not flushed."""

    NOTHING = "unflushed names and contents are lost"
    NAMES = "names exist, contents are lost"
    LENGTHS = "names and lengths exist, contents are zeros"
    EVERYTHING = "nothing is lost"


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
    """A folder and everything below it, as in memory and as on disk."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.top = _read(root)

    def apply(self, operation: Operation) -> None:
        """Apply one file operation of a process."""
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
    """The current content of a folder, all of it flushed."""
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
    """Simulate a power loss after each number of operations, with each outcome.

    Args:
        before: a copy of the folder before the operations; treated as flushed.
        root: the folder itself; the operations contain its paths.
        operations: the recorded operations, in order.
        scratch: the folder in which each resulting state is written; removed before the next.

    Yields:
        The number of operations done, the outcome, and the folder with the resulting state.

    Raises:
        NotOffered: an operation has a path outside the folder.
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
                f"Cannot simulate a power loss after {operation.kind} of {operation.path}.",
                f"{path} is outside of {root}.",
                "Record operations below a folder that contains all written files.",
            )


# ------------------------------------------------------------------------------------------------------------- damage


class Damage(NamedTuple):
    """The damage to one file.

    Args:
        kind: "truncated", "emptied", "bit flipped", "missing" or "extra file".
        path: the damaged file.
        serious: whether the damage makes the checkpoint incomplete.
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
"""Checks a folder after a fault; returns a description of what is wrong, or None."""

_FILLING = ("create", "write", "mkdir", "link", "copy", "symlink")
_WRITING = (*_FILLING, "rename", "exchange", "fsync", "truncate")


@dataclass
class Tally:
    """The results of a sweep.

    Attributes:
        kind: the kind of faults.
        injected: number of faults that occurred.
        survived: number of faults after which the check found nothing wrong.
        lost: descriptions of what was wrong after the other faults.
    """

    kind: str
    injected: int = 0
    survived: int = 0
    lost: list[str] = field(default_factory=list)

    def count(self, what: str, wrong: str | None) -> None:
        """Add one fault and the result of the check after it."""
        self.injected += 1
        if wrong is None:
            self.survived += 1
        else:
            self.lost.append(f"{what}: {wrong}")


@dataclass
class Workload:
    """The operation into which faults are injected.

    Args:
        folder: contains valid checkpoints; restored to its current state before each fault.
        save: saves another checkpoint below it; called in a forked child.
        check: called with the folder after each fault.
        companion: called in a second process of the same run, which must not hang.
        prepare: called before each pair of processes is forked.
        timeout: maximum run time of the children, in seconds.
    """

    folder: Path
    save: Save
    check: Check
    companion: Save | None = None
    prepare: Callable[[], Any] = lambda: None
    timeout: float = 200.0


def kill_everywhere(workload: Workload, *, every: int = 1) -> Tally:
    """Kill (SIGKILL) a saving process before every `every`-th of its file operations."""
    return _strike_everywhere("SIGKILL before a file operation", workload, every, None)


def fail_everywhere(workload: Workload, error: int, *, every: int = 1) -> Tally:
    """Make every `every`-th writing operation fail with an error.

    Args:
        workload: the operation under test.
        error: the error number. After `errno.ENOSPC` all later operations that need space fail too; other errors occur
            once.
        every: number of operations between two faults.
    """
    full = error == errno.ENOSPC
    kind = "disk full from a file operation on" if full else f"{errno.errorcode[error]} from a writing operation"
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
                if ended.code != 0:
                    raise AssertionError(f"The undisturbed save ended with exit code {ended.code}.")
                return tally
            wrong = "a process hung" if ended.hung else workload.check(workload.folder)
            tally.count(f"{_told(ended.hit, workload.folder)} (operation {at})", wrong)
            at += every


def lose_power(workload: Workload, *, every: int = 1) -> Tally:
    """Record one save, and check the folder after a simulated power loss at every `every`-th of its operations.

    The workload's `check` receives another folder, with the resulting state.
    """
    tally = Tally("power loss after a file operation, unflushed writes lost")
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
    """Damage each file of a checkpoint in each way.

    Args:
        folder: the checkpoint.
        check: receives `Damage.serious` and `Damage.path`; returns a description of what is wrong, or None.
    """
    tally = Tally("file truncated, emptied, changed by a bit, missing or extra")
    for damage in damages(folder):
        tally.count(f"{damage.path.name} {damage.kind}", check(damage.serious, damage.path))
    return tally


def _told(operation: Operation, folder: Path) -> str:
    path = operation.path
    return f"{operation.kind} of {path.relative_to(folder.resolve()) if folder.resolve() in path.parents else path}"


class _Kept:
    """A folder that can be restored to its earlier content."""

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
