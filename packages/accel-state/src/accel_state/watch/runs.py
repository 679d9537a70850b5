"""The launchers of this user on this machine: the private folder of each, and the run that a pid or a folder names.

A launcher creates a folder that only its user can enter, in memory where the machine has a place for that, else among
the temporary files. `run.json` in it identifies the launcher, and its processes keep their status records there. The
launcher locks its folder from the beginning, and removes it when it ends. The system releases the lock of a launcher
that was killed at any moment: then the next launcher or reader of the same user removes the folder.

If no place has room for a folder, the run starts all the same: then nothing is recorded, and readers see nothing.
"""

from __future__ import annotations

import contextlib
import os
import stat
import time
from collections.abc import Iterable, Iterator
from typing import Any, Final, NamedTuple

from accel_state.proc import environment_of, process_info, state_of

fcntl: Any
try:
    import fcntl
except ImportError:
    # Windows: folders of killed launchers remain.
    fcntl = None

__all__ = (
    "PREFIX",
    "RUN_FILE",
    "LaunchedRun",
    "announce_run",
    "find_run",
    "folder_of_output",
    "is_private",
    "make_launch_folder",
    "remove_abandoned_folders",
    "remove_launch_folder",
    "running_runs",
    "status_folder_in",
)

PREFIX: Final = "accel-launcher-"
"""Prefix of the name of a launcher's folder."""

RUN_FILE: Final = "run.json"
"""File in the status folder that identifies the launcher."""

PLACES: Final = ("/dev/shm", "/tmp")
"""Where launchers create their folders, beside the folder for temporary files: memory first."""

_STATUS_FOLDER_NAME: Final = "status"
_MIN_FREE_BYTES: Final = 2**20
"""Bytes that a new folder must have room for."""

_MAX_ATTEMPTS: Final = 3
"""How often a folder is created in a place where a reader removes it before it is locked."""

_MAX_RUN_FILE_BYTES: Final = 64 * 1024
_LIST_RUNS_REMEDY: Final = "Run `accel runs status` without an argument to see every run of this user on this machine."

# ---------------------------------------------------------------------- the launcher's side


def _places() -> Iterator[str]:
    memory, usual = PLACES
    yield memory
    if os.environ.get("TMPDIR"):
        yield os.environ["TMPDIR"]
    yield usual


def make_launch_folder() -> str:
    """Create and lock a private folder for a launcher; return its path, also if no place has room for one.

    Whatever uses the folder must continue if it does not exist.
    """
    path = ""
    for place in _places():
        for _ in range(_MAX_ATTEMPTS):
            path = os.path.abspath(os.path.join(place, f"{PREFIX}{os.urandom(8).hex()}"))
            with contextlib.suppress(OSError):
                os.mkdir(path, 0o700)
                if _lock(path):
                    if _has_room(path):
                        return path
                    remove_launch_folder(path)
                    break
    return path


def remove_launch_folder(folder: str) -> None:
    """Remove a folder that this process has created, and release its lock."""
    import shutil

    shutil.rmtree(folder, ignore_errors=True)
    if folder in _locks:
        os.close(_locks.pop(folder))


_locks: Final[dict[str, int]] = {}
"""The descriptors of the folders that this process has locked."""


def _lock(folder: str) -> bool:
    """Lock a folder as long as this process lives; False if a reader removed it before it was locked."""
    if fcntl is None:
        return True
    _locks[folder] = file = os.open(folder, os.O_RDONLY)
    # A file system without locks proves nothing to readers, who leave the folder alone.
    with contextlib.suppress(OSError):
        fcntl.flock(file, fcntl.LOCK_EX)
    if os.path.isdir(folder):
        return True
    os.close(_locks.pop(folder))
    return False


def _release_after_fork() -> None:
    """In a forked process, which must not keep a folder of its parent locked."""
    while _locks:
        os.close(_locks.popitem()[1])


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_release_after_fork)


def _is_abandoned(folder: str, remove: bool = False) -> bool:
    """Whether the lock of a folder proves that its launcher has ended; with `remove`, also remove it then."""
    import shutil

    if fcntl is None:
        return False
    try:
        file = os.open(folder, os.O_RDONLY | os.O_NOFOLLOW)
    except OSError:
        return False
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if remove:
            # Still locked: a launcher that is about to lock it waits, and then creates another one.
            shutil.rmtree(folder, ignore_errors=True)
    except OSError:
        return False
    finally:
        os.close(file)
    return True


def _has_room(folder: str) -> bool:
    path = os.path.join(folder, "room")
    try:
        with open(path, "wb") as file:
            if hasattr(os, "posix_fallocate"):
                os.posix_fallocate(file.fileno(), 0, _MIN_FREE_BYTES)
        return True
    except OSError:
        return False
    finally:
        with contextlib.suppress(OSError):
            os.unlink(path)


def status_folder_in(folder: str) -> str:
    """The folder for the records inside a launcher's folder, created if it is missing; returns its path."""
    status = os.path.join(folder, _STATUS_FOLDER_NAME)
    with contextlib.suppress(OSError):
        os.mkdir(status, 0o700)
    return status


def announce_run(folder: str) -> str:
    """Record in the folder of a launcher that this process is the launcher; return the folder for the records."""
    import json

    status = status_folder_in(folder)
    launcher = {"pid": os.getpid(), "namespace": _namespace(), "folder": os.getcwd(), "time": time.time()}
    with contextlib.suppress(OSError), open(os.path.join(status, RUN_FILE), "w", encoding="utf-8") as file:
        json.dump(launcher, file)
    return status


def _namespace() -> str:
    """The namespace in which the process ids of this process count; empty if the system does not report it."""
    with contextlib.suppress(OSError):
        return os.readlink("/proc/self/ns/pid")
    return ""


def remove_abandoned_folders() -> None:
    """Remove the folders of this user's launchers that ended without removing them."""
    for _ in _folders(_places()):
        pass


def _folders(places: Iterable[str]) -> Iterator[str]:
    """The folders of this user's launchers in places that all users share; those of ended launchers are removed."""
    for place in dict.fromkeys(places):
        try:
            names = os.listdir(place)
        except OSError:
            continue
        for name in names:
            folder = os.path.join(place, name)
            if name.startswith(PREFIX) and is_private(folder) and not _is_abandoned(folder, remove=True):
                yield folder


def is_private(folder: str) -> bool:
    """Whether a folder belongs to this user, and no other user can enter it; a symbolic link does not count."""
    try:
        facts = os.lstat(folder)
    except OSError:
        return False
    mine = getattr(os, "geteuid", lambda: facts.st_uid)() == facts.st_uid
    return mine and stat.S_ISDIR(facts.st_mode) and (os.name != "posix" or stat.S_IMODE(facts.st_mode) & 0o077 == 0)


# ---------------------------------------------------------------------- the reader's side


class LaunchedRun(NamedTuple):
    """A run, or the part of it that one launcher on this machine started.

    Args:
        pid: process id of the launcher.
        status_folder: folder for the records of its processes.
        working_folder: folder in which it was started.
        began: when it was started, in seconds since the epoch.
    """

    pid: int
    status_folder: str
    working_folder: str
    began: float

    def folder(self) -> str:
        """The folder of the run's output if a process has published one; else the folder in which it was started."""
        return folder_of_output(self.status_folder) or self.working_folder


def folder_of_output(status_folder: str) -> str:
    """The folder of a run's output, as its processes publish it; empty if they do not."""
    from accel_state.watch.status import read_statuses

    statuses = read_statuses(status_folder)
    return next((one.folder for _, one in sorted(statuses.items()) if one.folder), "")


def running_runs(places: tuple[str, ...] = ()) -> list[LaunchedRun]:
    """The runs of this user with a live launcher, the oldest first.

    Args:
        places: further folders in which launchers may have created theirs.
    """
    runs = (_read(os.path.join(folder, _STATUS_FOLDER_NAME)) for folder in _folders((*_places(), *places)))
    return sorted({run.pid: run for run in runs if run is not None}.values(), key=lambda run: run.began)


def find_run(run: str) -> LaunchedRun:
    """Find the run that a user names.

    Args:
        run: process id of the launcher or of one of its processes, or the folder of the run: the `project_dir` or
            `logging_dir` of its Accelerator, a folder inside or around it, or the folder in which it was started if it
            has none.

    Raises:
        NotFound: there is no such run, it has finished, or its launcher was not `accel launch`.
        NoAccess: it belongs to another user.
        SettingError: several runs use this folder.
    """
    if run.isdecimal() and not os.path.exists(run):
        return _of_process(int(run))
    return _of_folder(run)


def _read(status: str) -> LaunchedRun | None:
    """The run with processes that write into a folder; None if it is not this user's, or has ended."""
    from accel_state.untrusted import integer, number, read_json, record, text

    shape = record({"pid": integer(), "namespace": text(), "folder": text(), "time": number()})
    folder = os.path.dirname(status)
    try:
        launcher = (
            read_json(os.path.join(status, RUN_FILE), shape, limit=_MAX_RUN_FILE_BYTES) if is_private(folder) else None
        )
    except (OSError, ValueError):
        return None
    # The state of the process decides where the file system has no locks.
    if launcher is None or launcher["namespace"] != _namespace() or state_of(launcher["pid"]) == "ended":
        return None
    return None if _is_abandoned(folder) else LaunchedRun(launcher["pid"], status, launcher["folder"], launcher["time"])


def _of_process(pid: int) -> LaunchedRun:
    from accel_state.errors import NoAccess, NotFound
    from accel_state.watch.record import STATUS_FOLDER

    failure = f"Cannot show the run of process {pid}."
    if state_of(pid) == "ended":
        raise NotFound(failure, f"Process {pid} has ended, or never existed on this machine.", _LIST_RUNS_REMEDY)
    info = process_info(pid)
    if info is not None and info.owner != os.geteuid():
        owner = _name_of(info.owner)
        raise NoAccess(
            failure,
            f"Process {pid} belongs to the user {owner}, and only this user can see its run.",
            f"Repeat the command as {owner}.",
        )
    environment = environment_of(pid)
    own = environment.get(STATUS_FOLDER)
    # The launcher may have another folder for temporary files than this process.
    runs = running_runs(tuple(filter(None, [environment.get("TMPDIR")])))
    run = _read(own) if own else next((run for run in runs if run.pid == pid), None)
    if run is None:
        raise NotFound(failure, f"Process {pid} does not belong to a run of `accel launch`.", _LIST_RUNS_REMEDY)
    return run


def _name_of(user: int) -> str:
    try:
        import pwd

        return pwd.getpwuid(user).pw_name
    except (ImportError, KeyError):
        return str(user)


def _of_folder(folder: str) -> LaunchedRun:
    from accel_state.errors import NotFound, SettingError

    failure = f"Cannot show the run in {folder!r}."
    runs = [run for run in running_runs() if _around(run.folder(), folder)]
    if len(runs) == 1:
        return runs[0]
    if runs:
        pids = ", ".join(str(run.pid) for run in runs)
        raise SettingError(
            failure, f"{len(runs)} runs write to {folder!r}.", f"Name the process id of a launcher: {pids}."
        )
    if not os.path.exists(folder):
        raise NotFound(failure, f"{folder!r} is neither a folder nor a process id.", _LIST_RUNS_REMEDY)
    raise NotFound(
        failure, f"No run writes to {folder!r} now: it has finished, or runs on another machine.", _LIST_RUNS_REMEDY
    )


def _around(one: str, other: str) -> bool:
    """Whether one of two paths contains the other."""
    first, second = os.path.realpath(one), os.path.realpath(other)
    try:
        return os.path.commonpath((first, second)) in (first, second)
    except ValueError:
        return False
