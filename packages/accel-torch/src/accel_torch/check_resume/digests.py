"""Digests of the contents of a checkpoint: short texts that are equal for equal bytes.

The name of a piece of state has two parts, its group and its path: `("optimizer 0", "state.3.exp_avg")`.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from hashlib import blake2b
from types import FrameType
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import torch
from torch import nn

from accel_ops.dtensors import full_tensor
from accel_ops.rng import snapshot

if TYPE_CHECKING:
    from accel_torch.session import Session

__all__ = ("Pieces", "digests_of", "sample_digests", "state_pieces", "variables_of")

Pieces = dict[str, dict[str, str]]
"""Digests by group and path."""

_BYTES: Final = 8
_MOST_ITEMS: Final = 1000
_DEPTH: Final = 4


def state_pieces(session: Session, full: bool) -> Pieces:
    """Digests of the contents of an Accelerator's checkpoint, except loader positions; called on every process.

    They include non-persistent buffers, which `state_dict` omits.

    Args:
        session: the session.
        full: digest full tensors instead of shards, independent of the number of processes, and omit the
            random-number generators, which each process has.
    """
    prepared = session.prepared
    found: Pieces = {}
    for index, model in enumerate(prepared.models):
        found[f"weights of model {index}"] = digests_of(dict(model.named_parameters()), full)
        found[f"buffers of model {index}"] = digests_of(dict(model.named_buffers()), full)
    for index, optimizer in enumerate(prepared.optimizers):
        found[f"optimizer {index}"] = digests_of(optimizer.state_dict(), full)
    for index, scheduler in enumerate(prepared.schedulers):
        found[f"scheduler {index}"] = digests_of(scheduler.state_dict(), full)
    if not session.backend.capabilities.own_precision:
        found["gradient scaler"] = digests_of(session.precision.state_dict(), full)
    for index, item in enumerate(prepared.custom):
        found[f"registered object {index} ({type(item).__name__})"] = digests_of(item.state_dict(), full)
    if not full:
        for name, state in snapshot().items():
            found[f"generator {name}"] = {"state": _digest(state)}
    return {group: paths for group, paths in found.items() if paths}


def digests_of(state: Any, full: bool = False) -> dict[str, str]:
    """A digest of each leaf of a nested state, by its path."""
    return {path: _digest(leaf, full) for path, leaf in _leaves(state, "")}


def _leaves(state: Any, path: str) -> Iterator[tuple[str, Any]]:
    if isinstance(state, Mapping):
        items: Iterable[tuple[Any, Any]] = state.items()
    elif isinstance(state, (list, tuple)):
        items = enumerate(state)
    else:
        yield path or "value", state
        return
    for key, value in items:
        yield from _leaves(value, f"{path}.{key}" if path else str(key))


def _digest(value: Any, full: bool = False) -> str:
    made = blake2b(digest_size=_BYTES)
    for chunk in _chunks(value, full):
        made.update(chunk)
    return made.hexdigest()


def _chunks(value: Any, full: bool) -> Iterator[bytes]:
    if isinstance(value, torch.Tensor):
        value = value.detach()
        if hasattr(value, "placements"):
            value = full_tensor(value) if full else value.to_local()
        value = value.cpu().contiguous()
        yield f"{value.dtype}{tuple(value.shape)}".encode()
        yield value.reshape(-1).view(torch.uint8).numpy().tobytes() if value.numel() else b""
    elif isinstance(value, np.ndarray):
        yield f"{value.dtype}{value.shape}".encode()
        yield value.tobytes()
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield repr(key).encode()
            yield from _chunks(item, full)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _chunks(item, full)
            yield b","
    elif isinstance(value, (int, float, str, bytes, bool, type(None))):
        yield repr(value).encode()
    else:
        # The text of other objects may contain their address.
        yield type(value).__qualname__.encode()


# ---------------------------------------------------------------- samples


def sample_digests(batch: Any) -> list[str]:
    """A digest of each sample of a batch: of its row in all arrays that have as many rows as the first one."""
    arrays = [leaf for _, leaf in _leaves(batch, "") if isinstance(leaf, (torch.Tensor, np.ndarray)) and leaf.ndim]
    if not arrays:
        return [_digest(batch)]
    rows = len(arrays[0])
    matching = [array for array in arrays if len(array) == rows]
    return [_digest([array[row] for array in matching]) for row in range(rows)]


# ---------------------------------------------------------------- variables of the script


def variables_of(frame: FrameType | None, script: str, known: Iterable[Any]) -> dict[str, tuple[str, bool]]:
    """Digests of a script's local and global variables, by name.

    Args:
        frame: the innermost running frame.
        script: the script's file.
        known: objects to omit, because the checkpoint contains them.

    Returns:
        For each name, the digest, and whether the variable is an object with a state for training, such as a module, a
        generator, or an object with `state_dict` and `load_state_dict`.
    """
    passed = {id(item) for item in known}
    found: dict[str, tuple[str, bool]] = {}
    while frame is not None:
        if frame.f_code.co_filename == script:
            where = frame.f_code.co_name
            for name, value in list(frame.f_locals.items()):
                if name.startswith("_") or id(value) in passed:
                    continue
                state = _state_of(value, passed, _DEPTH)
                if state is not None:
                    label = name if where == "<module>" else f"{name} in {where}()"
                    found.setdefault(label, (_digest(state), _keeps_state(value)))
        frame = frame.f_back
    return found


_GENERATORS: Final[dict[type, Callable[[Any], Any]]] = {
    torch.Generator: torch.Generator.get_state,
    random.Random: random.Random.getstate,
    np.random.Generator: lambda generator: generator.bit_generator.state,
    np.random.RandomState: lambda generator: generator.get_state(legacy=False),
}
"""How to read the state of each type of generator."""


def _keeps_state(value: Any) -> bool:
    return isinstance(value, (nn.Module, *_GENERATORS)) or (
        hasattr(value, "state_dict") and hasattr(value, "load_state_dict")
    )


def _state_of(value: Any, passed: set[int], depth: int) -> Any:
    """Plain values that represent the object's state; None if there are none, or too many."""
    if id(value) in passed or depth == 0:
        return None
    if isinstance(value, (bool, int, float, str, torch.Tensor, np.ndarray)):
        return value
    if isinstance(value, nn.Module):
        return {**dict(value.named_parameters()), **dict(value.named_buffers())}
    for kind, read in _GENERATORS.items():
        if isinstance(value, kind):
            return read(value)
    if type(value).__module__ == "__main__" and hasattr(value, "__dict__"):
        value = vars(value)
    if not isinstance(value, (list, tuple, deque, dict)):
        return None
    if len(value) > _MOST_ITEMS:
        return len(value)
    items = value.items() if isinstance(value, dict) else enumerate(value)
    return {str(key): _state_of(item, passed, depth - 1) for key, item in items}
