from __future__ import annotations

import enum
from datetime import datetime
from pathlib import Path

import pytest

from accel_tracking.values import as_number, flatten_keys, plain, scalars_as_numbers

torch = pytest.importorskip("torch", reason="accel-tracking needs neither torch nor numpy")
np = pytest.importorskip("numpy")


class Color(enum.Enum):
    RED = "red"


def test_plain_returns_json_types() -> None:
    assert plain(
        {
            "tensor": torch.tensor(1.5, requires_grad=True),
            "half": torch.tensor([1.0, 2.0], dtype=torch.bfloat16),
            "scalar": np.float32(0.5),
            "float": np.float64(0.25),
            "int": np.int64(3),
            "array": np.arange(4).reshape(2, 2),
            "inner": {1: (True, None), "set": {5}},
            "enum": Color.RED,
            "path": Path("a") / "b",
            "time": datetime(2026, 1, 2),
            "type": int,
        }
    ) == {
        "tensor": 1.5,
        "half": [1.0, 2.0],
        "scalar": 0.5,
        "float": 0.25,
        "int": 3,
        "array": [[0, 1], [2, 3]],
        "inner": {"1": [True, None], "set": [5]},
        "enum": "red",
        "path": str(Path("a") / "b"),
        "time": "2026-01-02 00:00:00",
        "type": "<class 'int'>",
    }


def test_scalars_become_numbers_and_other_values_are_unchanged() -> None:
    image, array = object(), np.zeros(3)
    result = scalars_as_numbers(
        {"a": torch.tensor([2.0]), "b": np.float32(0.5), "c": {"d": torch.tensor(1)}, "e": array, "f": image, "g": "x"}
    )
    assert result["a"] == 2.0
    assert type(result["a"]) is type(result["b"]) is float
    assert result["c"] == {"d": 1}
    assert result["e"] is array
    assert result["f"] is image
    assert result["g"] == "x"


def test_nested_names_are_joined() -> None:
    assert flatten_keys({"a": 1, "b": {"c": 2, "d": {"e": 3}}, "empty": {}}) == {"a": 1, "b/c": 2, "b/d/e": 3}


class Level(enum.IntEnum):
    HIGH = 3


@pytest.mark.parametrize(("value", "number"), [(True, 1), (False, 0), (Level.HIGH, 3), (2, 2), (0.5, 0.5)])
def test_bools_and_numbers_are_drawn(value: float, number: float) -> None:
    assert as_number(value) == number
    assert type(as_number(value)) is type(number)


@pytest.mark.parametrize("value", ["1", None, [1], 1j, Color.RED])
def test_other_values_are_not_drawn(value: object) -> None:
    assert as_number(value) is None
