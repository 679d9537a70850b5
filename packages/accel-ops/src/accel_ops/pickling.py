"""Objects as bytes, with tensors of the dtypes that torch itself cannot pickle."""

from __future__ import annotations

import io
import pickle
from typing import Any, Final

import torch

__all__ = ("dumps", "loads")

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


class _Pickler(pickle.Pickler):
    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, torch.Tensor) and obj.dtype in _NOT_PICKLED_BY_TORCH:
            plain = obj.detach().cpu().contiguous()
            return _tensor, (plain.view(-1).view(torch.uint8).numpy().tobytes(), obj.dtype, tuple(obj.shape))
        return NotImplemented


def dumps(value: Any) -> bytes:
    """The bytes of an object."""
    buffer = io.BytesIO()
    _Pickler(buffer, protocol=pickle.HIGHEST_PROTOCOL).dump(value)
    return buffer.getvalue()


def loads(data: bytes) -> Any:
    """The object that `dumps` made the bytes of; only for bytes from processes of the same run."""
    return pickle.loads(data)


def _tensor(data: bytes, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    if not data:
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(bytearray(data), dtype=torch.uint8).view(dtype).view(shape)
