"""The test kit for backends: a suite that runs a backend in real processes and checks its behaviour.

A package with a backend defines a subclass of `BackendSuite` in a test file and names its manifest there. The kit needs
the extra `accel-plugins[testing]`.
"""

from __future__ import annotations

import sys

from accel_state.lazy import lazy_stub

if "pytest" in sys.modules:
    # Called before the module is imported, so that pytest shows values of failed assertions.
    sys.modules["pytest"].register_assert_rewrite(f"{__name__}.backend_suite")

__getattr__, __dir__ = lazy_stub(__name__, __file__)
