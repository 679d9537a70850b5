"""The XLA backend passes the kit on the CPU as torch_xla's device: with one device, and with two of them by SPMD."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from typing import Any, ClassVar
from unittest import mock

import pytest

from accel_plugins.xla.config import XLAPlugin
from accel_state.settings.installed import importable
from accel_testing.backends import BackendSuite
from accel_testing.processes import Processes

pytestmark = [
    pytest.mark.skipif(not importable("torch_xla"), reason="needs torch_xla: nox -s engines-xla"),
    pytest.mark.timeout(600),
]


class OnTheCPU(BackendSuite):
    """One process whose XLA devices are the CPU."""

    target = "accel_plugins.xla.manifest:MANIFEST"
    processes = 1
    devices: ClassVar[int]
    variables: ClassVar[dict[str, str]] = {}

    @pytest.fixture
    def driver(self) -> str:
        return "xla_session:XLASession"

    @pytest.fixture(scope="class")
    @classmethod
    def group(cls) -> Iterator[Processes]:
        told = {"PJRT_DEVICE": "CPU", "CPU_NUM_DEVICES": str(cls.devices), **cls.variables}
        found = [os.path.dirname(__file__), *sys.path]
        patches = mock.patch.dict(os.environ, told), mock.patch.object(sys, "path", found)
        with patches[0], patches[1], Processes(cls.processes, timeout=300) as group:
            yield group


class TestOneDevice(OnTheCPU):
    devices = 1


class TestTwoDevices(OnTheCPU):
    devices = 2
    config: ClassVar[Any] = XLAPlugin(fsdp=True)
    # torch_xla remembers in the environment what a process was switched to, and the kit puts that back after each call.
    variables: ClassVar[dict[str, str]] = {"XLA_USE_SPMD": "1"}
