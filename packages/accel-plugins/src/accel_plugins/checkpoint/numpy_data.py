"""Arrays and scalars of numpy in files of `torch.save`: numbers only, made without numpy's own unpickling.

Other programs save the state of numpy's generator as an array. numpy's functions would take the bytes of a file for
addresses of objects if the file says that they are; so the names of these functions stand for the classes here.
"""

from __future__ import annotations

import codecs
import io
import re
from typing import Any, Final

import numpy

__all__ = ("NAMES", "as_numpy")

_NAME: Final = re.compile(r"[<>|=]?[biufc]\d{1,2}")
"""The names of types of numbers; numpy would also evaluate shapes and fields in a text, and reserve their memory."""


class _Type:
    """In the place of `numpy.dtype`: a type of numbers."""

    def __init__(self, text: str, align: bool = False, copy: bool = True) -> None:
        if not isinstance(text, str) or _NAME.fullmatch(text) is None:
            raise ValueError(f"an array of {text!s:.20} is not one of numbers")
        self.dtype = numpy.dtype(text)

    def __setstate__(self, state: Any) -> None:
        if tuple(state) not in [(3, order, None, None, None, -1, -1, 0) for order in "<>|="]:
            raise ValueError("a type of numbers has another state than its order of bytes")
        self.dtype = self.dtype.newbyteorder(state[1])


class _Array:
    """In the place of `numpy.ndarray`: an array whose content follows as its state."""

    value: Any = None

    def __setstate__(self, state: Any) -> None:
        _, shape, kind, fortran, data = state
        if type(kind) is not _Type or type(data) is not bytes:
            raise ValueError("an array does not consist of the bytes of numbers")
        # numpy's own reading, too, brings the bytes into the order of this machine.
        flat = numpy.frombuffer(data, kind.dtype).astype(kind.dtype.newbyteorder("="))
        self.value = flat.reshape(tuple(shape), order="F" if fortran else "C")


def _reconstruct(kind: Any, shape: Any, code: Any) -> _Array:
    if kind is not _Array or tuple(shape) != (0,) or code != b"b":
        raise ValueError("an array is not made as numpy makes it")
    return _Array()


def _scalar(kind: Any, data: Any) -> Any:
    if type(kind) is not _Type or type(data) is not bytes or len(data) != kind.dtype.itemsize:
        raise ValueError("a number does not consist of its bytes")
    return numpy.frombuffer(data, kind.dtype)[0]


def _encode(text: Any, encoding: Any) -> bytes:
    if encoding != "latin1" or type(text) is not str:
        raise ValueError("bytes are not stored as text in Latin-1")
    return codecs.encode(text, "latin1")


NAMES: Final[list[Any]] = [
    *((_reconstruct, f"numpy.{core}.multiarray._reconstruct") for core in ("core", "_core")),
    *((_scalar, f"numpy.{core}.multiarray.scalar") for core in ("core", "_core")),
    (_Array, "numpy.ndarray"),
    (_Type, "numpy.dtype"),
    (_encode, "_codecs.encode"),
    bytes,
    io.BytesIO,
]
"""For `torch.serialization.safe_globals`; byte streams are those of Transformer Engine."""


def as_numpy(item: Any) -> Any:
    """The content of a file that was read with `NAMES`, with arrays of numpy; containers are changed in place."""
    return _converted(item, {})


def _converted(item: Any, done: dict[int, Any]) -> Any:
    if isinstance(item, _Array):
        return item.value
    if not isinstance(item, (dict, list, tuple)) or id(item) in done:
        return done.get(id(item), item)
    done[id(item)] = item
    if isinstance(item, dict):
        for key, value in item.items():
            item[key] = _converted(value, done)
    elif isinstance(item, list):
        item[:] = [_converted(value, done) for value in item]
    elif type(item) is tuple:
        parts = tuple(_converted(value, done) for value in item)
        changed = any(new is not old for new, old in zip(parts, item, strict=True))
        done[id(item)] = parts if changed else item
    return done[id(item)]
