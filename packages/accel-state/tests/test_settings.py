"""Settings: one definition, read from arguments, variables and defaults."""

from __future__ import annotations

import pickle
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest

from accel_state.errors import AccelError, Conflict, Missing, SettingError
from accel_state.settings.environ import (
    Given,
    _origins,
    from_environment,
    origins_text,
    publish,
    read_setting,
    resolve,
    to_environment,
)
from accel_state.settings.installed import Requirement, importable
from accel_state.settings.schema import (
    BOOLEAN,
    FLOAT,
    INTEGER,
    JSON,
    choice,
    int_at_least,
    listing,
    setting,
    settings_of,
)


@dataclass(frozen=True)
class Example:
    steps: int = setting(1, type=int_at_least(1), variable="ACCEL_TEST_STEPS", flag="--steps")
    rate: float | None = setting(None, type=FLOAT, variable="ACCEL_TEST_RATE", aliases=("ACCEL_TEST_OLD_RATE",))
    quick: bool = setting(False, type=BOOLEAN, variable="ACCEL_TEST_QUICK")
    mode: str = setting("slow", type=choice("slow", "fast"), variable="ACCEL_TEST_MODE")
    names: tuple[str, ...] | None = setting(None, type=listing(), variable="ACCEL_TEST_NAMES")
    extra: object = setting(None, type=JSON, variable="ACCEL_TEST_EXTRA")
    unset: int = setting(3, type=INTEGER)


def test_settings_have_the_names_of_their_fields() -> None:
    assert list(settings_of(Example)) == ["steps", "rate", "quick", "mode", "names", "extra", "unset"]
    assert settings_of(Example)["steps"].flag == "--steps"


def test_variable_flag_and_key_follow_from_the_name_of_the_field() -> None:
    family = partial(setting, variable="RUN_{NAME}", flag="--run_{name}", key="run.run_{name}")

    @dataclass
    class Run:
        batch_size: int = family(type=INTEGER, variable="BATCH")
        max_steps: int = family(type=INTEGER)

    known = settings_of(Run)
    assert [(one.variable, one.flag, one.key) for one in known.values()] == [
        ("BATCH", "--run_batch_size", "run.run_batch_size"),
        ("RUN_MAX_STEPS", "--run_max_steps", "run.run_max_steps"),
    ]


@pytest.mark.parametrize(
    "given",
    [
        Example(),
        Example(steps=4, rate=0.1, quick=True, mode="fast", names=("a", "b"), extra={"x": [1]}),
    ],
)
def test_settings_are_read_back_from_the_environment(given: Example) -> None:
    assert from_environment(Example, to_environment(given)) == given


@pytest.mark.parametrize("value", [[1], print, {"a": 1}])
def test_to_environment_refuses_objects_without_a_text_form(value: Any) -> None:
    with pytest.raises(SettingError, match="Cannot pass mode of Example on to another process"):
        to_environment(Example(mode=value))


def test_the_argument_wins_then_the_variable_then_the_file_then_the_default() -> None:
    environ = {"ACCEL_TEST_STEPS": "2", "ACCEL_TEST_RATE": "0.5"}
    file = {"rate": Given(0.7, "run.yaml:3"), "mode": Given("fast", "run.yaml:4")}

    found = resolve(Example, {"steps": 9}, environ, file)

    assert found["steps"] == Given(9, "argument")
    assert found["rate"] == Given(0.5, "$ACCEL_TEST_RATE")
    assert found["mode"] == Given("fast", "run.yaml:4")
    assert found["unset"] == Given(3, "default")


def test_an_empty_variable_is_not_set_and_aliases_are_read_last() -> None:
    rate = settings_of(Example)["rate"]
    assert read_setting(rate, {"ACCEL_TEST_RATE": " "}) is None
    assert read_setting(rate, {"ACCEL_TEST_OLD_RATE": "1"}) == Given(1.0, "$ACCEL_TEST_OLD_RATE")


@pytest.mark.parametrize(
    ("variable", "text"),
    [
        ("ACCEL_TEST_STEPS", "0"),
        ("ACCEL_TEST_STEPS", "many"),
        ("ACCEL_TEST_RATE", "high"),
        ("ACCEL_TEST_QUICK", "perhaps"),
        ("ACCEL_TEST_EXTRA", "{"),
    ],
)
def test_a_variable_that_cannot_be_read_is_named(variable: str, text: str) -> None:
    with pytest.raises(SettingError, match=rf"\${variable}"):
        from_environment(Example, {variable: text})


def test_the_error_for_a_misspelt_choice_suggests_the_closest_one() -> None:
    with pytest.raises(SettingError, match="Did you mean 'fast'"):
        from_environment(Example, {"ACCEL_TEST_MODE": "fats"})


def test_publish_writes_and_removes_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    import os

    monkeypatch.setenv("ACCEL_TEST_OLD", "1")
    monkeypatch.setenv("ACCEL_TEST_NEW", "0")
    publish({"ACCEL_TEST_NEW": "1"}, remove=["ACCEL_TEST_OLD"])
    assert os.environ["ACCEL_TEST_NEW"] == "1"
    assert "ACCEL_TEST_OLD" not in os.environ


def test_errors_have_three_parts_and_can_be_pickled() -> None:
    error = pickle.loads(pickle.dumps(Conflict("failure", "obstacle", "remedy")))
    assert (error.failure, error.obstacle, error.remedy) == ("failure", "obstacle", "remedy")
    assert str(error) == "failure\n  obstacle\n  remedy"
    assert isinstance(error, ValueError)
    assert isinstance(error, AccelError)


def test_a_requirement_that_is_not_met_gives_the_install_command() -> None:
    absent = Requirement("no_such_module", distribution="no-such", versions=">=2", install="no-such[plots]>=2")
    with pytest.raises(Missing, match=r'pip install "no-such\[plots\]>=2"'):
        absent.demand("Nothing was asked for.")
    old = Requirement("packaging", versions=">=1000")
    assert "is installed; >=1000 is needed" in str(old.obstacle())
    assert Requirement("packaging", versions=">=1").obstacle() is None


def test_importable() -> None:
    assert importable("json")
    assert not importable("no_such_module.inside")


def test_origins_of_texts_that_no_encoding_has_are_kept() -> None:
    origins = {("ACCEL_TEST_STEPS", "\ud800"): "--steps"}
    assert _origins(origins_text(origins)) == origins
