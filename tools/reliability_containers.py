"""Saves in containers: runs with one host name that do not see each other's processes, and restarts with one pid.

Beside them, and beside a run that is killed again and again, another run loads what they save. Each save has one number
in all that it saves, so a load of parts of two saves shows.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import random
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
from accel_state.errors import CheckpointError, NotOffered
from accel_testing.fresh import fresh

__all__ = ("kills", "neighbours", "restarts")

_NAMESPACES: Final = 0x20000000 | 0x04000000 | 0x00020000
"""New PIDs, a new host name, new mounts."""

_PRIVATE_BELOW: Final = (1 << 18) | (1 << 14)
_LONGEST: Final = 200.0
_REFUSED: Final = 99
_SAVES: Final = 87
_KILLS: Final = 100
_LATEST: Final = 0.05
"""Seconds after its first save until a run is killed: some saves."""


def neighbours(run: runs.Run, every: int) -> sweeps.Tally:
    """Two containers with one host name save under one name at once: no save fails, and every load reads one save."""
    tally = sweeps.Tally("another PID namespace saves there, and a run loads")
    times = -(-_SAVES // every)
    done = [run.project.with_name(f"done_{number}") for number in (0, 1)]
    started = [
        _contained(partial(_in_process, pid, partial(_save_often, run, times, file, pid)), run.project)
        for file, pid in zip(done, (100, 200), strict=True)
    ]
    wrong = _read_beside(run, started)
    for file in done:
        saved = int(file.read_text()) if file.exists() else 0
        for number in range(times):
            tally.count(f"{file.name}, save {number}", None if number < saved else "it failed")
    for sentence in {*wrong, *_left_after_save(run)}:
        tally.count("under the name", sentence)
    return tally


def _save_often(run: runs.Run, times: int, done: Path, first: int) -> None:
    """Save numbers from the first one on, under one name."""
    if not run.exchange:
        tracing.refuse_exchange()
    session = run.session()
    session.load()
    for number in range(times):
        _fill(session, first + number)
        session.save()
        done.write_text(str(number + 1))


def _fill(session: runs.Session, number: int) -> None:
    """Give everything that is saved one number."""
    session.step.done = number
    for parameter in session.model.parameters():
        parameter.data.fill_(number)


def _mixed(session: runs.Session) -> str | None:
    """What is wrong with a load; None when it reads one save."""
    try:
        session.load()
    except CheckpointError as error:
        return f"a load failed: {error}"
    numbers = {value for parameter in session.model.parameters() for value in parameter.detach().flatten().tolist()}
    return None if numbers == {float(session.step.done)} else f"a load has numbers of several saves: {sorted(numbers)}"


def _read_beside(run: runs.Run, started: list[int]) -> set[str]:
    """What is wrong with loads while containers save."""
    wrong, until = set[str](), time.monotonic() + _LONGEST
    with fresh():
        session = run.session()
        session.load()
        before = session.step.done
        while started:
            sentence = _mixed(session)
            # What was there before them was trained.
            if sentence is not None and session.step.done != before:
                wrong.add(sentence)
            started = [pid for pid in started if _code(pid, wait=False) is None]
            if time.monotonic() > until:
                for pid in started:
                    os.kill(pid, signal.SIGKILL)
                    os.waitpid(pid, 0)
                return wrong | {"a container hung"}
        if session.step.done == before:
            wrong.add("no load read what the containers saved")
    return wrong


def kills(run: runs.Run, every: int) -> sweeps.Tally:
    """SIGKILL to a run that saves over one name, at random moments, while another one loads it all the time."""
    tally = sweeps.Tally("SIGKILL at a random moment, beside loads")
    chance, done = random.Random(0), run.project.with_name("done")
    with fresh():
        session = run.session()
        session.load()
        _fill(session, 0)
        session.save()
    reports, over = run.project.with_name("reports"), run.project.with_name("over")
    reader = _forked(partial(_read_until, run, over, reports))
    number = 0
    for kill in range(_KILLS // every):
        done.unlink(missing_ok=True)
        writer = _forked(partial(_save_often, run, 1 << 20, done, number + 1))
        while not done.exists() and _code(writer, wait=False) is None:
            time.sleep(0.001)
        time.sleep(chance.uniform(0, _LATEST))
        os.kill(writer, signal.SIGKILL)
        os.waitpid(writer, 0)
        with fresh():
            session = run.session()
            wrong = _mixed(session)
        if wrong is None and session.step.done <= number:
            wrong = f"after {number} it went back to {session.step.done}"
        number = session.step.done
        tally.count(f"kill {kill}", wrong)
    over.touch()
    os.waitpid(reader, 0)
    for sentence in {*reports.read_text().splitlines(), *_left_after_save(run)}:
        tally.count("beside them", sentence)
    return tally


def _read_until(run: runs.Run, over: Path, reports: Path) -> None:
    """Load until a file appears, and report each kind of wrong load."""
    session, wrong, loads = run.session(), set[str](), 0
    while not over.exists():
        loads += 1
        wrong.add(_mixed(session) or "")
    reports.write_text("\n".join(wrong - {""}) if loads else "there was no load")


def _forked(function: Callable[[], Any]) -> int:
    """The pid of a process that calls a function."""
    pid = os.fork()
    if pid:
        return pid
    try:
        function()
        os._exit(0)
    except BaseException:  # it must not go on in the code of its parent
        traceback.print_exc()
        os._exit(1)


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


def _left_after_save(run: runs.Run) -> list[str]:
    """What is damaged or left over after one more save: what was read when it was replaced stays until then."""
    with fresh():
        session = run.session()
        session.load()
        session.save()
    return [*verify(run.project / "checkpoints" / "latest", hashes=True).damage, *_left(run.project)]


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
