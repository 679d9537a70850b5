"""The class of the guide to device families passes the kit on the simulated device, as the guide says."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, ClassVar

import pytest

from accel_state.devices import select
from accel_state.devices.base import DeviceFamily
from accel_testing.devices import DeviceSuite
from accel_testing.simulated_device import POSSIBLE, simulated_device

GUIDE = Path(__file__).resolve().parents[1] / "docs" / "how-to" / "write-a-device-family.md"

pytestmark = pytest.mark.skipif(not POSSIBLE, reason="this torch cannot have a device that is written in Python")


@pytest.fixture(scope="module")
def module(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """The first block of the guide as an installed module, without the lines that use the device."""
    (block,) = re.findall(r"```python\n(.*?class Abacus.*?)```", GUIDE.read_text(encoding="utf-8"), re.DOTALL)
    folder = tmp_path_factory.mktemp("installed")
    (folder / "abacus_of_the_guide.py").write_text(block.partition("if POSSIBLE")[0], encoding="utf-8")
    sys.path.insert(0, str(folder))
    import importlib

    yield importlib.import_module("abacus_of_the_guide")
    sys.path.remove(str(folder))
    # The module has registered its family, which other tests of this process must not get.
    select._load.cache_clear()


class TestAbacus(DeviceSuite):
    around: ClassVar[Callable[[], AbstractContextManager[None]]] = simulated_device

    @pytest.fixture
    def family(self, module: Any) -> DeviceFamily:
        family: DeviceFamily = module.Abacus()
        return family
