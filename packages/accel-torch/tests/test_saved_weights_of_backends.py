"""`save_model` writes the same files under every backend as one process does: the same bytes under the same names."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Final

import pytest
import torch
from torch import nn

from accel_testing.backends.sequences import PLAN, SequenceModel
from accel_testing.fresh import fresh
from accel_testing.processes import Processes
from accel_torch import (
    Accelerator,
    FullyShardedDataParallelPlugin,
    ParallelismConfig,
    TorchTensorParallelPlugin,
)

LIMITS: Final = ("10GB", 700)
"""Sizes of files: all weights are in one, and each of a few in one."""

PLANS: Final[dict[str, dict[str, Any]]] = {
    "ddp": {},
    "fsdp1": {"fsdp": 1},
    "fsdp1 with joined parameters": {"fsdp": 1, "joined": True},
    "fsdp2": {"fsdp": 2},
    "tp": {"axes": {"tp_size": 2}},
    "dp_shard": {"fsdp": 2, "axes": {"dp_shard_size": 2}},
}
PLANS_OF_FOUR: Final[dict[str, dict[str, Any]]] = {
    "hsdp": {"fsdp": 2, "axes": {"dp_replicate_size": 2, "dp_shard_size": 2}},
    "dp_shard-tp": {"fsdp": 2, "axes": {"dp_shard_size": 2, "tp_size": 2}},
}


class TiedModel(SequenceModel):
    """Sequences, a weight tied across modules, one in 16 bits, a buffer, and a buffer that is not saved."""

    def __init__(self) -> None:
        super().__init__()
        self.again = nn.Linear(8, 8)
        self.again.weight = self.head.weight
        self.register_buffer("scale", torch.full((3,), 0.5, dtype=torch.float16))
        self.register_buffer("cache", torch.zeros(2), persistent=False)


def save(folder: str, how: dict[str, Any]) -> None:
    """Prepare a model and save it, once for each limit."""
    options: dict[str, Any] = {}
    if "fsdp" in how:
        options["fsdp_plugin"] = FullyShardedDataParallelPlugin(
            how["fsdp"], auto_wrap_policy="TRANSFORMER_BASED_WRAP", use_orig_params=False if "joined" in how else None
        )
    if "axes" in how:
        options["parallelism_config"] = ParallelismConfig(**how["axes"])
    if "tp_size" in how.get("axes", {}):
        options["torch_tp_plugin"] = TorchTensorParallelPlugin(parallelize_plan=PLAN)
    accelerator = Accelerator(cpu=True, **options)
    model = TiedModel()
    model, _ = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    for limit in LIMITS:
        accelerator.save_model(model, f"{folder}/{limit}", max_shard_size=limit)
    accelerator.wait_for_everyone()


def files(folder: Path) -> dict[str, Any]:
    """By name: of a weight file its header and the bytes of its tensors, of an index what it says."""
    found: dict[str, Any] = {}
    for path in sorted(folder.glob("*/*")):
        content = path.read_bytes()
        begin = 8 + int.from_bytes(content[:8], "little")
        safe = path.suffix == ".safetensors"
        header = json.loads(content[8:begin] if safe else content)
        found[str(path.relative_to(folder))] = (list(header), header, content[begin:] if safe else b"")
    return found


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("one")
    with fresh():
        save(str(folder), {})
    found = files(folder)
    _, header, _ = found["10GB/model.safetensors"]
    assert header["__metadata__"] == {"format": "pt"}
    assert "head.weight" in header
    assert "again.weight" not in header
    assert len(found) > 4
    return found


@pytest.mark.parametrize("plan", PLANS)
def test_two_processes_write_the_files_of_one(
    two: Processes, plan: str, tmp_path: Path, expected: dict[str, Any]
) -> None:
    two.run(save, str(tmp_path), PLANS[plan])

    assert files(tmp_path) == expected


@pytest.mark.parametrize("plan", PLANS_OF_FOUR)
def test_four_processes_write_the_files_of_one(
    four: Processes, plan: str, tmp_path: Path, expected: dict[str, Any]
) -> None:
    four.run(save, str(tmp_path), PLANS_OF_FOUR[plan])

    assert files(tmp_path) == expected
