"""Whether a model that a library has quantised and dispatched can be trained."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from torch import nn

from accel_bigmodel.device_map import HOST, OFFLOADED
from accel_state.errors import SettingError
from accel_state.settings.installed import Requirement

__all__ = ("BITSANDBYTES", "check_trainable", "trains_on_cpu")

BITSANDBYTES: Final = Requirement("bitsandbytes", versions=">=0.46")
"""The releases that compute on the CPU too."""

_FLAGS: Final = ("is_loaded_in_8bit", "is_loaded_in_4bit")


def trains_on_cpu() -> bool:
    """Whether the installed bitsandbytes computes on the CPU."""
    return BITSANDBYTES.obstacle() is None


def check_trainable(model: nn.Module) -> None:
    """Check that a model which a library has quantised and dispatched can be trained.

    Raises:
        SettingError: it has parts on the disk, or on the CPU beside an accelerator: these have no quantised weights.
    """
    device_map: Mapping[str, object] = getattr(model, "hf_device_map", {})
    devices = set(device_map.values())
    if not devices & {*OFFLOADED} or not any(getattr(model, flag, False) for flag in _FLAGS):
        return
    if devices != {HOST} or not trains_on_cpu():
        raise SettingError(
            f"Cannot train {type(model).__name__}, whose weights are quantised to 8 or 4 bits.",
            f"Its device map has CPU or disk offload: {dict(device_map)!r:.200}.",
            "Load it whole on the device that trains it; bitsandbytes>=0.46 also trains one that is whole on the CPU.",
        )
