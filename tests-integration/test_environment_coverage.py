"""Every environment variable of the original has a setting here, a reader, a part to come, or a reason for none."""

from __future__ import annotations

import ast
import importlib
import json
from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import tomli

from accel_state.settings.schema import settings_of

ROOT = Path(__file__).resolve().parents[1]
REFERENCE = Path(__file__).parent / "reference"
FATES = ("reader", "built_by", "no_reader")


@cache
def sources() -> dict[str, tuple[str, frozenset[str]]]:
    """Module name to its text and to the texts quoted in it, for every module but those that help tests."""
    found = {}
    for path in sorted(ROOT.glob("packages/*/src/**/*.py")):
        name = ".".join(path.relative_to(ROOT).with_suffix("").parts[3:]).removesuffix(".__init__")
        if name.startswith("accel_testing"):
            continue
        text = path.read_text(encoding="utf-8")
        quoted = (node.value for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Constant))
        found[name] = (text, frozenset(value for value in quoted if isinstance(value, str)))
    return found


def settings_classes() -> Iterator[type]:
    """Every class with declared settings, wherever in the packages."""
    for name, (text, _) in sources().items():
        if "setting(" in text or "partial(\n    setting," in text:
            for value in vars(importlib.import_module(name)).values():
                if isinstance(value, type) and value.__module__ == name and has_settings(value):
                    yield value


def has_settings(cls: type) -> bool:
    try:
        return bool(settings_of(cls))
    except TypeError:  # it is not a dataclass
        return False


@cache
def declared() -> frozenset[str]:
    """The variables that a declared setting reads."""
    return frozenset(
        variable
        for cls in settings_classes()
        for setting in settings_of(cls).values()
        for variable in (setting.variable, *setting.aliases)
        if variable
    )


def original_variables() -> list[str]:
    """The variables that the original reads or writes."""
    facts = json.loads((REFERENCE / "environment.json").read_text(encoding="utf-8"))
    return sorted(facts["variables"])


@cache
def listed() -> list[dict[str, Any]]:
    """The entries of variables.toml."""
    return tomli.loads((REFERENCE / "variables.toml").read_text(encoding="utf-8"))["variables"]


def fates(entries: list[dict[str, Any]]) -> dict[str, tuple[str, str]]:
    """Listed variable to its fate and what the list says about it."""
    return {
        name: (fate, entry[fate]) for entry in entries for fate in FATES if fate in entry for name in entry["names"]
    }


def problem(variable: str, entry: tuple[str, str] | None) -> str | None:
    """What is wrong with the entry of one variable, or with its lack of one."""
    if variable in declared():
        return f"a setting declares {variable} by now: take it off variables.toml" if entry else None
    if entry is None:
        return f"declare {variable} in a settings class, or say in variables.toml what becomes of it"
    fate, words = entry
    readers = [name for name, (_, quoted) in sources().items() if variable in quoted]
    if fate == "reader":
        return None if words in readers else f"{words} is said to read {variable}, but does not name it"
    return f"{variable} stands in {', '.join(readers)} by now: name its reader in variables.toml" if readers else None


def test_the_facts_name_166_variables() -> None:
    assert len(original_variables()) == 166


def test_an_entry_has_one_fate_with_words_to_it() -> None:
    for entry in listed():
        given = [fate for fate in FATES if entry.get(fate)]
        assert len(given) == 1, entry
        assert set(entry) == {*given, "names"}, entry


def test_nothing_is_listed_twice_or_unknown() -> None:
    names = Counter(name for entry in listed() for name in entry["names"])
    assert [name for name, times in names.items() if times > 1] == []
    assert sorted(set(names) - set(original_variables())) == []


@pytest.mark.parametrize("variable", original_variables())
def test_every_variable_has_a_fate(variable: str) -> None:
    assert problem(variable, fates(listed()).get(variable)) is None


@pytest.mark.parametrize(
    ("variable", "entry", "words"),
    [
        ("RUN_SLOW", None, "say in variables.toml"),
        ("ACCELERATE_MIXED_PRECISION", ("built_by", "launcher"), "take it off"),
        ("WORLD_SIZE", ("no_reader", "not wanted"), "accel_state.topology"),
        ("WORLD_SIZE", ("reader", "accel_state.errors"), "does not name it"),
        ("WORLD_SIZE", ("reader", "accel_state.nowhere"), "does not name it"),
    ],
)
def test_a_wrong_list_is_found_out(variable: str, entry: tuple[str, str] | None, words: str) -> None:
    found = problem(variable, entry)
    assert found is not None
    assert words in found
