"""Small models of ten kinds in plain torch, each with its loss function and one batch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as functional
from torch import Tensor, nn

Made = tuple[nn.Module, Callable[[nn.Module, Any], Tensor], Any]
WIDTH, HEADS, LENGTH, WORDS, BATCH, DEPTH = 128, 4, 32, 512, 8, 3


def loss_of_classes(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """Cross entropy over the last dimension."""
    inputs, targets = batch
    outputs = model(inputs)
    return functional.cross_entropy(outputs.flatten(0, -2), targets.flatten())


def words() -> tuple[Tensor, Tensor]:
    """Token ids and targets."""
    return torch.randint(WORDS, (BATCH, LENGTH)), torch.randint(WORDS, (BATCH, LENGTH))


def images() -> tuple[Tensor, Tensor]:
    """Images and classes."""
    return torch.randn(BATCH, 3, 32, 32), torch.randint(10, (BATCH,))


class FeedForward(nn.Module):
    def __init__(self, activation: Callable[[Tensor], Tensor] = functional.gelu) -> None:
        super().__init__()
        self.up, self.down, self.activation = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH), activation

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.activation(self.up(x)))


class GatedFeedForward(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up = nn.Linear(WIDTH, 3 * WIDTH, bias=False), nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.down = nn.Linear(3 * WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(functional.silu(self.gate(x)) * self.up(x))


class Experts(nn.Module):
    """Two of four experts for each token, with a fixed capacity."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, 4)
        self.experts = nn.ModuleList(FeedForward() for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.flatten(0, -2)
        weights = self.router(tokens).softmax(-1)
        capacity = tokens.shape[0] // 2
        made = torch.zeros_like(tokens)
        for number, expert in enumerate(self.experts):
            weight, chosen = weights[:, number].topk(capacity)
            made = made.index_add(0, chosen, expert(tokens[chosen]) * weight.unsqueeze(-1))
        return made.view_as(x)


class Attention(nn.Module):
    def __init__(self, causal: bool) -> None:
        super().__init__()
        self.query, self.key, self.value, self.out = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.causal = causal

    def forward(self, x: Tensor, memory: Tensor | None = None) -> Tensor:
        other = x if memory is None else memory
        heads = [
            part.unflatten(-1, (-1, WIDTH // HEADS)).transpose(1, 2)
            for part in (self.query(x), self.key(other), self.value(other))
        ]
        attended = functional.scaled_dot_product_attention(*heads, is_causal=self.causal)
        return self.out(attended.transpose(1, 2).flatten(-2))


class Block(nn.Module):
    def __init__(self, causal: bool, feed_forward: Callable[[], nn.Module], norm: Callable[[int], nn.Module]) -> None:
        super().__init__()
        self.attention, self.feed_forward = Attention(causal), feed_forward()
        self.norm1, self.norm2 = norm(WIDTH), norm(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.feed_forward(self.norm2(x))


class CrossBlock(Block):
    def __init__(self) -> None:
        super().__init__(True, FeedForward, nn.LayerNorm)
        self.cross, self.norm3 = Attention(False), nn.LayerNorm(WIDTH)

    def forward(self, x: Tensor, memory: Tensor) -> Tensor:  # type: ignore[override]
        x = x + self.attention(self.norm1(x))
        x = x + self.cross(self.norm3(x), memory)
        return x + self.feed_forward(self.norm2(x))


class Language(nn.Module):
    """A stack of blocks over tokens."""

    def __init__(
        self, causal: bool = True, feed_forward: Any = FeedForward, norm: Any = nn.LayerNorm, tied: bool = False
    ) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(WORDS, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.ModuleList(Block(causal, feed_forward, norm) for _ in range(DEPTH))
        self.norm, self.head = norm(WIDTH), nn.Linear(WIDTH, WORDS, bias=False)
        if tied:
            self.head.weight = self.words.weight
        self.tp_plan = {f"blocks.*.attention.{name}": "colwise" for name in ("query", "key", "value")}
        self.tp_plan["blocks.*.attention.out"] = "rowwise"
        if feed_forward is not Experts:
            self.tp_plan |= {"blocks.*.feed_forward.up": "colwise", "blocks.*.feed_forward.down": "rowwise"}
        if feed_forward is GatedFeedForward:
            self.tp_plan["blocks.*.feed_forward.gate"] = "colwise"

    def forward(self, ids: Tensor) -> Tensor:
        x = self.words(ids) + self.places.weight[: ids.shape[1]]
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class Translation(nn.Module):
    """An encoder and a decoder over one embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        self.encoder = nn.ModuleList(Block(False, FeedForward, nn.LayerNorm) for _ in range(DEPTH))
        self.decoder = nn.ModuleList(CrossBlock() for _ in range(DEPTH))
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        self.tp_plan = {f"{stack}.*.feed_forward.up": "colwise" for stack in ("encoder", "decoder")}
        self.tp_plan |= {f"{stack}.*.feed_forward.down": "rowwise" for stack in ("encoder", "decoder")}

    def forward(self, ids: Tensor) -> Tensor:
        memory = x = self.words(ids)
        for block in self.encoder:
            memory = block(memory)
        for block in self.decoder:
            x = block(x, memory)
        return self.head(x)


class Vision(nn.Module):
    """A transformer over the patches of an image."""

    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, WIDTH, 4, 4)
        self.blocks = nn.ModuleList(Block(False, FeedForward, nn.LayerNorm) for _ in range(DEPTH))
        self.head = nn.Linear(WIDTH, 10)
        self.tp_plan = {"blocks.*.feed_forward.up": "colwise", "blocks.*.feed_forward.down": "rowwise"}

    def forward(self, images: Tensor) -> Tensor:
        x = self.patches(images).flatten(2).transpose(1, 2)
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean(1))


class Residual(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            *(nn.Conv2d(channels, channels, 3, padding=1, bias=False), nn.BatchNorm2d(channels), nn.ReLU()),
            *(nn.Conv2d(channels, channels, 3, padding=1, bias=False), nn.BatchNorm2d(channels)),
        )

    def forward(self, x: Tensor) -> Tensor:
        return (x + self.layers(x)).relu()


class Perceptron(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(FeedForward(functional.relu) for _ in range(4))
        self.head = nn.Linear(WIDTH, 10)
        self.tp_plan = {"blocks.*.up": "colwise", "blocks.*.down": "rowwise"}

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def mlp() -> Made:
    return Perceptron(), loss_of_classes, (torch.randn(64, WIDTH), torch.randint(10, (64,)))


def cnn() -> Made:
    layers: list[nn.Module] = []
    for before, after in ((3, 32), (32, 64), (64, 128)):
        layers += [nn.Conv2d(before, after, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(128 * 16, 10)), loss_of_classes, images()


def resnet() -> Made:
    stem = nn.Conv2d(3, 32, 3, padding=1)
    blocks = nn.Sequential(*(Residual(32) for _ in range(DEPTH)))
    model = nn.Sequential(stem, blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 10))
    return model, loss_of_classes, images()


def bert() -> Made:
    return Language(causal=False), loss_of_classes, words()


def gpt() -> Made:
    return Language(), loss_of_classes, words()


def llama() -> Made:
    return Language(feed_forward=GatedFeedForward, norm=nn.RMSNorm), loss_of_classes, words()


def t5() -> Made:
    return Translation(), loss_of_classes, words()


def vit() -> Made:
    return Vision(), loss_of_classes, images()


def moe() -> Made:
    return Language(feed_forward=Experts), loss_of_classes, words()


def tied() -> Made:
    return Language(tied=True), loss_of_classes, words()


MODELS: dict[str, Callable[[], Made]] = {
    made.__name__: made for made in (mlp, cnn, resnet, bert, gpt, llama, t5, vit, moe, tied)
}
