"""The Python stacks of processes, read from outside.

py-spy needs no help from a process, but the system may not permit it to read another process. The processes of a launch
can write their stacks themselves, even while native code in them holds the GIL: at SIGURG, `faulthandler` writes them
to a file of the launch (`accel_cli.launch.run_script`). No other library uses SIGURG, and processes without a handler
ignore it. A stopped process writes no stack; py-spy can read it.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import sysconfig
import time
from collections.abc import Iterable, Mapping
from typing import Final, NamedTuple

from accel_state.watch.calls import UserFrame, locate

__all__ = (
    "SUFFIX",
    "Frame",
    "frames_of_main_thread",
    "is_importing",
    "py_spy_program",
    "py_spy_stack",
    "signalled_stacks",
    "user_frame",
)

SUFFIX: Final = ".stack"
"""Suffix of the files into which processes write their stacks."""

_PATIENCE: Final = 1.5
"""Seconds for which to wait until processes have written their stacks."""

_QUIET: Final = 0.1
"""Seconds without a new line after which a stack is complete."""

_PY_SPY_PATIENCE: Final = 10.0
_MOST_BYTES: Final = 256 * 1024
_FRAME: Final = re.compile(r'  File "(?P<path>.*)", line (?P<line>\d+) in (?P<function>.+)')
_PACKAGES: Final = re.compile(
    r"[\\/](site|dist)-packages[\\/]|[\\/]accel_(state|ops|data|bigmodel|tracking|plugins|cli|torch)[\\/]"
)
_IMPORTING: Final = "<frozen importlib"
_RUNNER: Final = os.path.join("accel_cli", "launch", "run_script.py")


class Frame(NamedTuple):
    """One line of a stack.

    Args:
        path: the file.
        line: number of the line.
        function: the function that runs there.
    """

    path: str
    line: int
    function: str

    @property
    def of_user(self) -> bool:
        """Whether it is a line of the user's code."""
        library = self.path.startswith(("<", *_libraries())) or _PACKAGES.search(self.path)
        return not library


def _libraries() -> tuple[str, ...]:
    return tuple({sysconfig.get_path("stdlib"), sysconfig.get_path("platstdlib")})


def py_spy_program() -> str | None:
    """Path of py-spy; None if it is not installed."""
    # The folder of the interpreter is not on PATH if its environment is not activated.
    return shutil.which("py-spy") or shutil.which("py-spy", path=os.path.dirname(sys.executable))


def py_spy_stack(pid: int, stopped: bool = False) -> str:
    """The stacks of all threads of a process by py-spy; empty if it is not installed or not permitted.

    Args:
        pid: pid of the process; py-spy pauses it meanwhile.
        stopped: whether the process is stopped, so that py-spy cannot pause it.
    """
    program = py_spy_program()
    if program is None:
        return ""
    command = [program, "dump", *(["--nonblocking"] if stopped else []), "--pid", str(pid)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_PY_SPY_PATIENCE, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout if done.returncode == 0 else ""


def signalled_stacks(files: Mapping[int, str]) -> dict[int, str]:
    """The stacks that processes write at a signal, by pid; processes that write none are missing.

    Args:
        files: the file into which each process writes, by pid.
    """
    begun = {pid: _size(path) for pid, path in files.items() if _listens(pid, path)}
    for pid in begun:
        os.kill(pid, signal.SIGURG)
    deadline = time.monotonic() + _PATIENCE
    sizes, since = dict(begun), dict.fromkeys(begun, time.monotonic())
    while time.monotonic() < deadline:
        time.sleep(_QUIET / 4)
        now = time.monotonic()
        for pid in begun:
            size = _size(files[pid])
            if size != sizes[pid]:
                sizes[pid], since[pid] = size, now
        if all(sizes[pid] > begun[pid] and now - since[pid] > _QUIET for pid in begun):
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
        return any(os.path.samestat(os.stat(f"/proc/{pid}/fd/{number}"), os.stat(path)) for number in _open_files(pid))
    except (OSError, StopIteration, ValueError, AttributeError):
        return False


def _open_files(pid: int) -> Iterable[str]:
    return [number for number in os.listdir(f"/proc/{pid}/fd") if os.path.exists(f"/proc/{pid}/fd/{number}")]


def _size(path: str) -> int:
    try:
        return os.stat(path).st_size
    except OSError:
        return 0


def _read(path: str, begin: int) -> str:
    try:
        with open(path, "rb") as file:
            file.seek(begin)
            return file.read(_MOST_BYTES).decode(errors="replace")
    except OSError:
        return ""


def frames_of_main_thread(stack: str) -> list[Frame]:
    """The frames of the main thread in the output of `faulthandler`, the innermost first."""
    # The main thread was started first, and is therefore the last one in the output.
    thread = re.split(r"^(?:Current t|T)hread 0x.*\n", stack, flags=re.MULTILINE)[-1]
    found = [match for line in thread.splitlines() if (match := _FRAME.fullmatch(line)) is not None]
    return [Frame(match["path"], int(match["line"]), match["function"]) for match in found]


def user_frame(frames: list[Frame], working_folder: str) -> UserFrame | None:
    """The innermost frame of the user's code in a thread; None if it runs none.

    Args:
        frames: the frames of the thread, the innermost first.
        working_folder: the folder in which the run was started; paths below it become relative to it.
    """
    inside = ""
    for frame in _of_script(frames):
        if frame.of_user:
            return UserFrame(locate(frame.path, frame.line, working_folder), inside)
        inside = frame.function
    return None


def is_importing(frames: list[Frame]) -> bool:
    """Whether a thread is importing a module."""
    return any(frame.path.startswith(_IMPORTING) for frame in _of_script(frames))


def _of_script(frames: list[Frame]) -> list[Frame]:
    """The frames of the script, without our own frames that run it."""
    return frames[: next((index for index, frame in enumerate(frames) if frame.path.endswith(_RUNNER)), len(frames))]
