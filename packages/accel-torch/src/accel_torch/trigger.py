"""A flag that any process may raise and all processes lower together, for decisions such as stopping early."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from accel_state.current import Process

__all__ = ("Trigger",)


class Trigger:
    """The flag of one Accelerator.

    Attributes:
        flag: on the device, 1 where this process has raised it; None before it was first used.
    """

    def __init__(self) -> None:
        self.flag: torch.Tensor | None = None

    def set(self, process: Process) -> None:
        """Raise the flag on this process."""
        self.flag = torch.tensor(1, device=process.device)

    def check(self, process: Process) -> bool:
        """Whether any process raised the flag since the last check; it is lowered everywhere. Called on all of them."""
        raised = torch.tensor(0, device=process.device) if self.flag is None else self.flag
        self.flag = torch.tensor(0, device=process.device)
        # Collectives are a dozen modules that a script without triggers may not need.
        from accel_ops import reduce

        return bool(reduce(raised, "sum").item() >= 1)
