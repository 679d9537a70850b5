"""Attribute names by which modules carry facts that other packages and libraries read."""

from __future__ import annotations

from typing import Final

__all__ = ("DEVICE_MAP", "HOOK", "OLD_FORWARD", "PREPARED")

DEVICE_MAP: Final = "hf_device_map"
"""On a model whose blocks lie on several devices: mapping of block name to device."""

HOOK: Final = "_hf_hook"
"""On a module: the hook that runs around its forward."""

OLD_FORWARD: Final = "_old_forward"
"""On a hooked module: the forward it had before."""

PREPARED: Final = "_is_accelerate_prepared"
"""On an object that went through `prepare`: True."""
