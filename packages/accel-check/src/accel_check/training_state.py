"""Digests of the state from which a training script goes on, taken before the first forward of each step."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from types import FrameType
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import torch
from torch import nn

from accel_check.digests import digest, digests_of, generators, leaves
from accel_check.models import piece_of
from accel_check.records import TensorPart

if TYPE_CHECKING:
    from accel_check.recorder import StepRecorder

__all__ = ("optimizer_pieces", "training_state", "variables_of")

_IGNORED_SCHEDULE_FIELDS: Final = ("_step_count", "_get_lr_called_within_step", "_is_initial")
"""What differs in right resumes by `last_epoch=`."""
_MAX_ITEMS: Final = 1000
_MAX_DEPTH: Final = 4


def training_state(recorder: StepRecorder) -> dict[str, dict[str, str]]:
    """Digests of models, optimizers, schedulers, scalers and generators, by group and path."""
    names = {id(parameter): name for name, parameter in recorder.models.parameters()}
    digests = {
        "weights": digests_of(dict(recorder.models.parameters())),
        "buffers": digests_of(dict(recorder.models.buffers())),
    }
    digests["gradients so far"] = {
        name: digest(one.grad)
        for name, one in recorder.models.parameters()
        if one.grad is not None and bool(_local(one.grad).any())
    }
    for number, optimizer in _living(recorder.optimizers):
        digests[f"optimizer {number}"] = _of_optimizer(optimizer, names)
    for number, scheduler in _living(recorder.schedulers):
        state = {name: value for name, value in scheduler.state_dict().items() if name not in _IGNORED_SCHEDULE_FIELDS}
        digests[f"scheduler {number}"] = _readable(state)
    for number, scaler in _living(recorder.scalers):
        if scaler.is_enabled():
            digests[f"scaler {number}"] = _readable(scaler.state_dict())
    for name, drawn in generators().items():
        digests[f"generator {name}"] = {"state": drawn}
    for more in recorder.more_state:
        digests |= more()
    return {group: paths for group, paths in digests.items() if paths}


def _local(tensor: Any) -> Any:
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def _living(references: list[Any]) -> Iterable[tuple[int, Any]]:
    return [(number, one) for number, reference in enumerate(references) if (one := reference()) is not None]


def _of_optimizer(optimizer: Any, names: Mapping[int, str]) -> dict[str, str]:
    digests: dict[str, str] = {}
    for parameter, state in optimizer.state.items():
        name = names.get(id(parameter), "a parameter")
        digests |= {f"{name}.{path}": value for path, value in digests_of(state).items()}
    for number, group in enumerate(optimizer.param_groups):
        options = {key: value for key, value in group.items() if key != "params"}
        digests |= {f"group {number}.{path}": value for path, value in _readable(options).items()}
    return digests


def optimizer_pieces(recorder: StepRecorder) -> dict[str, TensorPart]:
    """The parts of the optimizers' tensors that this process has, by name."""
    names = {id(parameter): name for name, parameter in recorder.models.parameters()}
    pieces: dict[str, TensorPart] = {}
    for number, optimizer in _living(recorder.optimizers):
        for parameter, state in optimizer.state.items():
            for key, value in state.items() if isinstance(state, Mapping) else ():
                if isinstance(value, torch.Tensor):
                    pieces[f"optimizer {number}: {names.get(id(parameter), 'a parameter')}.{key}"] = piece_of(value)
    return pieces


def _readable(state: Any) -> dict[str, str]:
    """Numbers as text, and digests of everything else."""
    return {
        path: repr(leaf) if isinstance(leaf, (bool, int, float, str, type(None))) else digest(leaf)
        for path, leaf in leaves(state)
    }


# ---------------------------------------------------------------- variables of the script


def variables_of(frame: FrameType | None, script: str, compared: Iterable[Any]) -> dict[str, tuple[str, bool]]:
    """Digests of a script's local and global variables, by name.

    Args:
        frame: the innermost running frame.
        script: the script's file.
        compared: objects to omit, because their state is compared already.

    Returns:
        For each name, the digest, and whether the variable is an object with a state for training, such as a module, a
        generator, or an object with `state_dict` and `load_state_dict`.
    """
    passed = {id(item) for item in compared}
    variables: dict[str, tuple[str, bool]] = {}
    while frame is not None:
        if frame.f_code.co_filename == script:
            where = frame.f_code.co_name
            for name, value in list(frame.f_locals.items()):
                if name.startswith("_") or id(value) in passed:
                    continue
                state = _state_of(value, passed, _MAX_DEPTH)
                if state is not None:
                    label = name if where == "<module>" else f"{name} in {where}()"
                    variables.setdefault(label, (digest(state), _keeps_state(value)))
        frame = frame.f_back
    return variables


_STATES_OF_GENERATORS: Final[dict[type, Callable[[Any], Any]]] = {
    torch.Generator: torch.Generator.get_state,
    random.Random: random.Random.getstate,
    np.random.Generator: lambda generator: generator.bit_generator.state,
    np.random.RandomState: lambda generator: generator.get_state(legacy=False),
}
"""How to read the state of each type of generator."""


def _keeps_state(value: Any) -> bool:
    return isinstance(value, (nn.Module, *_STATES_OF_GENERATORS)) or (
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
    for kind, read in _STATES_OF_GENERATORS.items():
        if isinstance(value, kind):
            return read(value)
    if type(value).__module__ == "__main__" and hasattr(value, "__dict__"):
        value = vars(value)
    if not isinstance(value, (list, tuple, deque, dict)):
        return None
    if len(value) > _MAX_ITEMS:
        return len(value)
    items = value.items() if isinstance(value, dict) else enumerate(value)
    return {str(key): _state_of(item, passed, depth - 1) for key, item in items}
