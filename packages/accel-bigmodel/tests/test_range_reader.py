"""Parts of tensors in files, read into tensors of other dtypes, devices and memory formats."""

from __future__ import annotations

import ctypes
import math
import mmap
import os
import threading
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from accel_bigmodel.weight_files import range_reader
from accel_bigmodel.weight_files.range_reader import RangeReader
from accel_state.errors import CheckpointError
from accel_testing.plugin import on_devices

BEGIN = 13


def stored(path: Path, tensor: torch.Tensor) -> torch.Tensor:
    """The tensor, written behind some other bytes."""
    path.write_bytes(b"x" * BEGIN + tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return tensor


DIMENSIONS = st.lists(st.tuples(st.integers(1, 7), st.integers(0, 6), st.integers(0, 7)), max_size=4)


@settings(max_examples=150, deadline=None)
@given(dimensions=DIMENSIONS, dtype=st.sampled_from([torch.float32, torch.float64, torch.bfloat16]), flip=st.booleans())
def test_a_part_of_a_tensor_arrives_and_no_other_byte_is_read(
    tmp_path_factory: pytest.TempPathFactory,
    dimensions: list[tuple[int, int, int]],
    dtype: torch.dtype,
    flip: bool,
) -> None:
    shape = [size for size, _, _ in dimensions]
    starts = [min(start, size - 1) for size, start, _ in dimensions]
    sizes = [min(count, size - start) for (size, _, count), start in zip(dimensions, starts, strict=True)]
    path = tmp_path_factory.mktemp("part") / "file"
    whole = stored(path, torch.arange(float(math.prod(shape))).reshape(shape))
    # Flipped, the target is not contiguous.
    target = torch.full(sizes[::-1], math.nan, dtype=dtype).permute(list(range(len(sizes)))[::-1])
    target = target if flip else target.contiguous()
    before = range_reader.PIECE, range_reader.BLOCK
    range_reader.PIECE, range_reader.BLOCK = 64, 32
    try:
        reader = RangeReader(threads=3)
        reader.add(target, path, BEGIN, torch.float32, shape, starts)
        reader.run()
    finally:
        range_reader.PIECE, range_reader.BLOCK = before
    for dimension, (start, size) in enumerate(zip(starts, sizes, strict=True)):
        whole = whole.narrow(dimension, start, size)
    assert torch.equal(target, whole.to(dtype))
    assert reader.bytes_read == reader.size == whole.numel() * 4


@on_devices("cpu", "simulated", differs="pinned staging buffers and a stream for each thread")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64])
def test_weights_arrive_on_devices(tmp_path: Path, device: torch.device, dtype: torch.dtype) -> None:
    whole = stored(tmp_path / "file", torch.arange(3e6).reshape(1500, 2000))
    target = torch.empty(whole.shape, dtype=dtype, device=device)
    columns = torch.empty(1500, 300, dtype=dtype, device=device)
    reader = RangeReader()
    reader.add(target, tmp_path / "file", BEGIN, torch.float32)
    reader.add(columns, tmp_path / "file", BEGIN, torch.float32, whole.shape, (0, 700))
    reader.run()
    assert torch.equal(target.cpu(), whole.to(dtype))
    assert torch.equal(columns.cpu(), whole[:, 700:1000].to(dtype))


def test_a_parameter_that_is_filled_counts_as_changed(tmp_path: Path) -> None:
    stored(tmp_path / "file", torch.ones(3))
    parameter = torch.nn.Parameter(torch.zeros(3))
    version = parameter._version
    reader = RangeReader()
    reader.add(parameter, tmp_path / "file", BEGIN)
    reader.run()
    assert parameter.tolist() == [1, 1, 1]
    assert parameter._version > version


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_tensors_of_inference_mode_are_filled_in_that_mode(tmp_path: Path, dtype: torch.dtype) -> None:
    stored(tmp_path / "file", torch.ones(3))
    with torch.inference_mode():
        target, reader = torch.zeros(3, dtype=dtype), RangeReader()
        reader.add(target, tmp_path / "file", BEGIN, torch.float32)
        reader.run()
    assert target.tolist() == [1, 1, 1]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_file_that_became_shorter_is_named_with_the_offset(tmp_path: Path, dtype: torch.dtype) -> None:
    path = tmp_path / "file"
    stored(path, torch.ones(3_000_000))
    os.truncate(path, 5_000_000)
    reader = RangeReader()
    reader.add(torch.empty(3_000_000, dtype=dtype), path, BEGIN, torch.float32)
    # Threads read the second and the third piece at the same time, and both are cut short; a piece that is converted
    # is read in blocks.
    step = range_reader.PIECE if dtype == torch.float32 else range_reader.BLOCK
    ends = [end for end in range(step, 12_000_000 + step, step) if end + BEGIN > 5_000_000]
    offsets = "|".join(str(BEGIN + end - step) for end in ends)
    with pytest.raises(
        CheckpointError, match=rf"at offset ({offsets}) of '.*file'.\n.*the file ends \d+ bytes too early"
    ):
        reader.run()
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("accel-load")]


def pages_in_cache(path: Path) -> int:
    """How many pages of a file the page cache holds."""
    size = path.stat().st_size
    with open(path, "rb") as file, mmap.mmap(file.fileno(), size, access=mmap.ACCESS_COPY) as pages:
        states = (ctypes.c_ubyte * -(-size // mmap.PAGESIZE))()
        first = ctypes.c_char.from_buffer(pages)
        libc = ctypes.CDLL(None, use_errno=True)
        assert libc.mincore(ctypes.c_void_p(ctypes.addressof(first)), ctypes.c_size_t(size), states) == 0
        del first
    return sum(state & 1 for state in states)


@pytest.mark.skipif(not hasattr(os, "posix_fadvise"), reason="the system takes no advice on the page cache")
@pytest.mark.parametrize("larger", [False, True])
def test_pages_of_a_file_that_is_larger_than_memory_leave_the_cache(tmp_path: Path, larger: bool) -> None:
    path = tmp_path / "file"
    whole = stored(path, torch.arange(4e6))
    with open(path, "rb+") as file:
        # Pages that are not on the disk cannot leave.
        os.fsync(file.fileno())
    if pages_in_cache(path) < 16e6 / mmap.PAGESIZE:
        pytest.skip("this file system does not say what is in its cache")
    target = torch.empty_like(whole)
    reader = RangeReader(cache_up_to=10_000_000 if larger else 100_000_000)
    reader.add(target, path, BEGIN)
    reader.run()
    assert torch.equal(target, whole)
    left = pages_in_cache(path) * mmap.PAGESIZE / 16e6
    assert left < 0.1 if larger else left > 0.9
