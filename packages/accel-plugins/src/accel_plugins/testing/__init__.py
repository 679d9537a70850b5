"""The conformance kit: a suite of tests that a backend passes, in real processes, before anybody relies on it.

A package that brings a backend subclasses `BackendSuite` in one of its test files and names its manifest. It needs the
extra `accel-plugins[testing]`.
"""

from __future__ import annotations

import sys

from accel_state.lazy import lazy_stub

if "pytest" in sys.modules:
    # Before the module is imported, so that its assertions show values.
    sys.modules["pytest"].register_assert_rewrite(f"{__name__}.backend_suite")

__getattr__, __dir__ = lazy_stub(__name__, __file__)
