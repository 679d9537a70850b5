"""Tests for launchers: a suite that every launcher passes, and the plan of a launch as data.

A package that offers a launcher subclasses `LauncherSuite` in one of its test files and names the launcher.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from accel_state.lazy import lazy_names

if TYPE_CHECKING:
    from accel_cli.testing.launcher_suite import LauncherSuite
    from accel_cli.testing.plans import make_plan, prepare_launch

__all__ = ("LauncherSuite", "make_plan", "prepare_launch")

__getattr__, __dir__ = lazy_names(
    __name__,
    {
        "accel_cli.testing.launcher_suite": ("LauncherSuite",),
        "accel_cli.testing.plans": ("make_plan", "prepare_launch"),
    },
)
