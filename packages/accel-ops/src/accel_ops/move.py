"""Moving nested data to a device."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, Final

import torch

from accel_ops.tree import map_children, mapping_like

__all__ = ("send_to_device",)

_ATOMS: Final = frozenset({str, bytes, int, float, bool, complex, type(None)})


def send_to_device(
    tensor: Any, device: Any, non_blocking: bool = False, skip_keys: str | Collection[str] | None = None
) -> Any:
    """Nested data with its tensors, and all other objects that have a `.to`, on `device`.

    Tensors that lie there already are not touched. What cannot be moved stays as it is.

    Args:
        tensor: a tensor, an object with `.to`, or nested data.
        device: a `torch.device` or what makes one (text, or the index of a device).
        non_blocking: do not wait until copies from pinned memory are done.
        skip_keys: keys of mappings whose values stay where they are, at every depth.

    Example:
        >>> batch = send_to_device({"pixels": torch.zeros(2, 3), "names": ["a", "b"]}, "cpu")
    """
    target = device if isinstance(device, torch.device) else torch.device(device)
    skipped = (skip_keys,) if isinstance(skip_keys, str) else tuple(skip_keys or ())

    def walk(value: Any) -> Any:
        kind = type(value)
        if kind is torch.Tensor:
            return value if value.device == target else value.to(target, non_blocking=non_blocking)
        if kind is dict and not skipped:
            return {key: walk(item) for key, item in value.items()}
        if kind is list:
            return [walk(item) for item in value]
        if kind is tuple:
            return tuple([walk(item) for item in value])
        if kind in _ATOMS:
            return value
        if hasattr(value, "to"):
            return _move(value, target, non_blocking)
        if skipped and isinstance(value, Mapping):
            return mapping_like(value, {key: item if key in skipped else walk(item) for key, item in value.items()})
        return map_children(value, walk)

    return walk(tensor)


def _move(value: Any, device: torch.device, non_blocking: bool) -> Any:
    try:
        return value.to(device, non_blocking=non_blocking)
    except TypeError as error:
        if "non_blocking" not in str(error):
            raise
        return value.to(device)
