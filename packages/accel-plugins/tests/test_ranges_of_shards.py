"""What each process reads of a folder of shards that another number of processes wrote."""

from __future__ import annotations

import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed import checkpoint

from accel_plugins.checkpoint import shards
from accel_plugins.checkpoint.shards import SavePlans, read_into, read_whole, write_shards
from accel_plugins.fsdp import weights
from accel_plugins.manifest import ObjectKind
from accel_state.errors import CheckpointError
from accel_state.process import PartialState
from accel_testing.processes import Processes


def wide(seed: int) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(1002, 2052), nn.ReLU(), nn.Linear(2052, 500, dtype=torch.bfloat16))


def sharded(how: str, seed: int) -> nn.Sequential:
    """A model that is sharded over all processes, by rows, by columns or by layers of tensor parallelism."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import Shard
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    model, mesh = wide(seed), init_device_mesh("cpu", (PartialState(cpu=True).num_processes,))
    if how == "tp":
        parallelize_module(model, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
    else:
        cut = None if how == "rows" else (lambda p: Shard(p.dim() - 1))
        fully_shard(model[0], mesh=mesh, shard_placement_fn=cut)
        fully_shard(model[2], mesh=mesh, shard_placement_fn=cut)
    return model


def written(folder: str) -> None:
    state = weights.model_state(sharded("rows", seed=0), full=False)
    weights.write(ObjectKind.MODEL, state, Path(folder), 0, full=False, first=True, plans=SavePlans())


def bytes_of_process() -> int:
    """Bytes that this process has received from reads of files since it started."""
    return int(Path("/proc/self/io").read_text().split("rchar: ")[1].split()[0])


def read_and_held(folder: str, how: str) -> tuple[bool, float]:
    """Whether all weights arrived, and bytes read by bytes held."""
    weights.load_model(sharded(how, seed=1), Path(folder), 0)  # imports what a load needs
    model = sharded(how, seed=2)
    before = bytes_of_process()
    weights.load_model(model, Path(folder), 0)
    read = bytes_of_process() - before
    tensors: dict[str, Any] = model.state_dict()
    held = sum(getattr(tensor, "_local_tensor", tensor).nbytes for tensor in tensors.values())
    full = {
        name: tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor for name, tensor in tensors.items()
    }
    expected = wide(0).state_dict()
    return all(torch.equal(full[name], expected[name]) for name in expected), read / held


@pytest.mark.skipif(sys.platform != "linux", reason="the system does not count the bytes that a process reads")
@pytest.mark.parametrize("how", ["rows", "columns", "tp"])
def test_each_process_reads_its_ranges_of_shards_that_two_processes_wrote(
    two: Processes, three: Processes, tmp_path: Path, how: str
) -> None:
    two.run(written, str(tmp_path))
    for same, read_by_held in three.run(read_and_held, str(tmp_path), how):
        assert same
        # What is mapped does not count; torch would read all shards that overlap, one and a half times as much.
        assert read_by_held <= 0.05


def packed(value: float) -> dict[str, Any]:
    """A packed weight of two matrices, of each of which a process has a slice, and one that is sharded by columns."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Shard, distribute_tensor
    from torch.distributed.tensor.placement_types import _StridedShard

    process = PartialState(cpu=True)
    mesh, whole = init_device_mesh("cpu", (process.num_processes,)), full_packed() * value
    held = torch.cat([block.chunk(mesh.size())[process.process_index] for block in whole.chunk(2)])
    placed = DTensor.from_local(
        held, mesh, [_StridedShard(0, split_factor=2)], run_check=False, shape=whole.shape, stride=whole.stride()
    )
    return {"packed": placed, "columns": distribute_tensor(whole, mesh, [Shard(1)])}


def full_packed() -> torch.Tensor:
    return torch.arange(24.0 * 6).reshape(24, 6)


def packed_is_written(folder: str) -> None:
    write_shards({"model": packed(1.0)}, Path(folder) / "shards", SavePlans())


def packed_is_read(folder: str, swapped: bool) -> bool:
    """Whether packed shards are those that were saved; `swapped`: each tensor is read into the layout of the other."""
    state, names = packed(0.0), ("packed", "columns")
    given = dict(zip(names, reversed(state.values()), strict=True)) if swapped else state
    read_into({"model": given}, Path(folder) / "shards")
    expected = packed(1.0)
    return all(torch.equal(state[name].to_local(), expected[name].to_local()) for name in names)


@pytest.mark.parametrize("swapped", [False, True])
def test_packed_weights_are_read_on_any_number_of_processes_and_in_any_layout(
    two: Processes, three: Processes, tmp_path: Path, swapped: bool
) -> None:
    two.run(packed_is_written, str(tmp_path))
    found = read_whole(tmp_path / "shards")["model"]
    assert all(torch.equal(found[name], full_packed()) for name in ("packed", "columns"))
    assert two.run(packed_is_read, str(tmp_path), swapped) == [True] * 2
    assert three.run(packed_is_read, str(tmp_path), swapped) == [True] * 3


def saved(folder: Path, state: dict[str, Any]) -> Path:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)
        checkpoint.save(state, checkpoint_id=folder, no_dist=True)
    return folder


@pytest.mark.parametrize(
    "stored",
    [
        torch.arange(40.0).view(5, 8).t(),
        torch.arange(40.0).view(5, 8)[:, ::2],
        torch.arange(40.0, dtype=torch.bfloat16).view(4, 10),
        torch.arange(40).view(8, 5)[3:],
        torch.tensor(3.0),
        torch.ones(3, 1, 2, dtype=torch.complex64),
        torch.ones(2, 3, dtype=torch.complex64).conj(),
        torch.ones(0, 3),
        torch.zeros(300, dtype=torch.uint8),
        torch.eye(3).bool(),
    ],
)
def test_tensors_of_all_forms_arrive(tmp_path: Path, stored: torch.Tensor) -> None:
    source = saved(tmp_path / "shards", {"weight": stored, "seed": 3})
    state = {"weight": torch.empty_like(stored), "seed": None}
    read_into(state, source, alone=True)
    assert torch.equal(state["weight"], stored)
    assert state["seed"] == 3


def test_a_tensor_is_converted_to_the_dtype_of_the_model(tmp_path: Path) -> None:
    stored = torch.randn(40, 30)
    source = saved(tmp_path / "shards", {"weight": stored})
    state = {"weight": torch.empty(40, 30, dtype=torch.bfloat16)}
    read_into(state, source, alone=True)
    assert torch.equal(state["weight"], stored.to(torch.bfloat16))


def failing_disk(*arguments: object) -> None:
    """Stands for a page of a mapped file that cannot be read."""
    raise OSError(5, "Input/output error")


def fails_in_the_middle(folder: str) -> tuple[str, str, bool]:
    """The error of a load whose disk fails, what using the model says then, and whether a further load mends it."""
    model, intact = sharded("rows", seed=1), Path(folder)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(shards._LoadPlanner, "commit_tensor", failing_disk)
        with pytest.raises(CheckpointError) as failed:
            weights.load_model(model, intact, 0)
    with pytest.raises(CheckpointError) as used:
        model(torch.ones(1, 1002))
    weights.load_model(model, intact, 0)
    model[0](torch.ones(1, 1002))
    return str(failed.value), str(used.value), True


def test_a_model_that_was_read_in_part_says_so_when_it_is_used(two: Processes, tmp_path: Path) -> None:
    two.run(written, str(tmp_path))
    for failed, used, mended in two.run(fails_in_the_middle, str(tmp_path)):
        assert "Input/output error" in failed
        assert "weights are partly loaded" in used
        assert mended


def refused_before_writing(folder: str) -> tuple[str, bool]:
    """The error of a load from damaged shards, and whether the model is as it was."""
    model = sharded("rows", seed=1)
    before = {name: tensor.full_tensor().clone() for name, tensor in model.state_dict().items()}
    with pytest.raises(CheckpointError) as raised:
        weights.load_model(model, Path(folder), 0)
    after = {name: tensor.full_tensor() for name, tensor in model.state_dict().items()}
    return str(raised.value), all(torch.equal(after[name], before[name]) for name in before)


def test_damage_of_the_last_record_is_found_before_a_tensor_is_written(two: Processes, tmp_path: Path) -> None:
    two.run(written, str(tmp_path))
    for shard in tmp_path.glob("*/*.distcp"):
        content = shard.read_bytes()
        shard.write_bytes(content[: content.rindex(b"PK\x05\x06")])
    for message, unchanged in two.run(refused_before_writing, str(tmp_path)):
        assert "damaged" in message
        assert unchanged
