"""The folder of a launcher, in which it and its processes write their statuses.

It is in the folder for temporary files, only its user can enter it, and `run.json` in it identifies the launcher. A
launcher removes its folder when it ends. The folder of a killed launcher remains until another launcher of the same
user has started its processes. A lock shows whether the launcher still runs: the system releases it however the
launcher ends. This also works if launchers in different containers, which see different process ids, share the folder.
"""

from __future__ import annotations

import os
import stat
import time
from collections.abc import Iterator
from typing import Final

from accel_state.proc import process_info

__all__ = (
    "PREFIX",
    "RUN_FILE",
    "STATUS",
    "announce_run",
    "is_private",
    "make_launch_folder",
    "make_status_folder",
    "remove_abandoned_folders",
)

PREFIX: Final = "accel-launch-"
"""Prefix of the name of a launcher's folder."""

RUN_FILE: Final = "run.json"
"""File in the status folder that identifies the launcher."""

STATUS: Final = "status"
"""Name of the status folder inside the launcher's folder."""

_LOCK: Final = "lock"
_USUAL: Final = "/tmp"

_locks: dict[str, int] = {}
"""Locks of the folders of this process, open until the process ends."""


def make_launch_folder() -> str:
    """Create a folder for a launcher; return its path."""
    path = os.path.join(os.environ.get("TMPDIR") or _USUAL, f"{PREFIX}{os.urandom(8).hex()}")
    try:
        os.mkdir(path, 0o700)
    except OSError:
        # The module `tempfile` knows further places, but its import takes longer than the rest of a launch here.
        import tempfile

        path = tempfile.mkdtemp(prefix=PREFIX)
    return os.path.abspath(path)


def make_status_folder(folder: str) -> str:
    """Create the status folder inside a launcher's folder; return its path."""
    status = os.path.join(folder, STATUS)
    os.makedirs(status, mode=0o700, exist_ok=True)
    return status


def announce_run(folder: str) -> str:
    """Record in the folder of a launcher that this process is the launcher; return the folder for its processes.

    Args:
        folder: a folder inside the folder for temporary files that only this user can enter; its name begins with
            `PREFIX`.
    """
    import json

    status = make_status_folder(folder)
    _lock(folder)
    info = process_info(os.getpid())
    launcher = {"pid": os.getpid(), "started": info.started if info else 0, "folder": os.getcwd(), "time": time.time()}
    with open(os.path.join(status, RUN_FILE), "w", encoding="utf-8") as file:
        json.dump(launcher, file)
    return status


def _lock(folder: str) -> None:
    """Lock a folder until this process ends; the lock file gets its name once it is locked."""
    if folder in _locks or os.name != "posix":
        return
    import fcntl

    path = os.path.join(folder, _LOCK)
    lock = os.open(f"{path}.new", os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.rename(f"{path}.new", path)
    except OSError:
        # A file system without locks: the folder is not recognised as abandoned.
        os.close(lock)
        return
    _locks[folder] = lock


def remove_abandoned_folders(beside: str) -> None:
    """Remove the folders of this user's launchers that ended without removing them.

    Args:
        beside: the folder of a launcher; its parent folder is searched.
    """
    import shutil

    for folder in _abandoned(os.path.dirname(beside)):
        shutil.rmtree(folder, ignore_errors=True)


def _abandoned(place: str) -> Iterator[str]:
    if os.name != "posix":
        return
    import fcntl

    try:
        names = os.listdir(place)
    except OSError:
        return
    for name in names:
        folder = os.path.join(place, name)
        if not name.startswith(PREFIX) or folder in _locks or not is_private(folder):
            continue
        try:
            lock = os.open(os.path.join(folder, _LOCK), os.O_WRONLY)
        except OSError:
            # A launcher that has not announced its run yet.
            continue
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            yield folder
        except OSError:
            # Its launcher still runs.
            continue
        finally:
            os.close(lock)


def is_private(folder: str) -> bool:
    """Whether a folder belongs to this user, and no other user can enter it."""
    try:
        found = os.lstat(folder)
    except OSError:
        return False
    mine = getattr(os, "geteuid", lambda: found.st_uid)() == found.st_uid
    return mine and stat.S_ISDIR(found.st_mode) and (os.name != "posix" or stat.S_IMODE(found.st_mode) & 0o077 == 0)
