"""Training in 8 bits on a GPU that computes with them, by each library that is installed."""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest
import torch
from torch import nn

from accel_plugins.fsdp.config import FullyShardedDataParallelPlugin
from accel_plugins.fsdp.manifest import FSDP2
from accel_plugins.manifest import Manifest
from accel_plugins.precision.config import AORecipeKwargs, TERecipeKwargs
from accel_plugins.single.manifest import MANIFEST as SINGLE
from accel_testing.backends import Case
from accel_testing.backends.reference_loop import CUDATraining
from accel_testing.plugin import on_devices
from accel_testing.processes import Processes

SHARDED = FullyShardedDataParallelPlugin(2, auto_wrap_policy="SIZE_BASED_WRAP", min_num_params=500)
RECIPES = {"torchao": AORecipeKwargs, "transformer_engine": TERecipeKwargs}
WIDE = 64
"""The sizes of matrices in 8 bits have to be multiples of 16."""


class Wide(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.first = nn.Linear(6, WIDE)
        self.blocks = nn.ModuleList([nn.Linear(WIDE, WIDE), nn.Linear(WIDE, WIDE)])
        self.last = nn.Linear(WIDE, 3)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        # Transformer Engine takes rows in multiples of 8, and so many samples are not in each batch.
        rows = nn.functional.pad(self.first(inputs), (0, 0, 0, -len(inputs) % 16))
        for block in self.blocks:
            rows = block(rows).tanh()
        out: torch.Tensor = self.last(rows[: len(inputs)])
        return out


def train(case: Case, library: str | None) -> dict[str, Any]:
    handlers = [] if library is None else [RECIPES[library]()]
    training = CUDATraining(case, Wide(), handlers=handlers)
    losses = training.train()[0]
    kinds = sorted({type(part).__name__ for part in training.strategy.unwrap(training.wrapped).modules()})
    return {"losses": losses, "kinds": kinds}


@pytest.mark.parametrize("library", sorted(RECIPES))
@pytest.mark.parametrize(
    ("manifest", "config"),
    [(SINGLE, None), (FSDP2, SHARDED)],
    ids=["single", "fsdp2"],
)
@on_devices(differs="matrices are multiplied by 8-bit units; elsewhere torchao computes the same numbers another way")
def test_losses_stay_near_those_of_full_precision(
    device: torch.device, gpus: Processes, manifest: Manifest, config: Any, library: str
) -> None:
    if importlib.util.find_spec(library) is None:
        pytest.skip(f"{library} is not installed")
    if torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("this GPU has no 8-bit units; they came with compute capability 8.9")
    case = Case(manifest, config, precision="fp8", adam=True)
    full = gpus.run(train, case.but(precision="no"), None)[0]
    for answer in gpus.run(train, case, library):
        assert answer["losses"] == pytest.approx(full["losses"], rel=0.1)
        assert answer["losses"] != full["losses"]
        assert answer["kinds"] != full["kinds"]
