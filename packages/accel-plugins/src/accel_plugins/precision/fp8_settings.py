"""What can be said about training in 8 bits, from outside of a script: flags, keys and variables, without torch.

The recipes in `fp8_config` take their fields from these definitions.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from accel_state.settings.environ import Given, read_setting
from accel_state.settings.schema import (
    BOOLEAN,
    INTEGER,
    SWITCH,
    Setting,
    ValueType,
    choice,
    int_at_least,
    setting,
    settings_class,
)

__all__ = ("FP8Settings", "overridden_of_environment")

_GROUP: Final = "FP8"
_OVERRIDDEN: Final = (
    "ACCELERATE_FP8_OVERRIDE_FPROP",
    "ACCELERATE_FP8_OVERRIDE_DGRAD",
    "ACCELERATE_FP8_OVERRIDE_WGRAD",
)
"""Forward, the gradient of the input and that of the weights."""


def _parse_three(text: str) -> tuple[bool, ...]:
    """Three bools; files have them as a list, command lines as "true,false,false" or "(True, False, False)"."""
    parts = text.strip().strip("()[]").split(",")
    if len(parts) != len(_OVERRIDDEN):
        raise ValueError(text)
    return tuple(BOOLEAN.parse(part) for part in parts)


_THREE: Final = ValueType("three bools, such as true,false,false", _parse_three, lambda v: ",".join(map(str, v)))


def _fp8(name: str, value_type: ValueType, said: str, unset: Any = None) -> Any:
    return setting(
        None,
        type=value_type,
        variable=f"ACCELERATE_FP8_{name.upper()}",
        flag=f"--fp8_{name}",
        key=f"fp8_config.fp8_{name}",
        help=said,
        group=_GROUP,
        unset=unset,
    )


@settings_class
class FP8Settings:
    """What `mixed_precision=fp8` means."""

    backend: str | None = _fp8("backend", choice("ao", "te", "msamp"), "Library that computes in 8 bits.")
    use_autocast_during_eval: bool | None = _fp8(
        "use_autocast_during_eval", SWITCH, "Compute so in evaluation too.", False
    )
    margin: int | None = _fp8("margin", INTEGER, "Margin of the scaling factors, in powers of two.", 0)
    interval: int | None = _fp8(
        "interval", int_at_least(1), "Steps between two computations of the scaling factors.", 1
    )
    format: str | None = _fp8(
        "format",
        choice("HYBRID", "E4M3", "E5M2", fold=str.upper),
        "Format: E5M2 in backward only, or one for all.",
        "HYBRID",
    )
    amax_history_len: int | None = _fp8(
        "amax_history_len", int_at_least(1), "Steps whose largest values are remembered.", 1024
    )
    amax_compute_algo: str | None = _fp8(
        "amax_compute_algo", choice("max", "most_recent"), "Which of the remembered values scales.", "most_recent"
    )
    override_linear_precision: tuple[bool, ...] | None = setting(
        None,
        type=_THREE,
        flag="--fp8_override_linear_precision",
        key="fp8_config.fp8_override_linear_precision",
        help="Whether forward, the gradient of the input and that of the weights are computed in higher precision.",
        group=_GROUP,
    )
    opt_level: str | None = _fp8("opt_level", choice("O1", "O2", fold=str.upper), "Level of MS-AMP.", "O2")
    enable_fsdp_float8_all_gather: bool | None = _fp8(
        "enable_fsdp_float8_all_gather", BOOLEAN, "Let FSDP2 gather parameters in 8 bits.", True
    )
    pad_inner_dim: bool | None = _fp8("pad_inner_dim", BOOLEAN, "Pad matrices to sizes that 8-bit kernels take.", True)
    use_mxfp8_block_scaling: bool | None = setting(
        None,
        type=BOOLEAN,
        variable="ACCELERATE_FP8_USE_MXFP8_BLOCK_SCALING",
        help="Scale blocks of values, on GPUs that can.",
        group=_GROUP,
        unset=False,
    )

    @staticmethod
    def further_variables(given: Mapping[str, Given]) -> dict[str, str]:
        """The variables of a setting that has three of them."""
        three = given.get("override_linear_precision")
        if three is None:
            return {}
        return {name: str(one) for name, one in zip(_OVERRIDDEN, three.value, strict=True)}


def overridden_of_environment(environ: Mapping[str, str] | None = None) -> tuple[bool, bool, bool]:
    """What the three variables of `override_linear_precision` say, False where one is not set.

    Raises:
        SettingError: a variable is not a bool.
    """
    found = [read_setting(Setting(name, BOOLEAN, variable=name), environ) for name in _OVERRIDDEN]
    forward, of_inputs, of_weights = (given is not None and bool(given.value) for given in found)
    return forward, of_inputs, of_weights
