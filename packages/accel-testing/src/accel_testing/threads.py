"""Ranks as threads of one process: many ranks in a test, with real collectives between them.

    def rank() -> int:
        return PartialState(cpu=True).process_index

    assert run_as_threads(64, rank) == list(range(64))

64 ranks start and end within a second; 64 processes would take minutes. Each thread has its own state, and a default
process group (torch's multi-threaded one) that connects it to the others. All ranks share everything else of the
process: environment, modules, signals, random generators, the main thread. Point-to-point messages do not exist, so
pipelines and DistributedDataParallel do not work. Threads that a rank starts have no rank. Use processes
(`accel_testing.processes`) if any of this matters.
"""

from __future__ import annotations

import os
import sys
import threading
import time
import traceback
from collections.abc import Callable
from typing import Any, Final, TypeVar

import torch
import torch.distributed as dist
from torch.testing._internal.distributed import multi_threaded_pg

from accel_state import current
from accel_state.errors import NotReady, SettingError
from accel_state.protocol.state import protocol_state
from accel_state.settings.environ import publish
from accel_testing.fresh import LAUNCH_VARIABLES
from accel_testing.processes import ProcessesFailed, RankOutcome

__all__ = ("run_as_threads",)

T = TypeVar("T")

_WAKE_TIMEOUT_S: Final = 5.0
"""Seconds within which ranks that wait in a collective end after another rank has failed or at the timeout."""

_one_world = threading.Lock()


def run_as_threads(count: int, function: Callable[..., T], *args: Any, timeout: float = 250.0) -> list[T]:
    """Call a function on `count` ranks, each a thread of this process, and return the values of all ranks.

    Args:
        count: number of ranks.
        function: the function that each rank calls; it begins without a state.
        args: its arguments; all ranks get the same objects.
        timeout: timeout in seconds.

    Raises:
        ProcessesFailed: a rank raised, or was still busy at the timeout; the message has the traceback of each.
        SettingError: the number of ranks is below 1.
        NotReady: this process already runs ranks as threads.

    Example:
        >>> from accel_state import PartialState
        >>> run_as_threads(3, lambda: PartialState(cpu=True).process_index)
        [0, 1, 2]
    """
    if count < 1:
        raise SettingError(f"Cannot run {count} ranks.", "There must be at least one rank.", "Pass 1 or more.")
    if not _one_world.acquire(blocking=False):
        raise NotReady(
            f"Cannot run {count} ranks as threads.",
            "This process already runs ranks as threads.",
            "Wait until they have ended, or call this in another process.",
        )
    try:
        return _World(count, function, args).run(timeout)
    finally:
        _one_world.release()


class _World:
    """The ranks of one call.

    Args:
        count: number of ranks.
        function: the function that each rank calls.
        args: its arguments.
    """

    def __init__(self, count: int, function: Callable[..., Any], args: tuple[Any, ...]) -> None:
        self._function, self._args = function, args
        self._outcomes: list[RankOutcome | None] = [None] * count
        self._store = dist.HashStore()  # type: ignore[attr-defined]
        self._ends = threading.Event()
        self._threads = [
            threading.Thread(target=self._rank, args=(rank,), name=f"rank {rank}", daemon=True) for rank in range(count)
        ]

    def run(self, timeout: float) -> list[Any]:
        deadline = time.monotonic() + timeout
        threads, hook = torch.get_num_threads(), sys.excepthook
        launched = {name: os.environ[name] for name in LAUNCH_VARIABLES if name in os.environ}
        publish({}, remove=launched)
        c10d: Any = torch._C._distributed_c10d
        c10d._set_thread_isolation_mode(True)
        multi_threaded_pg._install_threaded_pg()  # type: ignore[no-untyped-call]
        torch.set_num_threads(1)
        try:
            with current.slot_per_thread():
                for thread in self._threads:
                    thread.start()
                outcomes = self._wait(deadline)
        finally:
            multi_threaded_pg.ProcessLocalGroup.reset()  # type: ignore[no-untyped-call]
            multi_threaded_pg._uninstall_threaded_pg()  # type: ignore[no-untyped-call]
            c10d._set_thread_isolation_mode(False)
            torch.set_num_threads(threads)
            publish(launched)
            # Each rank has wrapped it.
            sys.excepthook = hook
        if not all(outcome.ok for outcome in outcomes):
            raise ProcessesFailed([outcome for outcome in outcomes if not outcome.ok])
        return [outcome.value for outcome in outcomes]

    def _wait(self, deadline: float) -> list[RankOutcome]:
        """The outcome of each rank, after all have ended or at the timeout."""
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        frames = sys._current_frames()
        hung = {
            rank: RankOutcome(rank, error="".join(traceback.format_stack(frames.get(thread.ident or 0))), hung=True)
            for rank, thread in enumerate(self._threads)
            if thread.is_alive()
        }
        if hung:
            _wake()
            until = time.monotonic() + _WAKE_TIMEOUT_S
            for thread in self._threads:
                thread.join(max(0.0, until - time.monotonic()))
        ended = enumerate(self._outcomes)
        return [hung.get(rank) or outcome or RankOutcome(rank, hung=True) for rank, outcome in ended]

    def _rank(self, rank: int) -> None:
        """The body of the thread of one rank."""
        try:
            dist.init_process_group("threaded", rank=rank, world_size=len(self._threads), store=self._store)
            try:
                value = self._function(*self._args)
            finally:
                _leave()
            self._outcomes[rank] = RankOutcome(rank, value)
        except BaseException as error:
            woken = isinstance(error, SystemExit) and multi_threaded_pg.ProcessLocalGroup._terminate.is_set()
            reason = "It waited for a rank that had failed.\n" if woken else traceback.format_exc()
            self._outcomes[rank] = RankOutcome(rank, error=reason)
            _wake()


def _wake() -> None:
    """End all ranks that wait in a collective."""
    multi_threaded_pg.ProcessLocalGroup.exception_handle(None)  # type: ignore[no-untyped-call]


def _leave() -> None:
    """Close what the rank of this thread has opened."""
    process = current.process_or_none()
    if process is not None:
        protocol_state(process.transport).monitor.stop()
    current.clear()
    if dist.is_initialized():
        dist.destroy_process_group()
