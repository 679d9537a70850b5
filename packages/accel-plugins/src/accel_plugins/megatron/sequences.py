"""Positions, masks and shifted labels of sequences; a mask is true where nothing may be seen, as in Megatron-LM."""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

__all__ = ("IGNORED", "causal_mask", "hidden_between", "hidden_later", "positions", "shifted_left", "shifted_right")

IGNORED: Final = -100
"""The label that does not count, as in torch and transformers."""


def shifted_left(labels: Tensor) -> Tensor:
    """By token, the label of the one after it; the last has none. (batch, length)"""
    return torch.cat([labels[:, 1:], labels.new_full((len(labels), 1), IGNORED)], dim=1)


def shifted_right(labels: Tensor, start: int) -> Tensor:
    """What a decoder is given to predict labels: a start token, then each label before. (batch, length)"""
    given = labels.masked_fill(labels == IGNORED, start)
    return torch.cat([given.new_full((len(given), 1), start), given[:, :-1]], dim=1)


def _document(ends: Tensor) -> Tensor:
    """By token, the number of the document it is in; an end belongs to the one that it ends."""
    return torch.cumsum(ends.long(), dim=1) - ends.long()


def positions(tokens: Tensor, ends: Tensor | None = None) -> Tensor:
    """Position of each token, from the begin of the sequence or, with `ends`, from that of its document."""
    count = torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens)
    if ends is None:
        return count.contiguous()
    begins = torch.zeros_like(ends)
    begins[:, 1:] = ends[:, :-1]
    return count - torch.cummax(torch.where(begins, count, 0), dim=1).values


def causal_mask(seen: Tensor, ends: Tensor | None = None) -> Tensor:
    """Which token does not see which in a decoder: later ones, padding and, with `ends`, those of other documents.

    A token always sees itself, so that no row is empty.

    Args:
        seen: 1 for tokens, 0 for padding. (batch, length)
        ends: whether a token ends a document. (batch, length)

    Returns:
        (batch, 1, length, length)
    """
    length = seen.shape[1]
    hidden = hidden_later(length, seen.device) | (seen == 0)[:, None, :]
    if ends is not None:
        document = _document(ends)
        hidden = hidden | (document[:, :, None] != document[:, None, :])
    itself = torch.eye(length, dtype=torch.bool, device=seen.device)
    return (hidden & ~itself)[:, None]


def hidden_later(length: int, device: torch.device) -> Tensor:
    """Later tokens, for each token. (1, length, length)"""
    return torch.ones((1, length, length), dtype=torch.bool, device=device).triu(1)


def hidden_between(looking: Tensor, looked_at: Tensor) -> Tensor:
    """Pairs of which one is padding. (batch, length of the first, length of the second)"""
    return (looking == 0)[:, :, None] | (looked_at == 0)[:, None, :]
