"""gather, reduce, broadcast, pad and scatter on 1, 2 and 4 real processes, against plain torch.distributed."""

from __future__ import annotations

from collections import namedtuple
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from accel_ops import broadcast, gather, gather_object, pad_across_processes, reduce, scatter
from accel_ops.packing import as_bytes
from accel_ops.tree import flatten, leaves_with_paths
from accel_state import PartialState
from accel_state.protocol.header import HEADER_BYTES, eager_header_bytes
from accel_testing.processes import Processes

Pair = namedtuple("Pair", "first second")

ADDABLE = ["float32", "float64", "bfloat16", "float16", "int64", "int32", "int16", "uint8", "int8", "complex64"]
MOVABLE = [*ADDABLE, "bool", "complex128", "float8_e4m3fn", "float8_e5m2", "uint16"]

# Sizes within the eager header, beyond it together, and beyond what travels packed.
SHAPES = [[], [0], [3], [2, 3], [1, 0, 2], [4, 1, 2], [5000], [40, 300], [300, 300]]


def leaves_of(dtypes: list[str]) -> Any:
    return st.tuples(st.sampled_from(dtypes), st.sampled_from(SHAPES), st.booleans()).map(lambda leaf: ("leaf", *leaf))


def structures_of(dtypes: list[str]) -> Any:
    return st.recursive(
        leaves_of(dtypes),
        lambda inner: (
            st.lists(inner, max_size=3).map(lambda parts: ("list", parts))
            | st.lists(inner, max_size=3).map(lambda parts: ("tuple", parts))
            | st.dictionaries(st.sampled_from("abcd"), inner, max_size=4).map(lambda parts: ("dict", parts))
            | st.tuples(inner, inner).map(lambda parts: ("pair", list(parts)))
        ),
        max_leaves=8,
    )


def build(spec: Any, generator: torch.Generator) -> Any:
    """Nested data; numbers are small enough that all sums and means of four are exact in every dtype."""
    kind, *rest = spec
    if kind == "leaf":
        return tensor_of(*rest, generator)
    if kind == "dict":
        items = [(key, build(part, generator)) for key, part in rest[0].items()]
        # Processes fill their dictionaries in different orders.
        return dict(items if PartialState().process_index % 2 else reversed(items))
    parts = [build(part, generator) for part in rest[0]]
    return parts if kind == "list" else tuple(parts) if kind == "tuple" else Pair(*parts)


def tensor_of(dtype: str, shape: list[int], transposed: bool, generator: torch.Generator) -> torch.Tensor:
    numbers = torch.randint(0, 4, torch.Size(shape), generator=generator) * 4
    tensor = numbers.to(torch.float32).to(getattr(torch, dtype))
    return tensor.transpose(0, 1).contiguous().transpose(0, 1) if transposed and len(shape) > 1 else tensor


def data_of(spec: Any, seed: int) -> Any:
    rank = PartialState(cpu=True).process_index
    return build(spec, torch.Generator().manual_seed(seed * 100 + rank))


def in_order(data: Any) -> list[tuple[str, torch.Tensor]]:
    """Leaves by path, so that all processes take them in the same order."""
    return sorted(leaves_with_paths(data), key=lambda found: found[0])


def on_all_ranks(leaf: torch.Tensor) -> list[torch.Tensor]:
    """Every process's tensor, by the plainest means."""
    world_size = PartialState().num_processes
    if world_size == 1 or not leaf.numel():
        return [leaf] * world_size
    given = leaf.contiguous().view(-1).view(torch.uint8)
    rows = [torch.empty_like(given) for _ in range(world_size)]
    dist.all_gather(rows, given)
    return [row.view(leaf.dtype).view(leaf.shape) for row in rows]


def check_same(mine: Any, expected: dict[str, torch.Tensor], data: Any) -> None:
    assert flatten(mine, "")[1] == flatten(data, "")[1]
    for path, leaf in leaves_with_paths(mine):
        wanted = expected[path]
        assert leaf.dtype is wanted.dtype, (path, leaf.dtype, wanted.dtype)
        assert leaf.shape == wanted.shape, (path, leaf.shape, wanted.shape)
        assert torch.equal(as_bytes(leaf.contiguous()), as_bytes(wanted.contiguous())), path


def expected_gather(leaf: torch.Tensor) -> torch.Tensor:
    rows = on_all_ranks(leaf)
    if len(rows) == 1:
        return leaf
    whole = torch.cat([as_bytes(row.contiguous()) for row in rows]).view(leaf.dtype)
    return whole.view(len(rows) * leaf.shape[0], *leaf.shape[1:]) if leaf.dim() else whole


def compare_gathers(specs: list[Any]) -> None:
    for seed, spec in enumerate(specs):
        data = data_of(spec, seed)
        expected = {path: expected_gather(leaf) for path, leaf in in_order(data)}
        check_same(gather(data), expected, data)
        for dst in range(PartialState().num_processes):
            mine = gather(data, dst=dst)
            if dst == PartialState().process_index:
                check_same(mine, expected, data)
            else:
                assert mine is None


def compare_reductions(specs: list[Any]) -> None:
    for seed, spec in enumerate(specs):
        data = data_of(spec, seed)
        before = {path: leaf.clone() for path, leaf in in_order(data)}
        rows = {path: on_all_ranks(leaf) for path, leaf in in_order(data)}
        sums = {path: torch.stack(parts).sum(0, dtype=parts[0].dtype) for path, parts in rows.items()}
        check_same(reduce(data, "sum"), sums, data)
        if all(leaf.is_floating_point() or leaf.is_complex() for leaf in sums.values()):
            check_same(reduce(data), {path: total / len(rows[path]) for path, total in sums.items()}, data)
            check_same(reduce(data, "sum", 2.0), {path: total * 2 for path, total in sums.items()}, data)
        check_same(data, before, data)
        assert reduce(data, "none") is data


def compare_broadcasts(specs: list[Any]) -> None:
    for seed, spec in enumerate(specs):
        for source in range(PartialState(cpu=True).num_processes):
            data = data_of(spec, seed)
            expected = {path: on_all_ranks(leaf)[source] for path, leaf in in_order(data)}
            assert broadcast(data, src=source) is data
            check_same(data, expected, data)


def compare_scatters(specs: list[Any]) -> None:
    state = PartialState(cpu=True)
    for seed, spec in enumerate(specs):
        data = data_of(("dict", {"a": spec, "b": ("leaf", "float32", [8, 2], False)}), seed)
        for source in range(state.num_processes):
            whole = {path: on_all_ranks(leaf)[source] for path, leaf in in_order(data)}
            mine = scatter(data if state.process_index == source else None, src=source)
            parts = {path: leaf.chunk(state.num_processes)[state.process_index] for path, leaf in whole.items()}
            for path, leaf in leaves_with_paths(mine):
                assert torch.equal(as_bytes(leaf.contiguous()), as_bytes(parts[path].contiguous())), path
                assert leaf.shape == parts[path].shape


def compare_pads(sizes: list[int], dim: int, value: int, first: bool) -> None:
    state = PartialState(cpu=True)
    shapes = [[2 + (state.process_index * size) % 5 if axis == dim else 3 for axis in range(3)] for size in sizes]
    data = [torch.randint(5, 9, shape) for shape in shapes]
    padded = pad_across_processes(data, dim=dim, pad_index=value, pad_first=first)
    for before, after in zip(data, padded, strict=True):
        longest = max(gather_object([before.shape[dim]])) if state.num_processes > 1 else before.shape[dim]
        missing = longest - before.shape[dim]
        assert after.shape[dim] == longest
        assert after.narrow(dim, missing if first else 0, before.shape[dim]).equal(before)
        assert after.narrow(dim, 0 if first else before.shape[dim], missing).eq(value).all()
        assert missing or after is before


@pytest.fixture(scope="module", params=[1, 2, 4])
def group(request: pytest.FixtureRequest) -> Iterator[Processes]:
    with Processes(request.param) as group:
        yield group


few = settings(max_examples=6, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@few
@given(specs=st.lists(structures_of(MOVABLE), min_size=5, max_size=12))
def test_gather_equals_plain_torch(group: Processes, specs: list[Any]) -> None:
    group.run(compare_gathers, specs)


@few
@given(specs=st.lists(structures_of(ADDABLE), min_size=5, max_size=12))
def test_reduce_equals_plain_torch(group: Processes, specs: list[Any]) -> None:
    group.run(compare_reductions, specs)


@few
@given(specs=st.lists(structures_of(MOVABLE), min_size=5, max_size=12))
def test_broadcast_equals_plain_torch(group: Processes, specs: list[Any]) -> None:
    group.run(compare_broadcasts, specs)


@few
@given(
    sizes=st.lists(st.integers(0, 9), min_size=1, max_size=20),
    dim=st.integers(0, 2),
    value=st.integers(0, 9),
    first=st.booleans(),
)
def test_padding_equals_plain_torch(group: Processes, sizes: list[int], dim: int, value: int, first: bool) -> None:
    group.run(compare_pads, sizes, dim, value, first)


@few
@given(
    specs=st.lists(
        st.tuples(
            st.sampled_from(MOVABLE), st.sampled_from([[4], [8, 3], [4, 0], [0, 2], [64, 600]]), st.booleans()
        ).map(lambda leaf: ("list", [("leaf", *leaf)])),
        min_size=2,
        max_size=6,
    )
)
def test_scatter_equals_plain_torch(group: Processes, specs: list[Any]) -> None:
    group.run(compare_scatters, specs)


def around_the_slot() -> list[int]:
    rank, limit = PartialState(cpu=True).process_index, eager_header_bytes(2)
    wrong = []
    for length in range(limit - 2 * HEADER_BYTES, limit + HEADER_BYTES):
        own = torch.full((length,), rank, dtype=torch.uint8)
        if gather(own).tolist() != [0] * length + [1] * length or gather_object([bytes(length)]) != [bytes(length)] * 2:
            wrong.append(length)
    return wrong


def test_tensors_around_the_size_of_the_eager_header_arrive_whole(two: Processes) -> None:
    assert two.run(around_the_slot) == [[], []]


def grad_modes() -> list[bool]:
    PartialState(cpu=True)
    found = []
    for mode in (True, False):
        with torch.set_grad_enabled(mode):
            gather(torch.ones(1))
            found.append(torch.is_grad_enabled())
    return found


def test_gradients_are_recorded_after_a_collective_as_before_it(two: Processes) -> None:
    assert two.run(grad_modes) == [[True, False]] * 2
