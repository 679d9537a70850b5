"""The transport of a process that was forked from one of several: it has no way to the others."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any, NoReturn

import torch

from accel_state.errors import NotReady
from accel_state.transport.base import Reduction, Transport, Work

__all__ = ("ForkedTransport",)


class ForkedTransport(Transport):
    """Answers who the parent is among the processes, and refuses every collective.

    The parent goes on using its connections; a second process that wrote to them would destroy its data.

    Args:
        rank: index of the parent.
        world_size: number of processes.
        device: where the parent works.
    """

    def __init__(self, rank: int, world_size: int, device: torch.device) -> None:
        self.rank = rank
        self.world_size = world_size
        self.device = device
        self.timeout = timedelta(0)

    def _refuse(self) -> NoReturn:
        raise NotReady(
            f"A collective was called in a process that was forked from process {self.rank} of {self.world_size}.",
            "Its connections belong to the parent.",
            "Call collectives in the processes that were launched, not in those that they fork (such as the workers "
            "of a DataLoader).",
        )

    def all_gather(self, output: torch.Tensor, tensor: torch.Tensor, *, header: bool = False) -> Work:
        self._refuse()

    def all_reduce(self, tensor: torch.Tensor, operation: Reduction = "sum", into: torch.Tensor | None = None) -> Work:
        self._refuse()

    def broadcast(self, tensor: torch.Tensor, source: int) -> Work:
        self._refuse()

    def scatter(self, output: torch.Tensor, inputs: Sequence[torch.Tensor] | None, source: int) -> Work:
        self._refuse()

    def gather(self, outputs: Sequence[torch.Tensor] | None, tensor: torch.Tensor, destination: int) -> Work:
        self._refuse()

    def barrier(self) -> None:
        self._refuse()

    def store(self) -> Any | None:
        self._refuse()

    def close(self) -> None:
        """The connections are the parent's to close."""
