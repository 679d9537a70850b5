"""Finds the runs of `accel launch` on this machine, and the run that belongs to a pid or a folder.

The folder of a launcher (`accel_state.run_status.folder`) contains its pid, and its processes write their statuses
there (`accel_state.hang_report.rank_status`). The folder of a killed launcher remains for a while; readers recognise it
by the pid and the start time in it.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from typing import Final, NamedTuple

from accel_state.errors import NoAccess, NotFound, SettingError
from accel_state.hang_report.progress import STATUS_FOLDER
from accel_state.hang_report.rank_status import read_statuses
from accel_state.proc import environment_of, process_info, state_of
from accel_state.run_status.folder import PREFIX, RUN_FILE, STATUS, is_private
from accel_state.untrusted import integer, number, read_json, record, text

__all__ = ("LaunchedRun", "find_run", "running_runs")

_SHAPE: Final = record({"pid": integer(), "started": integer(), "folder": text(), "time": number()})
_MOST_BYTES: Final = 64 * 1024
_USUAL: Final = "/tmp"
"""Folder for temporary files of launchers that were started without TMPDIR."""

_LIST: Final = "Run `accel runs status` without an argument to see every run of this user on this machine."


class LaunchedRun(NamedTuple):
    """A run, or the part of it that one launcher on this machine started.

    Args:
        pid: process id of the launcher.
        status_folder: folder for the statuses of its processes.
        working_folder: folder in which it was started.
        began: when it was started, in seconds since the epoch.
    """

    pid: int
    status_folder: str
    working_folder: str
    began: float

    def folder(self) -> str:
        """The folder of the run's output if a process has published one; else the folder in which it was started."""
        statuses = read_statuses(self.status_folder)
        return next((one.folder for _, one in sorted(statuses.items()) if one.folder), self.working_folder)


def running_runs() -> list[LaunchedRun]:
    """The runs of this user with a live launcher, the oldest first."""
    found = {run.pid: run for folder in dict.fromkeys((tempfile.gettempdir(), _USUAL)) for run in _runs_in(folder)}
    return sorted(found.values(), key=lambda run: run.began)


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


def _runs_in(folder: str) -> Iterator[LaunchedRun]:
    try:
        names = os.listdir(folder)
    except OSError:
        return
    for name in names:
        if name.startswith(PREFIX):
            run = _read(os.path.join(folder, name, STATUS))
            if run is not None:
                yield run


def _read(status: str) -> LaunchedRun | None:
    """The run with processes that write into a folder; None if it is not this user's, or has ended."""
    if not is_private(os.path.dirname(status)):
        return None
    try:
        launcher = read_json(os.path.join(status, RUN_FILE), _SHAPE, limit=_MOST_BYTES)
    except (OSError, ValueError):
        return None
    info = process_info(launcher["pid"])
    another = info is not None and info.started != launcher["started"]
    if another or state_of(launcher["pid"]) == "ended":
        return None
    return LaunchedRun(launcher["pid"], status, launcher["folder"], launcher["time"])


def _of_process(pid: int) -> LaunchedRun:
    failed = f"Cannot show the run of process {pid}."
    if state_of(pid) == "ended":
        raise NotFound(failed, f"Process {pid} has ended, or never existed on this machine.", _LIST)
    info = process_info(pid)
    if info is not None and info.owner != os.geteuid():
        owner = _name_of(info.owner)
        raise NoAccess(
            failed,
            f"Process {pid} belongs to the user {owner}, and only this user can see its run.",
            f"Repeat the command as {owner}.",
        )
    environment = environment_of(pid)
    # The launcher may have another folder for temporary files than this process.
    elsewhere = _runs_in(environment["TMPDIR"]) if "TMPDIR" in environment else ()
    own = environment.get(STATUS_FOLDER)
    found = _read(own) if own else next((run for run in (*running_runs(), *elsewhere) if run.pid == pid), None)
    if found is not None:
        return found
    raise NotFound(failed, f"Process {pid} does not belong to a run of `accel launch`.", _LIST)


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
            failed, f"{len(runs)} runs write to {folder!r}.", f"Name the process id of a launcher: {pids}."
        )
    if not os.path.exists(folder):
        raise NotFound(failed, f"{folder!r} is neither a folder nor a process id.", _LIST)
    raise NotFound(failed, f"No run writes to {folder!r} now: it has finished, or runs on another machine.", _LIST)


def _around(one: str, other: str) -> bool:
    """Whether one of two paths contains the other."""
    first, second = os.path.realpath(one), os.path.realpath(other)
    try:
        return os.path.commonpath((first, second)) in (first, second)
    except ValueError:
        return False
