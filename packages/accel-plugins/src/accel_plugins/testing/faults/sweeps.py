"""Sweeps: one kind of fault at every place where it can happen, and what is found after each."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from accel_plugins.testing.faults.damage import damages
from accel_plugins.testing.faults.disk import crashes
from accel_plugins.testing.faults.operations import Operation
from accel_plugins.testing.faults.tracing import Fault, run

__all__ = ("Check", "Job", "Tally", "fail_everywhere", "harm_everything", "kill_everywhere", "lose_power")

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
class Job:
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


def kill_everywhere(job: Job, *, every: int = 1) -> Tally:
    """Kill (SIGKILL) a process that saves, before every `every`-th of its file operations."""
    return _strike_everywhere("SIGKILL before a file operation", job, every, None)


def fail_everywhere(job: Job, error: int, *, every: int = 1) -> Tally:
    """Let every `every`-th operation that writes fail with an error.

    Args:
        job: what is hit.
        error: its number. After `errno.ENOSPC` whatever needs room fails too; others strike once.
        every: number of operations between two faults.
    """
    full = error == errno.ENOSPC
    kind = "disk full from an operation on" if full else f"{errno.errorcode[error]} from an operation that writes"
    return _strike_everywhere(kind, job, every, error)


def _strike_everywhere(kind: str, job: Job, every: int, error: int | None) -> Tally:
    tally, at = Tally(kind), 0
    full = error == errno.ENOSPC
    only = () if error is None else _FILLING if full else _WRITING
    with _Kept(job.folder) as kept:
        while True:
            kept.put_back()
            job.prepare()
            ended = run(
                job.save,
                job.folder,
                Fault(at, error, only, lasting=full),
                companion=job.companion,
                timeout=job.timeout,
                log=kept.beside / "output",
            )
            if ended.hit is None:
                return tally
            wrong = "a process hung" if ended.hung else job.check(job.folder)
            tally.count(f"{_told(ended.hit, job.folder)} (operation {at})", wrong)
            at += every


def lose_power(job: Job, *, every: int = 1) -> Tally:
    """Record one save, and look at what is found when power is lost after every `every`-th of its operations.

    The job's `check` is called with a folder of the same contents at another place.
    """
    tally = Tally("loss of power after a file operation, unflushed writes lost")
    with _Kept(job.folder) as kept:
        job.prepare()
        ended = run(job.save, job.folder, companion=job.companion, timeout=job.timeout)
        if ended.code != 0:
            raise AssertionError(f"The undisturbed save ended with exit code {ended.code}.")
        for done, outcome, path in crashes(kept.copy, job.folder, ended.operations, kept.beside / "found"):
            if done % every == 0 or done == len(ended.operations):
                tally.count(f"after {done} operations, {outcome.value}", job.check(path))
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
