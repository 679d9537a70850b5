"""Hooks that run when a program creates a state."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from accel_state import AcceleratorState, GradientState, PartialState, current
from accel_state.creation import on_creation

pytestmark = pytest.mark.usefixtures("fresh_state")

started: list[bool] = []
"""For each call of the hook, whether the process had a state already."""

on_creation(lambda: started.append(current.process_or_none() is not None))


@pytest.mark.parametrize("kind", [PartialState, AcceleratorState, GradientState])
def test_a_hook_runs_at_the_start_of_each_creation(kind: Callable[[], Any]) -> None:
    started.clear()
    kind()
    assert started == [False]
    PartialState(cpu=True)
    kind()
    assert started[2:] == [True]
