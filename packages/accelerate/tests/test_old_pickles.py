"""Pickles that name the old modules load, and become our objects."""

from __future__ import annotations

import pickle

import pytest

from accel_plugins.checkpoint.config import ProjectConfiguration
from accel_state.labels import DistributedType
from accel_state.run_state import AcceleratorState


def named(module: str, name: str) -> bytes:
    """A pickle of an object that is looked up by its module and name."""
    return pickle.PROTO + b"\x02" + pickle.GLOBAL + f"{module}\n{name}\n".encode() + pickle.STOP


@pytest.mark.parametrize(
    ("module", "name", "expected"),
    [
        ("accelerate.state", "AcceleratorState", AcceleratorState),
        ("accelerate.utils.dataclasses", "DistributedType", DistributedType),
        ("accelerate.utils", "DistributedType", DistributedType),
    ],
)
def test_a_class_is_found(module: str, name: str, expected: type) -> None:
    assert pickle.loads(named(module, name)) is expected


def test_a_member_of_an_enumeration() -> None:
    written = pickle.dumps(DistributedType.MULTI_CPU, protocol=2).replace(
        b"accel_state.labels", b"accelerate.utils.dataclasses"
    )
    assert b"accelerate.utils.dataclasses" in written
    assert pickle.loads(written) is DistributedType.MULTI_CPU


def test_a_pickled_object_of_an_old_module_is_loaded() -> None:
    written = pickle.dumps(ProjectConfiguration("runs"), protocol=2).replace(
        b"accel_plugins.checkpoint.config", b"accelerate.utils.dataclasses"
    )
    assert b"accelerate.utils.dataclasses" in written
    assert pickle.loads(written) == ProjectConfiguration("runs")
