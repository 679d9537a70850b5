"""Single variables, read and changed for a while; places on CPUs; and the functions for files of variables."""

from __future__ import annotations

import logging
import os
import platform
from typing import Any

import pytest

from accel_state.errors import SettingError
from accelerate.legacy.environment import (
    CPUInformation,
    are_libraries_initialized,
    check_os_kernel,
    clear_environment,
    convert_dict_to_env_variables,
    get_cpu_distributed_information,
    get_int_from_env,
    override_numa_affinity,
    parse_choice_from_env,
    parse_flag_from_env,
    patch_environment,
    purge_accelerate_environment,
    set_numa_affinity,
    str_to_bool,
)

pytestmark = pytest.mark.usefixtures("fresh_state")


def test_words_that_mean_yes_and_no() -> None:
    assert [str_to_bool(word) for word in ("y", "YES", "t", "True", "on", "1")] == [1] * 6
    assert [str_to_bool(word) for word in ("n", "No", "f", "FALSE", "off", "0")] == [0] * 6
    assert str_to_bool("on", to_bool=True) is True
    for word in ("perhaps", "", "2"):
        with pytest.raises(SettingError, match="true or false"):
            str_to_bool(word)


def test_flags_choices_and_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TEST_FLAG", "yes")
    monkeypatch.setenv("TEST_NUMBER", "7")
    monkeypatch.setenv("TEST_NEGATIVE", "-3")
    monkeypatch.setenv("TEST_EMPTY", "")
    assert parse_flag_from_env("TEST_FLAG")
    assert not parse_flag_from_env("TEST_ABSENT")
    assert parse_flag_from_env("TEST_EMPTY", default=True)
    assert parse_choice_from_env("TEST_FLAG") == "yes"
    assert parse_choice_from_env("TEST_ABSENT") == "no"
    assert parse_choice_from_env("TEST_ABSENT", "bf16") == "bf16"
    assert get_int_from_env(["TEST_ABSENT", "TEST_EMPTY", "TEST_NEGATIVE", "TEST_NUMBER"], 5) == 7
    assert get_int_from_env(["TEST_NEGATIVE"], 5) == 5


def test_a_variable_that_cannot_be_read_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TEST_WRONG", "several")
    with pytest.raises(SettingError, match="TEST_WRONG='several'"):
        get_int_from_env(["TEST_WRONG"], 1)
    with pytest.raises(SettingError, match="TEST_WRONG='several'"):
        parse_flag_from_env("TEST_WRONG")


def test_variables_are_set_for_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TEST_OLD", "1")
    with patch_environment(test_old=2, test_new="x"):
        assert (os.environ["TEST_OLD"], os.environ["TEST_NEW"]) == ("2", "x")
    assert os.environ["TEST_OLD"] == "1"
    assert "TEST_NEW" not in os.environ


def test_all_variables_are_gone_for_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TEST_OLD", "1")
    before = dict(os.environ)
    with clear_environment():
        assert dict(os.environ) == {}
        os.environ["TEST_NEW"] = "1"
    assert dict(os.environ) == before


def test_what_a_function_did_to_our_variables_is_taken_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCELERATE_OLD", "1")
    monkeypatch.setenv("ACCELERATE_GONE", "1")

    @purge_accelerate_environment
    def change() -> int:
        os.environ.update(ACCELERATE_OLD="2", ACCELERATE_NEW="1", TEST_OTHER="1")
        del os.environ["ACCELERATE_GONE"]
        return 5

    assert change() == 5
    assert (os.environ["ACCELERATE_OLD"], os.environ["ACCELERATE_GONE"]) == ("1", "1")
    assert "ACCELERATE_NEW" not in os.environ
    assert os.environ["TEST_OTHER"] == "1"


def test_methods_that_are_tests_are_taken_back_in_subclasses_too() -> None:
    @purge_accelerate_environment
    class Base:
        def test_it(self) -> None:
            os.environ["ACCELERATE_BASE"] = "1"

        def helper(self) -> None:
            os.environ["ACCELERATE_HELPER"] = "1"

    class Child(Base):
        def test_more(self) -> None:
            os.environ["ACCELERATE_CHILD"] = "1"

    child = Child()
    child.test_it()
    child.test_more()
    child.helper()
    assert [name for name in os.environ if name.startswith("ACCELERATE_")] == ["ACCELERATE_HELPER"]


def test_lines_of_a_file_of_variables(caplog: pytest.LogCaptureFixture) -> None:
    given = {"A": "1", "B": "x;y", "C D": "1", "E": "a b", "F": "a\n", "G": "<", "H": ""}
    with caplog.at_level(logging.WARNING):
        assert convert_dict_to_env_variables(given) == ["A=1\n"]
    assert len(caplog.records) == 6


def test_libraries_that_are_imported() -> None:
    assert are_libraries_initialized("pytest", "no_such_library") == ["pytest"]


def test_the_place_on_cpus(monkeypatch: pytest.MonkeyPatch) -> None:
    assert get_cpu_distributed_information() == CPUInformation()
    for name, value in {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    assert get_cpu_distributed_information() == CPUInformation(3, 4, 1, 2)


@pytest.mark.parametrize(
    ("system", "release", "warned"),
    [
        ("Linux", "5.4.0-42-generic", True),
        ("Linux", "5.5.0", False),
        ("Linux", "6.1", False),
        ("Linux", "4.19-custom", True),
        ("Darwin", "4.0", False),
    ],
)
def test_check_os_kernel_warns_about_old_kernels(
    system: str, release: str, warned: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(platform, "system", lambda: system)
    monkeypatch.setattr(platform, "release", lambda: release)
    check_os_kernel()
    assert bool(caplog.records) is warned


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="processes cannot be bound here")
def test_setting_it_again_changes_nothing_and_overriding_does(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    calls: list[Any] = []
    monkeypatch.setattr(os, "sched_setaffinity", lambda pid, wanted: calls.append(wanted))
    set_numa_affinity.cache_clear()
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    with caplog.at_level(logging.INFO):
        set_numa_affinity(0, verbose=True)
        set_numa_affinity(0, verbose=True)
        assert len(calls) == 1
        assert "The process of cpu:0 runs on the processors" in caplog.text
        override_numa_affinity(0)
        assert len(calls) == 2
    set_numa_affinity.cache_clear()
