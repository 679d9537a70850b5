"""Optimizers that compute with whole matrices, and the backends that give them only flat pieces."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch.optim import Muon

from accel_plugins.wrapped.optimizer import inner_optimizer
from accel_state.errors import NotOffered

__all__ = ("refuse_matrix_optimizers",)


def refuse_matrix_optimizers(optimizers: Iterable[Any], backend: str) -> None:
    """Raise for an optimizer that needs whole matrices, in a backend that joins parameters to flat tensors.

    Args:
        optimizers: the optimizers of a `prepare` call.
        backend: the backend, as users know it.

    Raises:
        NotOffered: one of them is Muon.
    """
    for optimizer in optimizers:
        if isinstance(inner := inner_optimizer(optimizer), Muon):
            raise NotOffered(
                f"Cannot use {type(inner).__name__} with {backend}.",
                "It orthogonalises whole matrices, and this backend gives the optimizer flat pieces of joined "
                "parameters.",
                "Use the backend 'ddp' or 'fsdp2', or AdamW.",
            )
