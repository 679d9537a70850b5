"""Which library trains in 8 bits: that of the recipe, else that of the environment, else one that is installed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from accel_plugins.precision.base import Precision
from accel_plugins.precision.config import AutocastKwargs
from accel_plugins.precision.fp8_config import (
    AORecipeKwargs,
    FP8RecipeKwargs,
    MSAMPRecipeKwargs,
    TERecipeKwargs,
    backend_of_environment,
)
from accel_plugins.precision.fp8_library import FP8BackendType
from accel_state.devices.base import DeviceFamily
from accel_state.errors import Conflict, Missing
from accel_state.settings.installed import importable

__all__ = ("choose_float8",)

_MODULES: Final = {
    FP8BackendType.TE: "transformer_engine",
    FP8BackendType.AO: "torchao",
    FP8BackendType.MSAMP: "msamp",
}
"""Packages, in the order in which one is taken when nothing else was said."""


def choose_float8(family: DeviceFamily, handlers: tuple[object, ...]) -> Precision:
    """The precision of 8 bits.

    Args:
        family: family of the device that computes.
        handlers: settings objects; a recipe among them says which library.

    Raises:
        Conflict: there are recipes of two libraries.
        Missing: the library, or any, is not installed.
    """
    recipes = [one for one in handlers if isinstance(one, (AORecipeKwargs, TERecipeKwargs, MSAMPRecipeKwargs))]
    if len(recipes) > 1:
        raise Conflict(
            f"Cannot use mixed_precision='fp8' with {' and '.join(type(one).__name__ for one in recipes)}.",
            "Each is the recipe of a library, and one library computes.",
            "Give one of them.",
        )
    library = _library_of(recipes[0]) if recipes else backend_of_environment() or _installed()
    options = next((one for one in handlers if isinstance(one, AutocastKwargs)), None)
    return _MAKERS[library](family, options, recipes[0] if recipes else None)


def _library_of(recipe: object) -> FP8BackendType:
    if isinstance(recipe, FP8RecipeKwargs):
        return FP8BackendType(recipe.backend)
    if isinstance(recipe, AORecipeKwargs):
        return FP8BackendType.AO
    return FP8BackendType.TE if isinstance(recipe, TERecipeKwargs) else FP8BackendType.MSAMP


def _installed() -> FP8BackendType:
    for library, module in _MODULES.items():
        if importable(module):
            return library
    raise Missing(
        "Cannot use mixed_precision='fp8'.",
        "No library that trains in 8 bits is installed.",
        'Run: pip install "accel-plugins[torchao]", or on NVIDIA GPUs: pip install "transformer-engine[pytorch]".',
    )


def _torchao(family: DeviceFamily, options: AutocastKwargs | None, recipe: Any) -> Precision:
    from accel_plugins.precision.torchao import TorchAO

    return TorchAO(family, options, recipe)


def _transformer_engine(family: DeviceFamily, options: AutocastKwargs | None, recipe: Any) -> Precision:
    from accel_plugins.precision.transformer_engine import TransformerEngine

    return TransformerEngine(family, options, recipe)


def _msamp(family: DeviceFamily, options: AutocastKwargs | None, recipe: Any) -> Precision:
    from accel_plugins.precision.msamp import MSAMP

    return MSAMP(family, options, recipe)


_MAKERS: Final[dict[FP8BackendType, Callable[[DeviceFamily, AutocastKwargs | None, Any], Precision]]] = {
    FP8BackendType.AO: _torchao,
    FP8BackendType.TE: _transformer_engine,
    FP8BackendType.MSAMP: _msamp,
}
