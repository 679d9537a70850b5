"""Saves in containers: runs with one host name that do not see each other's processes, and restarts with one pid."""

from __future__ import annotations

import contextlib
import ctypes
import os
import shutil
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, Final

from faults import sweeps, tracing

import reliability_runs as runs
from accel_plugins.checkpoint.manifest import verify
from accel_plugins.checkpoint.recovery import unfinished
from accel_state.errors import NotOffered

__all__ = ("neighbours", "restarts")

_NAMESPACES: Final = 0x20000000 | 0x04000000 | 0x00020000
"""New PIDs, a new host name, new mounts."""

_PRIVATE_BELOW: Final = (1 << 18) | (1 << 14)
_LONGEST: Final = 200.0
_REFUSED: Final = 99
_SAVES: Final = 87


def neighbours(run: runs.Run, every: int) -> sweeps.Tally:
    """Two containers with one host name save under one name at once: no save fails, and what is there is whole."""
    tally = sweeps.Tally("another PID namespace saves there")
    times = -(-_SAVES // every)
    done = [run.project.with_name(f"done_{number}") for number in (0, 1)]
    started = [
        _contained(partial(_in_process, pid, partial(_save_often, run, times, file)), run.project)
        for file, pid in zip(done, (100, 200), strict=True)
    ]
    damage = _watched(run.project / "checkpoints" / "latest", started)
    for file in done:
        saved = int(file.read_text()) if file.exists() else 0
        for number in range(times):
            tally.count(f"{file.name}, save {number}", None if number < saved else "it failed")
    last = verify(run.project / "checkpoints" / "latest", hashes=True)
    for sentence in {*damage, *last.damage, *_left(run.project)}:
        tally.count("under the name", sentence)
    return tally


def _save_often(run: runs.Run, times: int, done: Path) -> None:
    session = run.session()
    for number in range(times):
        session.save()
        done.write_text(str(number + 1))


def _watched(target: Path, started: list[int]) -> set[str]:
    """What was seen damaged under a name while processes saved; one that was replaced meanwhile does not count."""
    damage: set[str] = set()
    until = time.monotonic() + _LONGEST
    while started:
        before = _identity(target)
        verdict = verify(target, hashes=True)
        if before is not None and _identity(target) == before:
            damage.update(verdict.damage)
        started = [pid for pid in started if _code(pid, wait=False) is None]
        if time.monotonic() > until:
            for pid in started:
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
            return damage | {"a container hung"}
    return damage


def _identity(folder: Path) -> bytes | None:
    try:
        return (folder / "checkpoint_manifest.json").read_bytes()
    except FileNotFoundError:
        return None


def restarts(run: runs.Run, every: int) -> sweeps.Tally:
    """A container is killed while it saves; its successor, with its host name and pid, cleans up and resumes."""
    tally = sweeps.Tally("SIGKILL before a file operation, and a restart with the same pid")
    before = run.project.with_name("before")
    shutil.copytree(run.project, before)
    for at in range(0, 1000, every):
        shutil.rmtree(run.project)
        shutil.copytree(before, run.project)
        killed = partial(_save_once, run, run.save, tracing.Fault(at))
        first = _code(_contained(killed, run.project), wait=True)
        if first == 0:
            break
        again = partial(_save_once, run, partial(_save_beside, run), None)
        second = _code(_contained(again, run.project), wait=True)
        wrong = f"the containers ended with {first} and {second}" if (first, second) != (1, 0) else None
        tally.count(f"operation {at}", wrong or ", ".join(_left(run.project)) or run.wrong(run.project))
    return tally


def _save_once(run: runs.Run, save: Callable[[], None], fault: tracing.Fault | None) -> None:
    _next_pid(300)
    ended = tracing.run(save, run.project, fault, log=run.project.with_name("output"))
    if ended.hit is not None or ended.code != 0:
        raise SystemExit(1 if ended.hit is not None and ended.code == -signal.SIGKILL else 2)


def _save_beside(run: runs.Run) -> None:
    session = run.session()
    session.load()
    session.accelerator.save_state(str(run.project / "checkpoints" / "another"))


def _left(project: Path) -> list[str]:
    return [f"{entry.name} stayed" for entry in unfinished(project / "checkpoints")]


# ---------------------------------------------------------------- containers


def _contained(function: Callable[[], Any], project: Path) -> int:
    """Fork a process that calls a function as the first one of a container.

    Raises:
        NotOffered: this process may not make one.
    """
    pid = os.fork()
    if pid:
        return pid
    code = 2
    try:
        code = _as_container(function)
    except PermissionError as error:
        project.with_name("refused").write_text(str(error))
        code = _REFUSED
    finally:
        os._exit(code)


def _as_container(function: Callable[[], Any]) -> int:
    libc = ctypes.CDLL(None, use_errno=True)
    _checked(libc.unshare(_NAMESPACES))
    first = os.fork()
    if first:
        return os.waitstatus_to_exitcode(os.waitpid(first, 0)[1]) & 0xFF
    code = 2
    try:
        _checked(libc.mount(None, b"/", None, ctypes.c_ulong(_PRIVATE_BELOW), None))
        _checked(libc.mount(b"proc", b"/proc", b"proc", ctypes.c_ulong(0), None))
        socket.sethostname("one-name")
        function()
        code = 0
    except SystemExit as leaving:
        code = leaving.code if isinstance(leaving.code, int) else 1
    except BaseException:  # it must not go on in the code of its parent
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _checked(result: int) -> None:
    if result != 0:
        number = ctypes.get_errno()
        raise PermissionError(number, os.strerror(number))


def _next_pid(pid: int) -> None:
    """Let the next process of this container have a pid."""
    Path("/proc/sys/kernel/ns_last_pid").write_text(str(pid - 1))


def _in_process(pid: int, function: Callable[[], Any]) -> None:
    """Call a function in a process with a given pid of this container."""
    _next_pid(pid)
    child = os.fork()
    if child:
        raise SystemExit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) & 0xFF)
    assert os.getpid() == pid
    function()


def _code(pid: int, *, wait: bool) -> int | None:
    """The exit code of a container; None while it runs.

    Raises:
        NotOffered: it could not be made.
    """
    with contextlib.suppress(ChildProcessError):
        found, status = os.waitpid(pid, 0 if wait else os.WNOHANG)
        if not found:
            return None
        if (code := os.waitstatus_to_exitcode(status)) == _REFUSED:
            raise NotOffered("Containers were to save.", "This process may not make namespaces.", "Run it as root.")
        return code
    return 0
