"""Observers of a run; imported at their first use, so that runs without them start faster."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from accel_plugins.prepared import PreparedObjects
    from accel_plugins.strategy import Strategy
    from accel_state.gradient import GradientState
    from accel_torch.assemble import ActiveBackend
    from accel_torch.misuse import MisuseGuard
    from accel_torch.options import Options
    from accel_torch.replicas import ReplicaChecker
    from accel_torch.straggler import StragglerReport

__all__ = ("RUN_OBSERVERS", "RunObserver", "guarding", "reporting", "watching")


class RunObserver:
    """Called for every Accelerator of a process; commands that run unchanged scripts use it.

    The methods of this base class do nothing.
    """

    def configures(self, options: Options) -> Options:
        """Called with the arguments of each new Accelerator, before it joins a run; returns the arguments to use."""
        return options

    def begins(self, accelerator: Any) -> None:
        """Called with each new Accelerator, before it prepares anything."""

    def loader_prepared(self, accelerator: Any, loader: Any) -> None:
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


def guarding(
    options: Options, gradient: GradientState, backend: ActiveBackend, prepared: PreparedObjects
) -> MisuseGuard:
    """The guard that checks the first steps for mistakes; by default it also compares replicas once."""
    from accel_torch.misuse import MisuseGuard

    alike = backend.manifest.capabilities.equal_replicas and backend.strategy.context.process.world_size > 1
    comparison = None
    if options.check_replicas_every is None and alike:
        from accel_torch.replicas import ReplicaComparison

        comparison = ReplicaComparison(backend.strategy, prepared)
    guard = MisuseGuard(gradient, backend, prepared, comparison)
    if backend.strategy.context.process.world_size > 1:
        guard.watch_steps()
    return guard
