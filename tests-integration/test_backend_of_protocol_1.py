"""A backend that was written for version 1 of the interface passes the kit of version 2 through the adapter."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from protocol_1_backend.config import ExampleConfig
from protocol_1_backend.manifest import MANIFEST

from accel_testing.backends import BackendSuite, Case, tasks


class TestProtocol1(BackendSuite):
    target = "protocol_1_backend.manifest:MANIFEST"


def test_its_class_attributes_are_followed(two: Any, tmp_path: Path) -> None:
    case = Case(MANIFEST, ExampleConfig(keep=0.2))
    for answer in two.run(tasks.save_and_resume, case, str(tmp_path)):
        assert answer["resumed"] == answer["expected"]
    # Every process writes, because `saves_together` is set.
    assert {path.name for path in tmp_path.glob("unsent_*")} == {"unsent_0_0.safetensors", "unsent_0_1.safetensors"}
