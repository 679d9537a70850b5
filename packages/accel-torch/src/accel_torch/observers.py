"""What watches a run only when it was asked for; imported then, so that other runs do not pay for it."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from accel_plugins.strategy import Strategy
    from accel_torch.options import Options
    from accel_torch.registry import Registry
    from accel_torch.sentinel import Sentinel
    from accel_torch.straggler import StragglerReport

__all__ = ("reporting", "watching")


def reporting(options: Options) -> StragglerReport | None:
    """What times this process, or None."""
    if not options.straggler_report:
        return None
    from accel_torch.straggler import StragglerReport

    return StragglerReport()


def watching(options: Options, registry: Registry, strategy: Strategy) -> Sentinel | None:
    """What compares replicas, or None."""
    if options.check_replicas_every is None:
        return None
    from accel_torch.sentinel import Sentinel

    return Sentinel(options.check_replicas_every, registry, strategy)
