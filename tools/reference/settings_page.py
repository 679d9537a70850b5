"""The page of settings: every one with its default, flag, variable, key of the config file and argument.

Taken from the definitions themselves, so the classes are imported; none of them needs torch.
"""

from __future__ import annotations

import dataclasses
import enum
import importlib
import inspect
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from accel_cli.launch.launchers import launch_classes
from accel_state.settings.schema import Setting, plain_value, settings_of
from accel_torch import Accelerator
from reference.api import published_in
from reference.docstrings import argument_meanings, first_sentence
from reference.markdown import code, page, prose, table
from reference.published import ROOT, Entry, Links, Modules

__all__ = ("classes_with_settings", "settings_page")

_HEAD = ("setting", "meaning", "type", "default", "set by")
_CLASS_OF_SETTINGS = re.compile(r"(Plugin|Kwargs|Config|Configuration)$")
_DEFINES = re.compile(r"\b(?:setting|taken)\(")
_NONE = "–"
_OF_EVERY_RUN = "accel_state.settings.run"
_GIVEN_AS_OBJECTS = ("Plugin", "Kwargs", "Config", "Configuration")
_ABOUT = """Every setting, with the flag of `accel launch`, the environment variable, the key of the config file and the
argument that set it. An argument overrides a flag, a flag overrides a variable, a variable overrides the file, and the
file overrides the default. `accel explain` shows which of them counts for a launch. You can write flags with dashes
instead of underscores; a switch has an opposite, `--no_...`."""
_IN_SCRIPTS = "These arguments are objects or belong to one call, so no flag, variable or key can set them."


def settings_page(modules: Modules, links: Links) -> str:
    """The page."""
    arguments = set(inspect.signature(Accelerator).parameters)
    lines = ["# Settings", "", prose(_ABOUT), ""]
    classes = classes_with_settings()
    for cls in classes:
        lines += [f"## {cls.__qualname__}", "", first_sentence(cls, links.link), ""]
        place = links.link(f"{cls.__module__}.{cls.__qualname__}")
        lines += [f"In {place}.", "", *table(_HEAD, _rows(cls, arguments)), ""]
    published = [entry for found in published_in(modules).values() for entry in found if "legacy" not in entry.home]
    lines += ["## Given in scripts only", "", _IN_SCRIPTS, ""]
    return page([*lines, *_only_in_scripts(published, classes, links)])


def classes_with_settings(root: Path = ROOT) -> list[type]:
    """Every class with settings: those of a launch in the order of its help text, then the others."""
    found = list(dict.fromkeys(launch_classes()))
    for path in sorted(root.glob("packages/*/src/**/*.py")):
        name = ".".join(path.with_suffix("").relative_to(root).parts[3:])
        if (
            not name.startswith("accel_testing.")
            and name != "accel_state.settings.schema"
            and _DEFINES.search(path.read_text("utf-8"))
        ):
            found += [cls for cls in _defined_in(name) if cls not in found]
    return found


def _defined_in(name: str) -> Iterator[type]:
    for value in vars(importlib.import_module(name)).values():
        if isinstance(value, type) and value.__module__ == name and _settings(value):
            yield value


def _settings(cls: type) -> Mapping[str, Setting]:
    try:
        return settings_of(cls)
    except TypeError:
        # Neither a dataclass nor a table of settings.
        return {}


def _rows(cls: type, arguments: set[str]) -> Iterator[tuple[str, ...]]:
    usual = _usual(cls)
    for name, known in settings_of(cls).items():
        yield (
            code(name),
            prose(known.help),
            _type(known),
            _default(known, usual.get(name)),
            ", ".join(_ways(known, cls, name, arguments)) or _NONE,
        )


def _type(known: Setting) -> str:
    return ", ".join(map(code, known.type.choices)) if known.type.choices else prose(known.type.name)


def _ways(known: Setting, cls: type, name: str, arguments: set[str]) -> Iterator[str]:
    """Flag, variables, key and argument of a setting, those that it has."""
    yield from () if known.flag is None else (code(known.flag),)
    yield from map(code, known.variables)
    yield from () if known.key is None else (f"key {code(known.key)}",)
    yield from _argument(cls, name, arguments)


def _default(known: Setting, usual: Any) -> str:
    """The first value that says something; an object that stands for none, such as an empty table, has no text."""
    values = (getattr(value, "value", value) for value in (known.default, known.unset, usual))
    plain = (value for value in values if isinstance(value, (bool, int, float, str, tuple)) and value not in ("", ()))
    value = next(plain, None)
    return _NONE if value is None else code(known.type.format(value))


def _argument(cls: type, name: str, arguments: set[str]) -> Iterator[str]:
    if dataclasses.is_dataclass(cls) and cls.__name__.endswith(_GIVEN_AS_OBJECTS):
        yield code(f"{cls.__name__}({name}=)")
    elif name in arguments and cls.__module__ == _OF_EVERY_RUN:
        yield code(f"Accelerator({name}=)")


def _usual(cls: type) -> dict[str, Any]:
    """What an object has that is made without arguments, and without variables: some classes fill in by themselves."""
    if not dataclasses.is_dataclass(cls):
        return {}
    with _no_variables():
        made = cls()
    # The names of objects of torch, and not the objects, which only torch could make.
    return {name: plain_value(made, name) for name in settings_of(cls)}


@contextmanager
def _no_variables() -> Iterator[None]:
    kept = dict(os.environ)
    os.environ.clear()
    try:
        yield
    finally:
        os.environ.update(kept)


def _only_in_scripts(published: Iterable[Entry], known: Iterable[type], links: Links) -> Iterator[str]:
    """A table for each class of settings that has fields without flag, variable or key."""
    for entry in published:
        if (
            isinstance(entry.item, type)
            and dataclasses.is_dataclass(entry.item)
            and _CLASS_OF_SETTINGS.search(entry.name)
        ):
            rows = list(_fields(entry.item, settings_of(entry.item) if entry.item in known else (), links))
            if rows:
                said = first_sentence(entry.item, links.link)
                yield from (f"### {entry.name} in scripts", "", said, "", f"In {links.link(entry.address)}.", "")
                yield from (*table(("argument", "meaning", "type", "default"), rows), "")


def _fields(cls: Any, declared: Iterable[str], links: Links) -> Iterator[tuple[str, ...]]:
    meanings: dict[str, str] = {}
    for source in reversed(cls.__mro__):
        meanings |= argument_meanings(source, links.link)
    for name, one in inspect.signature(cls).parameters.items():
        if name not in declared and not name.startswith("_"):
            yield code(name), meanings.get(name, ""), code(str(one.annotation)), _given(cls, one)


def _given(cls: Any, one: inspect.Parameter) -> str:
    """The default of an argument, as a script would write it."""
    field = cls.__dataclass_fields__.get(one.name)
    if one.kind is inspect.Parameter.VAR_KEYWORD:
        return code("{}")
    if one.default is inspect.Parameter.empty:
        return "needed"
    if field is not None and field.default_factory is not dataclasses.MISSING:
        return code(f"{field.default_factory.__name__}()")
    value = one.default
    return code(f"{type(value).__name__}.{value.name}" if isinstance(value, enum.Enum) else repr(value))
