"""Fields that keep names and are read as objects."""

# ruff: noqa: RUF009 - `setting` makes the fields of every settings class

from __future__ import annotations

import copy
import sys
from dataclasses import dataclass
from signal import Signals
from typing import Any

import pytest

from accel_state.errors import SettingError
from accel_state.settings.environ import from_environment
from accel_state.settings.schema import (
    ObjectField,
    choice,
    enum_field,
    given_value,
    object_fields,
    plain_value,
    setting,
)

MADE: list[Any] = []


def _make(settings: Any, plain: Any) -> Any:
    MADE.append(plain)
    return [plain]


@object_fields(
    signal=enum_field("signal:Signals", {"NOTHING": None}, fallback=lambda settings: settings.usual),
    box=ObjectField(lambda settings, given: given, _make),
)
@dataclass
class Ending:
    signal: Any = setting(
        None, type=choice("SIGINT", "SIGTERM", "NOTHING", fold=str.upper, numbered=2), variable="ENDING_SIGNAL"
    )
    usual: str = "SIGTERM"
    box: Any = None


@pytest.mark.parametrize("given", ["sigint", Signals.SIGINT, "1"])
def test_enum_fields_accept_members_names_and_numbers(given: Any) -> None:
    ending = Ending(given)
    assert ending.signal is Signals.SIGINT
    assert plain_value(ending, "signal") == "SIGINT"


def test_the_fallback_of_a_field_reads_other_fields() -> None:
    ending = Ending()
    assert ending.signal is Signals.SIGTERM
    ending.usual = "SIGINT"
    assert ending.signal is Signals.SIGINT
    assert given_value(ending, "signal") is None
    ending.signal = "nothing"
    assert ending.signal is None
    assert plain_value(ending, "usual") == "SIGINT"


def test_enum_fields_are_read_from_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ENDING_SIGNAL", "2")
    assert from_environment(Ending).signal is Signals.SIGTERM


@pytest.mark.parametrize("given", ["SIGKILL", Signals.SIGKILL, 3, 0, True, 1.0, object()])
def test_enum_fields_refuse_unknown_values(given: Any) -> None:
    with pytest.raises(SettingError, match="SIGINT, SIGTERM, NOTHING"):
        Ending(given)
    ending = Ending()
    with pytest.raises(SettingError, match="SIGINT, SIGTERM, NOTHING"):
        ending.signal = given
    assert ending.signal is Signals.SIGTERM


def test_an_object_field_creates_the_object_once_when_it_is_read() -> None:
    MADE.clear()
    ending = Ending(box="one")
    assert MADE == []
    first = ending.box
    assert ending.box is first
    assert copy.copy(ending).box == ["one"]
    ending.box = "two"
    assert (ending.box, MADE) == (["two"], ["one", "two"])
    assert "box" in vars(sys.modules[__name__])["Ending"].__dataclass_fields__
