"""Which parts of a full tensor a process holds: of plain shards, uneven ones, packed weights, and several mesh axes."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.distributed.tensor.placement_types import _StridedShard

from accel_ops.dtensors import local_chunks, write_full_tensor
from accel_state.process import PartialState
from accel_testing.processes import Processes


def packed(rows: int) -> tuple[list[tuple[int, ...]], list[list[float]]]:
    """The places and the values of a matrix of two packed ones, each in shards, filled by `write_full_tensor`."""
    process = PartialState(cpu=True)
    mesh = init_device_mesh("cpu", (process.num_processes,))
    whole = torch.arange(float(rows * 2)).reshape(rows, 2)
    held = [block.chunk(mesh.size())[process.process_index] for block in whole.chunk(2)]
    weight = DTensor.from_local(
        torch.zeros_like(torch.cat(held)),
        mesh,
        [_StridedShard(0, split_factor=2)],
        run_check=False,
        shape=whole.shape,
        stride=whole.stride(),
    )
    write_full_tensor(weight, whole)
    assert torch.equal(weight.to_local(), torch.cat(held))
    return [chunk.offsets for chunk in local_chunks(weight)], [
        chunk.local.flatten().tolist() for chunk in local_chunks(weight)
    ]


@pytest.mark.parametrize(("rows", "offsets"), [(8, [[0, 4], [2, 6]]), (6, [[0, 3], [2, 5]])])
def test_a_packed_weight_is_held_in_a_chunk_for_each_matrix(
    two: Processes, rows: int, offsets: list[list[int]]
) -> None:
    for (places, values), expected in zip(two.run(packed, rows), offsets, strict=True):
        assert [place[0] for place in places] == expected
        assert [part[0] for part in values] == [float(2 * begin) for begin in expected]


def on_two_axes(rows: int) -> list[bool]:
    """Whether the chunks of parameters that two axes shard, and what is written to them, agree with the shards."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, rows))
    whole = {name: value.clone() for name, value in model.state_dict().items()}
    parallelize_module(model, mesh["tp"], {"0": ColwiseParallel()})
    fully_shard(model, mesh=mesh["dp"])
    same = []
    for name, parameter in model.named_parameters():
        assert isinstance(parameter, DTensor)
        (chunk,) = local_chunks(parameter)
        same.append(torch.equal(whole[name][chunk.place], chunk.local))
        written = torch.empty_like(parameter)
        write_full_tensor(written, whole[name])
        same.append(torch.equal(written.to_local(), parameter.to_local()))
    return same


@pytest.mark.parametrize("rows", [8, 9, 37])
def test_shards_of_two_axes_are_where_both_have_cut(four: Processes, rows: int) -> None:
    assert four.run(on_two_axes, rows) == [[True] * 4] * 4


def several_kinds() -> list[tuple[tuple[int, ...], int]]:
    """First indexes and size of the only chunk, for shards that are even, uneven, empty and replicated."""
    process = PartialState(cpu=True)
    mesh, found = init_device_mesh("cpu", (process.num_processes,)), []
    for rows, placement in ((4, Shard(0)), (3, Shard(0)), (1, Shard(0)), (3, Replicate()), (3, Shard(1))):
        local = torch.zeros(rows, 2)
        if isinstance(placement, Shard):
            chunks = local.chunk(2, placement.dim)
            local = chunks[process.process_index] if process.process_index < len(chunks) else local[:0]
        tensor = DTensor.from_local(
            local, mesh, [placement], run_check=False, shape=torch.Size((rows, 2)), stride=(2, 1)
        )
        ((offsets, chunk),) = local_chunks(tensor)
        found.append((offsets, chunk.numel()))
    return found


def test_a_plain_shard_is_one_chunk(two: Processes) -> None:
    first, second = two.run(several_kinds)
    assert first == [((0, 0), 4), ((0, 0), 4), ((0, 0), 2), ((0, 0), 6), ((0, 0), 3)]
    assert second == [((2, 0), 4), ((2, 0), 2), ((0, 0), 0), ((0, 0), 6), ((0, 1), 3)]


def without_values() -> list[tuple[int, ...]]:
    """The places of chunks where tensors have no values."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    with FakeTensorMode():
        weight = DTensor.from_local(
            torch.empty(2, 3), mesh, [Shard(0), Shard(0)], run_check=False, shape=torch.Size((8, 3)), stride=(3, 1)
        )
        return [chunk.offsets for chunk in local_chunks(weight)]


def test_chunks_are_known_where_tensors_have_no_values(four: Processes) -> None:
    assert four.run(without_values) == [[(0, 0)], [(2, 0)], [(4, 0)], [(6, 0)]]


def refused() -> list[str]:
    """The errors of a partial sum, and of a shard that does not have the shape of its placement."""
    process = PartialState(cpu=True)
    mesh, errors = init_device_mesh("cpu", (process.num_processes,)), []
    for placement, rows in ((Partial(), 2), (Shard(0), 3)):
        tensor = DTensor.from_local(
            torch.zeros(rows), mesh, [placement], run_check=False, shape=torch.Size((4,)), stride=(1,)
        )
        with pytest.raises(ValueError, match=r"is a sum|does not agree with its placement") as error:
            local_chunks(tensor)
        errors.append(str(error.value))
    return errors


def test_a_sum_and_a_shard_of_another_shape_are_refused(two: Processes) -> None:
    for first, second in two.run(refused):
        assert "no process holds a part" in first
        assert "has shape (3,)" in second
