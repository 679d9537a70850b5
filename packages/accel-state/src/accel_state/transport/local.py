"""The transport of a process that runs alone: every collective is a copy."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch

from accel_state.transport.base import DONE, Reduction, Transport, Work

__all__ = ("LocalTransport",)


class LocalTransport(Transport):
    """Collectives among one process."""

    rank = 0
    world_size = 1

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.timeout = timedelta(0)

    def all_gather(self, output: torch.Tensor, tensor: torch.Tensor, *, header: bool = False) -> Work:
        output.view(-1).copy_(tensor.reshape(-1))
        return DONE

    def all_reduce(self, tensor: torch.Tensor, operation: Reduction = "sum", into: torch.Tensor | None = None) -> Work:
        if into is not None:
            into.copy_(tensor)
        return DONE

    def broadcast(self, tensor: torch.Tensor, source: int) -> Work:
        return DONE

    def scatter(self, output: torch.Tensor, inputs: Sequence[torch.Tensor] | None, source: int) -> Work:
        assert inputs is not None
        output.copy_(inputs[0])
        return DONE

    def gather(self, outputs: Sequence[torch.Tensor] | None, tensor: torch.Tensor, destination: int) -> Work:
        assert outputs is not None
        outputs[0].copy_(tensor)
        return DONE

    def barrier(self) -> None:
        """Nobody else has to arrive."""

    def store(self) -> Any | None:
        return None

    def control(self) -> None:
        return None

    def close(self) -> None:
        """Nothing was opened."""
