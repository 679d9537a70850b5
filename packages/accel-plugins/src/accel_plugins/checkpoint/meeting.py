"""Processes that wait for each other while a checkpoint is saved or loaded, with a deadline that names those missing.

They meet through the key-value store of the run, not through a collective: a process that failed says so and goes on,
and one that died is noticed by the others when their patience ends.
"""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Final

from accel_state import current
from accel_state.errors import CheckpointError

if TYPE_CHECKING:
    from accel_state.current import Process

__all__ = ("Meeting",)

_FIRST_PAUSE: Final = 0.001
_LONGEST_PAUSE: Final = 0.05
_FAREWELL: Final = 10.0
_held: Counter[str] = Counter()
_connections: dict[int, Any] = {}


class Meeting:
    """A series of exchanges between all processes of a run.

    Args:
        process: who this process is.
        topic: what the meeting is about; all processes give the same one.
        asked: what messages say was wanted.
        deadline: seconds to wait for the others at each exchange.
    """

    def __init__(self, process: Process, topic: str, asked: str, deadline: float) -> None:
        if not _held:
            current.on_clear(_forget)
        _held[topic] += 1
        self._process = process
        self._asked = asked
        self._deadline = deadline
        self._prefix = f"accel/meeting/{topic}/{_held[topic]}"

    @property
    def is_first(self) -> bool:
        """Whether this is the first of the processes, which speaks for all."""
        return self._process.rank == 0

    def exchange(self, phase: str, value: str = "") -> list[str]:
        """Give a value and return everyone's, by rank.

        Raises:
            CheckpointError: a process failed before, or did not come before the deadline.
        """
        if self._process.world_size == 1:
            return [value]
        answers = self._everyones(phase, "+" + value)
        self._refuse_failures(phase, dict(enumerate(answers)))
        return [answer[1:] for answer in answers]

    def leave(self) -> None:
        """Go, all done: the process that serves the store stays a while for those who have not heard everything."""
        if self._process.world_size == 1:
            return
        self._deadline = min(self._deadline, _FAREWELL)
        try:
            if self._process.rank == 0:
                self._everyones("leave", "+")
            else:
                self._tell("leave", "+")
        except RuntimeError:
            # Somebody is gone already; what was agreed stands.
            return

    def look_for_failures(self, phase: str) -> None:
        """Raise what `exchange` would if another process has failed in this phase already; does not wait.

        Raises:
            CheckpointError: one has failed.
        """
        others = [rank for rank in range(self._process.world_size) if rank != self._process.rank]
        try:
            told = [rank for rank in others if self._store().check([self._key(phase, rank)])]
            answers = {rank: self._store().get(self._key(phase, rank)).decode() for rank in told}
        except RuntimeError:
            # The store went with the process that served it; nothing can be learnt any more.
            return
        self._refuse_failures(phase, answers)

    def _refuse_failures(self, phase: str, answers: Mapping[int, str]) -> None:
        failed = {rank: answer[1:] for rank, answer in answers.items() if answer.startswith("-")}
        if failed:
            raise CheckpointError(
                f"{self._asked} ({phase})",
                " ".join(f"Process {rank} failed: {reason}" for rank, reason in failed.items()),
                "Older checkpoints are untouched; see the error of that process.",
            )

    def fail(self, phase: str, reason: str) -> None:
        """Tell the others, who wait in `exchange` of this phase, that this process failed; returns at once."""
        if self._process.world_size > 1:
            self._tell_quietly(phase, "-" + reason)

    def _tell_quietly(self, phase: str, text: str) -> None:
        try:
            self._tell(phase, text)
        except RuntimeError:
            # The store went with the process that served it; nobody can be told any more.
            return

    def _store(self) -> Any:
        return _connection(self._process, self._deadline)

    def _key(self, phase: str, rank: int) -> str:
        return f"{self._prefix}/{phase}/{rank}"

    def _tell(self, phase: str, text: str) -> None:
        self._store().set(self._key(phase, self._process.rank), text)

    def _everyones(self, phase: str, mine: str) -> list[str]:
        ranks = range(self._process.world_size)
        missing = list(ranks)
        pause, until = _FIRST_PAUSE, time.monotonic() + self._deadline
        try:
            store = self._store()
            self._tell(phase, mine)
            while missing := [rank for rank in missing if not store.check([self._key(phase, rank)])]:
                if time.monotonic() > until:
                    self._refuse_absence(phase, missing)
                time.sleep(pause)
                pause = min(2 * pause, _LONGEST_PAUSE)
            return [store.get(self._key(phase, rank)).decode() for rank in ranks]
        except RuntimeError as error:
            if isinstance(error, CheckpointError):
                raise
            raise CheckpointError(
                f"{self._asked} ({phase})",
                f"The store of the run does not answer, so the process that serves it is gone: {error}",
                "Older checkpoints are untouched; restart the run from the newest one.",
            ) from error

    def _refuse_absence(self, phase: str, missing: Sequence[int]) -> None:
        raise CheckpointError(
            f"{self._asked} ({phase})",
            f"Process {', '.join(map(str, missing))} did not come within {self._deadline:g} s.",
            "Look at what it does; call this on every process, or give ProjectConfiguration(deadline=...) more time.",
        )


def _forget() -> None:
    _held.clear()
    _connections.clear()


def _connection(process: Process, patience: float) -> Any:
    """A connection of our own to the store: on training's, a wait of another thread would keep us out.

    Raises:
        RuntimeError: the store does not answer.
    """
    shared: Any = process.transport.store()
    if os.getpid() not in _connections:
        before = shared.timeout
        # Who dials a store that is gone tries until the time-out of the one that is copied.
        shared.set_timeout(timedelta(seconds=max(min(patience, before.total_seconds()), 1.0)))
        try:
            _connections[os.getpid()] = shared.clone()
        finally:
            shared.set_timeout(before)
    return _connections[os.getpid()]
