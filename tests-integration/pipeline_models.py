"""The model with which the kit tests the backend of a pipeline."""

from __future__ import annotations

import torch
from torch import Tensor, nn

__all__ = ("Classifier",)


class Classifier(nn.Sequential):
    """Layers for two stages, and the loss of the kit."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__(nn.Linear(6, 10), nn.Tanh(), nn.Linear(10, 10, bias=False), nn.Tanh(), nn.Linear(10, 3))
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.5)

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Mean cross entropy."""
        return nn.functional.cross_entropy(outputs, targets)

    def forward(self, inputs: Tensor) -> Tensor:
        """Logits of shape (samples, 3)."""
        outputs: Tensor = super().forward(inputs)
        return outputs
