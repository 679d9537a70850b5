"""Choose a precision by its name."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Final, TypeVar

from accel_plugins.precision.base import Precision
from accel_state.devices.base import DeviceFamily
from accel_state.errors import NotOffered

__all__ = ("choose", "settings_classes")

K = TypeVar("K")


def choose(name: str, family: DeviceFamily, handlers: Iterable[object] = ()) -> Precision:
    """The precision called `name` on a device family.

    Args:
        name: "no", "bf16", "fp16" or "fp8".
        family: the family of the training device.
        handlers: settings objects; `AutocastKwargs`, `GradScalerKwargs` and recipes of fp8 among them are used.

    Raises:
        NotOffered: no such precision exists, or the device family does not support it.
        Missing: no library for this precision is installed.
    """
    listed = tuple(handlers)
    if name not in _MAKERS_BY_NAME:
        raise NotOffered(
            f"Cannot use mixed_precision={name!r}.",
            f"The precisions are {', '.join(_MAKERS_BY_NAME)}.",
            "Use mixed_precision='bf16'.",
        )
    precision = _MAKERS_BY_NAME[name](family, listed)
    if precision.dtype is not None and not family.supports(precision.dtype):
        raise NotOffered(
            f"Cannot use mixed_precision={name!r}.",
            f"The {family.name!r} devices of this machine do not support autocast to {precision.dtype}.",
            "Use mixed_precision='no', or another device.",
        )
    return precision


def settings_classes(name: str) -> tuple[type, ...]:
    """The classes of settings objects that the precision called `name` uses."""
    from accel_plugins.precision import config

    recipes = (config.AORecipeKwargs, config.TERecipeKwargs, config.MSAMPRecipeKwargs)
    further = {"fp16": (config.GradScalerKwargs,), "fp8": recipes}
    return () if name == "no" else (config.AutocastKwargs, *further.get(name, ()))


def _full(family: DeviceFamily, handlers: tuple[object, ...]) -> Precision:
    return Precision()


# The others are imported when used, so that a run in full precision starts without them.


def _bfloat16(family: DeviceFamily, handlers: tuple[object, ...]) -> Precision:
    from accel_plugins.precision.config import AutocastKwargs
    from accel_plugins.precision.native import BFloat16

    return BFloat16(family, _of(AutocastKwargs, handlers))


def _float16(family: DeviceFamily, handlers: tuple[object, ...]) -> Precision:
    from accel_plugins.precision.config import AutocastKwargs, GradScalerKwargs
    from accel_plugins.precision.native import Float16

    return Float16(family, _of(AutocastKwargs, handlers), _of(GradScalerKwargs, handlers))


def _float8(family: DeviceFamily, handlers: tuple[object, ...]) -> Precision:
    from accel_plugins.precision.fp8 import choose_float8

    return choose_float8(family, handlers)


_MAKERS_BY_NAME: Final[dict[str, Callable[[DeviceFamily, tuple[object, ...]], Precision]]] = {
    "no": _full,
    "bf16": _bfloat16,
    "fp16": _float16,
    "fp8": _float8,
}


def _of(kind: type[K], handlers: tuple[object, ...]) -> K | None:
    return next((handler for handler in handlers if isinstance(handler, kind)), None)
