"""A small model of causal attention and its data, for runs with a `ParallelismConfig`.

Every axis finds something to divide in it: blocks, layers of a block, heads, a sequence, samples.
"""

from __future__ import annotations

from typing import ClassVar, Final

import torch
from torch import Tensor, nn

__all__ = ("PLAN", "AttentionBlock", "SequenceModel", "sequences")

HEADS, WIDTH, LENGTH = 4, 8, 8

PLAN: Final = {
    "blocks.*.queries": "colwise",
    "blocks.*.keys": "colwise",
    "blocks.*.values": "colwise",
    "blocks.*.out": "rowwise",
}
"""How its layers are divided along the axis of tensors."""


class AttentionBlock(nn.Module):
    """Causal attention of several heads; the number of heads is read from the projections, as some may be elsewhere."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.queries, self.keys, self.values = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, inputs: Tensor) -> Tensor:
        """(samples, length, WIDTH), from the same."""
        normal = self.norm(inputs)
        projected = (self.queries(normal), self.keys(normal), self.values(normal))
        queries, keys, values = (one.unflatten(-1, (-1, WIDTH // HEADS)).transpose(1, 2) for one in projected)
        attended = nn.functional.scaled_dot_product_attention(queries, keys, values, is_causal=True)
        out: Tensor = inputs + self.out(attended.transpose(1, 2).flatten(2))
        return out


class SequenceModel(nn.Module):
    """Two blocks and a head; the same in every process."""

    _no_split_modules: ClassVar = ("AttentionBlock",)

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(11)
        self.blocks = nn.ModuleList([AttentionBlock(), AttentionBlock()])
        self.head = nn.Linear(WIDTH, WIDTH)

    def forward(self, inputs: Tensor) -> Tensor:
        """(samples, length, WIDTH), from the same."""
        for block in self.blocks:
            inputs = block(inputs)
        out: Tensor = self.head(inputs)
        return out


def sequences(samples: int) -> tuple[Tensor, Tensor]:
    """Inputs and targets of shape (samples, LENGTH, WIDTH), the same in every process."""
    generator = torch.Generator().manual_seed(21)
    shape = (samples, LENGTH, WIDTH)
    return torch.randn(shape, generator=generator), torch.randn(shape, generator=generator)
