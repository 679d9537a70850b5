"""Config files: their entries as values of settings."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Any, Final, NamedTuple

from accel_cli.config.document import Entry, read_document
from accel_cli.config.known import KNOWN, is_known, says_nothing, with_prefix
from accel_cli.config.repeated import REPEATED
from accel_cli.config.resolved import label
from accel_state.errors import SettingError
from accel_state.settings.environ import Given
from accel_state.settings.schema import JSON, Setting, closest, settings_of

__all__ = ("ConfigFile", "modern", "read_config")


_ADDITIONAL: Final = "additional_args."


class ConfigFile(NamedTuple):
    """What a config file says.

    Args:
        path: path of the file.
        values: values by the label of their setting, with file and line as origin.
        unread: entries that no installed part reads and that ask for something.
        additional: entries below `additional_args`, by name; the launcher of SageMaker passes it on.
    """

    path: str
    values: Mapping[str, Given]
    unread: tuple[Entry, ...] = ()
    additional: Mapping[str, Any] = MappingProxyType({})


def read_config(path: str, classes: Iterable[type]) -> ConfigFile:
    """Read a config file.

    Args:
        path: the file.
        classes: settings classes whose keys it may hold.

    Raises:
        SettingError: the file is not readable or not valid, a key is unknown, or a value is not of its setting's kind.
    """
    keys = _keys(classes)
    values: dict[str, Given] = {}
    unread = []
    additional = {}
    for entry in map(modern, read_document(path)):
        if entry.key in keys:
            for known in keys[entry.key]:
                given = _given(known, entry, path)
                if given is not None:
                    values[label(known)] = given
        elif entry.key.startswith(_ADDITIONAL):
            additional[entry.key.removeprefix(_ADDITIONAL)] = entry.value
        elif not is_known(entry.key):
            raise _unknown(entry, path, keys)
        elif not says_nothing(entry.key, entry.value):
            unread.append(entry)
    return ConfigFile(path, values, tuple(unread), additional)


def _keys(classes: Iterable[type]) -> dict[str, list[Setting]]:
    """Settings by key; a key that two of them share is read by both."""
    keys: dict[str, list[Setting]] = {}
    for settings_class in classes:
        for known in settings_of(settings_class).values():
            if known.key is not None:
                keys.setdefault(known.key, []).append(known)
    return keys


def modern(entry: Entry) -> Entry:
    """An entry with its key as files have it today."""
    key = with_prefix(entry.key)
    if key == "fp16":
        return entry._replace(key="mixed_precision", value="fp16" if str(entry.value).lower() == "true" else None)
    return entry._replace(key="dynamo_config.dynamo_backend" if key == "dynamo_backend" else key)


def _given(known: Setting, entry: Entry, path: str) -> Given | None:
    origin = f"{path}:{entry.line}"
    value: Any = entry.value
    if value is None or (known.name == "num_processes" and value == "-1"):
        return None
    if isinstance(value, list):
        if known.type.parse is JSON.parse:
            return Given(value, origin)
        if known.type is REPEATED:
            return Given(tuple(str(item) for item in value if item is not None), origin)
        value = ",".join(str(item) for item in value)
    return Given(known.parse(value, origin), origin)


def _unknown(entry: Entry, path: str, keys: Iterable[str]) -> SettingError:
    near = closest(entry.key, {*keys, *KNOWN})
    remedy = f"Did you mean {near!r}?" if near else "Remove the line, or update the package that reads it."
    return SettingError(
        f"Cannot read the config file {path}.", f"{path}:{entry.line} has the unknown key {entry.key!r}.", remedy
    )
