"""Settings of mixed precision: autocasting, loss scaling, and 8-bit training; plain data, without torch.

The 8-bit recipes take default values from `FP8Settings`, which flags, keys and variables set.
"""

# ruff: noqa: RUF009 - `field_of` creates the fields of every settings class

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import InitVar, dataclass
from enum import Enum
from functools import partial
from typing import Any, Final, Literal

from accel_state.errors import NotOffered, SettingError
from accel_state.kwargs import KwargsHandler
from accel_state.labels import EnumWithContains
from accel_state.settings.environ import Given, fill_from_environment, read_setting
from accel_state.settings.schema import (
    BOOLEAN,
    INTEGER,
    SWITCH,
    Setting,
    ValueType,
    choice,
    field_of,
    int_at_least,
    setting,
    settings_of,
)

__all__ = (
    "AORecipeKwargs",
    "AmaxComputeAlgorithm",
    "AutocastKwargs",
    "FP8BackendType",
    "FP8Format",
    "FP8RecipeKwargs",
    "FP8Settings",
    "GradScalerKwargs",
    "MSAMPRecipeKwargs",
    "OptLevel",
    "TERecipeKwargs",
    "backend_of_environment",
    "no_msamp",
    "overridden_of_environment",
)


@dataclass
class AutocastKwargs(KwargsHandler):
    """How forward passes autocast.

    Args:
        enabled: False: compute in the dtype of the weights.
        cache_enabled: cache cast weights during one forward; None: torch's default.
    """

    enabled: bool = True
    cache_enabled: bool | None = None


@dataclass
class GradScalerKwargs(KwargsHandler):
    """How the loss is scaled in fp16 training; the arguments of `torch.amp.GradScaler`.

    Args:
        init_scale: the initial scale.
        growth_factor: the scale is multiplied by this after `growth_interval` steps without overflow.
        backoff_factor: the scale is multiplied by this after an overflow.
        growth_interval: number of steps without overflow before the scale grows.
        enabled: False: train without scaling.

    Raises:
        SettingError: a value is out of its range.
    """

    init_scale: float = 65536.0
    growth_factor: float = 2.0
    backoff_factor: float = 0.5
    growth_interval: int = 2000
    enabled: bool = True

    def __post_init__(self) -> None:
        rules = {
            "init_scale": (self.init_scale > 0, "more than 0"),
            "growth_factor": (self.growth_factor > 1, "more than 1"),
            "backoff_factor": (0 < self.backoff_factor < 1, "between 0 and 1"),
            "growth_interval": (self.growth_interval >= 1, "at least 1"),
        }
        for name, (holds, rule) in rules.items():
            if not holds:
                raise SettingError(
                    f"Cannot use GradScalerKwargs({name}={getattr(self, name)!r}).",
                    f"The value must be {rule}.",
                    "Change it, or remove it to use torch's default.",
                )


# ---------------------------------------------------------------------- 8 bits


class FP8BackendType(str, Enum, metaclass=EnumWithContains):
    """Libraries for 8-bit training."""

    NO = "NO"
    TE = "TE"
    MSAMP = "MSAMP"
    AO = "AO"

    def __str__(self) -> str:
        return self.value

    def __repr__(self) -> str:
        return self.value


_FLAG_GROUP: Final = "FP8"
_OVERRIDE_VARIABLES: Final = (
    "ACCELERATE_FP8_OVERRIDE_FPROP",
    "ACCELERATE_FP8_OVERRIDE_DGRAD",
    "ACCELERATE_FP8_OVERRIDE_WGRAD",
)
"""One bool each for forward, the gradient of the input and that of the weights."""


def _parse_three(text: str) -> tuple[bool, ...]:
    """Three bools; a list in files, "true,false,false" or "(True, False, False)" on command lines."""
    parts = text.strip().strip("()[]").split(",")
    if len(parts) != len(_OVERRIDE_VARIABLES):
        raise ValueError(text)
    return tuple(BOOLEAN.parse(part) for part in parts)


_THREE_BOOLS: Final = ValueType("three bools, such as true,false,false", _parse_three, lambda v: ",".join(map(str, v)))


_fp8: Final = partial(
    setting, variable="ACCELERATE_FP8_{NAME}", flag="--fp8_{name}", key="fp8_config.fp8_{name}", group=_FLAG_GROUP
)
"""A setting; its variable, flag and key are derived from the field name."""


@dataclass
class FP8Settings:
    """The settings of `mixed_precision=fp8`."""

    backend: str | None = _fp8(type=choice("ao", "te", "msamp"), help="Library for 8-bit computation.")
    use_autocast_during_eval: bool | None = _fp8(type=SWITCH, help="Compute in 8 bits in evaluation too.", unset=False)
    margin: int | None = _fp8(type=INTEGER, help="Margin of the scaling factors, in powers of two.", unset=0)
    interval: int | None = _fp8(type=int_at_least(1), help="Steps between updates of the scaling factors.", unset=1)
    format: str | None = _fp8(
        type=choice("HYBRID", "E4M3", "E5M2", fold=str.upper),
        help="8-bit format; HYBRID is E4M3 in forward and E5M2 in backward.",
        unset="HYBRID",
    )
    amax_history_len: int | None = _fp8(
        type=int_at_least(1), help="Length of the history of largest values (amax).", unset=1024
    )
    amax_compute_algo: str | None = _fp8(
        type=choice("max", "most_recent"),
        help="Value of the amax history that determines the scaling factor.",
        unset="most_recent",
    )
    override_linear_precision: tuple[bool, ...] | None = _fp8(
        type=_THREE_BOOLS,
        variable=None,
        help="Compute in higher precision: forward, the gradient of the input, that of the weights (three bools).",
    )
    opt_level: str | None = _fp8(
        type=choice("O1", "O2", fold=str.upper), help="Optimization level of MS-AMP.", unset="O2"
    )
    enable_fsdp_float8_all_gather: bool | None = _fp8(
        type=BOOLEAN, help="Gather parameters in 8 bits with FSDP2.", unset=True
    )
    pad_inner_dim: bool | None = _fp8(type=BOOLEAN, help="Pad matrices to sizes that 8-bit kernels accept.", unset=True)
    use_mxfp8_block_scaling: bool | None = _fp8(
        type=BOOLEAN, flag=None, key=None, help="Scale blocks of values (MXFP8), on GPUs that support it.", unset=False
    )

    @staticmethod
    def further_variables(settings: Mapping[str, Given]) -> dict[str, str]:
        """The three environment variables of a setting."""
        three = settings.get("override_linear_precision")
        if three is None:
            return {}
        return {name: str(one) for name, one in zip(_OVERRIDE_VARIABLES, three.value, strict=True)}


def overridden_of_environment(environ: Mapping[str, str] | None = None) -> tuple[bool, bool, bool]:
    """The values of the three variables of `override_linear_precision`; False for one that is not set.

    Raises:
        SettingError: a variable is not a bool.
    """
    overrides = [read_setting(Setting(name, BOOLEAN, variable=name), environ) for name in _OVERRIDE_VARIABLES]
    forward, of_inputs, of_weights = (override is not None and bool(override.value) for override in overrides)
    return forward, of_inputs, of_weights


FP8Format = Literal["HYBRID", "E4M3", "E5M2"]
"""8-bit formats: E4M3 or E5M2 for all, or HYBRID: E4M3 in forward and E5M2 in backward."""

AmaxComputeAlgorithm = Literal["max", "most_recent"]
"""The value of the amax history that determines the scaling factor."""

OptLevel = Literal["O1", "O2"]
"""Levels of MS-AMP."""


_FP8_SETTINGS: Final = settings_of(FP8Settings)


def backend_of_environment() -> FP8BackendType | None:
    """The library that `ACCELERATE_FP8_BACKEND` names, or None."""
    backend = read_setting(_FP8_SETTINGS["backend"])
    return None if backend is None else FP8BackendType(backend.value.upper())


class _Filled(KwargsHandler):
    """A recipe; fields that are not passed come from the environment, else from the library's defaults."""

    def _fill(self) -> None:
        for name, declared in settings_of(type(self)).items():
            value = getattr(self, name)
            if isinstance(value, str):
                setattr(self, name, declared.parse(value, "argument"))
        fill_from_environment(self)

    def to_kwargs(self) -> dict[str, Any]:
        """The fields that an argument or the environment set to a value other than the default."""
        default = {field.name: field.default for field in dataclasses.fields(self)}
        default |= {name: declared.unset for name, declared in settings_of(type(self)).items() if default[name] is None}
        # One declared with three variables.
        default["override_linear_precision"] = (False, False, False)
        return {name: value for name, value in self.to_dict().items() if default[name] != value}


@dataclass
class AORecipeKwargs(_Filled):
    """How torchao trains linear layers in 8 bits.

    Args:
        config: a `Float8LinearConfig` of torchao, or the name of one of its recipes: "tensorwise", "rowwise" or
            "rowwise_with_gw_hp". When None, "tensorwise" with the two options below.
        module_filter_func: receives a module and its name and returns whether to convert it; by default all linear
            layers except the first and the last.
        pad_inner_dim: pad matrices to sizes that 8-bit kernels accept.
        enable_fsdp_float8_all_gather: make FSDP2 gather parameters in 8 bits.

    Example:
        >>> Accelerator(mixed_precision="fp8", kwargs_handlers=[AORecipeKwargs(config="rowwise")])
    """

    config: Any = None
    module_filter_func: Callable[..., bool] | None = None
    pad_inner_dim: bool | None = field_of(_FP8_SETTINGS["pad_inner_dim"])
    enable_fsdp_float8_all_gather: bool | None = field_of(_FP8_SETTINGS["enable_fsdp_float8_all_gather"])

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
        amax_history_len: number of steps in the history of largest values (amax).
        amax_compute_algo: "max" or "most_recent".
        override_linear_precision: whether forward, the gradient of the input and that of the weights are computed in
            higher precision. Transformer Engine 2.2 and newer do not support it; a run with it raises an error.
        use_mxfp8_block_scaling: scale blocks of values, on GPUs that support it.

    Raises:
        SettingError: a value is invalid.
    """

    use_autocast_during_eval: bool | None = field_of(_FP8_SETTINGS["use_autocast_during_eval"])
    margin: int | None = field_of(_FP8_SETTINGS["margin"])
    interval: int | None = field_of(_FP8_SETTINGS["interval"])
    fp8_format: FP8Format | None = field_of(_FP8_SETTINGS["format"])
    amax_history_len: int | None = field_of(_FP8_SETTINGS["amax_history_len"])
    amax_compute_algo: AmaxComputeAlgorithm | None = field_of(_FP8_SETTINGS["amax_compute_algo"])
    override_linear_precision: tuple[bool, bool, bool] | None = None
    use_mxfp8_block_scaling: bool | None = field_of(_FP8_SETTINGS["use_mxfp8_block_scaling"])

    def __post_init__(self) -> None:
        self._fill()
        if self.override_linear_precision is None:
            self.override_linear_precision = overridden_of_environment()
        three = tuple(self.override_linear_precision)
        if len(three) != 3 or not all(isinstance(one, bool) for one in three):
            raise SettingError(
                f"Cannot use {type(self).__name__}(override_linear_precision={self.override_linear_precision!r}).",
                "The value must be three bools: for forward, the gradient of the input and that of the weights.",
                "Pass a tuple such as (False, False, True).",
            )


def no_msamp(failure: str) -> NotOffered:
    """The error for a run with MS-AMP.

    Args:
        failure: the first sentence of the message: what cannot be done.
    """
    return NotOffered(
        failure,
        "MS-AMP is not on any package index, and no backend of this package supports it.",
        "Use AORecipeKwargs (torchao) or TERecipeKwargs (Transformer Engine).",
    )


@dataclass
class MSAMPRecipeKwargs(_Filled):
    """How MS-AMP trains in 8 bits. MS-AMP is not on any package index; a run with this recipe raises an error.

    Args:
        opt_level: "O1" stores gradients in 8 bits, "O2" also the optimizer's first moments.

    Raises:
        SettingError: no such level exists.
    """

    opt_level: OptLevel | None = field_of(_FP8_SETTINGS["opt_level"])

    def __post_init__(self) -> None:
        self._fill()


@dataclass
class FP8RecipeKwargs(TERecipeKwargs, MSAMPRecipeKwargs):
    """The recipes of two libraries in one class, with the library to use.

    Args:
        opt_level: see `MSAMPRecipeKwargs`; "TE" or "MSAMP" here sets `backend`.
        backend: "TE" or "MSAMP"; from ACCELERATE_FP8_BACKEND, else TE.
        use_autocast: False: compute nothing in 8 bits.

    Raises:
        SettingError: a value is invalid.
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
                "FP8RecipeKwargs supports only Transformer Engine and MS-AMP.",
                "Pass backend='TE' or 'MSAMP', or use AORecipeKwargs for torchao.",
            )
        self.backend = chosen  # type: ignore[assignment]

    @staticmethod
    def _backend_found() -> str:
        backend = backend_of_environment()
        return "TE" if backend is None else backend.value

    def to_dict(self) -> dict[str, Any]:
        """All fields by name."""
        return {name: value for name, value in super().to_dict().items() if name != "autocasts"}
