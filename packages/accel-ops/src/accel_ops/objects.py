"""gather_object, broadcast_object_list and scatter_object: picklable objects between processes that trust each other.

They pickle with `dumps` and `loads`, which sign the pickles with the secret of the run, and also support tensors of the
dtypes that torch itself cannot pickle.
"""

from __future__ import annotations

import io
import pickle
import struct
from collections.abc import Iterable, Iterator, Mapping, MutableSequence, Sequence
from functools import lru_cache
from itertools import chain
from typing import Any, Final

import torch

from accel_ops.checked_call import CheckedCall, index_of, transport_of
from accel_ops.groups import Group
from accel_ops.packing import PackedLayout
from accel_ops.tree import recursively_apply
from accel_state.errors import SettingError, UnknownKind
from accel_state.transport.signature import SIGNATURE_BYTES, sign, signed_content

__all__ = ("broadcast_object_list", "dumps", "gather_object", "is_list_of_items", "loads", "scatter_object")

_LENGTHS_STRUCT: Final = struct.Struct("<2q")
"""At the beginning of a message of `scatter_object`: bytes of its tensors, and of its pickle."""

_NOT_PICKLED_BY_TORCH: Final = frozenset(
    getattr(torch, name)
    for name in (
        "float8_e4m3fn",
        "float8_e4m3fnuz",
        "float8_e5m2",
        "float8_e5m2fnuz",
        "float8_e8m0fnu",
        "float4_e2m1fn_x2",
        "uint16",
        "uint32",
        "uint64",
        "complex32",
    )
    if hasattr(torch, name)
)


def gather_object(object: Any, *, group: Group = None) -> Any:  # noqa: A002 - the name callers know
    """Gather the items of the lists of all processes in one list, in the order of the ranks.

    With one process the object is returned unchanged, after a check that several processes could gather it.

    Args:
        object: a list (or another iterable) of picklable items; lengths may differ between processes.
        group: a process group, a one-dimensional DeviceMesh, or the name of a mesh axis of the run. Only its
            processes take part; by default all processes do.

    Raises:
        SettingError: this process is not in the group.
        UnknownKind: it is not a list, or an item cannot be pickled.
        ShapeMismatch: on every process, when they call different collectives.
        CollectiveError: a process ended or did not call this in time.

    Example:
        >>> names = gather_object(["a.png", "b.png"])
    """
    transport = transport_of(group, "gather_object")
    if transport.world_size == 1:
        items = _items(object)
        _pickled("gather_object", items)
        return items if isinstance(object, Iterator) else object
    with CheckedCall(transport, "gather_object") as call:
        rows = call.all_gather_bytes(_pickled("gather_object", _items(object)))
    return list(chain.from_iterable(loads(row) for row in rows))


def broadcast_object_list(object_list: Any, src: int | None = None, *, group: Group = None) -> Any:
    """Send the items of one process's list to all processes.

    The list is overwritten in place and returned.

    Args:
        object_list: a list of picklable items, of the same length on all processes.
        src: rank in the run of the sending process; by default the first of the group, or rank 0 without a group.
        group: a process group, a one-dimensional DeviceMesh, or the name of a mesh axis of the run. Only its
            processes take part; by default all processes do.

    Raises:
        SettingError: `src` is not a rank of the group, or this process is not in the group.
        UnknownKind: it is not a list, or an item cannot be pickled.
        ShapeMismatch: on every process, when lengths or calls differ.
        CollectiveError: a process ended or did not call this in time.
    """
    transport = transport_of(group, "broadcast_object_list")
    src = transport.rank_in_run(0) if src is None else src
    if transport.world_size == 1:
        _check_list(object_list)
        index_of("broadcast_object_list", "src", src, transport)
        _pickled("broadcast_object_list", list(object_list))
        return object_list
    length = len(object_list) if isinstance(object_list, MutableSequence) else None
    with CheckedCall(transport, "broadcast_object_list", src=src, length=length) as call:
        _check_list(object_list)
        origin = index_of("broadcast_object_list", "src", src, transport)
        sends = transport.rank == origin
        data = _pickled("broadcast_object_list", list(object_list)) if sends else None
        received = call.broadcast_bytes(data, origin)
    if not sends:
        object_list[:] = loads(received)
    return object_list


def scatter_object(
    objects: Sequence[Any] | None = None,
    src: int | None = None,
    *,
    group: Group = None,
    operation: str = "scatter_object",
) -> Any:
    """Send object r of one process's list to process r.

    Each process receives its own object only, in one message: tensors in nested data as their bytes, everything else
    pickled. Received tensors are on the device of the run. The sending process gets its own object unchanged.

    Args:
        objects: on `src`, one object for each process; ignored on the others. Shapes and structures may differ.
        src: rank in the run of the sending process; by default the first of the group, or rank 0 without a group.
        group: a process group, a one-dimensional DeviceMesh, or the name of a mesh axis of the run. Only its
            processes take part; by default all processes do.
        operation: the name of the call in error messages, for a function that uses this one.

    Raises:
        SettingError: `src` is not a rank of the group, this process is not in the group, or `objects` has another
            length than the group.
        UnknownKind: an object cannot be pickled.
        ShapeMismatch: on the other processes, when `src` could not take part, or when the calls differ.
        CollectiveError: a process ended or did not call this in time.

    Example:
        >>> mine = scatter_object([{"text": "a"}] if state.is_main_process else None)
    """
    transport = transport_of(group, operation)
    src = transport.rank_in_run(0) if src is None else src
    if transport.world_size == 1:
        index_of(operation, "src", src, transport)
        return _one_for_each(operation, objects, 1)[0]
    with CheckedCall(transport, operation, src=src) as call:
        origin = index_of(operation, "src", src, transport)
        messages, own = [], None
        if transport.rank == origin:
            own = _one_for_each(operation, objects, transport.world_size)[origin]
            messages = [
                torch.empty(0, dtype=torch.uint8) if rank == origin else _message(operation, each)
                for rank, each in enumerate(objects or ())
            ]
        output = call.scatter_bytes(messages, origin)
    return own if messages else _received(output)


def _one_for_each(operation: str, objects: Sequence[Any] | None, count: int) -> Sequence[Any]:
    if not isinstance(objects, (list, tuple)) or len(objects) != count:
        has = f"a list of {len(objects)}" if isinstance(objects, (list, tuple)) else f"of type {type(objects).__name__}"
        raise SettingError(
            f"Cannot send the objects of {operation}() to {count} processes.",
            f"There must be one for each process in a list, and they are {has}.",
            "Pass a list with one object for each process.",
        )
    return objects


class _Place:
    """The place of a tensor in the pickle of a message that has the tensor's bytes elsewhere."""


_PLACE_OF_TENSOR: Final = _Place()


def _is_place(value: Any) -> bool:
    return type(value) is _Place


def _message(operation: str, value: Any) -> torch.Tensor:
    """Lengths, tensors and pickle of an object, uint8 of shape (bytes,)."""
    tensors: list[torch.Tensor] = []

    def described(tensor: torch.Tensor) -> Any:
        # A tensor with an unusual storage is pickled with the rest.
        if (
            type(tensor) is not torch.Tensor
            or tensor.layout is not torch.strided
            or tensor.is_quantized
            or tensor.is_meta
        ):
            return tensor
        tensors.append(tensor.detach().cpu())
        return _PLACE_OF_TENSOR

    content = recursively_apply(described, value)
    shapes_and_dtypes = tuple([(tensor.shape, tensor.dtype) for tensor in tensors])
    outline = _pickled(operation, [content, shapes_and_dtypes])
    layout = _layout(shapes_and_dtypes)
    start, stop = _LENGTHS_STRUCT.size, _LENGTHS_STRUCT.size + layout.nbytes
    message = torch.empty(stop + len(outline), dtype=torch.uint8)
    message[:start] = torch.frombuffer(bytearray(_LENGTHS_STRUCT.pack(layout.nbytes, len(outline))), dtype=torch.uint8)
    layout.write(tensors, layout.parts(message[start:stop]))
    message[stop:] = torch.frombuffer(bytearray(outline), dtype=torch.uint8)
    return message


@lru_cache(maxsize=64)
def _layout(tensors: tuple[tuple[torch.Size, torch.dtype], ...]) -> PackedLayout:
    """The layout of the tensors in a message; those of the batches of an epoch are mostly equal."""
    return PackedLayout(tensors)


def _received(message: torch.Tensor) -> Any:
    """The object in a message; its tensors do not share the message's memory."""
    start = _LENGTHS_STRUCT.size
    tensor_bytes, outline_bytes = _LENGTHS_STRUCT.unpack(_bytes_of(message[:start]))
    stop = start + tensor_bytes
    content, shapes_and_dtypes = loads(_bytes_of(message[stop : stop + outline_bytes]))
    layout = _layout(shapes_and_dtypes)
    tensors = iter(layout.split(layout.parts(message[start:stop])))
    return recursively_apply(lambda place: next(tensors), content, test_type=_is_place)


def _bytes_of(tensor: torch.Tensor) -> bytes:
    return tensor.cpu().numpy().tobytes()


def _check_list(value: Any) -> None:
    if not isinstance(value, MutableSequence):
        raise UnknownKind(
            f"Cannot use an object of type {type(value).__name__} in broadcast_object_list().",
            "Its items cannot be overwritten in place.",
            "Pass a list, for example [object].",
        )


def is_list_of_items(value: Any) -> bool:
    """Whether `gather_object` accepts an object: a list, or another iterable of items."""
    return isinstance(value, Iterable) and not isinstance(value, (str, bytes, Mapping))


def _items(value: Any) -> list[Any]:
    if is_list_of_items(value):
        return list(value)
    raise UnknownKind(
        f"Cannot use an object of type {type(value).__name__} in gather_object().",
        "The function joins lists, and this is not a list.",
        "Pass a list, for example [object].",
    )


def _pickled(operation: str, items: list[Any]) -> bytes:
    try:
        return dumps(items)
    except Exception as error:
        position = next((index for index, item in enumerate(items) if not _can_be_pickled(item)), None)
        where = "An item" if position is None else f"The item {position}, of type {type(items[position]).__name__},"
        raise UnknownKind(
            f"Cannot send the items of {operation}() to other processes.",
            f"{where} cannot be pickled: {error}",
            "Pass items that can be pickled, such as numbers, strings, tensors, and lists and dicts of them.",
        ) from error


def _can_be_pickled(item: Any) -> bool:
    try:
        dumps(item)
    except Exception:
        return False
    return True


class _Pickler(pickle.Pickler):
    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, torch.Tensor) and obj.dtype in _NOT_PICKLED_BY_TORCH:
            plain = obj.detach().cpu().contiguous()
            return _tensor, (plain.view(-1).view(torch.uint8).numpy().tobytes(), obj.dtype, tuple(obj.shape))
        return NotImplemented


def dumps(value: Any) -> bytes:
    """Pickle an object, for `loads` on another process of the run."""
    buffer = io.BytesIO()
    buffer.seek(SIGNATURE_BYTES)
    _Pickler(buffer, protocol=pickle.HIGHEST_PROTOCOL).dump(value)
    with buffer.getbuffer() as message:
        sign(message)
    return buffer.getvalue()


def loads(data: bytes) -> Any:
    """Unpickle the bytes from `dumps` of a process of this run.

    Raises:
        CollectiveError: they are not signed with the secret of this run.
    """
    return pickle.loads(signed_content(data))


def _tensor(data: bytes, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    if not data:
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(bytearray(data), dtype=torch.uint8).view(dtype).view(shape)
