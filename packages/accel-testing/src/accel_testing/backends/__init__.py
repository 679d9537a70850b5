"""The test kit for backends: a suite that runs a backend in real processes and checks its behaviour.

A package with a backend defines a subclass of `BackendSuite` in a test file and names its manifest there:

    class TestExample(BackendSuite):
        target = "accel_example.manifest:MANIFEST"

The kit needs the extra `accel-testing[backends]`.
"""

from __future__ import annotations

from accel_state.lazy import lazy_stub

__getattr__, __dir__ = lazy_stub(__name__, __file__)
