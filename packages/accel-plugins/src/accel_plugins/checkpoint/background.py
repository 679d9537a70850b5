"""Asynchronous saving: the state is copied to host memory at once, and a thread writes the copy while training goes on.

Nothing that training does after the copy changes the checkpoint. At most one save is in flight.

Memory: one copy of all data that this process writes; its buffers are reused by the next save.
"""

from __future__ import annotations

import atexit
import copy
import logging
import os
import sys
import threading
import traceback
import weakref
from collections.abc import Callable, Hashable, Mapping
from typing import Any, Final

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from accel_bigmodel.tensors import memory_of
from accel_ops.dtensors import with_shard
from accel_plugins.checkpoint.state import CheckpointState
from accel_plugins.manifest import ObjectKind
from accel_state.errors import CheckpointError

__all__ = ("BackgroundSaver", "Buffers", "copy_state")

_REMEDY: Final = "Earlier checkpoints are unchanged, and training can go on. Free memory, or save without async_save."

Place = tuple[Hashable, ...]


class Buffers:
    """Buffers in host memory, reused by the next save, because allocating memory costs more than copying.

    Args:
        pinned: use pinned memory, into which devices copy asynchronously.
    """

    def __init__(self, pinned: bool = False) -> None:
        self.pinned = pinned
        self._kept: dict[Place, Tensor] = {}
        self._used: set[Place] = set()

    def like(self, place: Place, tensor: Tensor) -> Tensor:
        """Memory for a copy of a tensor: the previous buffer at this position, if it fits.

        Raises:
            CheckpointError: there is not enough memory.
        """
        self._used.add(place)
        kept = self._kept.get(place)
        if kept is None or _form(kept) != _form(tensor):
            try:
                kept = torch.empty_like(tensor, device="cpu", pin_memory=self.pinned, requires_grad=False)
            except (MemoryError, RuntimeError) as error:
                failed = "Cannot copy the state of the run for an asynchronous save."
                obstacle = f"There is no host memory for {tensor.nbytes} more bytes: {error}"
                raise CheckpointError(failed, obstacle, _REMEDY) from error
            self._kept[place] = kept
        return kept

    def free(self) -> None:
        """Free all memory."""
        self._kept.clear()
        self._used.clear()

    def forget_unused(self) -> None:
        """Free memory that the last save did not use."""
        self._kept = {place: kept for place, kept in self._kept.items() if place in self._used}
        self._used.clear()

    @property
    def nbytes(self) -> int:
        """Total size of the buffers in bytes."""
        return sum(kept.nbytes for kept in self._kept.values())


def _form(tensor: Tensor) -> tuple[Any, ...]:
    return tensor.shape, tensor.stride(), tensor.dtype


def copy_state(state: CheckpointState, buffers: Buffers) -> CheckpointState:
    """A copy of all data that one process writes, in host memory; complete when this returns.

    Args:
        state: the states; their tensors share memory with the objects.
        buffers: the memory for the copy; valid until the next call with the same buffers.

    Raises:
        CheckpointError: there is not enough memory.

    Example:
        >>> taken = CheckpointState({}, {"counter.pkl": {"seen": torch.zeros(1)}})
        >>> copied = copy_state(taken, Buffers())
        >>> taken.files["counter.pkl"]["seen"] += 1
        >>> copied.files["counter.pkl"]["seen"]
        tensor([0.])
    """
    copying = _Copying(buffers)
    try:
        copied = CheckpointState(
            {kind: copying.tree(states, (kind,)) for kind, states in state.objects.items()},
            copying.tree(state.files, ("files",)),
            copying.tree(state.gradients, ("gradients",)),
            state.rank,
            copying.tree(state.evaluated, ("evaluated",)),
        )
        copying.finish()
    except BaseException:
        buffers.free()
        raise
    buffers.forget_unused()
    return copied


class _Copying:
    """Copies tensors into buffers; of tensors that share their memory, one copy is made.

    Args:
        buffers: the memory for the copies.
    """

    def __init__(self, buffers: Buffers) -> None:
        self._buffers = buffers
        # With the tensor that was copied: while it lives, no other one can have its identity.
        self._copies: dict[tuple[Any, ...], tuple[Tensor, Tensor]] = {}

    def tree(self, item: Any, place: Place) -> Any:
        """The same containers with copied leaves."""
        if isinstance(item, Tensor):
            return self._tensor(item, place)
        if type(item) is list or type(item) is tuple:
            return type(item)(self.tree(value, (*place, index)) for index, value in enumerate(item))
        if isinstance(item, Mapping) and (type(item) is dict or place[0] is ObjectKind.MODEL):
            return {key: self.tree(value, (*place, key)) for key, value in item.items()}
        return copy.deepcopy(item)

    def finish(self) -> None:
        """Wait for copies from devices."""
        devices = {source.device for source, _ in self._copies.values() if source.device.type != "cpu"}
        for device in devices if self._buffers.pinned else ():
            torch.get_device_module(device).synchronize(device)

    def _tensor(self, tensor: Tensor, place: Place) -> Tensor:
        if isinstance(tensor, DTensor):
            copied: Tensor = with_shard(tensor, self._plain(tensor.to_local(), place))
            return copied
        return self._plain(tensor, place)

    def _plain(self, tensor: Tensor, place: Place) -> Tensor:
        tensor = tensor.detach()
        if tensor.layout != torch.strided:
            return tensor.clone()
        memory = memory_of(tensor)
        if memory not in self._copies:
            target = self._buffers.like(place, tensor)
            target.copy_(tensor, non_blocking=self._buffers.pinned)
            self._copies[memory] = tensor, target
        return self._copies[memory][1]


class BackgroundSaver:
    """Writes one checkpoint at a time in a thread.

    The next `wait` raises the error of a failed save; a program that ends without one prints it and exits with code 1.

    Attributes:
        buffers: host memory for the copies, reused by the next save.
    """

    def __init__(self, pinned: bool = False) -> None:
        self.buffers = Buffers(pinned)
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        _savers.add(self)

    def start(self, work: Callable[[], None]) -> None:
        """Call `work` in a thread; no other save may be in flight.

        Raises:
            CheckpointError: no thread can be started.
        """
        # Not a daemon thread: the interpreter waits for it, so a started save is completed.
        thread = threading.Thread(target=self._run, args=(work,), name="accel-save", daemon=False)
        try:
            thread.start()
        except RuntimeError as error:
            failed = "Cannot start the thread that writes a checkpoint."
            raise CheckpointError(failed, f"{type(error).__name__}: {error}", _REMEDY) from error
        self._thread = thread

    def _run(self, work: Callable[[], None]) -> None:
        try:
            work()
        except BaseException as error:  # raised again in `wait`
            self._error = error

    def wait(self) -> None:
        """Wait until no save is in flight.

        Raises:
            BaseException: the error of the save in flight.
        """
        if self._thread is not None:
            self._thread.join()
        self._thread, error, self._error = None, self._error, None
        if error is not None:
            raise error

    @property
    def busy(self) -> bool:
        """Whether a save is being written."""
        return self._thread is not None and self._thread.is_alive()

    def release(self) -> None:
        """Wait, and free the memory of the copies."""
        self.wait()
        self.buffers.free()


_savers: weakref.WeakSet[BackgroundSaver] = weakref.WeakSet()


@atexit.register
def _show_errors_at_exit() -> None:
    """Exit with code 1 when a save failed and its error was not raised."""
    failed = False
    for saver in list(_savers):
        try:
            saver.wait()
        except BaseException as error:  # the error cannot be raised any more
            failed = True
            sys.stderr.write("The asynchronous save of a checkpoint failed:\n")
            traceback.print_exception(error)
    if failed:
        logging.shutdown()
        sys.stdout.flush()
        sys.stderr.flush()
        # Only this sets the exit code here: exceptions are printed and ignored.
        os._exit(1)
