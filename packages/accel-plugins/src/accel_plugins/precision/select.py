"""Choosing a precision by the name that users write."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Final, TypeVar

from accel_plugins.precision.base import Precision
from accel_plugins.precision.config import AutocastKwargs, GradScalerKwargs
from accel_plugins.precision.native import BFloat16, Float16, Full
from accel_state.devices.base import DeviceFamily
from accel_state.errors import NotOffered

__all__ = ("choose",)

K = TypeVar("K")


def choose(name: str, family: DeviceFamily, handlers: Iterable[object] = ()) -> Precision:
    """The precision called `name` on a device family.

    Args:
        name: "no", "bf16" or "fp16".
        family: family of the device that computes.
        handlers: settings objects; `AutocastKwargs` and `GradScalerKwargs` among them are used.

    Raises:
        NotOffered: the family cannot compute in that precision, or nothing here offers it.
    """
    given = tuple(handlers)
    if name not in _MAKERS:
        raise NotOffered(
            f"mixed_precision={name!r} was asked for.",
            f"The precisions offered here are {', '.join(_MAKERS)}.",
            "Use mixed_precision='bf16'.",
        )
    precision = _MAKERS[name](family, _of(AutocastKwargs, given), _of(GradScalerKwargs, given))
    if precision.dtype is not None and not family.supports(precision.dtype):
        raise NotOffered(
            f"mixed_precision={name!r} was asked for.",
            f"Devices of the family {family.name!r} that are here cannot autocast to {precision.dtype}.",
            "Use mixed_precision='no', or another device.",
        )
    return precision


Maker = Callable[[DeviceFamily, "AutocastKwargs | None", "GradScalerKwargs | None"], Precision]

_MAKERS: Final[dict[str, Maker]] = {
    "no": lambda family, options, scaling: Full(),
    "bf16": lambda family, options, scaling: BFloat16(family, options),
    "fp16": lambda family, options, scaling: Float16(family, options, scaling),
}


def _of(kind: type[K], handlers: tuple[object, ...]) -> K | None:
    return next((handler for handler in handlers if isinstance(handler, kind)), None)
