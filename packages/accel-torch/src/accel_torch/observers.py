"""Observers of a run; imported at their first use, so that runs without them start faster."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from accel_plugins.prepared import PreparedObjects
    from accel_plugins.strategy import Strategy
    from accel_torch.options import Options
    from accel_torch.replicas import ReplicaChecker
    from accel_torch.session import Session
    from accel_torch.straggler import StragglerReport

__all__ = ("RUN_OBSERVERS", "RunObserver", "guard_first_steps", "reporting", "watching")


class RunObserver:
    """Called for every Accelerator of a process; commands that run unchanged scripts use it.

    The methods of this base class do nothing.
    """

    def configures(self, options: Options) -> Options:
        """Called with the arguments of each new Accelerator, before it joins a run; returns the arguments to use."""
        return options

    def begins(self, accelerator: Any) -> None:
        """Called with each new Accelerator, before it prepares anything."""

    def loader_prepared(self, session: Session, loader: Any) -> None:
        """Called with each prepared loader, before it is read."""


RUN_OBSERVERS: Final[list[RunObserver]] = []
"""The observers of this process."""


def reporting(options: Options) -> StragglerReport | None:
    """The straggler report of this process, or None."""
    if not options.straggler_report:
        return None
    from accel_torch.straggler import StragglerReport

    return StragglerReport()


def watching(options: Options, prepared: PreparedObjects, strategy: Strategy) -> ReplicaChecker | None:
    """The periodic check of replicas, or None."""
    if not options.check_replicas_every:
        return None
    from accel_torch.replicas import ReplicaChecker

    return ReplicaChecker(options.check_replicas_every, prepared, strategy)


def guard_first_steps(session: Session) -> None:
    """Check the first steps for mistakes; by default also compare replicas once. A repeated call does nothing."""
    if not session.guards_first_steps:
        return
    from accel_torch.misuse import MisuseGuard

    session.guards_first_steps = False
    several = session.strategy.context.process.world_size > 1
    comparison = None
    if session.options.check_replicas_every is None and several and session.backend.capabilities.equal_replicas:
        from accel_torch.replicas import ReplicaComparison

        comparison = ReplicaComparison(session.strategy, session.prepared)
    guard = MisuseGuard(session.gradient, session.strategy, session.prepared, comparison)
    if several:
        guard.watch_steps()
    session.accumulation.watch_by(guard)
