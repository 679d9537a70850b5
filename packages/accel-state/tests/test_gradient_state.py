"""Gradient accumulation state: one per Accelerator, the last one reachable by everybody."""

from __future__ import annotations

import pytest

from accel_state import GradientAccumulationPlugin, GradientState
from accel_state.errors import NotReady, SettingError

pytestmark = pytest.mark.usefixtures("fresh_state")


class Loader:
    end_of_dataloader = False
    remainder = -1


def test_gradient_state_returns_the_newest_state() -> None:
    shared = GradientState()
    shared.sync_gradients = False
    assert not GradientState().sync_gradients

    own = GradientState.of(GradientAccumulationPlugin(num_steps=4))

    own.sync_gradients = False
    assert not GradientState().sync_gradients
    assert own.num_steps == 4
    assert shared.num_steps == 1
    assert own.plugin_kwargs == {"num_steps": 4}


def test_gradient_state_reads_the_innermost_loader() -> None:
    state, outer, inner = GradientState(), Loader(), Loader()
    assert not state.in_dataloader
    state.begin(outer)
    state.begin(inner)
    inner.end_of_dataloader, inner.remainder = True, 3

    assert state.end_of_dataloader
    assert state.remainder == 3
    state.finish(inner)
    assert not state.end_of_dataloader
    assert state.remainder == -1
    assert state.active_dataloader is outer
    assert state.dataloader_references == [None, outer]


def test_loaders_may_finish_in_any_order() -> None:
    state, first, second = GradientState(), Loader(), Loader()
    state.begin(first)
    state.begin(second)
    state.finish(first)
    assert state.loaders == [second]
    with pytest.raises(NotReady):
        state.finish(first)


@pytest.mark.parametrize("steps", [0, -1, 1.5, "2", True])
def test_invalid_numbers_of_accumulation_steps_are_refused(steps: object) -> None:
    with pytest.raises(SettingError, match="at least 1"):
        GradientAccumulationPlugin(num_steps=steps)  # type: ignore[arg-type]


def test_loaders_of_other_libraries_enter_and_leave_iteration() -> None:
    state, loader = GradientState(), Loader()
    state._add_dataloader(loader)
    assert state.active_dataloader is loader
    state._remove_dataloader(loader)
    assert not state.in_dataloader


def test_reset_state_clears_the_gradient_state() -> None:
    GradientState(GradientAccumulationPlugin(num_steps=4))
    GradientState._reset_state()
    assert GradientState().num_steps == 1
