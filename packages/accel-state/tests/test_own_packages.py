"""Packages of users whose names begin as those of this project do: they are the users'."""

from __future__ import annotations

import pytest

from accel_state.library import OWN_PACKAGES, is_library
from accel_state.watch.calls import CallLog


@pytest.mark.parametrize("module", ["accel_mine", "accel_mine.train", "accel_statements", "accel_"])
def test_a_package_of_the_user_is_no_library(module: str) -> None:
    assert not is_library(module)


@pytest.mark.parametrize("package", sorted(OWN_PACKAGES))
def test_a_package_of_this_project_is_a_library(package: str) -> None:
    assert is_library(f"{package}.module")


def test_a_call_is_located_in_the_package_of_the_user() -> None:
    names = {"__name__": "accel_mine.train", "log": CallLog()}
    code = compile("where = log.enter('gather')", "/home/user/accel_mine/train.py", "exec")
    exec(code, names)
    located = names["where"]
    assert isinstance(located, tuple)
    assert located == (code, 1)
