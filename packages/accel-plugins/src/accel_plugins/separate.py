"""Backends of this project in packages of their own, which a user may ask for without having the package.

Their manifests, which know everything else about them, are in those packages.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Final

from accel_state.errors import Missing
from accel_state.settings.environ import read_setting
from accel_state.settings.schema import BOOLEAN, Setting

__all__ = ("SEPARATE_PACKAGES", "check_variables", "install_remedy", "package_of")

SEPARATE_PACKAGES: Final = {"megatron_lm": "accel-megatron"}
"""Word in the names of a backend's settings -> the package that provides it."""


def package_of(name: str) -> str | None:
    """The package that provides the backend of a flag, a key, a variable or a `distributed_type`, or None.

    Example:
        >>> package_of("--megatron_lm_tp_degree"), package_of("MEGATRON_LM"), package_of("--mixed_precision")
        ('accel-megatron', 'accel-megatron', None)
    """
    text = name.lower().replace("-", "_")
    return next((package for word, package in SEPARATE_PACKAGES.items() if word in text), None)


def install_remedy(package: str) -> str:
    """What to do without the package."""
    return f"Install {package}, which provides this backend, from a wheel of the build that these packages are from."


def check_variables(installed: Collection[str | None]) -> None:
    """Check that the environment selects no backend whose package is not installed.

    Args:
        installed: the variables that select installed backends.

    Raises:
        Missing: it does.
    """
    for word, package in SEPARATE_PACKAGES.items():
        switch = Setting(f"use_{word}", BOOLEAN, False, variable=f"ACCELERATE_USE_{word.upper()}")
        chosen = None if switch.variable in installed else read_setting(switch)
        if chosen is not None and chosen.value:
            raise Missing(
                f"Cannot choose the backend that {chosen.origin} selects.",
                "No installed package provides it.",
                install_remedy(package),
            )
