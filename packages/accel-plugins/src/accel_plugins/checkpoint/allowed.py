"""The `.metadata` of `torch.distributed.checkpoint`: a pickle, looked through before anything in it is made.

Only these classes describe tensors and their positions, each constructed as in its own pickles: without arguments, with
a state of plain fields. torch reads the same pickle without any check.
"""

from __future__ import annotations

import dataclasses
import pickle
from collections.abc import Callable, Mapping
from functools import cache
from io import BufferedReader
from pathlib import Path
from typing import Any, Final

from torch.distributed.checkpoint.metadata import Metadata, TensorProperties

from accel_bigmodel.weight_files.torch_files import plain_rules
from accel_ops.pickle_check import Budget, Global, Made, Rule, Rules, check, demand, is_made
from accel_state.errors import CheckpointError
from accel_state.untrusted import open_regular

__all__ = ("metadata_rules", "read_metadata")

_METADATA: Final = "torch.distributed.checkpoint.metadata"
_FILES: Final = "torch.distributed.checkpoint.filesystem"
_PLANS: Final = "torch.distributed.checkpoint.planner"

Field = Callable[[Any], object]


def _is(value: Any, *kinds: str) -> bool:
    """Whether a value is an object of one of these kinds that was given its fields."""
    return is_made(value, *kinds) and (value.state is not None or not _required(value.kind))


def _kind(*kinds: str) -> Field:
    return lambda value: _is(value, *kinds)


@dataclasses.dataclass(frozen=True)
class _Optional:
    """What a field may hold that may be missing."""

    inner: Field

    def __call__(self, value: Any) -> bool:
        return value is None or bool(self.inner(value))


def _text(value: Any) -> bool:
    return type(value) is str


def _count(value: Any) -> bool:
    return type(value) is int and 0 <= value < 2**63


def _strides(value: Any) -> bool:
    return value is None or (is_made(value, "tuple") and all(map(_count, value.parts)))


def _list_of(kind: str) -> Field:
    return lambda value: is_made(value, "list") and all(_is(part, kind) for part in value.parts)


def _mapping(keys: Field, *kinds: str) -> Field:
    def admits(value: Any) -> bool:
        return (
            is_made(value, "dict")
            and all(map(keys, value.parts[::2]))
            and all(_is(part, *kinds) for part in value.parts[1::2])
        )

    return admits


def _file_name(value: Any) -> bool:
    """A name in the folder: any other would read files elsewhere."""
    inside = type(value) is str and value not in ("", ".", "..") and not set(value) & set("/\\:\0")
    demand(inside, f"it names the file {value!r}, which leads out of the folder")
    return True


def _place(value: Any) -> bool:
    return _text(value) or is_made(value, "path")


_FIELDS: Final[Mapping[tuple[str, str], Mapping[str, Field]]] = {
    (_METADATA, "Metadata"): {
        "state_dict_metadata": _mapping(
            _text, f"{_METADATA}.TensorStorageMetadata", f"{_METADATA}.BytesStorageMetadata"
        ),
        "storage_data": _Optional(_mapping(_kind(f"{_METADATA}.MetadataIndex"), f"{_FILES}._StorageInfo")),
        "storage_meta": _Optional(_kind(f"{_METADATA}.StorageMeta")),
        "version": _Optional(_text),
    },
    (_METADATA, "TensorStorageMetadata"): {
        "properties": _kind(f"{_METADATA}.TensorProperties"),
        "size": _kind("torch.Size"),
        "chunks": _list_of(f"{_METADATA}.ChunkStorageMetadata"),
    },
    (_METADATA, "BytesStorageMetadata"): {},
    (_METADATA, "ChunkStorageMetadata"): {"offsets": _kind("torch.Size"), "sizes": _kind("torch.Size")},
    (_METADATA, "MetadataIndex"): {
        "fqn": _text,
        "offset": _Optional(_kind("torch.Size")),
        "index": _Optional(_count),
    },
    (_METADATA, "StorageMeta"): {
        "checkpoint_id": _Optional(_place),
        "save_id": _Optional(_text),
        "load_id": _Optional(_text),
    },
    (_FILES, "_StorageInfo"): {
        "relative_path": _file_name,
        "offset": _count,
        "length": _count,
        "transform_descriptors": _Optional(lambda value: False),  # compressed, by an extension
    },
    (_FILES, "_StoragePrefix"): {"prefix": _file_name},
    (_PLANS, "SavePlan"): {"items": _list_of(f"{_PLANS}.WriteItem")},
    (_PLANS, "WriteItem"): {
        "index": _kind(f"{_METADATA}.MetadataIndex"),
        "type": _kind(f"{_PLANS}.WriteItemType"),
        "bytes_io_data": _Optional(_kind(f"{_PLANS}.BytesIOWriteData")),
        "tensor_data": _Optional(_kind(f"{_PLANS}.TensorWriteData")),
    },
    (_PLANS, "BytesIOWriteData"): {"nbytes": _count},
    (_PLANS, "TensorWriteData"): {
        "chunk": _kind(f"{_METADATA}.ChunkStorageMetadata"),
        "properties": _kind(f"{_METADATA}.TensorProperties"),
        "size": _kind("torch.Size"),
    },
}
"""The classes and what their fields hold; a field that is not named here, as of a later torch, holds plain data."""

_ENUMS: Final = {
    (_METADATA, "_MEM_FORMAT_ENCODING"): int,
    (_PLANS, "WriteItemType"): int,
    (_FILES, "SerializationFormat"): str,
}
_PROPERTIES: Final = (_METADATA, "TensorProperties")
_DATA: Final = ("collections.OrderedDict", "builtins.set", "torch.Size", "torch.serialization._get_layout")


@cache
def _required(kind: str) -> frozenset[str]:
    """The fields without which an object of a kind cannot be used."""
    for pair, fields in _FIELDS.items():
        if ".".join(pair) == kind:
            return frozenset(name for name, field in fields.items() if not isinstance(field, _Optional))
    return frozenset({"dtype"} if kind == ".".join(_PROPERTIES) else ())


def _made(name: Global, arguments: list[Any], budget: Budget) -> Made:
    demand(not arguments, f"{name} is made with arguments")
    return Made(str(name), [])


def _state(fields: Mapping[str, Field]) -> Callable[[Made, Any, Budget], None]:
    def build(made: Made, state: Any, budget: Budget) -> None:
        demand(is_made(state, "dict"), f"{made.kind} has a state that is not of fields")
        for name, value in zip(state.parts[::2], state.parts[1::2], strict=True):
            demand(_text(name) and name.isidentifier() and not name.startswith("__"), f"{made.kind} has odd fields")
            demand(name not in fields or fields[name](value), f"the {name} of {made.kind} is of another kind")
        missing = _required(made.kind) - set(state.parts[::2])
        demand(not missing, f"{made.kind} has no {', '.join(sorted(missing))}")

    return build


def _properties(made: Made, state: Any, budget: Budget) -> None:
    demand(is_made(state, "tuple") and len(state.parts) in (5, 6), f"{made.kind} has a state of its own")
    dtype, layout, gradient, memory, pinned, *strides = state.parts
    # torch 2.15 added the strides, and reads what an older torch wrote; an older one cannot read six properties.
    demand(all(map(_strides, strides)), f"{made.kind} has a state of its own")
    demand(
        len(state.parts) <= len(dataclasses.fields(TensorProperties)),
        "a newer torch wrote it: install torch 2.15 or newer",
    )
    demand(isinstance(dtype, Global) and is_made(layout, "torch.layout"), "a tensor has no dtype or layout")
    demand(is_made(memory, f"{_METADATA}._MEM_FORMAT_ENCODING"), "a tensor has no memory format")
    demand(type(gradient) is bool and type(pinned) is bool, f"{made.kind} has a state of its own")


def _member(kind: type) -> Callable[[Global, list[Any], Budget], Made]:
    def call(name: Global, arguments: list[Any], budget: Budget) -> Made:
        demand(len(arguments) == 1 and type(arguments[0]) is kind, f"{name} is not made of its value")
        return Made(str(name), [])

    return call


def _path(name: Global, arguments: list[Any], budget: Budget) -> Made:
    demand(all(map(_text, arguments)), f"{name} is not made of texts")
    return Made("path", [])


@cache
def metadata_rules() -> Rules:
    """What a description of tensors is made with, by module and name."""
    taken = {pair: rule for pair, rule in plain_rules().items() if ".".join(pair) in _DATA or rule.constant}
    own = {pair: Rule(new=_made, build=_state(fields)) for pair, fields in _FIELDS.items()}
    own[_METADATA, "MetadataIndex"] = Rule(new=_made, build=_state(_FIELDS[_METADATA, "MetadataIndex"]), key=True)
    own[_PROPERTIES] = Rule(new=_made, build=_properties)
    enums = {pair: Rule(call=_member(kind), key=True) for pair, kind in _ENUMS.items()}
    paths = {
        (module, name): Rule(call=_path)
        for module in ("pathlib", "pathlib._local")  # the second is that of Python 3.13
        for name in ("PosixPath", "WindowsPath")
    }
    return {**taken, **own, **enums, **paths}


def read_metadata(path: Path) -> Metadata:
    """What a `.metadata` describes, if it holds nothing but descriptions of tensors.

    Args:
        path: the file.

    Raises:
        CheckpointError: it holds more, or it is missing or damaged.
    """
    try:
        with BufferedReader(open_regular(path)) as file:
            content = file.read()
        described, _ = check(content, metadata_rules(), Budget(len(content)))
        demand(_is(described, f"{_METADATA}.Metadata"), "it is not a description of tensors")
        found: Metadata = pickle.loads(content)  # what was checked, whatever becomes of the file
        return found
    except FileNotFoundError:
        raise CheckpointError(
            f"Cannot load the shards in {path.parent}.",
            f"{path.name} is not there.",
            "The folder is incomplete: load an older checkpoint.",
        ) from None
    except Exception as error:  # a damaged pickle can make its reader raise anything
        raise CheckpointError(
            f"Cannot load the shards in {path.parent}.",
            f"{path.name} is damaged or holds more than descriptions of tensors: {error}",
            "Load an older checkpoint, one that you trust.",
        ) from error
