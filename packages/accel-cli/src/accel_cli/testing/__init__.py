"""Tests for launchers: a suite that every launcher must pass, and the plan of a launch as data.

A package that provides a launcher subclasses `LauncherSuite` in one of its test files, and sets the launcher's name.
"""

from __future__ import annotations

from accel_state.lazy import lazy_stub

__getattr__, __dir__ = lazy_stub(__name__, __file__)
