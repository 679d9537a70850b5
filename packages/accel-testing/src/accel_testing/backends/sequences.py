"""A small causal attention model, its data, and its runs with every supported combination of mesh axes.

The model has something to shard for every axis: blocks, layers of a block, heads, a sequence, samples.
"""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar, Final

import torch
from torch import Tensor, nn

from accel_plugins.ddp.manifest import MANIFEST as DDP
from accel_plugins.fsdp.config import FullyShardedDataParallelPlugin
from accel_plugins.fsdp.manifest import FSDP1, FSDP2
from accel_plugins.manifest import Axis, Manifest
from accel_plugins.mesh import PERMITTED, takes
from accel_plugins.transform import Transform
from accel_plugins.transforms.tensor_parallel import TensorParallel
from accel_state.mesh import ParallelismConfig
from accel_testing.backends.reference_loop import Case

__all__ = (
    "BY_BLOCK",
    "COMBINATIONS",
    "PLAN",
    "AttentionBlock",
    "SequenceModel",
    "case_of",
    "data",
    "loss_of",
    "name_of",
    "sequences",
)

HEADS, WIDTH, LENGTH = 4, 8, 8

PLAN: Final = {
    "blocks.*.queries": "colwise",
    "blocks.*.keys": "colwise",
    "blocks.*.values": "colwise",
    "blocks.*.out": "rowwise",
}
"""How its layers are sharded along the tensor-parallel axis."""


class AttentionBlock(nn.Module):
    """Causal attention with several heads; their number follows from the projections, which may be sharded."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.queries, self.keys, self.values = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, inputs: Tensor) -> Tensor:
        """From and to shape (samples, length, WIDTH)."""
        normal = self.norm(inputs)
        projected = (self.queries(normal), self.keys(normal), self.values(normal))
        queries, keys, values = (one.unflatten(-1, (-1, WIDTH // HEADS)).transpose(1, 2) for one in projected)
        attended = nn.functional.scaled_dot_product_attention(queries, keys, values, is_causal=True)
        out: Tensor = inputs + self.out(attended.transpose(1, 2).flatten(2))
        return out


class SequenceModel(nn.Module):
    """Two blocks and a head, with the same weights on every process."""

    _no_split_modules: ClassVar = ("AttentionBlock",)

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(11)
        self.blocks = nn.ModuleList([AttentionBlock(), AttentionBlock()])
        self.head = nn.Linear(WIDTH, WIDTH)

    def forward(self, inputs: Tensor) -> Tensor:
        """From and to shape (samples, length, WIDTH)."""
        for block in self.blocks:
            inputs = block(inputs)
        out: Tensor = self.head(inputs)
        return out


def sequences(samples: int) -> tuple[Tensor, Tensor]:
    """Inputs and targets of shape (samples, LENGTH, WIDTH), equal on all processes."""
    generator = torch.Generator().manual_seed(21)
    shape = (samples, LENGTH, WIDTH)
    return torch.randn(shape, generator=generator), torch.randn(shape, generator=generator)


SAMPLES, STEPS = 4, 3
BY_BLOCK = FullyShardedDataParallelPlugin(
    2, auto_wrap_policy="TRANSFORMER_BASED_WRAP", transformer_cls_names_to_wrap=["AttentionBlock"]
)
"""FSDP settings that shard each block separately."""
_CONFIGS_OF_BACKENDS: Final = {"fsdp1": dataclasses.replace(BY_BLOCK, fsdp_version=1), "fsdp2": BY_BLOCK}

COMBINATIONS: list[tuple[Manifest, frozenset[str]]] = [
    (manifest, combination.axes)
    for combination in PERMITTED
    for manifest in (DDP, FSDP1, FSDP2)
    if takes(manifest, combination.axes) and len(combination.axes) <= 2
]
"""All pairs of a backend and a supported combination of axes that four processes can form."""


def data() -> list[tuple[Tensor, Tensor]]:
    """Global batches."""
    inputs, targets = sequences(SAMPLES * STEPS)
    return list(zip(inputs.chunk(STEPS), targets.chunk(STEPS), strict=True))


def loss_of(model: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
    """Mean of squares."""
    return nn.functional.mse_loss(model(inputs), targets)


def case_of(manifest: Manifest, axes: frozenset[str], *more: Transform) -> Case:
    """A run of four processes, or of eight if it has three axes."""
    sizes: dict[str, Any] = {f"{Axis(axis).value}_size": 4 if len(axes) == 1 else 2 for axis in axes}
    if Axis.SEQUENCE in axes:
        sizes["sp_backend"] = "torch"
    transforms = (TensorParallel(PLAN), *more) if Axis.TENSOR in axes else more
    parallelism_config = ParallelismConfig(**sizes) if sizes else None
    return Case(
        manifest, _CONFIGS_OF_BACKENDS.get(manifest.name), parallelism_config=parallelism_config, transforms=transforms
    )


def name_of(value: object) -> str | None:
    """The name of a combination in test names."""
    if isinstance(value, Manifest):
        return value.name
    if isinstance(value, frozenset):
        return "-".join(sorted(axis.value for axis in value)) or "plain"
    return None
