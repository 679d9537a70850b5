"""Copies of what is being saved, so that training goes on while it is written.

Parameters and the state of their optimizers are meant to change in `Optimizer.step` and nowhere else, so a thread
copies them while the next forward and backward run, and the step waits for it. Whether somebody changed them
nevertheless is seen by the versions that torch counts and by samples of their contents, which are taken with the state
and compared after the copy. Everything else is copied before `save_state` returns.

Memory: one copy, on the host, of all that this process writes; it is kept for the next save.
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Hashable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.nn import Module, Parameter
from torch.optim import Optimizer

from accel_bigmodel.tied import memory_of
from accel_plugins.checkpoint.capture import Captured
from accel_plugins.checkpoint.samples import changed, samples_of
from accel_plugins.manifest import Part

__all__ = ("Buffers", "Gate", "Snapshot", "steady_tensors")

Place = tuple[Hashable, ...]


class Buffers:
    """Host memory that copies go into, kept from one save to the next: fresh memory costs more than the copy.

    Args:
        pinned: use memory that a device copies into by itself.
    """

    def __init__(self, pinned: bool = False) -> None:
        self._pinned = pinned
        self._kept: dict[Place, Tensor] = {}
        self._used: set[Place] = set()

    def like(self, place: Place, tensor: Tensor) -> Tensor:
        """Memory for a copy of a tensor: what was used at this place before where it fits."""
        self._used.add(place)
        kept = self._kept.get(place)
        if kept is None or _form(kept) != _form(tensor):
            kept = torch.empty_like(tensor, device="cpu", pin_memory=self._pinned, requires_grad=False)
            self._kept[place] = kept
        return kept

    def forget_unused(self) -> None:
        """Give back memory that the last save did not use."""
        self._kept = {place: kept for place, kept in self._kept.items() if place in self._used}
        self._used.clear()

    @property
    def nbytes(self) -> int:
        """Bytes that are held."""
        return sum(kept.nbytes for kept in self._kept.values())


def _form(tensor: Tensor) -> tuple[Any, ...]:
    return tensor.shape, tensor.stride(), tensor.dtype


@dataclass
class _Pending:
    """A tensor that is copied behind training, its name in the checkpoint, and its version when it was taken."""

    name: str
    source: Tensor
    target: Tensor
    version: int


class Snapshot:
    """A copy of everything that one process writes.

    What may be copied later is noted only; `copy` does that, in any thread.

    Args:
        taken: the living states.
        buffers: where copies go.
        steady: tensors that change in `Optimizer.step` and nowhere else.

    Attributes:
        captured: the copy; complete when `copy` has returned.
    """

    def __init__(self, taken: Captured, buffers: Buffers, steady: Iterable[Tensor]) -> None:
        self._buffers = buffers
        self._steady = {memory_of(_local(tensor)) for tensor in steady}
        self._copies: dict[tuple[Any, ...], Tensor] = {}
        self._pending: list[_Pending] = []
        self.captured = Captured(
            {part: self._tree(states, (part,)) for part, states in taken.objects.items()},
            self._tree(taken.files, ("files",)),
            self._tree(taken.gradients, ("gradients",)),
        )
        self._samples = samples_of([pending.source for pending in self._pending])

    def copy(self) -> list[str]:
        """Copy what was noted.

        Returns:
            Names of tensors that were changed since the state was taken, whose copies may be of another moment.
        """
        for pending in self._pending:
            pending.target.copy_(pending.source)
        # The copies too: what was changed for a while only, as for an evaluation, may have been copied meanwhile.
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
        if isinstance(item, Mapping) and (type(item) is dict or place[0] is Part.MODEL):
            return {key: self._tree(value, (*place, key)) for key, value in item.items()}
        return copy.deepcopy(item)

    def _tensor(self, tensor: Tensor, place: Place) -> Tensor:
        if isinstance(tensor, DTensor):
            local = self._plain(tensor.to_local(), place)
            return DTensor.from_local(
                local,
                tensor.device_mesh,
                tensor.placements,
                run_check=False,
                shape=tensor.shape,
                stride=tensor.stride(),
            )
        return self._plain(tensor, place)

    def _plain(self, tensor: Tensor, place: Place) -> Tensor:
        tensor = tensor.detach()
        if tensor.layout != torch.strided:
            return tensor.clone()
        memory = memory_of(tensor)
        if memory not in self._copies:
            target = self._copies[memory] = self._buffers.like(place, tensor)
            if memory in self._steady and type(tensor) in (Tensor, Parameter) and _same_order(tensor, target):
                self._pending.append(_Pending(_name(place), tensor, target, _version(tensor)))
            else:
                target.copy_(tensor)
        return self._copies[memory]


def _version(tensor: Tensor) -> int:
    """Number of changes made in place; those made in inference mode are not counted."""
    return 0 if tensor.is_inference() else tensor._version


def _same_order(tensor: Tensor, target: Tensor) -> bool:
    """Whether samples of both are of the same elements."""
    return tensor.stride() == target.stride() and not (tensor.is_quantized or tensor.is_neg())


def _name(place: Place) -> str:
    """Where a tensor is in the checkpoint, as "model 0: layer.weight"."""
    kind, index, *below = (part.value if isinstance(part, Part) else str(part) for part in place)
    return f"{kind} {index}: {'.'.join(below)}"


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


class Gate:
    """Lets steps of optimizers, and loading into models and optimizers, wait until a snapshot is copied.

    Args:
        optimizers, models: those whose changes have to wait.
        before_step: called before each step of the first optimizer, once a snapshot is copied.
        after_step: called after each step of any of them.
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
            # A checkpoint may have been begun there.
            self._copied.wait()

        return wait

    def _wait(self, *_: Any) -> None:
        self._copied.wait()

    def wait(self) -> None:
        """Return when everybody may pass."""
        self._copied.wait()

    def open(self) -> None:
        """Let everybody pass; from any thread."""
        self._copied.set()

    def close(self) -> None:
        """Let everybody wait again, for another snapshot."""
        self._copied.clear()

    def remove(self) -> None:
        """Take the hooks off; from the thread that trains."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()


def steady_tensors(optimizers: Iterable[Optimizer]) -> list[Tensor]:
    """Parameters of optimizers and the tensors of their states."""
    found: list[Tensor] = []
    for optimizer in optimizers:
        found += [parameter.detach() for group in optimizer.param_groups for parameter in group["params"]]
        for state in optimizer.state.values():
            values = state.values() if isinstance(state, Mapping) else ()
            found += [value.detach() for value in values if isinstance(value, Tensor)]
    return found
