"""The Python stacks of processes, which they write when they receive a signal.

They do so even while native code in them holds the GIL: at SIGURG, `faulthandler` writes the stacks to a file of the
launch (`accel_cli.launch.run_script`). No other library uses SIGURG, and processes without a handler ignore it. A
stopped process writes no stack.
"""

from __future__ import annotations

import os
import re
import signal
import sysconfig
import time
from collections.abc import Mapping
from typing import Final

from accel_state.watch.calls import IMPORT, UserFrame, locate
from accel_state.watch.runs import LaunchedRun

__all__ = ("SUFFIX", "signalled_stacks", "user_frame_in")

SUFFIX: Final = ".stack"
"""Suffix of the files into which processes write their stacks."""

_STACK_TIMEOUT_S: Final = 1.5
"""Seconds for which to wait until processes have written their stacks."""

_COMPLETE_AFTER_S: Final = 0.1
"""Seconds without a new line after which a stack is complete."""

_MAX_STACK_BYTES: Final = 256 * 1024
_THREAD_HEADING: Final = re.compile(r"^(?:Current t|T)hread 0x.*\n", re.MULTILINE)
_FRAME_LINE: Final = re.compile(r'^  File "(?P<path>.*)", line (?P<line>\d+) in (?P<function>.+)$', re.MULTILINE)
_LIBRARY_PATH: Final = re.compile(
    r"[\\/](site|dist)-packages[\\/]|[\\/]accel_(state|ops|data|bigmodel|tracking|plugins|cli|torch)[\\/]"
)
_IMPORTLIB_PREFIX: Final = "<frozen importlib"
_RUNNER_PATH: Final = os.path.join("accel_cli", "launch", "run_script.py")


def signalled_stacks(files: Mapping[int, str]) -> dict[int, str]:
    """The stacks that processes write at a signal, by pid; processes that write none are missing.

    Args:
        files: the file into which each process writes, by pid.
    """
    begun = {pid: _size(path) for pid, path in files.items() if _listens(pid, path)}
    for pid in begun:
        os.kill(pid, signal.SIGURG)
    deadline = time.monotonic() + _STACK_TIMEOUT_S
    sizes, quiet_since = dict(begun), time.monotonic()
    while time.monotonic() < deadline:
        time.sleep(_COMPLETE_AFTER_S / 4)
        before, sizes = sizes, {pid: _size(files[pid]) for pid in begun}
        if sizes != before:
            quiet_since = time.monotonic()
        if all(sizes[pid] > begun[pid] for pid in begun) and time.monotonic() - quiet_since > _COMPLETE_AFTER_S:
            break
    return {pid: _read(files[pid], begun[pid]) for pid in begun if sizes[pid] > begun[pid]}


def _listens(pid: int, path: str) -> bool:
    """Whether a process has a handler for the signal, and the handler's file is still open in it.

    A script may close descriptors that it did not open, and then open another file under the same number.
    """
    try:
        with open(f"/proc/{pid}/status", encoding="utf-8", errors="replace") as file:
            caught = next(line for line in file if line.startswith("SigCgt:"))
        if not int(caught.split()[1], 16) & 1 << (signal.SIGURG - 1):
            return False
        folder = f"/proc/{pid}/fd"
        return any(os.path.realpath(os.path.join(folder, one)) == os.path.realpath(path) for one in os.listdir(folder))
    except (OSError, StopIteration, ValueError, AttributeError):
        return False


def _size(path: str) -> int:
    try:
        return os.stat(path).st_size
    except OSError:
        return 0


def _read(path: str, begin: int) -> str:
    try:
        with open(path, "rb") as file:
            file.seek(begin)
            return file.read(_MAX_STACK_BYTES).decode(errors="replace")
    except OSError:
        return ""


def user_frame_in(stack: str, run: LaunchedRun) -> UserFrame | None:
    """The innermost frame of the user's code in the main thread, which may be in an import; None if it runs none.

    Args:
        stack: what `faulthandler` wrote.
        run: the run; paths below the folder in which it was started become relative to it.
    """
    libraries = ("<", sysconfig.get_path("stdlib"), sysconfig.get_path("platstdlib"))
    inside, user_frame, imports = "", None, False
    # The main thread was started first, and is therefore the last one in the output, with the innermost frame first.
    for frame in _FRAME_LINE.finditer(_THREAD_HEADING.split(stack)[-1]):
        path = frame["path"]
        if path.endswith(_RUNNER_PATH):
            break
        imports |= path.startswith(_IMPORTLIB_PREFIX)
        if user_frame is None and not path.startswith(libraries) and _LIBRARY_PATH.search(path) is None:
            user_frame = UserFrame(locate(path, int(frame["line"]), run.working_folder), inside)
        inside = frame["function"]
    return user_frame._replace(inside=IMPORT) if user_frame is not None and imports else user_frame
