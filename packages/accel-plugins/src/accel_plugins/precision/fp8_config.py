"""Settings of training in 8 bits, one class for each library that computes so; plain data, without torch."""

# ruff: noqa: RUF009 - `field_of` makes the fields of every settings class

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import InitVar, dataclass
from typing import Any, Final, Literal

from accel_plugins.precision.fp8_library import FP8BackendType
from accel_plugins.precision.fp8_settings import FP8Settings, overridden_of_environment
from accel_state.errors import SettingError
from accel_state.kwargs import KwargsHandler
from accel_state.settings.environ import fill_from_environment, read_setting
from accel_state.settings.schema import field_of, settings_of

__all__ = (
    "AORecipeKwargs",
    "AmaxComputeAlgorithm",
    "FP8Format",
    "FP8RecipeKwargs",
    "MSAMPRecipeKwargs",
    "OptLevel",
    "TERecipeKwargs",
    "backend_of_environment",
)

FP8Format = Literal["HYBRID", "E4M3", "E5M2"]
"""Formats of 8 bits: E4M3 or E5M2 for all, or E4M3 in forward and E5M2 in backward."""

AmaxComputeAlgorithm = Literal["max", "most_recent"]
"""Which of the largest values that are remembered scales."""

OptLevel = Literal["O1", "O2"]
"""Levels of MS-AMP."""


_SETTINGS: Final = settings_of(FP8Settings)


def backend_of_environment() -> FP8BackendType | None:
    """The library that `ACCELERATE_FP8_BACKEND` names, or None."""
    found = read_setting(_SETTINGS["backend"])
    return None if found is None else FP8BackendType(found.value.upper())


class _Filled(KwargsHandler):
    """Settings whose values are those given, else those of the environment, else the library's."""

    def _fill(self) -> None:
        for name, known in settings_of(type(self)).items():
            given = getattr(self, name)
            if isinstance(given, str):
                setattr(self, name, known.parse(given, "argument"))
        fill_from_environment(self)

    def to_kwargs(self) -> dict[str, Any]:
        """The fields that differ from the defaults of the class, wherever they came from."""
        default = {known.name: known.default for known in dataclasses.fields(self)}
        return {name: value for name, value in self.to_dict().items() if default[name] != value}


@dataclass
class AORecipeKwargs(_Filled):
    """How torchao trains linear layers in 8 bits.

    Args:
        config: a `Float8LinearConfig` of torchao, or the name of one of its recipes: "tensorwise", "rowwise" or
            "rowwise_with_gw_hp". When None, "tensorwise" with the two options below.
        module_filter_func: gets a module and its name and answers whether it is converted; by default all linear
            layers but the first and the last.
        pad_inner_dim: pad matrices to sizes that 8-bit kernels take.
        enable_fsdp_float8_all_gather: let FSDP2 gather parameters in 8 bits.

    Example:
        >>> Accelerator(mixed_precision="fp8", kwargs_handlers=[AORecipeKwargs(config="rowwise")])
    """

    config: Any = None
    module_filter_func: Callable[..., bool] | None = None
    pad_inner_dim: bool | None = field_of(_SETTINGS["pad_inner_dim"])
    enable_fsdp_float8_all_gather: bool | None = field_of(_SETTINGS["enable_fsdp_float8_all_gather"])

    def __post_init__(self) -> None:
        self._fill()


@dataclass
class TERecipeKwargs(_Filled):
    """How Transformer Engine trains in 8 bits.

    Args:
        use_autocast_during_eval: compute in 8 bits in evaluation too.
        margin: margin of the scaling factors, in powers of two.
        interval: has no effect: Transformer Engine computes scaling factors at every step.
        fp8_format: "HYBRID", "E4M3" or "E5M2".
        amax_history_len: steps whose largest values are remembered.
        amax_compute_algo: "max" or "most_recent".
        override_linear_precision: whether forward, the gradient of the input and that of the weights are computed in
            higher precision; Transformer Engine has it no more since 2.2, and refuses it.
        use_mxfp8_block_scaling: scale blocks of values, on GPUs that can.

    Raises:
        SettingError: a value cannot be used.
    """

    use_autocast_during_eval: bool | None = field_of(_SETTINGS["use_autocast_during_eval"])
    margin: int | None = field_of(_SETTINGS["margin"])
    interval: int | None = field_of(_SETTINGS["interval"])
    fp8_format: FP8Format | None = field_of(_SETTINGS["format"])
    amax_history_len: int | None = field_of(_SETTINGS["amax_history_len"])
    amax_compute_algo: AmaxComputeAlgorithm | None = field_of(_SETTINGS["amax_compute_algo"])
    override_linear_precision: tuple[bool, bool, bool] | None = None
    use_mxfp8_block_scaling: bool | None = field_of(_SETTINGS["use_mxfp8_block_scaling"])

    def __post_init__(self) -> None:
        self._fill()
        if self.override_linear_precision is None:
            self.override_linear_precision = overridden_of_environment()
        three = tuple(self.override_linear_precision)
        if len(three) != 3 or not all(isinstance(one, bool) for one in three):
            raise SettingError(
                f"Cannot use {type(self).__name__}(override_linear_precision={self.override_linear_precision!r}).",
                "It has three bools: for forward, the gradient of the input and that of the weights.",
                "Give a tuple such as (False, False, True).",
            )


@dataclass
class MSAMPRecipeKwargs(_Filled):
    """How MS-AMP trains in 8 bits.

    Args:
        opt_level: "O1" keeps gradients in 8 bits, "O2" the first moments of the optimizer too.

    Raises:
        SettingError: there is no such level.
    """

    opt_level: OptLevel | None = field_of(_SETTINGS["opt_level"])

    def __post_init__(self) -> None:
        self._fill()


@dataclass
class FP8RecipeKwargs(TERecipeKwargs, MSAMPRecipeKwargs):
    """Both recipes in one, and the library that they are for.

    Args:
        opt_level: see `MSAMPRecipeKwargs`; "TE" or "MSAMP" in this place is taken as `backend`.
        backend: "TE" or "MSAMP"; from ACCELERATE_FP8_BACKEND, else MSAMP where it is installed, else TE.
        use_autocast: False computes nothing in 8 bits.

    Raises:
        SettingError: a value cannot be used.
    """

    backend: Literal["MSAMP", "TE"] | None = None
    use_autocast: InitVar[bool] = True

    def __post_init__(self, use_autocast: bool) -> None:
        if str(self.opt_level).upper() in ("TE", "MSAMP"):
            self.backend, self.opt_level = self.opt_level, None  # type: ignore[assignment]
        super().__post_init__()
        self.autocasts = bool(use_autocast)
        chosen = str(self.backend).upper() if self.backend is not None else self._backend_found()
        if chosen not in ("TE", "MSAMP"):
            raise SettingError(
                f"Cannot use FP8RecipeKwargs(backend={self.backend!r}).",
                "It holds recipes of Transformer Engine and of MS-AMP.",
                "Give backend='TE' or 'MSAMP', or an AORecipeKwargs for torchao.",
            )
        self.backend = chosen  # type: ignore[assignment]

    @staticmethod
    def _backend_found() -> str:
        from accel_state.settings.installed import importable

        asked = backend_of_environment()
        if asked is not None:
            return asked.value
        return "MSAMP" if importable("msamp") else "TE"

    def to_dict(self) -> dict[str, Any]:
        """All fields by name."""
        return {name: value for name, value in super().to_dict().items() if name != "autocasts"}
