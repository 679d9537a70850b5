"""Processes forked from this one, which run a function that no other process could import: one of a notebook.

When one fails the others are ended, and its error is raised here with its traceback. Each dies with this process.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.connection import Connection, wait
from typing import Any, Final, NamedTuple

from accel_cli.launch.report import meaning
from accel_cli.launch.runner import PARENT_VARIABLE, follow_parent
from accel_state.errors import LaunchError, NotOffered
from accel_state.settings.environ import publish

__all__ = ("run_forked",)

_GRACE: Final = 10.0


class _Forked(NamedTuple):
    rank: int
    process: Any
    told: Connection


def run_forked(
    function: Callable[..., Any], arguments: Sequence[Any], environments: Sequence[Mapping[str, str]]
) -> None:
    """Call a function in one forked process for each environment, and wait until all have returned.

    Args:
        function: what each process calls.
        arguments: what it is given.
        environments: variables of each process, in the order of ranks.

    Raises:
        LaunchError: a process raised, was killed, or left with an exit code; the others were ended.
        NotOffered: this system does not fork.
    """
    if not hasattr(os, "fork"):
        raise NotOffered(
            "A function was to be run by several processes.",
            "This system cannot fork a process.",
            "Write the function into a script, and start it with: accel launch script.py",
        )
    sys.stdout.flush()
    sys.stderr.flush()
    started: list[_Forked] = []
    try:
        for rank, environment in enumerate(environments):
            started.append(_start(rank, function, arguments, {**environment, PARENT_VARIABLE: str(os.getpid())}))
        _watch(started)
    finally:
        _end(started)


def _start(
    rank: int, function: Callable[..., Any], arguments: Sequence[Any], environment: Mapping[str, str]
) -> _Forked:
    context = multiprocessing.get_context("fork")
    told, tells = context.Pipe(duplex=False)
    process = context.Process(
        target=_run, args=(function, tuple(arguments), dict(environment), tells), name=f"rank-{rank}"
    )
    process.start()
    tells.close()
    return _Forked(rank, process, told)


def _run(
    function: Callable[..., Any], arguments: tuple[Any, ...], environment: dict[str, str], tells: Connection
) -> None:
    publish(environment)
    follow_parent()
    _leave_one_thread()
    try:
        function(*arguments)
    except BaseException as error:
        if isinstance(error, SystemExit) and not error.code:
            return
        tells.send("".join(traceback.format_exception(type(error), error, error.__traceback__)))
        raise SystemExit(1) from None


def _leave_one_thread() -> None:
    """Keep torch from using threads that a fork did not bring along; a parallel region would wait for them for ever."""
    torch = sys.modules.get("torch")
    if torch is not None:
        torch.set_num_threads(1)


def _watch(started: Sequence[_Forked]) -> None:
    """Stay until all have returned or one has failed."""
    left = list(started)
    while left:
        wait([one.process.sentinel for one in left])
        ended = [one for one in left if not one.process.is_alive()]
        failed = [one for one in ended if one.process.exitcode != 0]
        if failed:
            # One that raised tells more than one that broke because the other had gone.
            _raise(min(failed, key=lambda one: one.process.exitcode > 0), len(started))
        left = [one for one in left if one not in ended]


def _raise(first: _Forked, processes: int) -> None:
    first.process.join()
    code = first.process.exitcode
    trace = _told(first)
    ending = f"was killed by {meaning(-code)}" if code < 0 else f"ended with exit code {code}"
    raise LaunchError(
        f"A function was run by {processes} processes.",
        f"Process {first.rank} {'raised:' if trace else ending + '.'}" + (f"\n\n{trace.rstrip()}\n" if trace else ""),
        "The other processes were ended. Correct the function, and launch it again.",
    )


def _told(one: _Forked) -> str:
    """The traceback that a process sent, or nothing."""
    try:
        return str(one.told.recv()) if one.told.poll() else ""
    except EOFError:
        return ""


def _end(started: Sequence[_Forked]) -> None:
    """Leave no process behind: ask those that are left to end, then make them."""
    for one in started:
        if one.process.is_alive():
            one.process.terminate()
    deadline = time.monotonic() + _GRACE
    for one in started:
        one.process.join(max(deadline - time.monotonic(), 0.0))
        if one.process.is_alive():
            one.process.kill()
            one.process.join()
        one.told.close()
        one.process.close()
