"""Tensors of all dtypes in one buffer, and back."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from accel_ops.packing import ALIGNMENT, Packing, as_bytes
from accel_ops.slot import HEADER, slot_size

DTYPES = [
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.uint8,
    torch.int8,
    torch.int16,
    torch.uint16,
    torch.int32,
    torch.int64,
    torch.bool,
    torch.complex64,
    torch.complex128,
]

kinds = st.tuples(st.sampled_from(DTYPES), st.lists(st.integers(0, 4), max_size=3))


def tensor_of(dtype: torch.dtype, shape: list[int]) -> torch.Tensor:
    raw = torch.randint(0, 2, (torch.Size(shape).numel() * dtype.itemsize,), dtype=torch.uint8)
    return raw.view(dtype).view(shape)


@settings(max_examples=40, deadline=None)
@given(st.lists(kinds, max_size=12), st.integers(1, 3))
def test_what_was_packed_is_unpacked(given_kinds: list[tuple[torch.dtype, list[int]]], rows: int) -> None:
    tensors = [[tensor_of(dtype, shape) for dtype, shape in given_kinds] for _ in range(rows)]
    packing = Packing((tensor.numel(), tensor.dtype) for tensor in tensors[0])
    buffer = torch.full((rows, packing.nbytes), 255, dtype=torch.uint8)
    for row in range(rows):
        packing.write(tensors[row], buffer[row])
    unpacked = packing.read(buffer)
    views = packing.views(buffer[0])
    for position, part in enumerate(unpacked):
        assert part.shape == (rows, tensors[0][position].numel())
        assert part.dtype is tensors[0][position].dtype
        for row in range(rows):
            assert torch.equal(as_bytes(part[row]), as_bytes(tensors[row][position]))
        assert torch.equal(as_bytes(views[position].clone()), as_bytes(tensors[0][position]))


@settings(max_examples=40, deadline=None)
@given(st.lists(kinds, min_size=2, max_size=12))
def test_each_unpacked_tensor_owns_its_memory(given_kinds: list[tuple[torch.dtype, list[int]]]) -> None:
    packing = Packing((torch.Size(shape).numel(), dtype) for dtype, shape in given_kinds)
    for part in packing.read(torch.zeros(1, packing.nbytes, dtype=torch.uint8)):
        assert part.untyped_storage().nbytes() == part.nbytes


def test_segments_begin_where_every_dtype_can_be_read() -> None:
    packing = Packing([(1, torch.bool), (3, torch.complex128), (1, torch.int8), (5, torch.bool)])
    assert all(segment.start % ALIGNMENT == 0 for segment in packing.segments)
    assert packing.nbytes % ALIGNMENT == 0
    assert [segment.members for segment in packing.segments] == [(0, 3), (1,), (2,)]


def test_tensors_that_are_not_contiguous_are_packed_in_their_order() -> None:
    tensor = torch.arange(6).reshape(2, 3).t()
    packing = Packing([(6, torch.int64)])
    buffer = torch.empty(packing.nbytes, dtype=torch.uint8)
    packing.write([tensor], buffer)
    assert packing.views(buffer)[0].tolist() == [0, 3, 1, 4, 2, 5]


@pytest.mark.parametrize("world_size", [2, 3, 4, 7, 64, 1000, 100_000])
def test_slots_shrink_with_the_number_of_processes(world_size: int) -> None:
    size = slot_size(world_size)
    assert size % ALIGNMENT == 0
    assert HEADER % ALIGNMENT == 0
    assert 1024 <= size <= 64 * 1024
    assert size <= max(1024, 256 * 1024 // world_size)
