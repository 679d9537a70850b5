"""The choices an Accelerator has for its loaders."""

from __future__ import annotations

from typing import Any

import pytest

from accel_data import DataLoaderConfiguration
from accel_state.errors import Conflict, Missing, SettingError
from accel_state.settings.installed import Requirement


def test_positions_and_defaults() -> None:
    config = DataLoaderConfiguration(True, False, False, True, 7, True, False)
    assert config.split_batches is True
    assert config.dispatch_batches is False
    assert config.even_batches is False
    assert config.use_seedable_sampler is True
    assert config.data_seed == 7
    assert config.non_blocking is True
    with pytest.raises(TypeError, match="positional argument"):
        DataLoaderConfiguration(True, False, False, True, 7, True, False, True)  # type: ignore[misc]
    assert DataLoaderConfiguration().sharding == "auto"
    assert DataLoaderConfiguration() == DataLoaderConfiguration(even_batches=True)


@pytest.mark.parametrize(("sharding", "dispatch"), [("already", True), ("dispatch", False), (lambda *_: None, True)])
def test_contradictions_are_refused(sharding: Any, dispatch: bool) -> None:
    with pytest.raises(Conflict, match="dispatch_batches"):
        DataLoaderConfiguration(dispatch_batches=dispatch, sharding=sharding)


def test_an_unknown_way_of_sharding_is_refused_with_the_nearest() -> None:
    with pytest.raises(SettingError, match="Did you mean 'already'"):
        DataLoaderConfiguration(sharding="alredy")  # type: ignore[arg-type]


@pytest.mark.parametrize("dispatch", [None, True])
def test_both_ways_to_say_dispatch_go_together(dispatch: bool | None) -> None:
    for sharding in ("auto", "dispatch"):
        DataLoaderConfiguration(dispatch_batches=dispatch, sharding=sharding)  # type: ignore[arg-type]


def test_a_stateful_loader_needs_torchdata(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("accel_data.config.TORCHDATA", Requirement("not_there_at_all"))
    with pytest.raises(Missing, match="not_there_at_all"):
        DataLoaderConfiguration(use_stateful_dataloader=True)
