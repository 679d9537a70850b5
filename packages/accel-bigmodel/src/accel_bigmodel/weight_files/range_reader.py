"""Reads byte ranges of files into tensors, on several threads.

If the bytes of a range are those of the tensor, it is read directly into the tensor's memory. A tensor of another
dtype, device or memory format is filled through a staging buffer of 4 MiB per thread. If it is faster for the device,
the buffer is pinned, and each thread copies on a separate stream. So a load needs little memory besides the tensors
themselves.

On a cold page cache, how a file is read decides how large the parts are that Linux caches. So each piece begins at a
multiple of 4 MiB and is read from a file that was opened for it. POSIX_FADV_WILLNEED would make Linux cache single
pages, and reading them takes twice the CPU time.
"""

from __future__ import annotations

import ctypes
import itertools
import math
import mmap
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from io import FileIO
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor

from accel_state.devices.select import family_of
from accel_state.errors import CheckpointError
from accel_state.untrusted import open_regular

__all__ = ("PIECE", "RangeReader")

PIECE: Final = 1 << 22
"""Bytes that a thread reads before it takes more work; the size of its staging buffer."""

BLOCK: Final = 1 << 20
"""Bytes that the processor converts at a time, small enough to stay in its cache."""

_LARGEST_ELEMENT: Final = 16
"""Bytes of complex128."""

_THREADS: Final = min(8, max(4, os.cpu_count() or 1))
"""One thread leaves a disk idle between two reads; staging buffers of more than 8 take memory and save no time."""


@dataclass(frozen=True)
class _Part:
    """A part of a tensor in a file, which may be all of it, and the tensor that it fills.

    Args:
        path: the file.
        begin: first byte of the whole tensor in the file.
        dtype: dtype in the file.
        shape: shape of the whole tensor.
        starts: first index of the part in each dimension.
        target: the tensor to fill; its shape is that of the part.
    """

    path: Path
    begin: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    starts: tuple[int, ...]
    target: Tensor

    def pieces(self) -> Iterator[_Piece]:
        """The part in pieces of at most `PIECE` bytes, in the order of the file."""
        target, itemsize = self.target, self.dtype.itemsize
        if target.numel() == 0:
            return
        if target.is_contiguous():
            flat, done = target.view(-1), 0
            for ranges in _grouped(self._ranges(), PIECE):
                size = sum(length for _, length in ranges) // itemsize
                yield _Piece(self, ranges, flat[done : done + size])
                done += size
        elif target.numel() * itemsize <= PIECE:
            yield _Piece(self, list(self._ranges()), target)
        else:
            row = math.prod(self.shape[1:]) * itemsize
            for index in range(target.shape[0]):
                begin = self.begin + (self.starts[0] + index) * row
                part = _Part(self.path, begin, self.dtype, self.shape[1:], self.starts[1:], target[index])
                yield from part.pieces()

    def _ranges(self) -> Iterator[tuple[int, int]]:
        """Offset and length of each contiguous run of bytes, in C order."""
        sizes, itemsize = tuple(self.target.shape), self.dtype.itemsize
        # All dimensions after the last one that is split are contiguous in the file.
        cut = max((d for d, size in enumerate(sizes) if size != self.shape[d]), default=-1)
        inner = math.prod(self.shape[cut + 1 :]) * itemsize
        length = inner * (sizes[cut] if cut >= 0 else 1)
        first = self.begin + (self.starts[cut] * inner if cut >= 0 else 0)
        strides = [math.prod(self.shape[d + 1 :]) * itemsize for d in range(max(cut, 0))]
        for indexes in itertools.product(*(range(size) for size in sizes[: max(cut, 0)])):
            places = zip(indexes, self.starts, strides, strict=False)
            yield first + sum((start + index) * stride for index, start, stride in places), length


@dataclass(frozen=True)
class _Piece:
    """What a thread reads at a time: ranges of one file, which fill a view of the target one after the other."""

    part: _Part
    ranges: list[tuple[int, int]]
    target: Tensor

    @property
    def size(self) -> int:
        return sum(length for _, length in self.ranges)

    def is_direct(self) -> bool:
        """Whether the bytes of the file are those of the target's memory."""
        target = self.target
        plain = target.device.type == "cpu" and target.is_contiguous() and not (target.is_neg() or target.is_conj())
        return plain and target.dtype == self.part.dtype

    def blocks(self) -> Iterator[_Piece]:
        """The piece in blocks of at most `BLOCK` bytes, where its target is contiguous."""
        if not self.target.is_contiguous():
            yield self
            return
        flat, done = self.target.view(-1), 0
        for ranges in _grouped(iter(self.ranges), BLOCK):
            size = sum(length for _, length in ranges) // self.part.dtype.itemsize
            yield _Piece(self.part, ranges, flat[done : done + size])
            done += size


def _grouped(ranges: Iterator[tuple[int, int]], most: int) -> Iterator[list[tuple[int, int]]]:
    """Ranges in groups of at most `most` bytes; longer ones are split at multiples of it, between elements."""
    group: list[tuple[int, int]] = []
    room = most
    for offset, length in ranges:
        while length > room:
            # A range that is split begins a group, so that each piece begins with an element.
            if not group:
                cut = room - offset % room // _LARGEST_ELEMENT * _LARGEST_ELEMENT
                group.append((offset, cut))
                offset, length = offset + cut, length - cut
            yield group
            group, room = [], most
        group.append((offset, length))
        room -= length
    if group:
        yield group


class RangeReader:
    """Fills tensors from files.

    Args:
        threads: number of threads that read at the same time.
        cache_up_to: size of a file in bytes above which its pages are removed from the page cache after reading, so
            that they do not displace others; if None, the memory of the machine.

    Attributes:
        size: number of bytes that `run` will read.
        bytes_read: number of bytes read so far.

    Example:
        reader = RangeReader()
        weight = torch.empty(1024, 1024, dtype=torch.bfloat16)
        reader.add(weight, Path("model.safetensors"), begin=4096, dtype=torch.float32)
        reader.run()
    """

    def __init__(self, *, threads: int = _THREADS, cache_up_to: int | None = None) -> None:
        self.size = 0
        self.bytes_read = 0
        self._threads = threads
        self._cache_up_to = cache_up_to
        self._parts: list[_Part] = []
        self._copies: list[tuple[Tensor, Tensor]] = []
        self._work: Iterator[_Piece | tuple[Tensor, Tensor]] = iter(())
        self._advance: Callable[[int], object] | None = None
        self._lock = threading.Lock()

    def add(
        self,
        target: Tensor,
        path: Path,
        begin: int,
        dtype: torch.dtype | None = None,
        shape: Sequence[int] | None = None,
        starts: Sequence[int] | None = None,
    ) -> None:
        """Add a tensor that `run` fills with a tensor of a file, or with a part of it.

        Args:
            target: any strided tensor with memory.
            path: the file.
            begin: offset of the tensor in the file in bytes; it is stored in C order.
            dtype: its dtype in the file; if None, that of the target.
            shape: its shape in the file; if None, that of the target.
            starts: first index of the part in each dimension; if None, zeros.
        """
        target = target.detach()
        whole = tuple(target.shape if shape is None else shape)
        first = tuple([0] * len(whole) if starts is None else starts)
        self._parts.append(_Part(path, begin, dtype or target.dtype, whole, first, target))
        self.size += target.numel() * (dtype or target.dtype).itemsize

    def add_copy(self, target: Tensor, source: Tensor) -> None:
        """Add a tensor that `run` fills from another one, which torch has mapped from a file of `torch.save`."""
        self._copies.append((target.detach(), source))
        self.size += source.numel() * source.dtype.itemsize

    def run(self, advance: Callable[[int], object] | None = None) -> None:
        """Fill all tensors, file by file.

        Args:
            advance: called by any thread with the number of bytes that it has read.

        Raises:
            CheckpointError: a file cannot be read, or ends too early; tensors may be filled in part.
        """
        parts, self._parts = sorted(self._parts, key=lambda part: (str(part.path), part.begin)), []
        copies, self._copies = self._copies, []
        self._work = itertools.chain(itertools.chain.from_iterable(part.pieces() for part in parts), copies)
        self._advance = advance
        for device in {part.target.device for part in parts}:
            if _has_streams(device):
                # Operations that were queued on the device before may still use the memory of the targets.
                torch.get_device_module(device).synchronize(device)
        threads = min(self._threads, 1 + self.size // PIECE)
        inference = torch.is_inference_mode_enabled()
        with ThreadPoolExecutor(threads, "accel-load") as pool:
            running = [pool.submit(_ReadingThread(self).run, inference) for _ in range(threads)]
            try:
                for future in running:
                    future.result()
            finally:
                # After an error in one thread, the others have nothing more to do.
                with self._lock:
                    self._work = iter(())
        for part in parts:
            if not part.target.is_inference():
                torch.autograd.graph.increment_version(part.target)

    def next(self) -> _Piece | tuple[Tensor, Tensor] | None:
        """The next piece to read or copy; None if nothing is left."""
        with self._lock:
            return next(self._work, None)

    def count(self, size: int) -> None:
        """Count bytes that were read."""
        with self._lock:
            self.bytes_read += size
        if self._advance is not None:
            self._advance(size)

    @cached_property
    def cache_limit(self) -> int:
        """Size of a file above which its pages are removed from the page cache."""
        return family_of("cpu").total_memory() if self._cache_up_to is None else self._cache_up_to


class _ReadingThread:
    """One thread of a reader, with its staging buffer."""

    def __init__(self, reader: RangeReader) -> None:
        self._reader = reader
        self._streams: dict[torch.device, Any] = {}

    def run(self, inference: bool) -> None:
        """Read until nothing is left."""
        # A tensor created in inference mode can only be written in that mode, which is set per thread.
        with torch.inference_mode(inference), torch.no_grad():
            while (work := self._reader.next()) is not None:
                if isinstance(work, _Piece):
                    self._read(work)
                    self._reader.count(work.size)
                else:
                    target, source = work
                    target.copy_(source)
                    self._reader.count(source.numel() * source.dtype.itemsize)

    def _read(self, piece: _Piece) -> None:
        direct = piece.is_direct()
        in_blocks = not direct and not _has_streams(piece.target.device)
        with _opened(piece) as file:
            for block in piece.blocks() if in_blocks else (piece,):
                self._read_block(file, block, direct)

    def _read_block(self, file: FileIO, piece: _Piece, direct: bool) -> None:
        size = piece.size
        buffer = piece.target if direct else self._buffer(piece.target.device)[:size]
        memory = memoryview((ctypes.c_char * size).from_address(buffer.data_ptr())).cast("B")
        for offset, length in piece.ranges:
            try:
                self._fill(memory[:length], file, offset)
            except (OSError, EOFError) as error:
                raise _unreadable(piece.part.path, offset, length, error) from error
            memory = memory[length:]
        if not direct:
            self._move(buffer.view(piece.part.dtype).view(piece.target.shape), piece.target)

    def _fill(self, memory: memoryview, file: FileIO, offset: int) -> None:
        file.seek(offset)
        left = memory
        while left:
            count = file.readinto(left)
            if not count:
                raise EOFError(f"the file ends {len(left)} bytes too early")
            left = left[count:]
        if os.fstat(file.fileno()).st_size > self._reader.cache_limit:
            _drop_pages(file, offset, offset + len(memory))

    @cached_property
    def _plain_buffer(self) -> Tensor:
        return torch.empty(PIECE, dtype=torch.uint8, device="cpu")

    @cached_property
    def _pinned_buffer(self) -> Tensor:
        return torch.empty(PIECE, dtype=torch.uint8, device="cpu", pin_memory=True)

    def _buffer(self, device: torch.device) -> Tensor:
        return self._pinned_buffer if _has_streams(device) else self._plain_buffer

    def _move(self, data: Tensor, target: Tensor) -> None:
        """Copy a filled buffer to its target; the buffer is free again on return."""
        device = target.device
        if not _has_streams(device):
            target.copy_(data)
            return
        module = torch.get_device_module(device)
        stream = self._streams.get(device) or self._streams.setdefault(device, module.Stream(device))
        with module.stream(stream):
            # The device converts the values, because the host would convert them in memory that is not pinned.
            target.copy_(data.to(device, non_blocking=True) if data.dtype != target.dtype else data, non_blocking=True)
        stream.synchronize()


def _opened(piece: _Piece) -> FileIO:
    try:
        return open_regular(piece.part.path)
    except OSError as error:
        raise _unreadable(piece.part.path, *piece.ranges[0], error) from error


def _unreadable(path: Path, offset: int, length: int, error: Exception) -> CheckpointError:
    return CheckpointError(
        f"Cannot read {length} bytes at offset {offset} of {str(path)!r}.",
        f"{type(error).__name__}: {error}.",
        "The file has changed, or its disk fails. Download it again, or load another checkpoint.",
    )


def _has_streams(device: torch.device) -> bool:
    """Whether pinned memory and streams make copies to a device faster."""
    return family_of(device).spec.pins_memory and hasattr(torch.get_device_module(device), "Stream")


def _drop_pages(file: FileIO, begin: int, end: int) -> None:
    """Remove a range from the page cache, if the system supports it."""
    if hasattr(os, "posix_fadvise"):
        begin -= begin % mmap.PAGESIZE
        os.posix_fadvise(file.fileno(), begin, end - begin, os.POSIX_FADV_DONTNEED)
