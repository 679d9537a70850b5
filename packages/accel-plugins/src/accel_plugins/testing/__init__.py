"""The conformance kit: a suite of tests that a backend passes, in real processes, before anybody relies on it.

A package that brings a backend subclasses `BackendSuite` in one of its test files and names its manifest. It needs the
extra `accel-plugins[testing]`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from accel_state.lazy import lazy_names

if TYPE_CHECKING:
    from accel_plugins.testing.backend_suite import BackendSuite
    from accel_plugins.testing.fake import FakeStrategy
    from accel_plugins.testing.reference_loop import Case, Session
    from accel_state.testing.fresh import fresh
    from accel_state.testing.processes import Processes, run_command

__all__ = ("BackendSuite", "Case", "FakeStrategy", "Processes", "Session", "fresh", "run_command")

__getattr__, __dir__ = lazy_names(
    __name__,
    {
        "accel_plugins.testing.backend_suite": ("BackendSuite",),
        "accel_plugins.testing.fake": ("FakeStrategy",),
        "accel_plugins.testing.reference_loop": ("Case", "Session"),
        "accel_state.testing.fresh": ("fresh",),
        "accel_state.testing.processes": ("Processes", "run_command"),
    },
)
