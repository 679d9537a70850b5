"""Progress bars and colours on the terminal."""

from __future__ import annotations

import sys

import pytest

from accel_state import PartialState, current, tqdm
from accel_state.errors import Missing, SettingError
from accel_state.settings import installed
from accel_testing.processes import Processes

pytest.importorskip("tqdm")
pytest.importorskip("rich")


@pytest.fixture(autouse=True)
def kept_excepthook(fresh_state: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)


def bars() -> list[bool]:
    PartialState(cpu=True)
    drawn = [tqdm(range(2)), tqdm(range(2), main_process_only=False), tqdm(range(2), disable=True)]
    shown = [not bar.disable for bar in drawn]
    assert [list(bar) for bar in drawn] == [[0, 1]] * 3
    return shown


def test_only_the_local_main_process_draws_a_progress_bar(two: Processes) -> None:
    assert two.run(bars) == [[True, True, False], [False, True, False]]


def test_tqdm_refuses_a_bool_as_first_argument() -> None:
    with pytest.raises(SettingError, match="main_process_only=True"):
        tqdm(True, range(2))


def test_coloured_tracebacks_are_off_by_default(monkeypatch: pytest.MonkeyPatch) -> None:
    before = sys.excepthook
    PartialState(cpu=True)
    assert sys.excepthook is before
    PartialState._reset_state()
    monkeypatch.setenv("ACCELERATE_ENABLE_RICH", "true")
    PartialState(cpu=True)
    assert sys.excepthook is not before


def test_coloured_tracebacks_without_rich_raise(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(installed, "importable", lambda module: module != "rich")
    monkeypatch.setenv("ACCELERATE_ENABLE_RICH", "true")
    with pytest.raises(Missing, match='pip install "rich"'):
        PartialState(cpu=True)


def test_a_progress_bar_does_not_connect_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("LOCAL_RANK", "1")
    with tqdm([1, 2]) as bar:
        assert bar.disable
    assert current.process_or_none() is None
