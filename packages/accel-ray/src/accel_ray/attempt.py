"""One attempt of a run on a cluster: starts the processes, and waits for their end."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple

from accel_cli.launch.devices import visible
from accel_cli.launch.failures import Failure, first_failure, report, shell_code
from accel_cli.launch.interface import LaunchPlan
from accel_cli.launch.output import PrefixedLines
from accel_cli.launch.signals import ENDING, Inbox
from accel_ray.cluster import Cluster, Layout, Placed
from accel_ray.process import ProcessUpdate
from accel_state.errors import LaunchError
from accel_state.exit_codes import RESUME
from accel_state.network import SECRET_VARIABLE, loopback_variables, new_secret
from accel_state.untrusted import printable

__all__ = ("Attempt", "AttemptResult", "AttemptStart")

_NEWS_TIMEOUT_S: Final = 5.0
"""Seconds for which an actor waits for news before it answers."""

_LOST_AFTER_S: Final = 15.0
"""Seconds after which an actor that does not answer counts as lost."""

_KILL_TIMEOUT_S: Final = 10.0

_CODES_OF_SIGTERM: Final = (RESUME, shell_code(-signal.SIGTERM))
"""Exit codes of a process that handles SIGTERM: it has saved a checkpoint, or says what ended it."""


class AttemptStart(NamedTuple):
    """The arguments of an attempt.

    Args:
        plan: the plan of the run.
        layout: how the run is placed on nodes.
        patience: seconds to wait until the cluster has enough free resources.
        number: the number of earlier attempts.
        restarts: the number of attempts allowed after this one.
    """

    plan: LaunchPlan
    layout: Layout
    patience: float
    number: int
    restarts: int


class AttemptResult(NamedTuple):
    """How an attempt ended.

    Args:
        code: exit code of the run.
        lost: nodes whose actors were lost.
        signalled: whether a signal ended it.
    """

    code: int
    lost: tuple[str, ...] = ()
    signalled: bool = False


class Attempt:
    """Places and starts the processes of a run, prints their output, and ends all if one fails."""

    def __init__(self, start: AttemptStart, cluster: Cluster, inbox: Inbox) -> None:
        self._start, self._plan = start, start.plan
        self._cluster, self._inbox = cluster, inbox
        self._processes: list[_Followed] = []
        self._signalled: int | None = None
        self._failed: _Followed | None = None
        self._deadline: float | None = None

    def run(self) -> AttemptResult:
        """Run the processes until all have ended.

        Raises:
            LaunchError: the cluster has too few free resources, a node cannot start a process, or the head is lost.
        """
        placement = self._cluster.place(self._start.layout, self._start.patience, self._interrupted)
        if placement is None:
            return self._outcome()
        group, placed = placement
        kill = True
        try:
            # A signal may have arrived while the actors started.
            if not self._interrupted():
                self._start_all(placed)
            while any(process.alive for process in self._processes):
                self._follow()
            kill = any(process.progress is None or process.progress.code for process in self._processes)
        finally:
            self._close(placed, kill)
            self._cluster.free(group, [one.actor for one in placed])
        return self._outcome()

    def _interrupted(self) -> bool:
        """Handle the received signals; whether one ends the run."""
        self._cluster.check_head()
        for number in self._inbox.wait(0):
            self._forward(number)
        return self._signalled is not None

    def _start_all(self, placed: Sequence[Placed]) -> None:
        started = []
        for rank, (one, place) in enumerate(zip(placed, _environments(placed, self._start), strict=True)):
            prefix = f"[rank {rank}] " if self._plan.prefix_output else ""
            self._processes.append(_Followed(rank, one, prefix))
            variables = {name: text for name, text in self._plan.inherited.items() if name not in self._plan.removed}
            environment = {**variables, **self._plan.environment, **place}
            started.append(one.actor.start.remote(self._plan.argv, environment, os.getcwd()))
        for process, reference in zip(self._processes, started, strict=True):
            try:
                self._cluster.value(reference)
            except Exception as error:
                if self._cluster.lost(error):
                    process.lost = True
                    continue
                raise LaunchError(
                    f"Cannot start process {process.rank} of {len(placed)} on {process.placed.place.address}.",
                    f"The node reports: {str(error).strip().splitlines()[-1]}",
                    "Use a folder on a file system that all nodes share.",
                ) from None

    def _follow(self) -> None:
        """Wait for news from the actors, and handle it."""
        for process in self._processes:
            if process.alive and process.answer is None:
                process.ask()
        answers = {process.answer: process for process in self._processes if process.answer is not None}
        # Read the news before the signals: a process may have failed because of a signal.
        for reference in self._cluster.wait(list(answers), 1.0, self._looked):
            self._read(answers[reference], reference)
        if self._signalled is None and self._failed is None:
            self._notice_failure()
        self._look_at_time()

    def _looked(self) -> bool:
        before = self._signalled, self._deadline
        self._interrupted()
        late = self._deadline is not None and time.monotonic() >= self._deadline
        return late or before != (self._signalled, self._deadline)

    def _read(self, process: _Followed, reference: Any) -> None:
        process.answer = None
        try:
            process.take(self._cluster.value(reference))
        except Exception as error:
            if not self._cluster.lost(error):
                raise
            process.missed(self._cluster.maybe_lost(error))

    def _notice_failure(self) -> None:
        """If a process has failed or its node is lost, ask the others to end."""
        failed = [process for process in self._processes if process.lost or process.failure is not None]
        if not failed:
            return
        self._failed = failed[0]
        self._deadline = time.monotonic() + self._plan.grace_period
        for process in self._processes:
            if process.alive and process not in failed:
                process.told_to_end = True
                process.signal(signal.SIGTERM)

    def _look_at_time(self) -> None:
        if self._deadline is not None and time.monotonic() >= self._deadline:
            self._deadline = None
            self._signal(signal.SIGKILL)

    def _forward(self, number: int) -> None:
        if number in ENDING:
            if self._signalled is not None:
                # The second signal ends the run at once.
                self._deadline = time.monotonic()
                return
            self._signalled = number
            self._deadline = time.monotonic() + self._plan.grace_period
        self._signal(signal.SIGTERM if number in ENDING and number != signal.SIGINT else number)

    def _signal(self, number: int) -> None:
        for process in self._processes:
            if process.alive:
                process.signal(number)

    def _close(self, placed: Sequence[Placed], kill: bool) -> None:
        """Make the actors end the remaining processes, and delete their files."""
        lost = {process.placed.actor for process in self._processes if process.lost}
        closing = [one.actor.close.remote(kill) for one in placed if one.actor not in lost]
        deadline = time.monotonic() + _KILL_TIMEOUT_S
        while closing and time.monotonic() < deadline:
            done = self._cluster.wait(closing, deadline - time.monotonic(), lambda: False)
            closing = [reference for reference in closing if reference not in done]

    def _outcome(self) -> AttemptResult:
        lost = tuple(dict.fromkeys(process.placed.place.node for process in self._processes if process.lost))
        failures = [process.failure for process in self._processes if process.failure is not None]
        if self._signalled is not None:
            return self._after_signal(failures, self._signalled)
        if lost:
            names = ", ".join(process.placed.place.address for process in self._processes if process.lost)
            if not self._plan.quiet:
                ranks = ", ".join(str(process.rank) for process in self._processes if process.lost)
                _tell(f"The node of process {ranks} ({names}) was lost.")
            return AttemptResult(1, lost)
        if not failures:
            return AttemptResult(0)
        first = first_failure(failures)
        report(failures, len(self._processes), first, self._plan.quiet)
        return AttemptResult(first.exit_code)

    def _after_signal(self, failures: Sequence[Failure], number: int) -> AttemptResult:
        """The exit code of a process, unless the signal killed it."""
        own = [failure.exit_code for failure in failures if failure.code is not None and failure.code > 0]
        if not self._plan.quiet:
            _tell(f"ended by {signal.Signals(number).name}.")
        code = RESUME if RESUME in own else own[0] if own else shell_code(-number)
        ended_well = self._processes and not failures
        return AttemptResult(0 if ended_well else code, signalled=True)


class _Followed:
    """One process of an attempt, on the launcher's side."""

    def __init__(self, rank: int, placed: Placed, prefix: str) -> None:
        self.rank, self.placed = rank, placed
        self.answer: Any = None
        self.progress: ProcessUpdate | None = None
        self.lost = self.told_to_end = False
        self._seen = 0
        self._silent_since: float | None = None
        self._lines = {1: PrefixedLines(prefix.encode()), 2: PrefixedLines(prefix.encode())} if prefix else {}

    @property
    def alive(self) -> bool:
        return not self.lost and (self.progress is None or self.progress.code is None)

    @property
    def failure(self) -> Failure | None:
        """How it failed, or None."""
        progress = self.progress
        if progress is None or progress.code == 0 or (progress.code is None and progress.record is None):
            return None
        # One that had failed by itself may have been sent the signal before its end was seen.
        by_signal = progress.code is None or progress.code < 0 or progress.code in _CODES_OF_SIGTERM
        return Failure(self.rank, progress.code, progress.record, stopped=self.told_to_end and by_signal)

    def ask(self) -> None:
        self.answer = self.placed.actor.follow.remote(self._seen, _NEWS_TIMEOUT_S)

    def take(self, progress: ProcessUpdate) -> None:
        """Print new output."""
        self._silent_since = None
        self.progress, self._seen = progress, progress.seen
        for stream, chunk in progress.output:
            self._write(stream, self._lines[stream].take(chunk) if self._lines else chunk)
        if progress.code is not None:
            for stream, lines in self._lines.items():
                self._write(stream, lines.rest())

    def _write(self, stream: int, text: bytes) -> None:
        target = (sys.stdout if stream == 1 else sys.stderr).buffer
        if text:
            target.write(text)
            target.flush()

    def missed(self, may_return: bool) -> None:
        """Handle an actor that did not answer, but may answer later."""
        now = time.monotonic()
        self._silent_since = self._silent_since or now
        self.lost = not may_return or now - self._silent_since > _LOST_AFTER_S

    def signal(self, number: int) -> None:
        self.placed.actor.signal.remote(number)


def _environments(placed: Sequence[Placed], start: AttemptStart) -> list[Mapping[str, str]]:
    """The environment variables with the rank of each process."""
    nodes = list(dict.fromkeys(one.place.node for one in placed))
    by_node = {node: [one.place for one in placed if one.place.node == node] for node in nodes}
    head = placed[0].place
    same_for_all = {
        "WORLD_SIZE": str(len(placed)),
        "MASTER_ADDR": head.address,
        "MASTER_PORT": str(start.plan.port or head.port),
        "TORCHELASTIC_RESTART_COUNT": str(start.number),
        "TORCHELASTIC_MAX_RESTARTS": str(start.number + start.restarts),
        SECRET_VARIABLE: new_secret(),
    }
    if all(one.place.address.startswith("127.") for one in placed):
        same_for_all.update(loopback_variables(start.plan.inherited))
    environments: list[Mapping[str, str]] = []
    for rank, one in enumerate(placed):
        neighbours = by_node[one.place.node]
        devices = list(dict.fromkeys(number for place in neighbours for number in place.devices))
        local = sum(other.place.node == one.place.node for other in placed[:rank])
        environments.append(
            {
                **same_for_all,
                **(visible(",".join(devices)) if devices else {}),
                "RANK": str(rank),
                "LOCAL_RANK": str(local),
                "LOCAL_WORLD_SIZE": str(len(neighbours)),
                "GROUP_RANK": str(nodes.index(one.place.node)),
            }
        )
    return environments


def _tell(text: str) -> None:
    print(printable(f"accel launch: {text}"), file=sys.stderr, flush=True)
