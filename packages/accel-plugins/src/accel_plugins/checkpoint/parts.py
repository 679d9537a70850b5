"""Models, optimizers and schedulers as files, for every strategy whose state is complete on each process.

On a CPU a file is read into existing memory: each tensor is in memory once, and writing to memory in use takes a
quarter of the time of fresh memory. A mapping of the file gives the positions of its tensors; the bytes are read,
because a copy from the mapping takes twice as long and a file that another process truncates would end the process.
"""

from __future__ import annotations

import copy
import struct
import zipfile
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from io import BufferedReader
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor
from torch.nn import Module, Parameter

from accel_bigmodel import weight_files
from accel_bigmodel.failed_load import LoadGuard, load_guard
from accel_bigmodel.weight_files.range_reader import RangeReader
from accel_bigmodel.weight_files.reading import FileWeight, WeightSource, open_weights
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
from accel_plugins.manifest import Part
from accel_plugins.parameters import by_position, canonical_name, names_parameters
from accel_plugins.wrapped.optimizer import inner_optimizer
from accel_state.errors import CheckpointError
from accel_state.untrusted import open_regular

__all__ = (
    "MappedState",
    "load_into_model",
    "plain_state_dict",
    "read_part",
    "read_weights",
    "write_part",
)

_NAMES = {Part.OPTIMIZER: optimizer_name, Part.SCHEDULER: scheduler_name}

_LOCAL_HEADER: Final = 30
_FORMATS: Final = (torch.contiguous_format, torch.channels_last, torch.channels_last_3d)


def plain_state_dict(model: Module) -> dict[str, Tensor]:
    """The state dict of a module under the names its author gave, whatever was compiled inside of it."""
    return {canonical_name(name): value for name, value in model.state_dict().items()}


def write_part(part: Part, state: Any, folder: Path, index: int, *, safe_serialization: bool = True) -> None:
    """Write the state of one object under its name of `checkpoint.files`.

    Raises:
        CheckpointError: it cannot be written.
    """
    if part is Part.MODEL:
        weight_files.save_weights_file(state, folder / weights_name(safe_serialization, index))
    else:
        pickled.write(state, folder / _NAMES[part](index))


def read_part(
    part: Part,
    item: Any,
    folder: Path,
    index: int,
    *,
    map_location: Any = "cpu",
    strict: bool = True,
    models: Sequence[Module] = (),
    **options: Any,
) -> None:
    """Read a file of `checkpoint.files` into an object; also one that a backend wrote which shards.

    On a CPU the file is read into the memory that parameters and the state of an optimizer have, so whoever still holds
    a state of that optimizer, uncopied, sees it change.

    Args:
        part: kind of the object.
        item: the object; of a model, the user's.
        folder: the checkpoint.
        index: which one of its kind.
        map_location: where tensors are read to, before they go to where the object has its own.
        strict: of models, whether names must agree.
        models: of optimizers, the user's models, for states that name their parameters.
        options: for `Module.load_state_dict`.

    Raises:
        CheckpointError: the file is missing or damaged, or it is that of another object.
    """
    if part is Part.MODEL:
        with load_guard(item, folder) as guard:
            in_place = not options.get("assign", False)
            weights = _weights(item, folder, index, map_location or "cpu", guard, in_place=in_place)
            load_into_model(item, weights, strict=strict, where=str(folder), **options)
        return
    path = folder / _NAMES[part](index)
    if part is Part.OPTIMIZER:
        state = _optimizer_state(item, folder, index, map_location or "cpu", models)
    else:
        state = pickled.read(path, map_location or "cpu")
    try:
        item.load_state_dict(state)
    except (ValueError, KeyError, TypeError, RuntimeError) as error:
        raise CheckpointError(
            f"Cannot load {path.name} of {folder} into {type(item).__name__}.",
            f"It is the state of another {part.value}: {error}",
            "Prepare the same objects in the same order as when it was saved.",
        ) from error


def _weights(
    model: Module, folder: Path, index: int, map_location: Any, guard: LoadGuard, *, in_place: bool
) -> dict[str, Any]:
    """All weights of a model, from whichever file or folder holds them."""
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
        f"None of {', '.join(path.name for path in (*candidates, whole, sharded))} is there.",
        "Prepare as many models as when it was saved, or name another folder.",
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
    mapped = MappedState(path)
    state, own = _positioned(mapped.state, optimizer, models), optimizer.state_dict()
    return mapped.read(state, own if _group_sizes(own) == _group_sizes(state) else None)


def _positioned(state: Any, optimizer: Any, models: Sequence[Module]) -> Any:
    """The state with its parameters by position."""
    if isinstance(state, Mapping) and "param_groups" in state and names_parameters(state):
        return by_position(state, inner_optimizer(optimizer), models)
    return state


def _group_sizes(state: Any) -> list[int] | None:
    """Numbers of parameters in the groups, which differ between optimizers that are not the same."""
    groups = state.get("param_groups") if isinstance(state, Mapping) else None
    return None if groups is None else [len(group["params"]) for group in groups]


def load_into_model(
    model: Module, weights: Mapping[str, Tensor], *, strict: bool = True, where: str = "", **options: Any
) -> None:
    """Load weights under the names of the user's model; names that are tied to a given one need not be given.

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
        raise CheckpointError(
            f"Cannot load weights{f' of {where}' if where else ''} into {type(model).__name__}.",
            str(error),
            "Build the model with the configuration it was saved with, or pass strict=False to load what agrees.",
        ) from error


def read_weights(path: Path, own: Mapping[str, Any], guard: LoadGuard | None = None) -> dict[str, Any]:
    """The weights of a safetensors file; where names and shapes agree, they are read into the tensors of `own`.

    A tensor of another dtype or on another device is converted and moved on the way.

    Args:
        path: the file.
        own: tensors by name.
        guard: its `writes` is set while tensors change.

    Raises:
        CheckpointError: the file is missing or damaged; tensors are filled in part when it cannot be read to its end.
    """
    found = open_weights([WeightSource(path)])
    reader, weights, filled = RangeReader(), dict[str, Any](), set[int]()
    fills = _agree(found, own)
    for name, weight in found.items():
        target: Any = own.get(name)
        # Of a tensor under several names, `load_state_dict` copies the later ones.
        if fills and _is_dense(target) and target.data_ptr() not in filled:
            filled.add(target.data_ptr())
            weight.read_into(reader, target)
            weights[name] = target
        else:
            weights[name] = weight.mapped()
    guard = guard or LoadGuard()
    guard.writes = bool(filled)
    reader.run()
    guard.writes = False
    return weights


def _agree(found: Mapping[str, FileWeight], own: Mapping[str, Any]) -> bool:
    """Whether the names and shapes agree; where they do not, `load_state_dict` says so before a tensor has changed."""
    if any(name not in own or weight.shape != tuple(own[name].shape) for name, weight in found.items()):
        return False
    given = {own[name].data_ptr() for name in found}
    return all(name in found or value.data_ptr() in given for name, value in own.items() if isinstance(value, Tensor))


def _is_dense(own: Any) -> bool:
    """Whether a tensor has memory of its own without gaps, which may be written to."""
    return (
        type(own) in (Tensor, Parameter)
        and own.layout == torch.strided
        and not (own.is_meta or own.is_inference() or own.is_neg() or own.is_conj())
        and any(own.is_contiguous(memory_format=form) for form in _FORMATS[: 1 + max(0, own.dim() - 3)])
    )


def _bytes_of(storage: torch.UntypedStorage, offset: int, size: int) -> Tensor:
    """Memory of a storage on the CPU as a tensor of bytes."""
    return torch.empty(0, dtype=torch.uint8).set_(storage, offset, (size,), (1,))


class MappedState:
    """What `torch.save` wrote, with tensors that are mapped until `read` is called.

    Args:
        path: the file.

    Attributes:
        state: what it holds; containers in it may be rearranged before `read`.

    Raises:
        CheckpointError: the file is missing, damaged, or holds more than plain data.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self.state: Any = None
        self._begin: int | None = None
        if records := _records(path):
            self.state = pickled.read(path, mmap=True)
            self._begin = _mapped_at(list(_tensors(self.state)), records)
        if self._begin is None:
            self.state = pickled.read(path)

    def read(self, state: Any, own: Any) -> Any:
        """The state with tensors that are read.

        Args:
            state: `self.state`, or containers that hold what it held.
            own: containers of the same form; a tensor in them receives the one at the same position in `state` if it
                has memory of the same form, and replaces it in the result.

        Raises:
            CheckpointError: the file is shorter than it says.
        """
        if self._begin is None:
            return state
        reading = _Reading(self._path, self._begin, list(_tensors(state)))
        read = reading.tree(state, own)
        reading.run()
        return read


class _Reading:
    """Replaces mapped tensors by such as have memory of their own."""

    def __init__(self, path: Path, begin: int, tensors: list[Tensor]) -> None:
        self._path, self._begin = path, begin
        self._reader = RangeReader()
        self._filled: dict[int, Tensor] = {}
        self._users = Counter(tensor.untyped_storage().data_ptr() for tensor in tensors)
        self._fresh: dict[int, torch.UntypedStorage] = {}

    def run(self) -> None:
        """Fill everything."""
        self._reader.run()
        for tensor in self._filled.values():
            torch.autograd.graph.increment_version(tensor)

    def tree(self, item: Any, own: Any) -> Any:
        """The same containers, with other tensors."""
        if isinstance(item, Tensor):
            return self._tensor(item, own)
        if isinstance(item, dict):
            known = own if isinstance(own, Mapping) else {}
            for key, value in item.items():
                item[key] = self.tree(value, known.get(key))
            return item
        if type(item) in (list, tuple):
            others = own if isinstance(own, (list, tuple)) and len(own) == len(item) else [None] * len(item)
            return type(item)(map(self.tree, item, others))
        return item

    def _tensor(self, mapped: Tensor, own: Any) -> Tensor:
        if not _is_plain(mapped):
            return copy.deepcopy(mapped)
        storage = mapped.untyped_storage()
        address = storage.data_ptr()
        alone = self._users[address] == 1 and storage.nbytes() == mapped.nbytes
        if alone and self._takes(own, mapped):
            self._filled[own.data_ptr()] = own
            self._fill(own.untyped_storage(), own.storage_offset() * own.itemsize, own.nbytes, address)
            return own  # type: ignore[no-any-return]
        if address not in self._fresh:
            self._fresh[address] = fresh = torch.UntypedStorage(storage.nbytes())  # type: ignore[no-untyped-call]
            self._fill(fresh, 0, fresh.nbytes(), address)
        read = torch.empty(0, dtype=mapped.dtype)
        read.set_(self._fresh[address], mapped.storage_offset(), mapped.shape, mapped.stride())
        return read

    def _takes(self, own: Any, wanted: Tensor) -> bool:
        """Whether the bytes of `wanted` are exactly those of `own`, which no other tensor fills."""
        return (
            _is_dense(own)
            and own.device.type == "cpu"
            and (own.dtype, own.shape, own.stride()) == (wanted.dtype, wanted.shape, wanted.stride())
            and own.data_ptr() not in self._filled
        )

    def _fill(self, storage: torch.UntypedStorage, offset: int, size: int, address: int) -> None:
        """Read the bytes that are mapped at an address into a part of a storage."""
        self._reader.add(_bytes_of(storage, offset, size), self._path, address - self._begin)


def _is_plain(tensor: Tensor) -> bool:
    return type(tensor) is Tensor and tensor.layout == torch.strided and not tensor.is_quantized and tensor.nbytes > 0


def _tensors(item: Any) -> Iterator[Tensor]:
    """All tensors in plain memory."""
    if isinstance(item, Tensor):
        if _is_plain(item):
            yield item
    elif isinstance(item, (dict, list, tuple)):
        for value in item.values() if isinstance(item, dict) else item:
            yield from _tensors(value)


def _mapped_at(tensors: list[Tensor], records: Mapping[int, int]) -> int | None:
    """The address at which a file is mapped, or None when some tensor is outside of its records.

    torch tells where its tensors are and not where the file begins; the first record has the first of the addresses.
    """
    places = {storage.data_ptr(): storage.nbytes() for storage in (one.untyped_storage() for one in tensors)}
    if not places or not records:
        return None
    begin = min(places) - min(records)
    agree = all(records.get(address - begin) == size for address, size in places.items())
    return begin if agree else None


def _records(path: Path) -> dict[int, int]:
    """Positions of the bytes of tensors in a file of `torch.save`, with sizes; empty if they cannot be mapped.

    The format: https://pytorch.org/docs/stable/notes/serialization.html. The header of each member in the file itself
    has fields of other lengths than that in the directory at its end.
    """
    try:
        with open_regular(path) as opened, BufferedReader(opened) as file, zipfile.ZipFile(file) as archive:
            members = [one for one in archive.infolist() if "/data/" in one.filename and one.file_size]
            if any(one.compress_type != zipfile.ZIP_STORED for one in members):
                return {}
            found = {}
            for one in members:
                file.seek(one.header_offset)
                name, extra = struct.unpack_from("<HH", file.read(_LOCAL_HEADER), 26)
                found[one.header_offset + _LOCAL_HEADER + name + extra] = one.file_size
            return found
    except Exception:  # a damaged archive can make its reader raise anything; who reads it next says what is wrong
        return {}
