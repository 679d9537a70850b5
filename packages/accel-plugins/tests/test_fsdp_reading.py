"""What each process of FSDP2 reads of a checkpoint that holds whole weights."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from accel_bigmodel.weight_files import save_weights_file
from accel_bigmodel.weight_files.reading import Copy
from accel_plugins.fsdp import weights
from accel_state.errors import CheckpointError
from accel_state.process import PartialState
from accel_testing.processes import Processes


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.inner = nn.Embedding(30, 16), nn.Linear(16, 16)
        self.head = nn.Linear(16, 30, bias=False)
        self.head.weight = self.embed.weight


def wrapped(model: nn.Module) -> nn.Module:
    """The model with a layer that names of parameters show, and sharded over two processes."""
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    model.inner = checkpoint_wrapper(model.inner)  # type: ignore[arg-type]
    mesh = init_device_mesh("cpu", (2,))
    fully_shard(model.inner, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def read_and_held(folder: str) -> tuple[bool, int, int]:
    PartialState(cpu=True)
    torch.manual_seed(1)
    model = wrapped(Tied())
    sizes: list[int] = []
    run = Copy.run

    def counted(self: Copy) -> None:
        sizes.append(self.size)
        run(self)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(Copy, "run", counted)
        weights.load_model(model, Path(folder), 0)
    torch.manual_seed(0)
    expected = {id(p): p for p in Tied().parameters()}.values()
    same = all(torch.equal(a.full_tensor(), b) for a, b in zip(model.parameters(), expected, strict=True))  # type: ignore[attr-defined]
    held = sum(p.to_local().nbytes for p in model.parameters())  # type: ignore[attr-defined]
    return same and model.head.weight is model.embed.weight, sum(sizes), held


def refused(folder: str) -> str:
    PartialState(cpu=True)
    with pytest.raises(CheckpointError) as raised:
        weights.load_model(wrapped(Tied()), Path(folder), 0)
    return str(raised.value)


def test_each_process_of_fsdp2_reads_its_shards_of_whole_weights(two: Processes, tmp_path: Path) -> None:
    torch.manual_seed(0)
    save_weights_file(Tied().state_dict(), tmp_path / "model.safetensors")
    for same, read, held in two.run(read_and_held, str(tmp_path)):
        assert same
        assert read == held


def test_weights_of_another_model_are_refused_on_every_process(two: Processes, tmp_path: Path) -> None:
    save_weights_file({"embed.weight": torch.zeros(30, 16)}, tmp_path / "model.safetensors")
    for message in two.run(refused, str(tmp_path)):
        assert "Missing: inner.weight, inner.bias" in message
