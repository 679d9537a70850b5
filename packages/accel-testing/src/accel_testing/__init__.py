"""Test kits for packages that extend accel, and what their tests start: real processes, ranks as threads, devices.

`backends`, `accelerator`, `launchers`, `trackers`, `stores`, `commands` and `devices` contain suites: classes whose
subclasses are the conformance tests of one backend, launcher, tracker, checkpoint store, command or device family.
`processes`, `threads`, `simulated_device` and `fresh` are for any test of several processes, and `plugin` offers them
to pytest as fixtures.
"""

from __future__ import annotations

import sys

__version__ = "0.1.0"

_BACKEND_MODULES = ("base", "checkpoints", "declaring", "gradients", "lifetime", "preparing", "training")
SUITES = (
    *("accelerator", "commands", "devices", "launchers", "stores", "trackers"),
    *(f"backends.{kind}" for kind in _BACKEND_MODULES),
)

if "pytest" in sys.modules:
    # Called before a suite is imported, so that pytest shows the values of failed assertions.
    sys.modules["pytest"].register_assert_rewrite(*(f"{__name__}.{suite}" for suite in SUITES))
