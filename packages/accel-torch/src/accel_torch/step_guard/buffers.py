"""Copies of the buffers of models, which forward passes change, such as the statistics of BatchNorm."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from accel_plugins.layers import strategy_model

if TYPE_CHECKING:
    from torch import Tensor
    from torch.nn import Module

    from accel_torch.session import Session

__all__ = ("BufferCopies",)


class BufferCopies:
    """The buffers of models as they were at one time, to put them back after a forward pass that must not count.

    Args:
        session: the session that prepared the models.
        models: prepared models.
    """

    def __init__(self, session: Session, models: Sequence[Module] = ()) -> None:
        # By module and name, because forward may assign another tensor.
        self._copies: list[tuple[weakref.ref[Module], str, Tensor]] = []
        self.follow(session, models)

    def follow(self, session: Session, models: Sequence[Module]) -> None:
        """Copy the buffers of further models, too."""
        for model in models:
            for module in session.strategy.unwrap(strategy_model(model)).modules():
                for name, buffer in module.named_buffers(recurse=False):
                    self._copies.append((weakref.ref(module), name, buffer.detach().clone()))

    @torch.no_grad()
    def keep(self) -> None:
        """Copy the buffers as they are now."""
        buffers, copies = self._pairs()
        if buffers:
            torch._foreach_copy_(copies, buffers)  # pyright: ignore[reportPrivateImportUsage]

    @torch.no_grad()
    def put_back(self) -> None:
        """Give the buffers the values that were copied last."""
        buffers, copies = self._pairs()
        if buffers:
            torch._foreach_copy_(buffers, copies)  # pyright: ignore[reportPrivateImportUsage]

    def _pairs(self) -> tuple[list[Tensor], list[Tensor]]:
        """The buffers of the modules that are still there, and their copies."""
        pairs = [(getattr(one, name), copy) for module, name, copy in self._copies if (one := module()) is not None]
        return [buffer for buffer, _ in pairs], [copy for _, copy in pairs]
