"""Prefetch: reads the next blocks of weights ahead, in the order in which the first pass needed them.

A block contains the weights that one hook needs together. Devices that copy from pinned memory are given the copies of
the next blocks at once, and order them by events. What is not in pinned memory, such as weights on the disk, a thread
reads first. If a block was not expected, or is not ready in time, the caller reads it itself, so the order only affects
the speed.
"""

from __future__ import annotations

import atexit
import logging
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from accel_state.devices.base import HostCopies
from accel_state.devices.select import family_of

__all__ = ("Block", "BlockReader", "end_threads")

logger = logging.getLogger(__name__)

_BLOCKS_AHEAD = 2
_PINNED_SHARE = 2
"""At most one of so many parts of the host memory that is free at the first pass is pinned."""
_THREAD_END_TIMEOUT_S = 10.0
_UNSHARED_COUNT = 2


@dataclass(eq=False)
class Block:
    """Weights that are needed together.

    Args:
        sources: name to a function that returns the weight on its current device.
        dtypes: target dtype of each.
        device: target device.
        size: bytes of all on that device.
        in_memory: name to the dictionary and key of a weight that stays in host memory, where a pinned copy may replace
            it.
    """

    sources: dict[str, Callable[[], Tensor]]
    dtypes: dict[str, torch.dtype]
    device: torch.device
    size: int
    in_memory: dict[str, tuple[dict[str, Tensor], str]] = field(default_factory=dict)


class _Ready(NamedTuple):
    """Weights on their device, or on the way there until `mark`."""

    weights: dict[str, Tensor]
    mark: Any = None


@dataclass(eq=False)
class _Shared:
    """State that the reader's callers share with its thread; the thread must not keep the reader itself alive."""

    changed: threading.Condition = field(default_factory=threading.Condition)
    queue: deque[Block] = field(default_factory=deque)
    to_pin: deque[Block] = field(default_factory=deque)
    loading: Block | None = None
    unwanted: Block | None = None
    ready: dict[Block, _Ready] = field(default_factory=dict)
    spare: dict[tuple[torch.dtype, torch.Size], list[Tensor]] = field(default_factory=dict)
    copies: dict[torch.device, HostCopies | None] = field(default_factory=dict)
    room_to_pin: int | None = None
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

    def copies_to(self, device: torch.device) -> HostCopies | None:
        """The copies to a device from pinned memory; None if it does not gain from them."""
        with self.changed:
            if device not in self.copies:
                self.copies[device] = family_of(device).host_copies(device)
            return self.copies[device]


_at_work: weakref.WeakSet[_Shared] = weakref.WeakSet()


@atexit.register
def end_threads() -> None:
    """End running reads: a thread that returns from torch after the interpreter has ended aborts the process."""
    for shared in list(_at_work):
        shared.close()
        if shared.thread is not None:
            shared.thread.join(_THREAD_END_TIMEOUT_S)


class BlockReader:
    """Provides blocks to the threads that need them, and reads the next ones ahead.

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
        self._seen: weakref.WeakSet[Block] = weakref.WeakSet()
        self._marks: weakref.WeakKeyDictionary[Block, Any] = weakref.WeakKeyDictionary()
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
        return min([_BLOCKS_AHEAD * self._largest, *(free // 2 for free in self._free.values())])

    @property
    def held(self) -> int:
        """Bytes of blocks that are queued, being read or ready."""
        with self._shared.changed:
            return self._shared.held()

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until the thread has nothing to read or pin; return False after `timeout` seconds."""
        shared = self._shared
        with shared.changed:
            return shared.changed.wait_for(
                lambda: not shared.queue and not shared.to_pin and shared.loading is None, timeout
            )

    def take(self, block: Block) -> dict[str, Tensor]:
        """The weights of a block, on its device, for the stream of the calling thread."""
        shared = self._shared
        with shared.changed:
            self._note(block)
            while shared.loading is block:
                shared.changed.wait()
            ready = shared.ready.pop(block, None)
            if ready is None and block in shared.queue:
                shared.queue.remove(block)
        if ready is None:
            ready = self._load_now(block)
        self._marks[block] = ready.mark
        self.share(block)
        self._look_ahead(block)
        return ready.weights

    def share(self, block: Block) -> None:
        """Let the stream of the calling thread wait for a block that was taken, also by another thread."""
        copies, mark = self._shared.copies_to(block.device), self._marks.get(block)
        if copies is not None and mark is not None:
            copies.use_after(mark)

    def leave(self, block: Block) -> None:
        """Let memory be reused only after what the calling thread's stream computes with a block."""
        copies = self._shared.copies_to(block.device)
        if copies is not None:
            copies.start_after_use()

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

    def _load_now(self, block: Block) -> _Ready:
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

    def release(self, block: Block, weights: dict[str, Tensor]) -> None:
        """Return the weights of `take`; unused host memory is reused for the next blocks."""
        copies = self._shared.copies_to(block.device)
        if copies is not None:
            for weight in weights.values():
                if _users_of(weight) > _UNSHARED_COUNT:
                    # A graph of autograd keeps it, and frees it at any time.
                    copies.keep_until_used(weight)
            self.leave(block)
            weights.clear()
            return
        with self._shared.changed:
            while weights:
                _, weight = weights.popitem()
                if weight.device == torch.device("cpu") and _users_of(weight) <= _UNSHARED_COUNT:
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
        """Request the blocks that followed last time, within the budget; they replace what was requested before."""
        shared = self._shared
        to_start: list[Block] = []
        with shared.changed:
            if block in self._next and block.device not in self._free and self.max_bytes is None:
                # Measured once: later, a caching allocator counts returned blocks as in use.
                self._free[block.device] = family_of(block.device).free_memory(block.device.index)
            expected = list(self._chain(block))
            others = {later for last in self._last.values() if last is not block for later in self._chain(last)}
            for stale in [ready for ready in shared.ready if ready not in expected and ready not in others]:
                del shared.ready[stale]
            shared.queue = deque(queued for queued in shared.queue if queued in others)
            size = shared.held()
            for later in expected:
                requested = later in shared.ready or later is shared.loading or later in shared.queue
                if not requested and size + later.size <= self.budget:
                    size += later.size
                    (to_start if self._is_pinned(later) else shared.queue).append(later)
            pins = shared.copies.get(block.device) is not None and self.max_bytes != 0
            if pins and block.in_memory and block not in self._seen:
                shared.to_pin.append(block)
            self._seen.add(block)
            if shared.queue or shared.to_pin:
                self._start()
                shared.changed.notify_all()
        for later in to_start:
            self._start_copies(later)

    def _is_pinned(self, block: Block) -> bool:
        """Whether the device can copy the block without a thread that reads it first."""
        copies = self._shared.copies.get(block.device)
        return (
            copies is not None
            and len(block.in_memory) == len(block.sources)
            and all(copies.is_pinned(weights[key]) for weights, key in block.in_memory.values())
        )

    def _start_copies(self, block: Block) -> None:
        try:
            ready = _load(block, self._shared)
        except torch.OutOfMemoryError as error:
            _stop_prefetching(self._shared, error)
            return
        with self._shared.changed:
            self._shared.ready[block] = ready

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


def _stop_prefetching(shared: _Shared, error: BaseException) -> None:
    logger.warning("Prefetching of weights stopped, because memory ran out: %s", error)
    with shared.changed:
        shared.exhausted = True
        shared.queue.clear()
        shared.to_pin.clear()


def _read_ahead(shared: _Shared) -> None:
    """The loop of the thread, until the reader is deleted."""
    while True:
        with shared.changed:
            shared.loading = shared.unwanted = None
            shared.changed.notify_all()
            while not shared.queue and not shared.to_pin and not shared.closed:
                shared.changed.wait()
            if shared.closed:
                return
            block = shared.loading = shared.queue.popleft() if shared.queue else None
            to_pin = shared.to_pin[0] if block is None else None
        ready = None
        try:
            if to_pin is not None:
                _pin(to_pin, shared)
            if block is not None:
                ready = _load(block, shared)
        except (torch.OutOfMemoryError, MemoryError) as error:
            _stop_prefetching(shared, error)
            continue
        except Exception:
            # A weight that cannot be pinned is used as it is. The thread that needs the block reads it again, and
            # raises the error where it can be handled.
            logger.debug("Weights were not read ahead", exc_info=True)
        with shared.changed:
            if to_pin is not None and shared.to_pin:
                shared.to_pin.popleft()
            if block is not None and ready is not None and block is not shared.unwanted:
                shared.ready[block] = ready
        # The thread must not keep the weights while it waits for work.
        del ready


def _pin(block: Block, shared: _Shared) -> None:
    """Replace weights in host memory by pinned copies, within the share of the host memory."""
    copies = shared.copies_to(block.device)
    if copies is None:
        return
    if shared.room_to_pin is None:
        shared.room_to_pin = family_of("cpu").free_memory() // _PINNED_SHARE
    for weights, key in block.in_memory.values():
        weight = weights[key]
        size = copies.pinned_size(weight)
        if copies.is_pinned(weight) or size > shared.room_to_pin:
            continue
        shared.room_to_pin -= size
        pinned = copies.pin(weight)
        # All names of a tied weight get the same copy.
        same = [name for name, other in weights.items() if other.data_ptr() == weight.data_ptr()]
        weights.update({name: pinned.view(weights[name].shape) for name in same})


def _load(block: Block, shared: _Shared) -> _Ready:
    copies = shared.copies_to(block.device)
    if copies is not None:
        moved = {name: copies.start(source(), block.dtypes[name]) for name, source in block.sources.items()}
        return _Ready(moved, copies.mark())
    weights = {}
    for name, source in block.sources.items():
        weight, dtype = source(), block.dtypes[name]
        if weight.device != block.device:
            weights[name] = weight.to(device=block.device, dtype=dtype)
        else:
            weights[name] = _spare(shared, dtype, weight).copy_(weight)
    return _Ready(weights)


def _spare(shared: _Shared, dtype: torch.dtype, weight: Tensor) -> Tensor:
    """Memory to read into; used memory is faster than new memory, which must first be mapped."""
    with shared.changed:
        waiting = shared.spare.get((dtype, weight.shape))
        if waiting:
            return waiting.pop()
    return torch.empty(weight.shape, dtype=dtype, device=weight.device)


def _users_of(weight: Tensor) -> int:
    """Number of tensors that share the memory of this one, including itself and the storage object."""
    storage = weight.untyped_storage()
    return int(torch._C._storage_Use_Count(storage._cdata))
