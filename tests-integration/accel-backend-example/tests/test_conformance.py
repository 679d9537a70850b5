"""The backend passes the suites that every backend passes."""

from __future__ import annotations

from accel_backend_example import ExampleConfig
from accel_testing.accelerator import AcceleratorSuite
from accel_testing.backends import BackendSuite


class TestExample(BackendSuite):
    target = "accel_backend_example.manifest:MANIFEST"


class TestExampleThroughTheAccelerator(AcceleratorSuite):
    target = "accel_backend_example.manifest:MANIFEST"


class TestExampleWithALossyShare(BackendSuite):
    target = "accel_backend_example.manifest:MANIFEST"
    config = ExampleConfig(keep=0.25)
    neutral = ExampleConfig()
    lacks = frozenset({"exact_gradients"})


class TestExampleAlone(BackendSuite):
    target = "accel_backend_example.manifest:MANIFEST"
    config = ExampleConfig(keep=0.1)
    processes = 1
