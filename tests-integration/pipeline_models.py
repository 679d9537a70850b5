"""The models with which the backend of a pipeline is tested."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from accel_plugins import ModelPart

__all__ = ("BuiltInParts", "Classifier")


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


class BuiltInParts(nn.Sequential):
    """Builds the layers of this process; their values follow from the generator of torch."""

    def __init__(self, part: ModelPart) -> None:
        layers: list[nn.Module] = []
        makers: list[Callable[[], nn.Module]] = [
            lambda: nn.Linear(6, 10),
            nn.Tanh,
            lambda: nn.Linear(10, 10),
            lambda: nn.LayerNorm(10),
            lambda: nn.Linear(10, 3),
        ]
        for number, make in enumerate(makers):
            with part.layer(number, len(makers)):
                layers.append(make())
        super().__init__(*layers)

    loss = Classifier.loss
