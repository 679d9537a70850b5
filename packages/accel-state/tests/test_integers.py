"""Integers of Python, numpy and torch are taken where a number is expected; bools and floats are not."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from accel_state.settings.integers import as_int


@pytest.mark.parametrize("value", [3, np.int64(3), np.array(3), torch.tensor(3), torch.tensor([3])])
def test_an_integer_of_any_library_is_an_int(value: Any) -> None:
    number = as_int(value)
    assert number == 3
    assert type(number) is int


@pytest.mark.parametrize("value", [True, np.True_, torch.tensor(True), 3.0, torch.tensor(3.0), "3", None])
def test_anything_else_is_no_integer(value: Any) -> None:
    assert as_int(value) is None
