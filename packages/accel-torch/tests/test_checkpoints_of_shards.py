"""Checkpoints of sharded models that `torch.compile` or an uneven mesh make difficult."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from accel_testing.fresh import fresh
from accel_testing.processes import Processes
from accel_torch import (
    Accelerator,
    FullyShardedDataParallelPlugin,
    ParallelismConfig,
    TorchTensorParallelPlugin,
)

ROWS = 37


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(6, 8)
        self.middle = nn.Linear(8, 8)
        self.head = nn.Linear(8, 6, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        logits: Tensor = self.head(self.middle(self.embedding(tokens)).tanh())
        return logits


def train(accelerator: Accelerator, model: Any, optimizer: Any, steps: int = 2) -> None:
    tokens = torch.arange(12).reshape(2, 6) % 6
    for _ in range(steps):
        accelerator.backward(functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten()))
        optimizer.step()
        optimizer.zero_grad()


def compiled_first(version: int, kind: str, part: str, folder: str) -> tuple[list[str], bool, list[str]]:
    """Names of the weights, whether a load brings back what a save had, and the names in an exported file.

    Args:
        version: of FSDP.
        kind: of state dict.
        part: a submodule that is compiled and sharded separately; empty: the whole model is.
        folder: for what is saved.
    """
    from safetensors.torch import load_file

    fresh()
    torch._dynamo.reset()
    blocks: dict[str, Any] = {"auto_wrap_policy": "NO_WRAP"}
    if part:
        blocks = {"auto_wrap_policy": "TRANSFORMER_BASED_WRAP", "transformer_cls_names_to_wrap": ["Linear"]}
    plugin = FullyShardedDataParallelPlugin(fsdp_version=version, state_dict_type=kind, **blocks)
    accelerator = Accelerator(cpu=True, fsdp_plugin=plugin)
    torch.manual_seed(0)
    model: Any = Tied()
    if part:
        setattr(model, part, torch.compile(getattr(model, part), backend="eager"))
    else:
        model = torch.compile(model, backend="eager")
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=0.03)
    model, optimizer = accelerator.prepare(model, optimizer)
    train(accelerator, model, optimizer)
    accelerator.save_state(f"{folder}/checkpoint")
    train(accelerator, model, optimizer)
    after = {name: value.clone() for name, value in accelerator.get_state_dict(model).items()}
    accelerator.load_state(f"{folder}/checkpoint")
    train(accelerator, model, optimizer)
    again = accelerator.get_state_dict(model)
    accelerator.save_model(model, f"{folder}/export")
    accelerator.wait_for_everyone()
    exported = sorted(load_file(f"{folder}/export/model.safetensors"))
    return sorted(again), all(torch.equal(again[name], value) for name, value in after.items()), exported


@pytest.mark.parametrize(
    ("version", "kind", "part"),
    [
        (1, "SHARDED_STATE_DICT", ""),
        (1, "FULL_STATE_DICT", ""),
        (1, "SHARDED_STATE_DICT", "middle"),
        (2, "SHARDED_STATE_DICT", ""),
        (2, "SHARDED_STATE_DICT", "middle"),
    ],
)
def test_a_model_that_was_compiled_before_prepare_is_saved_under_its_own_names(
    two: Processes, tmp_path: Path, version: int, kind: str, part: str
) -> None:
    names, is_back, exported = two.run(compiled_first, version, kind, part, str(tmp_path))[0]
    assert names == sorted(Tied().state_dict())
    assert is_back
    # A tied weight is written once.
    assert exported == ["embedding.weight", "middle.bias", "middle.weight"]


class Uneven(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(ROWS, 8)
        self.up = nn.Linear(8, 16)
        self.down = nn.Linear(16, 8)

    def forward(self, rows: Tensor) -> Tensor:
        out: Tensor = self.down(torch.tanh(self.up(self.embedding(rows))))
        return out


PLAN = {"embedding": "rowwise_rep", "up": "colwise", "down": "rowwise"}


def trained(seed: int, **options: Any) -> tuple[Accelerator, Any, Any]:
    fresh()
    accelerator = Accelerator(cpu=True, **options)
    torch.manual_seed(seed)
    model: Any = Uneven()
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=0.01)
    model, optimizer = accelerator.prepare(model, optimizer)
    for _ in range(2):
        accelerator.backward(model(torch.arange(ROWS)).square().mean())
        optimizer.step()
        optimizer.zero_grad()
    return accelerator, model, optimizer


def tensors(accelerator: Accelerator, model: Any, optimizer: Any) -> dict[str, Tensor]:
    """All weights and optimizer states, each as a full tensor."""
    found = {}
    for name, parameter in accelerator.unwrap_model(model).named_parameters():
        for key, value in {"": parameter, **optimizer.state[parameter]}.items():
            value = value.detach()
            found[f"{name} {key}"] = value.full_tensor() if hasattr(value, "full_tensor") else value.clone()
    return found


def uneven_is_saved(backend: str, folder: str) -> None:
    plugin = FullyShardedDataParallelPlugin(2, auto_wrap_policy="NO_WRAP", state_dict_type="FULL_STATE_DICT")
    accelerator, model, optimizer = trained(0, **({"fsdp_plugin": plugin} if backend == "fsdp2" else {}))
    accelerator.save_state(folder)
    full = tensors(accelerator, model, optimizer)
    if accelerator.is_main_process:
        torch.save(full, f"{folder}/expected.pt")
    accelerator.wait_for_everyone()


def uneven_is_loaded(efficient: bool, folder: str) -> list[str]:
    """The tensors that differ after a load on a mesh of two axes, both of which cut the rows."""
    accelerator, model, optimizer = trained(
        1,
        fsdp_plugin=FullyShardedDataParallelPlugin(
            2, auto_wrap_policy="NO_WRAP", state_dict_type="FULL_STATE_DICT", cpu_ram_efficient_loading=efficient
        ),
        parallelism_config=ParallelismConfig(dp_shard_size=2, tp_size=2),
        torch_tp_plugin=TorchTensorParallelPlugin(parallelize_plan=PLAN),
    )
    accelerator.load_state(folder, allow_missing=("random_states",))
    expected = torch.load(f"{folder}/expected.pt")
    found = tensors(accelerator, model, optimizer)
    return [name for name, value in expected.items() if not torch.equal(found[name], value)]


@pytest.mark.parametrize(("backend", "efficient"), [("fsdp2", False), ("fsdp2", True), ("ddp", False)])
def test_whole_files_are_cut_for_a_mesh_that_does_not_divide_a_dimension(
    two: Processes, four: Processes, tmp_path: Path, backend: str, efficient: bool
) -> None:
    folder = str(tmp_path / "checkpoint")
    two.run(uneven_is_saved, backend, folder)
    assert four.run(uneven_is_loaded, efficient, folder) == [[]] * 4
