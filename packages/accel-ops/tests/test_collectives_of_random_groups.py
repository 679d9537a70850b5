"""Random worlds, partitions, overlapping groups and nested data: every collective equals a reference in plain Python.

The ranks are threads of this process. The reference computes with lists of numbers and knows neither torch nor ranks
outside of a group.
"""

from __future__ import annotations

import math
from collections import namedtuple
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from accel_ops import (
    ShapeMismatch,
    UnknownKind,
    all_to_all,
    broadcast,
    broadcast_object_list,
    gather,
    gather_object,
    pad_across_processes,
    reduce,
    reduce_scatter,
    scatter,
)
from accel_state import PartialState
from accel_testing.fresh import fresh
from accel_testing.threads import run_as_threads

Pair = namedtuple("Pair", "first second")

SETTINGS = settings(
    max_examples=20,
    deadline=None,
    # Ranks that wait for one that failed take seconds, so a failing example is not made smaller.
    phases=[Phase.explicit, Phase.reuse, Phase.generate],
    suppress_health_check=list(HealthCheck),
)

Rows = list[list[float]]


# ---------------------------------------------------------------- what is drawn


@st.composite
def worlds(draw: Any) -> tuple[int, list[list[int]]]:
    """A number of ranks, and groups of them: a partition of all, and some that overlap with it."""
    count = draw(st.integers(2, 8))
    ranks = draw(st.permutations(range(count)))
    cuts = sorted(draw(st.sets(st.integers(1, count - 1), max_size=3)))
    partition = [sorted(ranks[low:high]) for low, high in zip([0, *cuts], [*cuts, count], strict=True)]
    overlapping = draw(st.lists(st.sets(st.integers(0, count - 1), min_size=1).map(sorted), max_size=3))
    return count, partition + overlapping


leaves = st.tuples(
    st.just("leaf"),
    st.sampled_from(["int64", "float64"]),
    st.integers(1, 2),
    st.sampled_from([1, 2, 5, 1000]),
)
structures = st.recursive(
    leaves,
    lambda inner: (
        st.tuples(st.just("list"), st.lists(inner, max_size=3))
        | st.tuples(st.just("tuple"), st.lists(inner, max_size=3))
        | st.tuples(st.just("dict"), st.lists(inner, min_size=1, max_size=3))
        | st.tuples(st.just("pair"), st.lists(inner, min_size=2, max_size=2))
    ),
    max_leaves=5,
)


def rows_of(leaf: Sequence[Any], rank: int, seed: int, groups_of: int) -> Rows:
    """The numbers of a leaf on a rank: `leaf` says how many rows, times a number that a group can divide."""
    _, _, rows, columns = leaf
    return [
        [float((rank * 7 + row * 3 + column + seed) % 5 - 1) for column in range(columns)]
        for row in range(rows * groups_of)
    ]


def nested(spec: Any, leaf: Callable[[Any], Any]) -> Any:
    """Containers of a structure, with `leaf` of each of its leaves."""
    kind, *rest = spec
    if kind == "leaf":
        return leaf(spec)
    parts = [nested(part, leaf) for part in rest[0]]
    if kind == "dict":
        return {f"key {index}": part for index, part in enumerate(parts)}
    return Pair(*parts) if kind == "pair" else tuple(parts) if kind == "tuple" else parts


def tensors(spec: Any, rank: int, seed: int, groups_of: int) -> Any:
    return nested(spec, lambda leaf: torch.tensor(rows_of(leaf, rank, seed, groups_of), dtype=getattr(torch, leaf[1])))


def plain(data: Any) -> Any:
    """Nested data with lists in place of tensors."""
    if isinstance(data, torch.Tensor):
        return data.tolist()
    if isinstance(data, dict):
        return {key: plain(value) for key, value in data.items()}
    if isinstance(data, Pair):
        return Pair(*map(plain, data))
    return type(data)(map(plain, data)) if isinstance(data, (list, tuple)) else data


# ---------------------------------------------------------------- the reference

COMBINE: dict[str, Callable[[list[float]], float]] = {
    "sum": sum,
    "mean": lambda values: sum(values) / len(values),
    "max": max,
    "min": min,
    "product": math.prod,
}


def combined(op: str, everyones: list[Rows]) -> Rows:
    return [
        [COMBINE[op]([rows[row][column] for rows in everyones]) for column in range(len(everyones[0][0]))]
        for row in range(len(everyones[0]))
    ]


def part(rows: Rows, index: int, count: int) -> Rows:
    size = len(rows) // count
    return rows[index * size : (index + 1) * size]


def expected(spec: Any, members: list[int], rank: int, src: int, seed: int) -> dict[str, Any]:
    """The result of each collective of `results` on one rank."""
    count, index = len(members), members.index(rank)

    def of(join: Callable[[list[Rows]], Rows]) -> Any:
        return nested(spec, lambda leaf: join([rows_of(leaf, member, seed, count) for member in members]))

    return {
        "gather": of(lambda all_rows: [row for rows in all_rows for row in rows]),
        "gather to one": of(lambda all_rows: [row for rows in all_rows for row in rows]) if rank == src else None,
        **{op: of(lambda all_rows, op=op: combined(op, all_rows)) for op in ("sum", "max", "min", "product")},
        "broadcast": of(lambda all_rows: all_rows[members.index(src)]),
        "scatter": of(lambda all_rows: part(all_rows[members.index(src)], index, count)),
        "all_to_all": of(lambda all_rows: [row for rows in all_rows for row in part(rows, index, count)]),
        "reduce_scatter": of(lambda all_rows: part(combined("sum", all_rows), index, count)),
        "mean": COMBINE["mean"]([float(member) for member in members]),
        "objects": [(member, "x" * member) for member in members],
        "object list": [src, {"from": src}],
        "pad": [1.0] * (rank + 1) + [0.0] * (max(members) - rank),
    }


def results(spec: Any, group: Any, rank: int, members: list[int], src: int, seed: int) -> dict[str, Any]:
    """The result of each collective in a group."""

    def data() -> Any:
        return tensors(spec, rank, seed, len(members))

    found = {
        "gather": gather(data(), group=group),
        "gather to one": gather(data(), src, group=group),
        **{op: reduce(data(), op, group=group) for op in ("sum", "max", "min", "product")},
        "broadcast": broadcast(data(), src, group=group),
        "scatter": scatter(data() if rank == src else None, src, group=group),
        "all_to_all": all_to_all(data(), group=group),
        "reduce_scatter": reduce_scatter(data(), group=group),
        "mean": reduce(torch.tensor(float(rank), dtype=torch.float64), "mean", group=group),
        "objects": gather_object([(rank, "x" * rank)], group=group),
        "object list": broadcast_object_list([rank, {"from": rank}], src, group=group),
        "pad": pad_across_processes(torch.ones(rank + 1), group=group),
    }
    return {name: plain(value) for name, value in found.items()}


# ---------------------------------------------------------------- equal to the reference


def differences(groups: list[list[int]], specs: list[Any], srcs: list[int], seed: int) -> list[str]:
    """The collectives of all groups of this rank whose results differ from the reference."""
    rank = PartialState(cpu=True).process_index
    made = [dist.new_group(members) for members in groups]
    wrong = []
    for number, (group, members) in enumerate(zip(made, groups, strict=True)):
        if rank not in members:
            continue
        spec, src = specs[number % len(specs)], members[srcs[number % len(srcs)] % len(members)]
        found = results(spec, group, rank, members, src, seed)
        wanted = expected(spec, members, rank, src, seed)
        assert found.keys() == wanted.keys()
        unequal = [name for name in found if found[name] != wanted[name]]
        wrong += [f"{name} in {members}: {found[name]}, not {wanted[name]}" for name in unequal]
    return wrong


@SETTINGS
@given(
    world=worlds(),
    specs=st.lists(structures, min_size=1, max_size=3),
    srcs=st.lists(st.integers(0, 7), min_size=1, max_size=4),
    seed=st.integers(0, 4),
)
def test_collectives_of_random_groups_equal_plain_python(
    world: tuple[int, list[list[int]]], specs: list[Any], srcs: list[int], seed: int
) -> None:
    count, groups = world
    with fresh():
        assert run_as_threads(count, differences, groups, specs, srcs, seed) == [[]] * count


# ---------------------------------------------------------------- mismatches


def other_shape(group: Any) -> Any:
    return gather(torch.ones(3), group=group)


def other_dtype(group: Any) -> Any:
    return gather(torch.ones(2, dtype=torch.float64), group=group)


def other_structure(group: Any) -> Any:
    return gather([torch.ones(2)], group=group)


def other_collective(group: Any) -> Any:
    return reduce(torch.ones(2), group=group)


def no_tensor(group: Any) -> Any:
    return gather("text", group=group)


DEVIATIONS = {one.__name__: one for one in (other_shape, other_dtype, other_structure, other_collective, no_tensor)}


def calls_of(groups: list[list[int]], broken: int, deviant: int, deviation: str) -> list[str]:
    """What each call of this rank ends with: a gather in each group, where one rank of one group deviates."""
    rank = PartialState(cpu=True).process_index
    made = [dist.new_group(members) for members in groups]
    found = []
    for repeat in range(2):
        for number, (group, members) in enumerate(zip(made, groups, strict=True)):
            if rank not in members:
                continue
            deviates = repeat == 0 and number == broken and rank == deviant
            try:
                gathered = DEVIATIONS[deviation](group) if deviates else gather(torch.ones(2), group=group)
                found.append(f"{len(gathered)} of {members}")
            except (ShapeMismatch, UnknownKind) as error:
                named = f" that names rank {deviant}" if f"rank {deviant}" in str(error) else ""
                found.append(f"{type(error).__name__}{named}")
    return found


@SETTINGS
@given(world=worlds(), choice=st.integers(0, 63), deviation=st.sampled_from(sorted(DEVIATIONS)))
def test_a_mismatch_raises_on_the_ranks_of_its_group_alone(
    world: tuple[int, list[list[int]]], choice: int, deviation: str
) -> None:
    count, groups = world
    several = [number for number, members in enumerate(groups) if len(members) > 1]
    if not several:
        groups, several = [*groups, list(range(count))], [len(groups)]
    broken = several[choice % len(several)]
    deviant = groups[broken][choice // 8 % len(groups[broken])]
    with fresh():
        told = run_as_threads(count, calls_of, groups, broken, deviant, deviation)
    for rank, found in enumerate(told):
        own = [(repeat, number) for repeat in range(2) for number, group in enumerate(groups) if rank in group]
        for outcome, (repeat, number) in zip(found, own, strict=True):
            if (repeat, number) != (0, broken):
                assert outcome == f"{2 * len(groups[number])} of {groups[number]}"
            elif deviation == "no_tensor" and rank == deviant:
                assert outcome == "UnknownKind"
            else:
                assert outcome == f"ShapeMismatch that names rank {deviant}"
