"""Which runs of `accel launch` there are on this machine, and which one a pid or a folder means.

A launcher keeps a folder that only its user can read, in the folder for temporary files. The folder names the launcher,
and its processes write their statuses there (`accel_state.hang_report.rank_status`). A launcher removes its folder when
it ends. The folder of a killed launcher stays; readers recognise it by the pid and the start time that it names.
"""

from __future__ import annotations

import json
import os
import stat
import tempfile
import time
from collections.abc import Iterator
from typing import Final, NamedTuple

from accel_state.errors import NoAccess, NotFound, SettingError
from accel_state.hang_report.rank_status import STATUS_FOLDER, read_statuses
from accel_state.proc import environment_of, process_info, state_of
from accel_state.untrusted import integer, number, read_json, record, text

__all__ = ("PREFIX", "LaunchedRun", "announce_run", "find_run", "running_runs")

PREFIX: Final = "accel-launch-"
"""Prefix of the name of a launcher's folder."""

_STATUS: Final = "status"
_RUN: Final = "run.json"
_SHAPE: Final = record({"pid": integer(), "started": integer(), "folder": text(), "time": number()})
_MOST_BYTES: Final = 64 * 1024
_LIST: Final = "`accel runs status` without an argument shows every run of this user on this machine"


class LaunchedRun(NamedTuple):
    """A run, or the part of it that one launcher on this machine started.

    Args:
        pid: process id of the launcher.
        status_folder: where its processes write their statuses.
        working_folder: where it was started.
        began: when it was started, seconds since the epoch.
    """

    pid: int
    status_folder: str
    working_folder: str
    began: float

    def folder(self) -> str:
        """Where the run keeps its output, as its processes know it; else where it was started."""
        statuses = read_statuses(self.status_folder)
        return next((one.folder for _, one in sorted(statuses.items()) if one.folder), self.working_folder)


def announce_run(folder: str) -> str:
    """Record in the folder of a launcher that this process is the launcher; return the folder for its processes.

    Args:
        folder: a folder that only this user can enter, in that for temporary files; its name begins with `PREFIX`.
    """
    status = os.path.join(folder, _STATUS)
    os.makedirs(status, mode=0o700, exist_ok=True)
    info = process_info(os.getpid())
    launcher = {"pid": os.getpid(), "started": info.started if info else 0, "folder": os.getcwd(), "time": time.time()}
    with open(os.path.join(status, _RUN), "w", encoding="utf-8") as file:
        json.dump(launcher, file)
    return status


def running_runs() -> list[LaunchedRun]:
    """The runs of this user whose launcher exists, the oldest first."""
    found = {run.pid: run for folder in dict.fromkeys((tempfile.gettempdir(), "/tmp")) for run in _runs_in(folder)}
    return sorted(found.values(), key=lambda run: run.began)


def find_run(run: str) -> LaunchedRun:
    """The run that a user means.

    Args:
        run: process id of the launcher or of one of its processes, or the folder of the run: the `project_dir` or
            `logging_dir` of its Accelerator, a folder inside or around it, or where it was started if it has none.

    Raises:
        NotFound: there is no such run, it has finished, or its launcher was not `accel launch`.
        NoAccess: it belongs to another user.
        SettingError: several runs use this folder.
    """
    if run.isdecimal() and not os.path.exists(run):
        return _of_process(int(run))
    return _of_folder(run)


def _runs_in(folder: str) -> Iterator[LaunchedRun]:
    try:
        names = os.listdir(folder)
    except OSError:
        return
    for name in names:
        if name.startswith(PREFIX):
            run = _read(os.path.join(folder, name, _STATUS))
            if run is not None:
                yield run


def _read(status: str) -> LaunchedRun | None:
    """The run whose processes write into a folder; None where it is not this user's, or is over."""
    if not _is_private(os.path.dirname(status)):
        return None
    try:
        launcher = read_json(os.path.join(status, _RUN), _SHAPE, limit=_MOST_BYTES)
    except (OSError, ValueError):
        return None
    info = process_info(launcher["pid"])
    another = info is not None and info.started != launcher["started"]
    if another or state_of(launcher["pid"]) == "ended":
        return None
    return LaunchedRun(launcher["pid"], status, launcher["folder"], launcher["time"])


def _is_private(folder: str) -> bool:
    """Whether a folder belongs to this user, and no other user can enter it."""
    try:
        found = os.lstat(folder)
    except OSError:
        return False
    mine = getattr(os, "geteuid", lambda: found.st_uid)() == found.st_uid
    return mine and stat.S_ISDIR(found.st_mode) and (os.name != "posix" or stat.S_IMODE(found.st_mode) & 0o077 == 0)


def _of_process(pid: int) -> LaunchedRun:
    failed = f"Cannot show the run of process {pid}."
    if state_of(pid) == "ended":
        raise NotFound(failed, f"process {pid} has ended, or never existed on this machine", _LIST)
    info = process_info(pid)
    if info is not None and info.owner != os.geteuid():
        owner = _name_of(info.owner)
        raise NoAccess(
            failed,
            f"process {pid} belongs to the user {owner}, and only this user can see its run",
            f"repeat the command as {owner}",
        )
    environment = environment_of(pid)
    # The launcher may have another folder for temporary files than this process.
    elsewhere = _runs_in(environment["TMPDIR"]) if "TMPDIR" in environment else ()
    own = environment.get(STATUS_FOLDER)
    found = _read(own) if own else next((run for run in (*running_runs(), *elsewhere) if run.pid == pid), None)
    if found is not None:
        return found
    raise NotFound(failed, f"process {pid} is not a run that `accel launch` started", _LIST)


def _name_of(user: int) -> str:
    try:
        import pwd

        return pwd.getpwuid(user).pw_name
    except (ImportError, KeyError):
        return str(user)


def _of_folder(folder: str) -> LaunchedRun:
    failed = f"Cannot show the run in {folder!r}."
    runs = [run for run in running_runs() if _around(run.folder(), folder)]
    if len(runs) == 1:
        return runs[0]
    if runs:
        pids = ", ".join(str(run.pid) for run in runs)
        raise SettingError(
            failed, f"{len(runs)} runs write to {folder!r}", f"name the process id of a launcher: {pids}"
        )
    if not os.path.exists(folder):
        raise NotFound(failed, f"{folder!r} is neither a folder nor a process id", _LIST)
    raise NotFound(failed, f"no run writes to {folder!r} now: it has finished, or runs on another machine", _LIST)


def _around(one: str, other: str) -> bool:
    """Whether one of two paths contains the other."""
    first, second = os.path.realpath(one), os.path.realpath(other)
    try:
        return os.path.commonpath((first, second)) in (first, second)
    except ValueError:
        return False
