"""Asynchronous saving: a thread copies the state and writes the copy, at most one save at a time.

Parameters and optimizer state should change only in `Optimizer.step`, so the thread copies them during the next forward
and backward, and the step waits for the copy. Other changes are detected by torch's version counters and by samples of
the contents (torch does not count writes through `.data`); both are taken with the state and compared after the copy.
Everything else is copied before `save_state` returns.

Memory: one copy in host memory of all data that this process writes; its buffers are reused by the next save. Reading
samples (every 509th element) of 900 MB takes about 10 ms and needs 1.8 MB.
"""

from __future__ import annotations

import atexit
import copy
import logging
import math
import os
import sys
import threading
import traceback
import weakref
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.nn import Module, Parameter
from torch.optim import Optimizer

from accel_bigmodel.tied import memory_of
from accel_ops.dtensors import with_shard
from accel_plugins.checkpoint.boundaries import StepBoundaries
from accel_plugins.checkpoint.state import CheckpointState
from accel_plugins.manifest import ObjectKind
from accel_state.errors import NotReady

__all__ = (
    "BackgroundSaver",
    "Buffers",
    "CopyGuard",
    "Snapshot",
    "TornError",
    "changed",
    "guarded_tensors",
    "samples_of",
)

_WHOLE: Final = 1 << 14
"""Tensors of up to this many elements are sampled completely."""

_SAMPLES: Final = 1 << 13
"""Minimum number of samples of a larger tensor."""

_LONGEST_STRIDE: Final = 509
"""Distance of samples in tensors of 4 million elements and more, so that reading costs little; a prime."""

_INTEGERS: Final = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}

Key = tuple[torch.device, torch.dtype]

Place = tuple[Hashable, ...]


def samples_of(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Samples of each tensor, as integers in host memory; one transfer per device and element size.

    Args:
        tensors: dense and strided.
    """
    grouped: dict[Key, list[tuple[int, Tensor]]] = {}
    for index, tensor in enumerate(tensors):
        chosen = _chosen(tensor)
        grouped.setdefault((chosen.device, chosen.dtype), []).append((index, chosen))
    found: dict[int, Tensor] = {}
    for members in grouped.values():
        together = torch.cat([chosen for _, chosen in members]).to("cpu")
        parts = torch.split(together, [chosen.numel() for _, chosen in members])
        found.update(zip((index for index, _ in members), parts, strict=True))
    return [found[index] for index in range(len(tensors))]


def changed(before: Sequence[Tensor], after: Sequence[Tensor]) -> list[int]:
    """Indices of the tensors with different samples."""
    return [index for index, (old, new) in enumerate(zip(before, after, strict=True)) if not torch.equal(old, new)]


def _chosen(tensor: Tensor) -> Tensor:
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor.resolve_conj())
    # In memory order, if the tensor is contiguous in some order: flattening in another order would copy the whole
    # tensor.
    order = sorted(range(tensor.dim()), key=tensor.stride, reverse=True)
    flat = tensor.permute(order).reshape(-1).view(_INTEGERS[tensor.element_size()])
    return flat if flat.numel() <= _WHOLE else flat[:: _stride(tensor)]


def _stride(tensor: Tensor) -> int:
    """The distance between samples.

    It has no common factor with any size, so every row and column at least as long as the stride has a sample.
    """
    stride = min(tensor.numel() // _SAMPLES | 1, _LONGEST_STRIDE)
    while any(math.gcd(stride, size) > 1 for size in tensor.shape):
        stride += 2
    return stride


class Buffers:
    """Buffers in host memory, reused by the next save, because allocating memory costs more than copying.

    Args:
        pinned: use pinned memory, into which devices copy asynchronously.
    """

    def __init__(self, pinned: bool = False) -> None:
        self._pinned = pinned
        self._kept: dict[Place, Tensor] = {}
        self._used: set[Place] = set()

    def like(self, place: Place, tensor: Tensor) -> Tensor:
        """Memory for a copy of a tensor: the previous buffer at this position, if it fits."""
        self._used.add(place)
        kept = self._kept.get(place)
        if kept is None or _form(kept) != _form(tensor):
            kept = torch.empty_like(tensor, device="cpu", pin_memory=self._pinned, requires_grad=False)
            self._kept[place] = kept
        return kept

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


@dataclass
class _Pending:
    """A tensor that is copied during training, its name in the checkpoint, and its version when the state was taken."""

    name: str
    source: Tensor
    target: Tensor
    version: int


class Snapshot:
    """A copy of all data that one process writes.

    Tensors that may be copied later are only recorded; `copy` copies them, in any thread.

    Args:
        taken: the states; their tensors share memory with the objects.
        buffers: the memory for copies.
        guarded: tensors that change only in `Optimizer.step`.

    Attributes:
        captured: the copy; complete after `copy` returns.
    """

    def __init__(self, taken: CheckpointState, buffers: Buffers, guarded: Iterable[Tensor]) -> None:
        self._buffers = buffers
        self._guarded = {memory_of(_local(tensor)) for tensor in guarded}
        self._copies: dict[tuple[Any, ...], Tensor] = {}
        self._pending: list[_Pending] = []
        self.captured = CheckpointState(
            {kind: self._tree(states, (kind,)) for kind, states in taken.objects.items()},
            self._tree(taken.files, ("files",)),
            self._tree(taken.gradients, ("gradients",)),
            taken.rank,
        )
        self._samples = samples_of([pending.source for pending in self._pending])

    def copy(self) -> list[str]:
        """Copy the recorded tensors.

        Returns:
            Names of tensors that changed after the state was taken, so that their copies may be inconsistent.
        """
        for pending in self._pending:
            pending.target.copy_(pending.source)
        # Compare the copies too: a temporary change, as for an evaluation, may have been copied.
        torn = {
            *changed(self._samples, samples_of([pending.source for pending in self._pending])),
            *changed(self._samples, samples_of([pending.target for pending in self._pending])),
            *(index for index, one in enumerate(self._pending) if _version(one.source) != one.version),
        }
        names = [self._pending[index].name for index in sorted(torn)]
        self._pending.clear()
        return names

    def _tree(self, item: Any, place: Place) -> Any:
        """The same containers with copied leaves."""
        if isinstance(item, Tensor):
            return self._tensor(item, place)
        if type(item) is list or type(item) is tuple:
            return type(item)(self._tree(value, (*place, index)) for index, value in enumerate(item))
        if isinstance(item, Mapping) and (type(item) is dict or place[0] is ObjectKind.MODEL):
            return {key: self._tree(value, (*place, key)) for key, value in item.items()}
        return copy.deepcopy(item)

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
            target = self._copies[memory] = self._buffers.like(place, tensor)
            if memory in self._guarded and type(tensor) in (Tensor, Parameter) and _same_order(tensor, target):
                self._pending.append(_Pending(_name(place), tensor, target, _version(tensor)))
            else:
                target.copy_(tensor)
        return self._copies[memory]


def _version(tensor: Tensor) -> int:
    """torch's count of in-place changes; changes in inference mode are not counted."""
    return 0 if tensor.is_inference() else tensor._version


def _same_order(tensor: Tensor, target: Tensor) -> bool:
    """Whether samples of both tensors are of the same elements."""
    return tensor.stride() == target.stride() and not (tensor.is_quantized or tensor.is_neg())


def _name(place: Place) -> str:
    """The position of a tensor in the checkpoint, such as "model 0: layer.weight"."""
    kind, index, *below = (part.value if isinstance(part, ObjectKind) else str(part) for part in place)
    return f"{kind} {index}: {'.'.join(below)}"


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


class CopyGuard:
    """Blocks optimizer steps, and loading into models and optimizers, until a snapshot is copied.

    Args:
        optimizers, models: the objects that must not change before.
        before_step: called before each step of the first optimizer, once a snapshot is copied.
        after_step: called after each step of any optimizer.
    """

    def __init__(
        self,
        optimizers: Iterable[Optimizer],
        models: Iterable[Module],
        before_step: Callable[[], None],
        after_step: Callable[[], None],
    ) -> None:
        self._copied = threading.Event()
        self._handles: list[Any] = []
        for index, optimizer in enumerate(optimizers):
            self._handles.append(
                optimizer.register_step_pre_hook(self._stepping(before_step) if not index else self._wait)
            )
            self._handles.append(optimizer.register_step_post_hook(lambda *_: after_step()))
            self._handles.append(optimizer.register_load_state_dict_pre_hook(self._wait))
        for model in models:
            handle = model.register_load_state_dict_pre_hook(self._wait)  # type: ignore[no-untyped-call]
            self._handles.append(handle)

    def _stepping(self, before_step: Callable[[], None]) -> Callable[..., None]:
        def wait(*_: Any) -> None:
            self._copied.wait()
            before_step()
            # `before_step` may have started a save.
            self._copied.wait()

        return wait

    def _wait(self, *_: Any) -> None:
        self._copied.wait()

    def wait(self) -> None:
        """Wait until the guard is open."""
        self._copied.wait()

    def release(self) -> None:
        """Open the guard; may be called from any thread."""
        self._copied.set()

    def hold(self) -> None:
        """Close the guard for another snapshot."""
        self._copied.clear()

    def remove(self) -> None:
        """Remove the hooks; called from the training thread."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()


def guarded_tensors(optimizers: Iterable[Optimizer]) -> list[Tensor]:
    """The parameters of optimizers and the tensors in their states."""
    found: list[Tensor] = []
    for optimizer in optimizers:
        found += [parameter.detach() for group in optimizer.param_groups for parameter in group["params"]]
        for state in optimizer.state.values():
            values = state.values() if isinstance(state, Mapping) else ()
            found += [value.detach() for value in values if isinstance(value, Tensor)]
    return found


class TornError(Exception):
    """The copy of some process is torn (not of one moment), so all processes must take the checkpoint again."""


class _InFlight:
    """One save: a thread that copies, opens the guard, and writes."""

    def __init__(
        self,
        work: Callable[[], None],
        guard: CopyGuard,
        boundaries: StepBoundaries,
        again: Callable[[bool], None],
        drop: Callable[[], None],
    ) -> None:
        self._work, self._drop = work, drop
        self.guard, self.boundaries, self.again = guard, boundaries, again
        self.error: BaseException | None = None
        # Not a daemon thread: the interpreter waits for it, so a started save is completed.
        self.thread = threading.Thread(target=self._run, name="accel-save", daemon=False)

    def _run(self) -> None:
        try:
            self._work()
        except BaseException as error:  # raised again in `wait`
            self.error = error
            if isinstance(error, TornError):
                _owing.add(self)
        finally:
            self.guard.release()
            self._drop()


class BackgroundSaver:
    """Writes one checkpoint at a time in a thread.

    The next `wait` raises the error of a failed save; a program that ends without one prints it and exits with code 1.
    A torn checkpoint is taken again at the boundary on which the processes agreed, or by the next `wait`.

    Attributes:
        buffers: host memory for the copies, reused by the next save.
    """

    def __init__(self, pinned: bool = False) -> None:
        self.buffers = Buffers(pinned)
        self._pinned = pinned
        self._in_flight: _InFlight | None = None
        _savers.add(self)

    def start(
        self, work: Callable[[], None], guard: CopyGuard, boundaries: StepBoundaries, again: Callable[[bool], None]
    ) -> None:
        """Start a save in a thread; no other save may be in flight.

        Args:
            work: copies, opens the guard and writes the copy; raises `TornError` when the copy is torn.
            guard: opened in any case when the work has ended.
            boundaries: the boundaries of training since the state was taken.
            again: takes the state again; with True, writes it before it returns.
        """
        self._in_flight = _InFlight(work, guard, boundaries, again, self.buffers.forget_unused)
        self._in_flight.thread.start()

    @property
    def boundaries(self) -> StepBoundaries | None:
        """The boundaries since the state of the save in flight was taken; None without a save."""
        return None if self._in_flight is None else self._in_flight.boundaries

    def between_steps(self) -> None:
        """Pass a boundary of training; a torn checkpoint may be taken again here. Called on every process.

        Raises:
            BaseException: the error of taking the copy.
        """
        in_flight = self._in_flight
        if in_flight is None or not in_flight.boundaries.reached():
            return
        in_flight.thread.join()
        if isinstance(in_flight.error, TornError):
            self._in_flight = None
            _owing.discard(in_flight)
            try:
                in_flight.again(False)
            except BaseException:
                in_flight.guard.remove()
                raise

    def wait_for_copy(self) -> None:
        """Wait until the state that is being saved may be changed."""
        if self._in_flight is not None:
            self._in_flight.guard.wait()

    def wait(self) -> None:
        """Wait until no save is in flight.

        Raises:
            NotReady: a torn checkpoint cannot be taken again at this moment; the next call does it.
            BaseException: the error of the save in flight.
        """
        while (in_flight := self._in_flight) is not None:
            in_flight.thread.join()
            try:
                if isinstance(in_flight.error, TornError):
                    in_flight.again(True)
                elif in_flight.error is not None:
                    raise in_flight.error
            except TornError:
                # Another process took the state again during training, and its copy was torn again.
                continue
            except NotReady:
                raise
            except BaseException:
                self._settle(in_flight)
                raise
            self._settle(in_flight)

    def _settle(self, in_flight: _InFlight) -> None:
        self._in_flight = None
        _owing.discard(in_flight)
        in_flight.guard.remove()

    @property
    def busy(self) -> bool:
        """Whether a save is in flight: copying or writing."""
        return self._in_flight is not None and self._in_flight.thread.is_alive()

    def release(self) -> None:
        """Wait, and free the memory of the copies."""
        self.wait()
        self.buffers = Buffers(self._pinned)


_savers: weakref.WeakSet[BackgroundSaver] = weakref.WeakSet()
_owing: set[_InFlight] = set()
"""Saves that must be repeated, with references to their state."""


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
