"""The test kit of backends through the Accelerator: what users of a backend do, and what only the Accelerator does.

    class TestExample(AcceleratorSuite):
        target = "accel_example.manifest:MANIFEST"

The backend is selected by its name, so its package must be installed with its entry point. The kit needs the extra
`accel-torch[testing]`.
"""

from __future__ import annotations

import sys

from accel_state.lazy import lazy_stub

if "pytest" in sys.modules:
    # Before the module is imported, so that its assertions show values.
    sys.modules["pytest"].register_assert_rewrite(f"{__name__}.accelerator_suite")

__getattr__, __dir__ = lazy_stub(__name__, __file__)
