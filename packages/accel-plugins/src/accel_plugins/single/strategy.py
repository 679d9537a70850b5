"""The strategy of a single process: the defaults of the interface."""

from __future__ import annotations

from accel_plugins.bundle import Bundle
from accel_plugins.strategy import Strategy
from accel_state.errors import Conflict

__all__ = ("SingleStrategy",)


class SingleStrategy(Strategy):
    """Trains in one process, without wrappers or communication."""

    def check(self, bundle: Bundle) -> None:
        processes = self.context.process.world_size
        if processes > 1:
            raise Conflict(
                "Cannot use the backend 'single'.",
                f"This run has {processes} processes, and each would train a separate model.",
                "Use the backend 'ddp', or launch one process.",
            )
