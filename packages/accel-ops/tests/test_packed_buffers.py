"""Tensors of all dtypes in one buffer, and back."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from accel_ops.packing import PackedLayout, as_bytes, gathered_shape
from accel_state.protocol.header import ALIGNMENT, HEADER_BYTES, eager_header_bytes

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

# Some draws have one dtype and all dimensions but the first in common, which is packed in another way.
mixed = st.lists(st.tuples(st.sampled_from(DTYPES), st.lists(st.integers(0, 4), max_size=3)), max_size=12)
alike = st.tuples(st.sampled_from(DTYPES), st.lists(st.integers(1, 3), max_size=2), st.lists(st.integers(0, 3))).map(
    lambda drawn: [(drawn[0], [first, *drawn[1]]) for first in drawn[2]]
)
same = st.tuples(st.sampled_from(DTYPES), st.lists(st.integers(1, 3), max_size=2), st.integers(1, 5)).map(
    lambda drawn: [(drawn[0], drawn[1])] * drawn[2]
)
kinds = mixed | alike | same


def tensor_of(dtype: torch.dtype, shape: list[int]) -> torch.Tensor:
    raw = torch.randint(0, 2, (torch.Size(shape).numel() * dtype.itemsize,), dtype=torch.uint8)
    return raw.view(dtype).view(shape)


@settings(max_examples=80, deadline=None)
@given(kinds, st.integers(1, 3))
def test_unpacking_returns_the_packed_tensors(given_kinds: list[tuple[torch.dtype, list[int]]], rows: int) -> None:
    tensors = [[tensor_of(dtype, shape) for dtype, shape in given_kinds] for _ in range(rows)]
    layout = PackedLayout(((tensor.shape, tensor.dtype) for tensor in tensors[0]), rows)
    buffer = torch.full((rows, layout.nbytes), 255, dtype=torch.uint8)
    for row in range(rows):
        layout.write(tensors[row], layout.parts(buffer[row]))
    for position, joined in enumerate(layout.join(layout.parts(buffer))):
        parts = [row[position] for row in tensors]
        assert joined.shape == gathered_shape(parts[0].shape, rows)
        assert joined.dtype is parts[0].dtype
        assert torch.equal(as_bytes(joined), torch.cat([as_bytes(part) for part in parts]))
    for copy in (True, False):
        for position, part in enumerate(layout.split(layout.parts(buffer[0]), copy)):
            assert part.shape == tensors[0][position].shape
            assert torch.equal(as_bytes(part), as_bytes(tensors[0][position]))


@settings(max_examples=40, deadline=None)
@given(kinds)
def test_each_unpacked_tensor_owns_its_memory(given_kinds: list[tuple[torch.dtype, list[int]]]) -> None:
    layout = PackedLayout(((shape, dtype) for dtype, shape in given_kinds), 2)
    buffer = torch.zeros(2, layout.nbytes, dtype=torch.uint8)
    for part in [*layout.join(layout.parts(buffer)), *layout.split(layout.parts(buffer[0]))]:
        assert part.untyped_storage().nbytes() == part.nbytes


def test_packing_no_tensors_takes_no_bytes() -> None:
    assert PackedLayout([], 2).nbytes == 0


def test_segments_begin_where_every_dtype_can_be_read() -> None:
    layout = PackedLayout([((1,), torch.bool), ((3,), torch.complex128), ((), torch.int8), ((5,), torch.bool)])
    assert all(segment.start % ALIGNMENT == 0 for segment in layout.segments)
    assert layout.nbytes % ALIGNMENT == 0
    assert [segment.members for segment in layout.segments] == [(0, 3), (1,), (2,)]


@pytest.mark.parametrize("beside", [[], [torch.zeros(2, 7, dtype=torch.int64)]])
def test_tensors_that_are_not_contiguous_are_packed_in_their_order(beside: list[torch.Tensor]) -> None:
    tensors = [torch.arange(6).reshape(2, 3).t(), *beside]
    layout = PackedLayout((tensor.shape, tensor.dtype) for tensor in tensors)
    buffer = torch.empty(layout.nbytes, dtype=torch.uint8)
    layout.write(tensors, layout.parts(buffer))
    assert layout.split(layout.parts(buffer))[0].tolist() == [[0, 3], [1, 4], [2, 5]]


@pytest.mark.parametrize("world_size", [2, 3, 4, 7, 64, 1000, 100_000])
def test_eager_headers_shrink_with_the_number_of_processes(world_size: int) -> None:
    size = eager_header_bytes(world_size)
    assert size % ALIGNMENT == 0
    assert HEADER_BYTES % ALIGNMENT == 0
    assert 1024 <= size <= 64 * 1024
    assert size <= max(1024, 256 * 1024 // world_size)
