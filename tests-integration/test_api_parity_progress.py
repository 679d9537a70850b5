"""The drop-in lacks no more names and parameters than are known to be missing; that list only becomes shorter."""

from __future__ import annotations

import json
from typing import Any

import pytest

import api_gaps

KNOWN = json.loads(api_gaps.LIST.read_text(encoding="utf-8"))
MODULES = json.loads((api_gaps.REFERENCE / "api.json").read_text(encoding="utf-8"))["modules"]


def test_what_is_missing_is_what_is_known_to_be_missing() -> None:
    assert list(api_gaps.differences(KNOWN, api_gaps.measured())) == []


def test_the_list_speaks_of_modules_of_the_original() -> None:
    assert set(KNOWN) <= set(MODULES)
    assert api_gaps.LIST.read_text(encoding="utf-8") == api_gaps.written(KNOWN)


@pytest.mark.parametrize(
    ("found", "line"),
    [
        ({"accelerate.state": {"names": 3, "parameters": 1}}, "accelerate.state lacks 3 names, 1 more than"),
        ({"accelerate.state": {"names": 2, "parameters": 0}}, "accelerate.state lacks 0 parameters, fewer than"),
        (
            {"accelerate.state": {"names": 2, "parameters": 1}, "accelerate.hooks": {"names": 1}},
            "accelerate.hooks lacks",
        ),
        ({}, "accelerate.state lacks 0 names, fewer than"),
    ],
)
def test_more_and_fewer_are_both_noticed(found: dict[str, Any], line: str) -> None:
    known = {"accelerate.state": {"names": 2, "parameters": 1}}
    assert list(api_gaps.differences(known, known)) == []
    assert any(told.startswith(line) for told in api_gaps.differences(known, found))
