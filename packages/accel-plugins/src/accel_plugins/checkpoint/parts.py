"""Models, optimizers and schedulers as files, for strategies with the complete state on each process.

On a CPU a file is mapped, and its tensors are copied into existing memory: each tensor is in memory only once, and
writing to used memory takes a quarter of the time of newly allocated memory.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor
from torch.nn import Module, Parameter

from accel_bigmodel import weight_files
from accel_bigmodel.dispatch import get_state_dict_offloaded_model
from accel_bigmodel.loading import LoadGuard, load_guard
from accel_bigmodel.weight_files.reading import Copy, StoredWeight, WeightSource, copy_all, forget_pages, open_weights
from accel_plugins.checkpoint import pickled
from accel_plugins.checkpoint.files import (
    FSDP_MODEL_NAME,
    OPTIMIZER_NAME,
    optimizer_name,
    scheduler_name,
    sharded_model_name,
    shards_name,
    weights_name,
)
from accel_plugins.manifest import ObjectKind
from accel_plugins.parameters import by_position, canonical_name, names_parameters
from accel_state.errors import CheckpointError

__all__ = (
    "load_into_model",
    "plain_state_dict",
    "read_part",
    "read_weights",
    "with_own_memory",
    "write_part",
)

_NAMES = {ObjectKind.OPTIMIZER: optimizer_name, ObjectKind.SCHEDULER: scheduler_name}

_FORMATS: Final = (torch.contiguous_format, torch.channels_last, torch.channels_last_3d)


def plain_state_dict(model: Module) -> dict[str, Tensor]:
    """The state dict of a module under the names in the user's model, also if submodules are compiled or offloaded."""
    return {canonical_name(name): value for name, value in get_state_dict_offloaded_model(model).items()}


def write_part(kind: ObjectKind, state: Any, folder: Path, index: int, *, safe_serialization: bool = True) -> None:
    """Write the state of one object under its name of `checkpoint.files`.

    Raises:
        CheckpointError: the file cannot be written.
    """
    if kind is ObjectKind.MODEL:
        weight_files.save_weights_file(state, folder / weights_name(safe_serialization, index))
    else:
        pickled.write(state, folder / _NAMES[kind](index))


def read_part(
    kind: ObjectKind,
    item: Any,
    folder: Path,
    index: int,
    *,
    map_location: Any = "cpu",
    strict: bool = True,
    models: Sequence[Module] = (),
    **options: Any,
) -> None:
    """Load a file of `checkpoint.files` into an object; also one that a sharding backend wrote.

    On a CPU the file is read into the existing memory of parameters and optimizer state. A state dict of that optimizer
    that was not copied therefore changes too.

    Args:
        kind: the kind of the object.
        item: the object; for models, the user's model.
        folder: the checkpoint.
        index: its index among the objects of its kind.
        map_location: the device to which tensors are read before they are copied into the object.
        strict: for models, whether names must agree.
        models: for optimizers, the user's models, needed for states that list parameters by name.
        options: for `Module.load_state_dict`.

    Raises:
        CheckpointError: the file is missing or damaged, or belongs to another object.
    """
    if kind is ObjectKind.MODEL:
        with load_guard(item, folder) as guard:
            in_place = not options.get("assign", False)
            weights = _weights(item, folder, index, map_location or "cpu", guard, in_place=in_place)
            load_into_model(item, weights, strict=strict, where=str(folder), **options)
        return
    path = folder / _NAMES[kind](index)
    if kind is ObjectKind.OPTIMIZER:
        state = _optimizer_state(item, folder, index, map_location or "cpu", models)
    else:
        state = pickled.read(path, map_location or "cpu")
    try:
        item.load_state_dict(state)
    except (ValueError, KeyError, TypeError, RuntimeError) as error:
        raise CheckpointError(
            f"Cannot load {path.name} of {folder} into {type(item).__name__}.",
            f"The file has the state of another {kind.value}: {error}",
            "Prepare the same objects in the same order as when the checkpoint was saved.",
        ) from (None if isinstance(error, ValueError) else error)


def _weights(
    model: Module, folder: Path, index: int, map_location: Any, guard: LoadGuard, *, in_place: bool
) -> dict[str, Any]:
    """All weights of a model, from the file or folder that contains them."""
    candidates = [folder / weights_name(safe, index) for safe in (True, False)]
    safe = candidates[0]
    if safe.is_file() and in_place and map_location == "cpu":
        own = model.state_dict(keep_vars=True)
        return read_weights(safe, {canonical_name(name): value for name, value in own.items()}, guard)
    found = next((path for path in candidates if path.is_file()), None)
    if found is not None:
        return weight_files.load_weights_file(found, map_location)
    whole, sharded = folder / sharded_model_name(index), folder / shards_name(FSDP_MODEL_NAME, index)
    if whole.is_file():
        weights: dict[str, Any] = pickled.read(whole, map_location)
        return weights
    if sharded.is_dir():
        from accel_plugins.checkpoint.shards import read_whole

        return dict(read_whole(sharded)["model"])
    raise CheckpointError(
        f"Cannot load model {index} from {folder}.",
        f"The folder has none of {', '.join(path.name for path in (*candidates, whole, sharded))}.",
        "Prepare as many models as when the checkpoint was saved, or use another folder.",
    )


def _optimizer_state(optimizer: Any, folder: Path, index: int, map_location: Any, models: Sequence[Module]) -> Any:
    """The state of an optimizer, with its parameters by position."""
    sharded = folder / shards_name(OPTIMIZER_NAME, index)
    if sharded.is_dir() and not (folder / optimizer_name(index)).is_file():
        from accel_plugins.checkpoint.shards import read_whole

        return _positioned(read_whole(sharded)["optimizer"], optimizer, models)
    path = folder / optimizer_name(index)
    if map_location != "cpu":
        return _positioned(pickled.read(path, map_location), optimizer, models)
    state = _positioned(pickled.read(path, mapped=True), optimizer, models)
    own = optimizer.state_dict()
    return with_own_memory(state, own if _group_sizes(own) == _group_sizes(state) else None)


def _positioned(state: Any, optimizer: Any, models: Sequence[Module]) -> Any:
    """The state with its parameters by position."""
    if isinstance(state, Mapping) and "param_groups" in state and names_parameters(state):
        return by_position(state, optimizer, models)
    return state


def _group_sizes(state: Any) -> list[int] | None:
    """Numbers of parameters in the groups; they usually differ between different optimizers."""
    groups = state.get("param_groups") if isinstance(state, Mapping) else None
    return None if groups is None else [len(group["params"]) for group in groups]


def load_into_model(
    model: Module, weights: Mapping[str, Tensor], *, strict: bool = True, where: str = "", **options: Any
) -> None:
    """Load weights by their names in the user's model; of tied weights, one name is enough.

    Raises:
        CheckpointError: names or shapes do not agree.
    """
    own = model.state_dict()
    known = {canonical_name(name): name for name in own}
    renamed = {known.get(name, name): value for name, value in weights.items()}
    for names in weight_files.tied_names(own):
        given = next((renamed[name] for name in names if name in renamed), None)
        if given is not None:
            renamed.update({name: given for name in names if name not in renamed})
    try:
        model.load_state_dict(renamed, strict=strict, **options)
    except RuntimeError as error:
        # torch names every weight of both models, which can be thousands of lines.
        raise CheckpointError(
            f"Cannot load weights{f' of {where}' if where else ''} into {type(model).__name__}.",
            _differences(renamed, own, strict=strict) or str(error),
            "Create the model with the configuration of the saved one, or pass strict=False to load only matching "
            "weights.",
        ) from None


def _differences(weights: Mapping[str, Any], own: Mapping[str, Any], *, strict: bool = True) -> str:
    """Where the names and shapes of weights differ from those of a model, with three examples each; empty if nowhere.

    Args:
        weights: the weights, by the model's names.
        own: the model's own ones.
        strict: whether names must agree.

    Example:
        >>> _differences({"a": torch.ones(2), "c": torch.ones(1)}, {"a": torch.ones(3), "b": torch.ones(1)})
        'Missing weights: b; unexpected ones: c; other shapes: a has (2,) and not (3,).'
    """
    missing = [name for name in own if name not in weights] if strict else []
    unexpected = [name for name in weights if name not in own] if strict else []
    shapes = [
        f"{name} has {tuple(value.shape)} and not {tuple(own[name].shape)}"
        for name, value in weights.items()
        if isinstance(value, Tensor) and isinstance(own.get(name), Tensor) and value.shape != own[name].shape
    ]
    parts = (("missing weights", missing), ("unexpected ones", unexpected), ("other shapes", shapes))
    text = "; ".join(f"{what}: {_first_three(names)}" for what, names in parts if names)
    return f"{text[:1].upper()}{text[1:]}." if text else ""


def _first_three(names: Sequence[str]) -> str:
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(names[:3]) + more


def read_weights(path: Path, own: Mapping[str, Any], guard: LoadGuard | None = None) -> dict[str, Any]:
    """The weights of a safetensors file; if names and shapes match, they are read into the tensors of `own`.

    Tensors of another dtype or device are converted and moved.

    Args:
        path: the file.
        own: the model's tensors by name.
        guard: its `writes` is set while tensors are written.

    Raises:
        CheckpointError: the file is missing or damaged. If reading fails in the middle, some tensors are already
            changed.
    """
    stored = open_weights([WeightSource(path)])
    copies, weights, filled = list[Copy](), dict[str, Any](), set[int]()
    fills = _agree(stored, own)
    for name, weight in stored.items():
        target: Any = own.get(name)
        # For a tensor with several names, `load_state_dict` copies the later ones.
        if fills and _is_dense(target) and target.data_ptr() not in filled:
            filled.add(target.data_ptr())
            copies.append(Copy(target, weight))
            weights[name] = target
        else:
            weights[name] = weight.mapped()
    guard = guard or LoadGuard()
    guard.writes = bool(filled)
    copy_all(copies)
    guard.writes = False
    return weights


def _agree(stored: Mapping[str, StoredWeight], own: Mapping[str, Any]) -> bool:
    """Whether names and shapes match; if not, `load_state_dict` raises before a tensor is changed."""
    if any(name not in own or weight.shape != tuple(own[name].shape) for name, weight in stored.items()):
        return False
    addresses = {own[name].data_ptr() for name in stored}
    return all(
        name in stored or value.data_ptr() in addresses for name, value in own.items() if isinstance(value, Tensor)
    )


def _is_dense(own: Any) -> bool:
    """Whether a tensor has contiguous, unshared, writable memory."""
    return (
        type(own) in (Tensor, Parameter)
        and own.layout == torch.strided
        and not (own.is_meta or own.is_inference() or own.is_neg() or own.is_conj())
        and any(own.is_contiguous(memory_format=form) for form in _FORMATS[: 1 + max(0, own.dim() - 3)])
    )


def with_own_memory(state: Any, own: Any) -> Any:
    """A state whose tensors are mapped from a file, with its tensors copied from there.

    Tensors that share memory in the file share it in the result.

    Args:
        state: containers of mapped tensors.
        own: containers of the same structure. A tensor in them with the same memory layout as the one at the same
            position in `state` receives its data and is used in the result.
    """
    return _CopyFromFile(state).copied(state, own)


class _CopyFromFile:
    """Copies the tensors of a state that is mapped from a file."""

    def __init__(self, state: Any) -> None:
        self._users = Counter(tensor.untyped_storage().data_ptr() for tensor in _plain_tensors(state))
        self._copies: dict[int, Any] = {}
        self._filled = set[int]()

    def copied(self, item: Any, own: Any) -> Any:
        """An item of the state, and what the run has in its place, as in `with_own_memory`."""
        if isinstance(item, Tensor):
            alone = _is_plain(item) and self._users[item.untyped_storage().data_ptr()] == 1
            if not alone or not _is_dense(item):
                return copy.deepcopy(item, self._copies)
            fits = _is_dense(own) and _layout(own) == _layout(item) and own.data_ptr() not in self._filled
            target = own if fits else torch.empty_like(item, requires_grad=item.requires_grad)
            self._filled.add(target.data_ptr())
            target.detach().copy_(item)
            forget_pages(item)
            return target
        if isinstance(item, dict):
            of_own = own if isinstance(own, Mapping) else {}
            item.update({key: self.copied(value, of_own.get(key)) for key, value in item.items()})
            return item
        if type(item) in (list, tuple):
            others = own if isinstance(own, (list, tuple)) and len(own) == len(item) else [None] * len(item)
            return type(item)(map(self.copied, item, others))
        return item


def _layout(tensor: Tensor) -> tuple[Any, ...]:
    return tensor.device, tensor.dtype, tensor.shape, tensor.stride()


def _is_plain(tensor: Tensor) -> bool:
    return type(tensor) is Tensor and tensor.layout == torch.strided and not tensor.is_quantized and tensor.nbytes > 0


def _plain_tensors(item: Any) -> Iterator[Tensor]:
    if isinstance(item, Tensor):
        if _is_plain(item):
            yield item
    elif isinstance(item, (dict, list, tuple)):
        for value in item.values() if isinstance(item, dict) else item:
            yield from _plain_tensors(value)
