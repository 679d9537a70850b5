"""Checks files of `torch.save` before `torch.load` reads them.

`torch.load(weights_only=True)` runs no code of a file. But a few bytes can still make it allocate a lot of memory, such
as `bytearray(10**10)` or `torch.Tensor(10**10)`, or create tensors with shapes larger than their memory. This module
accepts only one way to create each object, and checks that each tensor is inside its storage, and each storage inside
the file.
"""

from __future__ import annotations

import math
import re
import sys
import zipfile
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from io import BufferedReader
from mmap import ACCESS_READ, mmap
from pathlib import Path
from typing import IO, Any, Final, NamedTuple

import torch

from accel_ops.pickle_check import (
    Budget,
    Global,
    Made,
    PickleRefused,
    Rule,
    Rules,
    check_pickle,
    demand,
    is_made,
    numbers_in,
)
from accel_state.untrusted import open_regular

__all__ = (
    "STORAGES",
    "TorchTensor",
    "check_torch_file",
    "plain_rules",
    "torch_rules",
)

_MAGIC: Final = 0x1950A86A20F9469CFC6C
"""First bytes of files of torch before 1.6: https://pytorch.org/docs/stable/notes/serialization.html."""


@dataclass(frozen=True)
class TorchTensor:
    """A tensor with contiguous elements in a file, in C order.

    Args:
        dtype: its dtype.
        shape: its shape.
        begin: offset of its first byte in the file.
    """

    dtype: torch.dtype
    shape: tuple[int, ...]
    begin: int


class _StorageFacts(NamedTuple):
    """A storage in a pickle: bytes of an element, total bytes, its class and its key in the file."""

    itemsize: int
    nbytes: int
    kind: str
    key: str


class _TensorFacts(NamedTuple):
    """A tensor that a pickle describes; `begin` is its first byte in the storage, None if it is not in C order."""

    elements: int
    shape: list[int]
    dtype: str = ""
    storage: str = ""
    begin: int | None = None


class _Storages:
    """Describes the objects of the persistent ids in a file."""

    def __init__(self, size_of: Callable[[str], int], fields: int) -> None:
        self._size_of = size_of
        self._fields = fields
        self.known: dict[str, tuple[Any, ...]] = {}

    def __call__(self, name: Global, parts: list[Any], budget: Budget) -> Made:
        demand(len(parts) == self._fields and parts[0] == "storage", "it refers to something else than a storage")
        kind, key, location, count, *view = parts[1:]
        demand(isinstance(kind, Global) and (kind.module, kind.name) in STORAGES, f"{kind} is not a storage")
        demand(type(key) is str and type(location) is str and type(count) is int, "a storage is damaged")
        itemsize = STORAGES[kind.module, kind.name]
        whole = (str(kind), location, count)
        if key not in self.known:
            self.known[key] = whole
            demand(0 <= count * itemsize <= self._size_of(key), f"storage {key} is larger than what the file holds")
            budget.spend(count * itemsize)
        demand(self.known[key] == whole, f"storage {key} is of two kinds")
        if view and view[0] is not None:
            demand(is_made(view[0], "tuple") and len(view[0].parts) == 3, "a part of a storage is damaged")
            _, offset, part = view[0].parts
            demand(
                type(offset) is int and type(part) is int and 0 <= offset <= offset + part <= count,
                "a part is outside of its storage",
            )
            count = part
        return Made("storage", [], _StorageFacts(itemsize, count * itemsize, kind.name, key))


def check_torch_file(file: Path | IO[bytes]) -> TorchTensor | None:
    """Check that a file of `torch.save` contains only plain data, and does not need more memory than its size.

    Args:
        file: its path, or an open file that can be sought in; it is read from its first byte.

    Returns:
        The tensor of a file with a single tensor in C order, which can be read without torch; otherwise None.

    Raises:
        PickleRefused: it contains other data, needs more memory, or is damaged.
        OSError: it cannot be read.
    """
    if isinstance(file, Path):
        with BufferedReader(open_regular(file)) as opened:
            return _check_opened(opened, str(file))
    return _check_opened(file, file)


def _check_opened(file: IO[bytes], source: Any) -> TorchTensor | None:
    size = file.seek(0, 2)
    file.seek(0)
    begin = file.read(4)
    file.seek(0)
    if begin == b"PK\x03\x04":
        return _check_archive(file, source, size)
    _check_sequence(_mapped(file, size), size)
    return None


def _mapped(file: IO[bytes], size: int) -> bytes | mmap:
    try:
        return mmap(file.fileno(), 0, access=ACCESS_READ)
    except (OSError, ValueError, AttributeError):
        return file.read(size)


def _check_archive(file: IO[bytes], source: Any, size: int) -> TorchTensor | None:
    """The format since torch 1.6: a zip archive with one pickle, and a member for each storage."""
    budget = Budget(size)
    try:
        with zipfile.ZipFile(file) as archive:
            members = {member.filename.partition("/")[2]: member for member in archive.infolist()}
            lengths = {name: member.file_size for name, member in members.items()}
        # Compressed members may be larger than the file; torch reads some as soon as it opens the archive.
        demand(sum(lengths.values()) <= budget.left, "its members are larger than what it can hold")
        file.seek(0)
        records: Any = torch._C.PyTorchFileReader(source)
        length: Callable[[str], int] = getattr(records, "get_record_size", lengths.__getitem__)  # torch 2.9 lacks it
        demand(length("data.pkl") <= budget.left, "its pickle is larger than what it can hold")
        pickled: bytes = records.get_record("data.pkl")
    except (RuntimeError, KeyError, ValueError, EOFError, NotImplementedError, zipfile.BadZipFile) as error:
        raise PickleRefused(f"it is damaged: {(str(error).splitlines() or [''])[0]}") from error

    def size_of(key: str) -> int:
        name = f"data/{key}"
        demand(records.has_record(name) and name in lengths, f"storage {key} is not in the file")
        return min(length(name), lengths[name])

    content, _ = check_pickle(pickled, torch_rules(), budget, storage=_Storages(size_of, fields=5))
    facts = content.facts if is_made(content, "tensor") else None
    if not isinstance(facts, _TensorFacts) or facts.begin is None:
        return None
    member = members[f"data/{facts.storage}"]
    little = not records.has_record("byteorder") or records.get_record("byteorder") == b"little"
    if member.compress_type != zipfile.ZIP_STORED or not little or sys.byteorder != "little":
        return None
    begin = records.get_record_offset(f"data/{facts.storage}") + facts.begin
    return TorchTensor(getattr(torch, facts.dtype), tuple(facts.shape), begin)


def _check_sequence(data: bytes | mmap, size: int) -> None:
    """The format before torch 1.6: five pickles, then the storages one after another."""
    budget = Budget(size)
    left = size

    def size_of(key: str) -> int:
        return left

    storages = _Storages(size_of, fields=6)
    magic, at = check_pickle(data, {}, budget)
    demand(magic == _MAGIC, "it was not written by torch.save")
    for number, allowed in enumerate(({}, {}, torch_rules(), {})):
        _, at = check_pickle(data, allowed, budget, storage=storages if number == 2 else None, start=at)
    total = sum(STORAGES[_split(kind)] * count for kind, _, count in storages.known.values())
    demand(total <= size - at, "its storages are larger than the file")


def _split(kind: str) -> tuple[str, str]:
    module, _, name = kind.rpartition(".")
    return module, name


# --------------------------------------------------------------------------- plain Python


def _is_attribute(name: Any) -> bool:
    return type(name) is str and name.isidentifier() and not name.startswith("__")


def _attributes(made: Made, state: Any, budget: Budget) -> None:
    demand(is_made(state, "dict") and all(map(_is_attribute, state.parts[::2])), f"{made.kind} has a state of its own")


def _pairs(name: Global, arguments: list[Any], budget: Budget) -> Made:
    """An ordered mapping, empty or from pairs."""
    parts: list[Any] = []
    if arguments:
        demand(len(arguments) == 1 and is_made(arguments[0], "list"), f"{name} is not made of pairs")
        for pair in arguments[0].parts:
            demand(is_made(pair, "list", "tuple") and len(pair.parts) == 2, f"{name} is not made of pairs")
            _demand_keys(name, pair.parts[:1])
            parts.extend(pair.parts)
    return Made(str(name), parts)


def _demand_keys(name: Global, keys: Iterable[Any]) -> None:
    for key in keys:
        demand(type(key) in (str, int, float, bool, bytes, type(None)), f"{name} has keys that are not plain")


def _counter(name: Global, arguments: list[Any], budget: Budget) -> Made:
    demand(not arguments or (len(arguments) == 1 and is_made(arguments[0], "dict")), f"{name} is not made of counts")
    return Made(str(name), arguments[0].parts if arguments else [])


def _set(name: Global, arguments: list[Any], budget: Budget) -> Made:
    demand(len(arguments) == 1 and is_made(arguments[0], "list"), f"{name} is not made of a list")
    _demand_keys(name, arguments[0].parts)
    budget.spend(100 * len(arguments[0].parts))
    return Made("set", list(arguments[0].parts))


def _latin(arguments: list[Any], budget: Budget, *encodings: str) -> bytes:
    demand(len(arguments) == 2 and type(arguments[0]) is str and arguments[1] in encodings, "bytes are not text")
    budget.spend(len(arguments[0]))
    return bytes(arguments[0].encode("latin1"))


def _encode(name: Global, arguments: list[Any], budget: Budget) -> bytes:
    return _latin(arguments, budget, "latin1")


def _no_bytes(name: Global, arguments: list[Any], budget: Budget) -> bytes:
    demand(not arguments, f"{name} is called with arguments")
    return b""


def _bytearray(name: Global, arguments: list[Any], budget: Budget) -> Made:
    content = arguments[0] if len(arguments) == 1 else _latin(arguments, budget, "latin-1") if arguments else b""
    demand(type(content) is bytes, f"{name} is not made of bytes")
    budget.spend(len(content))
    return Made(str(name), [])


def _complex(name: Global, arguments: list[Any], budget: Budget) -> Made:
    demand(len(arguments) == 2 and all(type(part) is float for part in arguments), f"{name} is not made of two numbers")
    return Made(str(name), [])


def _empty(name: Global, arguments: list[Any], budget: Budget) -> Made:
    demand(not arguments, f"{name} is made with arguments")
    return Made(str(name), [])


def _bytes_io(made: Made, state: Any, budget: Budget) -> None:
    demand(is_made(state, "tuple") and len(state.parts) == 3, f"{made.kind} has a state of its own")
    content, position, others = state.parts
    demand(
        type(content) is bytes and type(position) is int and 0 <= position < 2**40, "a buffer has a state of its own"
    )
    demand(others is None, "a buffer has attributes")
    budget.spend(len(content))


# --------------------------------------------------------------------------- what describes tensors


def _layout(name: Global, arguments: list[Any], budget: Budget) -> Made:
    demand(len(arguments) == 1 and type(arguments[0]) is str, f"{name} is not made of text")
    return Made("torch.layout", [], arguments[0])


def _shape(name: Global, arguments: list[Any], budget: Budget) -> Made:
    demand(len(arguments) == 1, f"{name} is not made of a tuple")
    made = Made("torch.Size", numbers_in(arguments[0]))
    made.size += len(made.parts)
    return made


def _device(name: Global, arguments: list[Any], budget: Budget) -> Made:
    demand(1 <= len(arguments) <= 2 and type(arguments[0]) is str, f"{name} is not made of a name")
    demand(all(type(index) is int for index in arguments[1:]), f"{name} has an index that is not a number")
    return Made(str(name), list(arguments))


# --------------------------------------------------------------------------- tensors


def _bounded(place: list[Any], itemsize: int, budget: Budget) -> int:
    """The number of elements of a tensor whose storage, offset, size and stride are inside the storage."""
    storage, offset, size, stride = place
    demand(is_made(storage, "storage"), "a tensor has no storage")
    sizes, strides = numbers_in(size), numbers_in(stride)
    demand(len(sizes) == len(strides) <= 64, "a tensor has other strides than dimensions")
    demand(type(offset) is int and offset >= 0, "a tensor begins before its storage")
    count = math.prod(sizes)
    last = offset + sum((length - 1) * step for length, step in zip(sizes, strides, strict=True)) if count else 0
    demand(max(last + bool(count), 0) * itemsize <= storage.facts.nbytes, "a tensor reaches beyond its storage")
    # Elements that share memory, as after `expand`, need separate memory when the tensor is copied.
    budget.spend(max(0, count * itemsize - storage.facts.nbytes))
    return count


def _no_hooks(hooks: Any) -> None:
    demand(hooks is None or (is_made(hooks, "collections.OrderedDict") and not hooks.parts), "a tensor has hooks")


def _tensor(name: Global, arguments: list[Any], budget: Budget) -> Made:
    """`_rebuild_tensor_v2` and `_rebuild_tensor_v3`, whose seventh argument is a dtype, and their elder."""
    elder, third = name.name == "_rebuild_tensor", name.name.endswith("v3")
    expected = (4,) if elder else (7, 8) if third else (6, 7)
    demand(len(arguments) in expected, f"{name} has other arguments")
    storage = arguments[0]
    itemsize = storage.facts.itemsize if is_made(storage, "storage") else 0
    if third:
        demand(isinstance(arguments[6], Global) and str(arguments[6]) in _itemsizes(), f"{name} has no dtype")
        itemsize = _itemsizes()[str(arguments[6])]
    count = _bounded(arguments[:4], itemsize, budget)
    marked = False
    if not elder:
        demand(type(arguments[4]) is bool, f"{name} has other arguments")
        _no_hooks(arguments[5])
        for marks in arguments[6 + third :]:
            demand(is_made(marks, "dict"), f"{name} has other arguments")
            demand(set(marks.parts[::2]) <= {"conj", "neg"}, f"{name} has other arguments")
            demand(all(type(mark) is bool for mark in marks.parts[1::2]), f"{name} has other arguments")
            marked = marked or any(marks.parts[1::2])
    sizes, dtype = numbers_in(arguments[2]), arguments[6].name if third else _STORAGE_DTYPES.get(storage.facts.kind, "")
    in_order = all(
        size == 1 or stride == math.prod(sizes[dimension + 1 :])
        for dimension, (size, stride) in enumerate(zip(sizes, numbers_in(arguments[3]), strict=True))
    )
    begin = arguments[1] * itemsize if dtype and in_order and not marked else None
    return Made("tensor", [], _TensorFacts(count, sizes, dtype, storage.facts.key, begin))


def _demand_tensor(value: Any) -> None:
    demand(is_made(value, "tensor"), "a tensor is made of something else")


def _parameter(name: Global, arguments: list[Any], budget: Budget) -> Made:
    with_state = name.name.endswith("_state")
    demand(len(arguments) == 3 + with_state and type(arguments[1]) is bool, f"{name} has other arguments")
    _demand_tensor(arguments[0])
    _no_hooks(arguments[2])
    if with_state:
        _demand_own_state(name, arguments[3])
    return Made("tensor", [arguments[0], *arguments[3:]], arguments[0].facts)


def _demand_own_state(name: Global, state: Any) -> None:
    """Attributes of a tensor, with or without those in slots."""
    both = state.parts if is_made(state, "tuple") else [state]
    for one in both:
        plain = one is None or (is_made(one, "dict") and all(map(_is_attribute, one.parts[::2])))
        demand(plain and len(both) <= 2, f"{name} has a state of its own")


def _quantised(name: Global, arguments: list[Any], budget: Budget) -> Made:
    demand(len(arguments) == 7 and type(arguments[5]) is bool, f"{name} has other arguments")
    storage, _, size, _, how = arguments[:5]
    itemsize = storage.facts.itemsize if is_made(storage, "storage") else 0
    count = _bounded(arguments[:4], itemsize, budget)
    budget.spend(count * itemsize)
    _no_hooks(arguments[6])
    demand(is_made(how, "tuple") and how.parts and isinstance(how.parts[0], Global), f"{name} has other arguments")
    scheme, *rest = how.parts
    if str(scheme) == "torch.per_tensor_affine":
        demand(list(map(type, rest)) == [float, int], f"{name} has other arguments")
    else:
        demand(str(scheme).startswith("torch.per_channel_affine") and len(rest) == 3, f"{name} has other arguments")
        sizes = numbers_in(size)
        demand(type(rest[2]) is int and 0 <= rest[2] < len(sizes), f"{name} has no such axis")
        for part in rest[:2]:
            _demand_tensor(part)
            demand(part.facts.shape == [sizes[rest[2]]], f"{name} has other arguments")
    return Made("tensor", [], _TensorFacts(count, numbers_in(size)))


def _sparse(name: Global, arguments: list[Any], budget: Budget) -> Made:
    """Torch checks the values of its indices, after the storages are read."""
    demand(len(arguments) == 2 and is_made(arguments[0], "torch.layout"), f"{name} has other arguments")
    demand(is_made(arguments[1], "tuple"), f"{name} has other arguments")
    tensors = 2 if arguments[0].facts == "torch.sparse_coo" else 3
    parts = arguments[1].parts
    demand(tensors + 1 <= len(parts) <= (4 if tensors == 2 else tensors + 1), f"{name} has other arguments")
    for part in parts[:tensors]:
        _demand_tensor(part)
    demand(all(part is None or type(part) is bool for part in parts[tensors + 1 :]), f"{name} has other arguments")
    return Made("tensor", [], _TensorFacts(0, numbers_in(parts[tensors])))


def _of_device(name: Global, arguments: list[Any], budget: Budget) -> Made:
    demand(len(arguments) == 4 and type(arguments[2]) is str and type(arguments[3]) is bool, f"{name} is damaged")
    demand(isinstance(arguments[1], Global) and str(arguments[1]) in _itemsizes(), f"{name} has no dtype")
    _demand_tensor(arguments[0])
    count, shape = arguments[0].facts[:2]
    budget.spend(count * _itemsizes()[str(arguments[1])])
    return Made("tensor", [], _TensorFacts(count, shape))


def _on_meta(name: Global, arguments: list[Any], budget: Budget) -> Made:
    demand(len(arguments) == 4 and type(arguments[3]) is bool, f"{name} has other arguments")
    demand(isinstance(arguments[0], Global) and str(arguments[0]) in _itemsizes(), f"{name} has no dtype")
    demand(len(numbers_in(arguments[1])) == len(numbers_in(arguments[2])), f"{name} has other arguments")
    return Made("tensor", [], _TensorFacts(0, numbers_in(arguments[1])))


def _wrapper(name: Global, arguments: list[Any], budget: Budget) -> Made:
    """A tensor that wraps another tensor with separate memory."""
    demand(len(arguments) == 8 and isinstance(arguments[1], Global), f"{name} has other arguments")
    dtype, size, stride, offset, layout, device, gradient = arguments[1:]
    demand(str(dtype) in _itemsizes() and len(numbers_in(size)) == len(numbers_in(stride)), f"{name} is damaged")
    demand(type(offset) is int and type(gradient) is bool, f"{name} is damaged")
    demand(is_made(layout, "torch.layout") and is_made(device, "torch.device"), f"{name} is damaged")
    return Made("tensor", [], _TensorFacts(0, numbers_in(size)))


def _of_type(trusted: frozenset[str]) -> Callable[[Global, list[Any], Budget], Made]:
    """Tensors of a class of torch, or of one that the program has added to torch's safe globals, with attributes."""

    def check_call(name: Global, arguments: list[Any], budget: Budget) -> Made:
        demand(len(arguments) == 4 and is_made(arguments[2], "tuple"), f"{name} has other arguments")
        how, kind, parts, state = *arguments[:2], arguments[2].parts, arguments[3]
        demand(isinstance(how, Global) and isinstance(kind, Global), f"{name} has other arguments")
        if str(kind) in trusted:
            wraps = how.name == "_rebuild_wrapper_subclass" and bool(parts) and parts[0] == kind
            demand(wraps or str(how) in trusted or (how.module, how.name) in _TENSOR_RULES, f"{name} calls {how}")
            return Made(str(kind), [])
        _demand_own_state(name, state)
        if str(kind) == _DTENSOR:
            demand(how.name == "_rebuild_wrapper_subclass" and parts and parts[0] == kind, f"{name} calls {how}")
            held = state.parts[-1].parts if is_made(state, "tuple") else []
            demand(held[::2] == ["_local_tensor", "_spec"], f"{kind} has a state of its own")
            _demand_tensor(held[1])
            demand(is_made(held[3], _SPEC) and held[3].state is not None, f"{kind} has a state of its own")
            made = _wrapper(how, parts, budget)
        else:
            rule = _TENSOR_RULES.get((how.module, how.name))
            demand(str(kind) in _TENSOR_TYPES, f"{name} makes a {kind}")
            if rule is None or rule.call is None:
                raise PickleRefused(f"{name} calls {how}")
            made = rule.call(how, parts, budget)
        return Made("tensor", [state], made.facts)

    return check_call


_DTENSOR: Final = "torch.distributed.tensor.DTensor"
_SPEC: Final = "torch.distributed.tensor._dtensor_spec.DTensorSpec"

_TENSOR_TYPES: Final = frozenset({"torch.Tensor", "torch.nn.parameter.Parameter"})

_TENSOR_RULES: Final[Rules] = {
    ("torch._utils", "_rebuild_tensor"): Rule(call=_tensor),
    ("torch._utils", "_rebuild_tensor_v2"): Rule(call=_tensor),
    ("torch._utils", "_rebuild_tensor_v3"): Rule(call=_tensor),
    ("torch._utils", "_rebuild_parameter"): Rule(call=_parameter),
    ("torch._utils", "_rebuild_parameter_with_state"): Rule(call=_parameter),
    ("torch._utils", "_rebuild_qtensor"): Rule(call=_quantised),
    ("torch._utils", "_rebuild_sparse_tensor"): Rule(call=_sparse),
    ("torch._utils", "_rebuild_device_tensor_from_cpu_tensor"): Rule(call=_of_device),
    ("torch._utils", "_rebuild_meta_tensor_no_storage"): Rule(call=_on_meta),
}


# --------------------------------------------------------------------------- numpy


_DTYPE: Final = re.compile(r"b1|[iu][1248]|f(?:2|4|8|12|16)|c(?:8|16|24|32)")
"""Numbers and bools. With an object dtype, numpy would interpret bytes of the file as addresses."""


def _dtype(name: Global, arguments: list[Any], budget: Budget) -> Made:
    demand(len(arguments) == 3 and type(arguments[0]) is str, f"{name} has other arguments")
    demand(_DTYPE.fullmatch(arguments[0]), f"an array has a dtype {arguments[0]!r}, which is not of numbers")
    demand(arguments[1] in (False, 0) and arguments[2] in (True, 1), f"{name} has other arguments")
    return Made(str(name), [], int(arguments[0][1:]))


def _byte_order(made: Made, state: Any, budget: Budget) -> None:
    demand(is_made(state, "tuple") and len(state.parts) == 8, f"{made.kind} has a state of its own")
    version, order, *others = state.parts
    demand(version == 3 and order in ("<", ">", "|", "="), f"{made.kind} has a state of its own")
    demand(others == [None, None, None, -1, -1, 0], f"{made.kind} has a state of its own")


def _scalar(name: Global, arguments: list[Any], budget: Budget) -> Made:
    demand(len(arguments) == 2 and is_made(arguments[0], "numpy.dtype"), f"{name} has no dtype")
    demand(type(arguments[1]) is bytes and len(arguments[1]) == arguments[0].facts, f"{name} has other bytes")
    return Made(str(name), [])


def _array(name: Global, arguments: list[Any], budget: Budget) -> Made:
    demand(len(arguments) == 3 and arguments[0] == Global("numpy", "ndarray"), f"{name} has other arguments")
    demand(numbers_in(arguments[1]) == [0] and arguments[2] == b"b", f"{name} has other arguments")
    return Made("numpy.ndarray", [])


def _array_state(made: Made, state: Any, budget: Budget) -> None:
    demand(made.kind == "numpy.ndarray", f"{made.kind} has a state of its own")
    demand(is_made(state, "tuple") and len(state.parts) == 5, "an array has a state of its own")
    version, shape, dtype, fortran, content = state.parts
    demand(version == 1 and type(fortran) is bool and type(content) is bytes, "an array has a state of its own")
    demand(is_made(dtype, "numpy.dtype"), "an array has no dtype")
    sizes = numbers_in(shape)
    demand(len(sizes) <= 32, "an array has too many dimensions")
    demand(math.prod(sizes) * dtype.facts == len(content), "an array has other bytes than elements")
    budget.spend(len(content))


_NUMPY_RULES: Final[Rules] = {
    ("numpy", "ndarray"): Rule(),
    ("numpy", "dtype"): Rule(call=_dtype, build=_byte_order),
    **{
        (f"numpy.{core}.multiarray", name): rule  # numpy 1 has it under the first name
        for core in ("core", "_core")
        for name, rule in (
            ("scalar", Rule(call=_scalar, key=True)),
            ("_reconstruct", Rule(call=_array, build=_array_state)),
        )
    },
}


# --------------------------------------------------------------------------- the table


def _of_data(name: Global, arguments: list[Any], budget: Budget) -> Made:
    """A named tuple."""
    demand(not any(is_made(part, "tuple") and part.carries for part in arguments), f"{name} is made of names")
    demand(all(str(part) in _itemsizes() for part in arguments if isinstance(part, Global)), f"{name} is made of names")
    return Made(str(name), arguments)


_OF_FIELDS: Final = Rule(new=_empty, build=_attributes)
_OF_A_MESH: Final[Rules] = {
    ("torch.distributed.tensor", "DTensor"): Rule(),
    ("torch.distributed.tensor._dtensor_spec", "DTensorSpec"): _OF_FIELDS,
    ("torch.distributed.tensor._dtensor_spec", "TensorMeta"): Rule(new=_of_data),
    ("torch.distributed.tensor._dtensor_spec", "ShardOrderEntry"): Rule(new=_of_data),
    ("torch.distributed.device_mesh", "DeviceMesh"): _OF_FIELDS,
    **{("torch.distributed._mesh_layout", name): _OF_FIELDS for name in ("_MeshLayout", "_FlatLayout")},
    **{
        ("torch.distributed.tensor.placement_types", name): _OF_FIELDS
        for name in ("Shard", "Replicate", "Partial", "_StridedShard")
    },
}
"""What tells of which whole a tensor is a part."""


@cache
def _itemsizes() -> Mapping[str, int]:
    """Bytes of an element of each dtype, by name."""
    return {f"torch.{name}": kind.itemsize for name, kind in vars(torch).items() if isinstance(kind, torch.dtype)}


_ELEMENTS: Final = {
    **dict.fromkeys(("Byte", "Char", "Bool", "QInt8", "QUInt8", "QUInt4x2", "QUInt2x4"), 1),
    **dict.fromkeys(("Short", "Half", "BFloat16"), 2),
    **dict.fromkeys(("Int", "Float", "QInt32"), 4),
    **dict.fromkeys(("Long", "Double", "ComplexFloat"), 8),
    "ComplexDouble": 16,
}

_STORAGE_DTYPES: Final = {
    "ByteStorage": "uint8",
    "CharStorage": "int8",
    "BoolStorage": "bool",
    "ShortStorage": "int16",
    "HalfStorage": "float16",
    "BFloat16Storage": "bfloat16",
    "IntStorage": "int32",
    "FloatStorage": "float32",
    "LongStorage": "int64",
    "DoubleStorage": "float64",
    "ComplexFloatStorage": "complex64",
    "ComplexDoubleStorage": "complex128",
}
"""The dtype of a tensor in a storage of each class; quantised ones are left out."""

STORAGES: Final[Mapping[tuple[str, str], int]] = {
    ("torch.storage", "UntypedStorage"): 1,
    **{(module, f"{kind}Storage"): size for kind, size in _ELEMENTS.items() for module in ("torch", "torch.cuda")},
}
"""Bytes of an element in each class of storages, by module and name."""


@cache
def plain_rules() -> Rules:
    """Constructors of plain data."""
    mapping = Rule(call=_pairs, build=_attributes, items=True)
    constants = {*(name.partition(".")[2] for name in _itemsizes())}
    schemes = {name for name, value in vars(torch).items() if isinstance(value, torch.qscheme)}
    return {
        ("collections", "OrderedDict"): mapping,
        ("collections", "Counter"): Rule(call=_counter),
        ("builtins", "set"): Rule(call=_set),
        ("builtins", "bytes"): Rule(call=_no_bytes),
        ("builtins", "bytearray"): Rule(call=_bytearray),
        ("builtins", "complex"): Rule(call=_complex, key=True),
        ("_codecs", "encode"): Rule(call=_encode),
        ("_io", "BytesIO"): Rule(new=_empty, build=_bytes_io),
        ("torch.serialization", "_get_layout"): Rule(call=_layout, key=True),
        ("torch", "Size"): Rule(call=_shape, key=True),
        ("torch", "device"): Rule(call=_device, key=True),
        ("torch", "Tensor"): Rule(),
        ("torch.nn.parameter", "Parameter"): Rule(),
        ("torch._utils", "_rebuild_wrapper_subclass"): Rule(),
        **{("torch", name): Rule(constant=True, key=True) for name in constants},
        **{("torch", name): Rule() for name in schemes},
        **dict.fromkeys(STORAGES, Rule()),
        **_TENSOR_RULES,
        **_NUMPY_RULES,
        **_OF_A_MESH,
    }


def torch_rules() -> Rules:
    """Constructors of plain data, and the classes that the program has added to torch's safe globals.

    Classes from `torch.serialization.add_safe_globals` are read as torch reads them, except classes that torch adds
    itself.
    """
    told = {name for name in map(_full_name, torch.serialization.get_safe_globals()) if not name.startswith(_ADDED)}
    trusted = {tuple(name.rsplit(".", 1)): _TRUSTED for name in sorted(told) if "." in name}
    made_of = Rule(call=_of_type(frozenset(told)))
    return {**trusted, **plain_rules(), ("torch._tensor", "_rebuild_from_type_v2"): made_of}  # type: ignore[dict-item]


def _full_name(told: Any) -> str:
    return told[1] if isinstance(told, tuple) else f"{told.__module__}.{told.__qualname__}"


_ADDED: Final = ("torch.", "numpy.", "builtins.", "collections.", "_codecs.", "_io.")
"""Where names come from that torch adds by itself, or that are added while a file is read that was checked."""

_TRUSTED: Final = Rule(
    call=lambda name, arguments, budget: Made(str(name), arguments),
    new=lambda name, arguments, budget: Made(str(name), arguments),
    build=lambda made, state, budget: None,
    constant=True,
    key=True,
)
