"""Runs a function that no other process can import, such as one of a notebook, in processes forked from this one.

If one process fails, the others are ended, and its error is raised here with its traceback. All end with this process.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.connection import wait
from typing import IO, Any, Final, NamedTuple

from accel_cli.launch.failure_record import folded
from accel_cli.launch.failures import meaning
from accel_cli.launch.run_script import PARENT_VARIABLE, follow_parent
from accel_state.errors import LaunchError, NotOffered
from accel_state.settings.environ import publish

__all__ = ("run_forked",)

_GRACE: Final = 10.0


class _Forked(NamedTuple):
    """One process; it writes an error to a file, because a full pipe would block it."""

    rank: int
    process: Any
    error: IO[str]


def run_forked(
    function: Callable[..., Any], arguments: Sequence[Any], environments: Sequence[Mapping[str, str]]
) -> None:
    """Call a function in one forked process for each environment, and wait until all calls have returned.

    Args:
        function: what each process calls.
        arguments: arguments of the call.
        environments: variables of each process, in the order of ranks.

    Raises:
        LaunchError: a process raised an error, was killed, or ended with an exit code; the others were ended.
        NotOffered: this system does not support fork.
    """
    if not hasattr(os, "fork"):
        raise NotOffered(
            "Cannot run the function in several processes.",
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
    error = tempfile.TemporaryFile("w+", encoding="utf-8", errors="backslashreplace")  # noqa: SIM115 - kept for the process's life
    process = multiprocessing.get_context("fork").Process(
        target=_run, args=(function, tuple(arguments), dict(environment), error), name=f"rank-{rank}"
    )
    try:
        process.start()
    except BaseException:
        error.close()
        raise
    return _Forked(rank, process, error)


def _run(
    function: Callable[..., Any], arguments: tuple[Any, ...], environment: dict[str, str], record: IO[str]
) -> None:
    publish(environment)
    follow_parent()
    _leave_one_thread()
    try:
        function(*arguments)
    except BaseException as error:
        if isinstance(error, SystemExit) and not error.code:
            return
        record.write(folded(error))
        record.flush()
        raise SystemExit(1) from None


def _leave_one_thread() -> None:
    """Limit torch to one thread: a fork does not copy threads, and a parallel region would wait for them forever."""
    torch = sys.modules.get("torch")
    if torch is not None:
        torch.set_num_threads(1)


def _watch(started: Sequence[_Forked]) -> None:
    """Wait until all have returned or one has failed."""
    left = list(started)
    while left:
        wait([one.process.sentinel for one in left])
        ended = [one for one in left if not one.process.is_alive()]
        failed = [one for one in ended if one.process.exitcode != 0]
        if failed:
            # An error with a traceback is more useful than that of a process which lost its connection.
            _raise(min(failed, key=lambda one: one.process.exitcode > 0), len(started))
        left = [one for one in left if one not in ended]


def _raise(first: _Forked, processes: int) -> None:
    first.process.join()
    code = first.process.exitcode
    first.error.seek(0)
    trace = first.error.read().rstrip()
    ending = f"was killed by {meaning(-code)}." if code < 0 else f"ended with exit code {code}."
    raise LaunchError(
        f"The function failed in one of {processes} processes.",
        f"Process {first.rank} {'raised:' if trace and code > 0 else ending}" + (f"\n\n{trace}\n" if trace else ""),
        "The other processes were ended. Correct the function, and launch it again.",
    )


def _end(started: Sequence[_Forked]) -> None:
    """End all remaining processes: first with SIGTERM, then with SIGKILL."""
    for one in started:
        if one.process.is_alive():
            one.process.terminate()
    deadline = time.monotonic() + _GRACE
    for one in started:
        one.process.join(max(deadline - time.monotonic(), 0.0))
        if one.process.is_alive():
            one.process.kill()
            one.process.join()
        one.error.close()
        one.process.close()
