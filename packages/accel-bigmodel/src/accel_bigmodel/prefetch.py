"""Prefetch: a thread records the order in which hooks need blocks of weights, and reads the next ones ahead.

A block contains the weights that one hook needs together. If the thread has not read a block in time, or did not expect
it, the caller reads it itself, so the order only affects the speed.
"""

from __future__ import annotations

import atexit
import logging
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from accel_state.devices.select import family_of

__all__ = ("Block", "BlockReader", "end_threads")

logger = logging.getLogger(__name__)

_AHEAD = 2
_GRACE = 10.0
_UNSHARED = 2


@dataclass(eq=False)
class Block:
    """Weights that are needed together.

    Args:
        sources: name to a function that returns the weight on its current device.
        dtypes: target dtype of each.
        device: target device.
        size: bytes of all on that device.
    """

    sources: dict[str, Callable[[], Tensor]]
    dtypes: dict[str, torch.dtype]
    device: torch.device
    size: int


@dataclass(eq=False)
class _Shared:
    """State that the reader's callers share with its thread; the thread must not keep the reader itself alive."""

    changed: threading.Condition = field(default_factory=threading.Condition)
    queue: deque[Block] = field(default_factory=deque)
    loading: Block | None = None
    unwanted: Block | None = None
    ready: dict[Block, dict[str, Tensor]] = field(default_factory=dict)
    spare: dict[tuple[torch.dtype, torch.Size], list[Tensor]] = field(default_factory=dict)
    streams: dict[torch.device, Any] = field(default_factory=dict)
    closed: bool = False
    exhausted: bool = False
    thread: threading.Thread | None = None

    def close(self) -> None:
        with self.changed:
            self.closed = True
            self.changed.notify_all()

    def held(self) -> int:
        """Bytes of blocks that are requested, being read or ready."""
        blocks = {*self.queue, *self.ready, *(() if self.loading is None else (self.loading,))}
        return sum(block.size for block in blocks)


_at_work: weakref.WeakSet[_Shared] = weakref.WeakSet()


@atexit.register
def end_threads() -> None:
    """End running reads: a thread that returns from torch after the interpreter has ended aborts the process."""
    for shared in list(_at_work):
        shared.close()
        if shared.thread is not None:
            shared.thread.join(_GRACE)


class BlockReader:
    """Provides blocks to the threads that need them, and reads the next ones ahead in a thread.

    Args:
        max_bytes: most that may be ready or in flight besides the weights in use. With 0 nothing is read ahead; when
            None it is twice the largest block, but not more than half of what was free on the device after the first
            pass.
    """

    def __init__(self, max_bytes: int | None = None) -> None:
        self.max_bytes = max_bytes
        self._largest = 0
        self._free: dict[torch.device, int] = {}
        self._next: dict[Block | None, Block] = {}
        self._last: dict[int, Block] = {}
        self._shared = _Shared()
        weakref.finalize(self, self._shared.close)

    def __reduce__(self) -> tuple[Any, ...]:
        return BlockReader, (self.max_bytes,)

    @property
    def budget(self) -> int:
        """Bytes that may be read ahead."""
        if self._shared.exhausted:
            return 0
        if self.max_bytes is not None:
            return self.max_bytes
        return min([_AHEAD * self._largest, *(free // 2 for free in self._free.values())])

    @property
    def held(self) -> int:
        """Bytes of blocks that are queued, being read or ready."""
        with self._shared.changed:
            return self._shared.held()

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until no block is queued or being read; return False after `timeout` seconds."""
        shared = self._shared
        with shared.changed:
            return shared.changed.wait_for(lambda: not shared.queue and shared.loading is None, timeout)

    def take(self, block: Block) -> dict[str, Tensor]:
        """The weights of a block, on its device."""
        shared = self._shared
        with shared.changed:
            self._note(block)
            while shared.loading is block:
                shared.changed.wait()
            weights = shared.ready.pop(block, None)
            if weights is None and block in shared.queue:
                shared.queue.remove(block)
        if weights is None:
            weights = self._load_now(block)
        with shared.changed:
            self._look_ahead(block)
        _used_here(weights, block.device)
        return weights

    def end_pass(self) -> None:
        """Forget what the calling thread was expected to need next: nothing stays on the device between passes."""
        shared = self._shared
        with shared.changed:
            self._last.pop(threading.get_ident(), None)
            others = {later for last in self._last.values() for later in self._chain(last)}
            shared.queue = deque(queued for queued in shared.queue if queued in others)
            if shared.loading not in others:
                shared.unwanted = shared.loading
            for stale in [ready for ready in shared.ready if ready not in others]:
                del shared.ready[stale]

    def _load_now(self, block: Block) -> dict[str, Tensor]:
        """Read a block; if the device is full, discard the blocks read ahead, and stop prefetching."""
        try:
            return _load(block, self._shared)
        except torch.OutOfMemoryError:
            with self._shared.changed:
                if not self._shared.held():
                    raise
                self.max_bytes = 0
                self._shared.queue.clear()
                while self._shared.loading is not None:
                    self._shared.changed.wait()
                self._shared.ready.clear()
        family_of(block.device).empty_cache()
        return _load(block, self._shared)

    def release(self, weights: dict[str, Tensor]) -> None:
        """Return the weights of `take`; unused host memory is reused for the next blocks."""
        with self._shared.changed:
            while weights:
                _, weight = weights.popitem()
                if weight.device == torch.device("cpu") and _users_of(weight) <= _UNSHARED:
                    self._shared.spare.setdefault((weight.dtype, weight.shape), []).append(weight)

    def _note(self, block: Block) -> None:
        """Record that this block follows the one that the same thread took before."""
        self._largest = max(self._largest, block.size)
        thread = threading.get_ident()
        before = self._last.get(thread)
        if before is not None:
            self._next[before] = block
        self._last[thread] = block

    def _look_ahead(self, block: Block) -> None:
        """Queue the blocks that followed last time, within the budget; they replace the previous queue."""
        shared = self._shared
        if block in self._next and block.device not in self._free and self.max_bytes is None:
            # Measured once: later, a caching allocator counts returned blocks as in use.
            self._free[block.device] = family_of(block.device).free_memory(block.device.index)
        expected = list(self._chain(block))
        others = {later for last in self._last.values() if last is not block for later in self._chain(last)}
        for stale in [ready for ready in shared.ready if ready not in expected and ready not in others]:
            del shared.ready[stale]
        shared.queue = deque(queued for queued in shared.queue if queued in others)
        for later in expected:
            known = later in shared.ready or later is shared.loading or later in shared.queue
            if not known and shared.held() + later.size <= self.budget:
                shared.queue.append(later)
        if shared.queue:
            self._start()
            shared.changed.notify_all()

    def _chain(self, block: Block) -> Iterator[Block]:
        room, start = self.budget, block
        while (block := self._next.get(block, start)) is not start and block.size <= room:
            room -= block.size
            yield block

    def _start(self) -> None:
        shared = self._shared
        if shared.thread is None or not shared.thread.is_alive():
            shared.thread = threading.Thread(target=_read_ahead, args=(shared,), name="accel-prefetch", daemon=True)
            _at_work.add(shared)
            shared.thread.start()


def _read_ahead(shared: _Shared) -> None:
    """The loop of the thread, until the reader is deleted."""
    while True:
        with shared.changed:
            shared.loading = shared.unwanted = None
            shared.changed.notify_all()
            while not shared.queue and not shared.closed:
                shared.changed.wait()
            if shared.closed:
                return
            block = shared.loading = shared.queue.popleft()
        try:
            weights = _load(block, shared, beside=True)
        except (torch.OutOfMemoryError, MemoryError) as error:
            logger.warning("Prefetching of weights stopped, because memory ran out: %s", error)
            with shared.changed:
                shared.exhausted = True
                shared.queue.clear()
            continue
        except Exception:
            # The thread that needs the block reads it again, and raises the error where it can be handled.
            continue
        with shared.changed:
            if block is not shared.unwanted:
                shared.ready[block] = weights
        # The thread must not keep the weights while it waits for work.
        del weights


def _load(block: Block, shared: _Shared, beside: bool = False) -> dict[str, Tensor]:
    weights = {}
    for name, source in block.sources.items():
        weight, dtype = source(), block.dtypes[name]
        if weight.device != block.device:
            weights[name] = _transfer(weight, dtype, block.device, shared.streams if beside else None)
        else:
            weights[name] = _spare(shared, dtype, weight).copy_(weight)
    return weights


def _spare(shared: _Shared, dtype: torch.dtype, weight: Tensor) -> Tensor:
    """Memory to read into; used memory is faster than new memory, which must first be mapped."""
    with shared.changed:
        waiting = shared.spare.get((dtype, weight.shape))
        if waiting:
            return waiting.pop()
    return torch.empty(weight.shape, dtype=dtype, device=weight.device)


def _transfer(
    weight: Tensor, dtype: torch.dtype, device: torch.device, streams: dict[torch.device, Any] | None
) -> Tensor:
    """A copy on another device; with `streams`, through pinned memory on a separate stream, if the device supports it.

    It is the same stream each time, because a device's allocator reuses freed memory only for the stream that allocated
    it.
    """
    module = torch.get_device_module(device)
    if streams is None or not hasattr(module, "Stream") or not family_of(device).spec.pins_memory:
        return weight.to(device=device, dtype=dtype)
    pinned = torch.empty(weight.shape, dtype=weight.dtype, pin_memory=True).copy_(weight)
    stream = streams.get(device) or streams.setdefault(device, module.Stream(device))
    with module.stream(stream):
        moved = pinned.to(device, non_blocking=True).to(dtype)
    stream.synchronize()
    return moved


def _used_here(weights: dict[str, Tensor], device: torch.device) -> None:
    """Inform the allocator that this thread's stream uses memory that another stream has filled."""
    module = torch.get_device_module(device)
    if family_of(device).spec.pins_memory and hasattr(module, "current_stream"):
        for weight in weights.values():
            weight.record_stream(module.current_stream(device))


def _users_of(weight: Tensor) -> int:
    """Number of tensors that share the memory of this one, including itself and the storage object."""
    storage = weight.untyped_storage()
    return int(torch._C._storage_Use_Count(storage._cdata))
