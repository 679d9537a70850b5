"""Collectives between some of the processes: process groups, axes of a mesh, ranks of the run, named errors."""

from __future__ import annotations

import threading
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from accel_ops import (
    CollectiveError,
    SettingError,
    ShapeMismatch,
    UnknownKind,
    all_agree,
    all_to_all,
    broadcast,
    broadcast_object_list,
    gather,
    gather_object,
    pad_across_processes,
    raise_on_any_rank,
    recent_calls,
    reduce,
    reduce_scatter,
    scatter,
    where_is_everyone,
)
from accel_state import ParallelismConfig, PartialState, current
from accel_state.run_state import AcceleratorState
from accel_testing.processes import Processes
from accel_testing.recording_transport import recording


def own_group(*lists: list[int]) -> Any:
    """The group of this rank among several, all of which every rank makes."""
    groups = [dist.new_group(ranks) for ranks in lists]
    rank = dist.get_rank()
    return next(group for group, ranks in zip(groups, lists, strict=True) if rank in ranks)


def mesh_2x2() -> DeviceMesh:
    """[[0, 1], [2, 3]], of axes a and b."""
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))


def every_collective(group: Any, members: list[int]) -> None:
    rank, count = dist.get_rank(), len(members)
    mine, last = float(rank), members[-1]
    all_of = [float(member) for member in members]
    big = torch.full((300, 300), mine)
    assert gather({"x": torch.tensor([mine])}, group=group)["x"].tolist() == all_of
    assert gather(big, group=group)[::300, 0].tolist() == all_of
    gathered = gather(torch.tensor([mine]), last, group=group)
    assert (gathered.tolist() if gathered is not None else None) == (all_of if rank == last else None)
    assert reduce(torch.tensor([mine]), "sum", group=group).item() == sum(all_of)
    assert reduce([big, torch.tensor(mine)], "max", group=group)[0][0, 0].item() == max(all_of)
    assert broadcast(torch.tensor([mine]), last, group=group).item() == last
    assert broadcast(torch.tensor([mine]), group=group).item() == members[0]
    assert broadcast(big.clone(), last, group=group)[5, 5].item() == last
    parts = torch.arange(float(count)) + 10 * rank
    assert scatter(parts if rank == last else None, last, group=group).tolist() == [members.index(rank) + 10 * last]
    assert all_to_all(parts, group=group).tolist() == [10 * member + members.index(rank) for member in members]
    share = reduce_scatter(torch.arange(float(count)), group=group)
    assert share.tolist() == [float(count * members.index(rank))]
    assert gather_object([rank], group=group) == members
    assert broadcast_object_list([rank, "x"], last, group=group) == [last, "x"]
    assert broadcast_object_list(["y" * 100_000 + str(rank)], group=group)[0].endswith(str(members[0]))
    padded = pad_across_processes(torch.ones(1 + rank), group=group)
    assert padded.shape == (1 + max(members),)


def with_process_groups(lists: list[list[int]]) -> None:
    PartialState(cpu=True)
    group = own_group(*lists)
    every_collective(group, next(ranks for ranks in lists if dist.get_rank() in ranks))
    # All processes together are in step afterwards.
    assert gather_object([dist.get_rank()]) == list(range(dist.get_world_size()))


def test_every_collective_works_in_a_group_of_all_of_two(two: Processes) -> None:
    two.run(with_process_groups, [[0, 1]])


def test_every_collective_works_in_groups_of_unequal_size(three: Processes) -> None:
    three.run(with_process_groups, [[0, 2], [1]])


@pytest.mark.parametrize("lists", [[[0, 3], [1, 2]], [[0, 1, 3], [2]], [[1, 2, 3], [0]]])
def test_every_collective_works_in_groups_of_four(four: Processes, lists: list[list[int]]) -> None:
    four.run(with_process_groups, lists)


def with_meshes() -> None:
    state = PartialState(cpu=True)
    mesh, rank = mesh_2x2(), state.process_index
    along_a, along_b = [rank % 2, rank % 2 + 2], [rank // 2 * 2, rank // 2 * 2 + 1]
    every_collective(mesh["a"], along_a)
    every_collective(mesh["b"], along_b)
    # Groups that overlap, in turn.
    both = reduce(reduce(torch.tensor([float(rank)]), "sum", group=mesh["a"]), "sum", group=mesh["b"])
    assert both.item() == 6.0


def test_every_collective_works_along_the_axes_of_a_mesh(four: Processes) -> None:
    four.run(with_meshes)


def by_names_of_axes() -> None:
    config = ParallelismConfig(dp_replicate_size=2, dp_shard_size=2)
    state = AcceleratorState(cpu=True, parallelism_config=config)
    rank = state.process_index
    every_collective("dp_replicate", [rank % 2, rank % 2 + 2])
    every_collective("dp_shard", [rank // 2 * 2, rank // 2 * 2 + 1])
    every_collective("dp", [0, 1, 2, 3])
    assert gather(torch.tensor([1]), group="tp").tolist() == [1]
    with pytest.raises(SettingError) as caught:
        gather(torch.ones(1), group="pp")
    assert "'pp'" in str(caught.value)
    assert "'dp_replicate', 'dp_shard'" in str(caught.value)


def test_an_axis_of_the_mesh_of_the_run_is_a_group_by_its_name(four: Processes) -> None:
    four.run(by_names_of_axes)


def different_collectives() -> list[Any]:
    state = PartialState(cpu=True)
    mesh, rank = mesh_2x2(), state.process_index
    pair = mesh["b"]
    found = []
    for turn in range(20):
        # The ranks of one group are not in step with those of the other.
        if rank < 2:
            found.append(gather(torch.tensor([rank + turn]), group=pair).sum().item())
        else:
            found.append(reduce({"x": torch.full((4,), rank + turn)}, "sum", group=pair)["x"][0].item())
            found.append(gather_object([rank], group=pair))
    assert gather_object([rank]) == [0, 1, 2, 3]
    return found


def test_groups_run_different_collectives_at_the_same_time(four: Processes) -> None:
    first, _, third, _ = four.run(different_collectives)
    assert first == [1 + 2 * turn for turn in range(20)]
    assert third == [value for turn in range(20) for value in (5 + 2 * turn, [2, 3])]


def in_two_threads() -> list[float]:
    state = PartialState(cpu=True)
    groups = [dist.new_group([0, 1]), dist.new_group([0, 1])]
    totals = [0.0, 0.0]

    def add(index: int) -> None:
        for turn in range(5):
            totals[index] += reduce(
                torch.tensor([turn + index + state.process_index * 1.0]), group=groups[index]
            ).item()

    # The threads of one process meet those of the other in any order.
    threads = [threading.Thread(target=add, args=(index,)) for index in (0, 1)]
    for thread in threads if state.is_main_process else reversed(threads):
        thread.start()
    for thread in threads:
        thread.join(250)
    return totals


def test_threads_use_groups_of_the_same_processes_independently(two: Processes) -> None:
    expected = [sum(turn + 0.5 for turn in range(5)), sum(turn + 1.5 for turn in range(5))]
    assert two.run(in_two_threads) == [expected, expected]


def mismatched() -> tuple[str, str]:
    state = PartialState(cpu=True)
    mesh, rank = mesh_2x2(), state.process_index
    column = mesh["a"]
    with pytest.raises(ShapeMismatch) as shapes:
        gather(torch.ones(1 + rank // 2), group=column)
    collective = gather if rank < 2 else reduce
    with pytest.raises(ShapeMismatch) as operations:
        collective(torch.ones(1), group=column)
    assert gather_object([rank], group=column) == [rank % 2, rank % 2 + 2]
    return str(shapes.value), str(operations.value)


def test_calls_that_differ_inside_a_group_are_named_by_ranks_of_the_run(four: Processes) -> None:
    for rank, (shapes, operations) in enumerate(four.run(mismatched)):
        one, other = rank % 2, rank % 2 + 2
        assert f"the group 'a' of ranks {one}, {other}" in shapes
        assert f"(1,) torch.float32 on rank {one}, (2,) torch.float32 on rank {other}" in shapes
        assert "reduce() in the group 'a'" in operations
        assert f"on rank {other}" in operations


def failing_alone() -> str:
    state = PartialState(cpu=True)
    group = dist.new_group([0, 2])
    if state.process_index == 1:
        return ""
    with pytest.raises((UnknownKind, ShapeMismatch)) as caught:
        gather("text" if state.process_index == 2 else torch.ones(1), group=group)
    return str(caught.value)


def test_a_process_that_cannot_take_part_is_named_by_its_rank_in_the_run(three: Processes) -> None:
    first, _, _ = three.run(failing_alone)
    assert "rank 2 could not take part" in first


def outside() -> tuple[str, str, str]:
    state = PartialState(cpu=True)
    group = dist.new_group([0, 1])
    mesh = mesh_2x2() if state.num_processes == 4 else None
    if state.process_index < 2:
        with pytest.raises(SettingError) as caught:
            broadcast(torch.ones(1), src=2, group=group)
        return "", "", str(caught.value)
    with pytest.raises(SettingError) as not_in_it:
        gather(torch.ones(1), group=group)
    with pytest.raises(SettingError) as two_dimensions:
        gather(torch.ones(1), group=mesh)
    return str(not_in_it.value), str(two_dimensions.value), ""


def test_ranks_outside_of_a_group_are_refused(four: Processes) -> None:
    first, _, third, _ = four.run(outside)
    assert "Cannot run broadcast() with src=2" in first[2]
    assert "0, 1; these are ranks of the run" in first[2]
    assert "rank 2, is not in it" in third[0]
    assert "2 dimensions" in third[1]
    assert "mesh['a']" in third[1]


@pytest.mark.parametrize("group", [3, object(), [0, 1]])
def test_objects_that_are_not_groups_are_refused(cpu_state: PartialState, group: Any) -> None:
    with pytest.raises(SettingError, match="process group"):
        gather(torch.ones(1), group=group)


def test_a_name_without_a_mesh_is_refused(cpu_state: PartialState) -> None:
    with pytest.raises(SettingError, match="no device mesh"):
        reduce(torch.ones(1), group="dp")


def alone_in_a_group() -> None:
    state = PartialState(cpu=True)
    group = own_group([0], [1])
    rank = state.process_index
    assert gather(torch.tensor([rank]), group=group).tolist() == [rank]
    assert broadcast_object_list([rank], rank, group=group) == [rank]
    for refused, error in (
        (lambda: gather([1], group=group), UnknownKind),
        (lambda: reduce(torch.ones(1, dtype=torch.int64), "mean", group=group), UnknownKind),
        (lambda: broadcast(torch.ones(1), 1 - rank, group=group), SettingError),
        (lambda: broadcast_object_list((1,), group=group), UnknownKind),
        (lambda: gather_object(3, group=group), UnknownKind),
    ):
        with pytest.raises(error):
            refused()
    # Process 0 keeps the store: it must not leave while the other still connects its group.
    dist.barrier()


def test_a_group_of_one_refuses_what_several_refuse(two: Processes) -> None:
    two.run(alone_in_a_group)


def with_gradients() -> list[float]:
    state = PartialState(cpu=True)
    mesh, rank = mesh_2x2(), state.process_index
    mine = torch.tensor([1.0 + rank], requires_grad=True)
    every = gather({"x": mine}, differentiable=True, group=mesh["a"])["x"]
    # The loss of each process weighs the parts of its group by its own rank.
    (every * torch.tensor([1.0, 10.0]) * (1 + rank)).sum().backward()
    assert mine.grad is not None
    return mine.grad.tolist()


def test_gradients_flow_back_inside_of_a_group(four: Processes) -> None:
    # Rank 0 is first in its group with rank 2: 1 * (1 + 0) + 1 * (1 + 2).
    assert four.run(with_gradients) == [[4.0], [6.0], [40.0], [60.0]]


def agreeing() -> tuple[str, str, str]:
    state = PartialState(cpu=True)
    process, rank = current.process(), state.process_index
    group = own_group([0, 3], [1, 2])
    same = all_agree(process, "topic", f"value {rank in (0, 3)}", "Cannot agree.", 60, group=group)
    with pytest.raises(Exception, match=r"3|2") as differing:
        all_agree(process, "topic", str(rank), "Cannot agree.", 60, group=group)

    def fail() -> int:
        if rank == 3:
            raise SettingError("Cannot work.", "It is rank 3.", "Do not.")
        return rank

    if rank in (1, 2):
        assert raise_on_any_rank(process, "work", fail, "Cannot work.", 60, group=group) == rank
        failed = ""
    else:
        with pytest.raises(SettingError) as caught:
            raise_on_any_rank(process, "work", fail, "Cannot work.", 60, group=group)
        failed = str(caught.value)
    dist.barrier()
    return same, str(differing.value), failed


def test_the_processes_of_a_group_agree_among_themselves(four: Processes) -> None:
    first, second, _, last = four.run(agreeing)
    assert (first[0], second[0]) == ("value True", "value False")
    assert "'0' on rank 0; '3' on rank 3" in first[1]
    assert "'1' on rank 1; '2' on rank 2" in second[1]
    assert "Process 3 failed" in first[2]
    assert "It is rank 3." in last[2]


def counted() -> list[str]:
    PartialState(cpu=True)
    group = own_group([0, 2], [1])
    gather(torch.ones(1), group=group)
    with recording() as records:
        for _ in range(3):
            gather({"x": torch.ones(1), "y": torch.ones(2)}, group=group)
    return [record.operation for record in records]


def test_small_tensors_take_one_collective_of_the_group(three: Processes) -> None:
    first, second, _ = three.run(counted)
    assert first == ["all_gather"] * 3
    assert second == []


def logged() -> tuple[list[tuple[str, str, int]], str]:
    state = PartialState(cpu=True)
    mesh = mesh_2x2()
    gather(torch.ones(1))
    gather(torch.ones(1), group=mesh["b"])
    reduce(torch.ones(1), group=mesh["b"])
    calls = [(call.operation, call.group, call.number) for call in recent_calls(3)]
    where = where_is_everyone()
    state.wait_for_everyone()
    return calls, where


def test_the_log_and_the_report_name_the_group(four: Processes) -> None:
    calls, where = four.run(logged)[2]
    group = "the group 'b' of ranks 2-3"
    assert calls == [("gather", "", calls[0][2]), ("gather", group, 1), ("reduce", group, 2)]
    assert f"reduce() in {group}" in where


def given_up(found: str) -> None:
    """Return once rank 0 has called this too: a process that left would be missed for another reason."""
    store: Any = current.process().transport.store()
    if dist.get_rank() == 0:
        store.set("found", found)
    else:
        store.wait(["found"], timedelta(seconds=60))


def missing_member() -> str:
    state = PartialState(cpu=True, timeout=timedelta(seconds=4))
    group, found = dist.new_group([0, 2]), ""
    if state.process_index == 0:
        with pytest.raises(CollectiveError) as caught:
            gather(torch.ones(1), group=group)
        found = str(caught.value)
    given_up(found)
    return found


def test_a_process_that_never_uses_its_group_is_named(three: Processes) -> None:
    first, *_ = three.run(missing_member)
    assert "gather() in the group of ranks 0, 2" in first
    assert "Process 2 did not arrive" in first


def late_member() -> str:
    state = PartialState(cpu=True, timeout=timedelta(seconds=4))
    group, found = dist.new_group([0, 2]), ""
    if state.process_index != 1:
        gather(torch.ones(1), group=group)
    if state.process_index == 0:
        with pytest.raises(CollectiveError) as caught:
            reduce(torch.ones(1), group=group)
        found = str(caught.value)
    given_up(found)
    return found


def test_a_collective_that_a_member_never_joins_names_the_group(three: Processes) -> None:
    first, *_ = three.run(late_member)
    assert first.startswith("Cannot complete reduce() in the group of ranks 0, 2 at ")
    assert "after gather() in the group of ranks 0, 2" in first
