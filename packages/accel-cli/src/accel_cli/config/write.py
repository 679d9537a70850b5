"""Writes config files: given values, the default file for this machine, and an old file in the current format."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from types import MappingProxyType
from typing import Any, Final

from accel_cli.config.file import ConfigEntry, modern, read_config, read_document, read_tables
from accel_cli.config.resolved import label
from accel_state.choices import ComputeEnvironment
from accel_state.errors import SettingError
from accel_state.labels import DistributedType
from accel_state.settings.schema import settings_of

__all__ = (
    "config_text",
    "differing",
    "meanings",
    "modernised",
    "nested",
    "usual_config",
    "write_config",
)


_NO_COMMENTS: Final[Mapping[str, str]] = MappingProxyType({})


def nested(values: Mapping[str, Any]) -> dict[str, Any]:
    """Convert values by dotted key to nested tables; values are lists and scalars only.

    Example:
        >>> nested({"num_processes": 2, "parallelism_config.parallelism_config_tp_size": 2})
        {'num_processes': 2, 'parallelism_config': {'parallelism_config_tp_size': 2}}
    """
    root: dict[str, Any] = {}
    for key, value in values.items():
        *tables, name = key.split(".")
        table = root
        for part in tables:
            table = table.setdefault(part, {})
        table[name] = list(value) if isinstance(value, tuple) else value
    return root


def differing(values: Mapping[str, Any], classes: Iterable[type]) -> dict[str, Any]:
    """The values by dotted key that differ from the defaults of their settings."""
    defaults = {setting.key: setting.default for one in classes for setting in settings_of(one).values()}
    return {key: value for key, value in values.items() if key not in defaults or value != defaults[key]}


def meanings(classes: Iterable[type]) -> dict[str, str]:
    """The help of each setting by its dotted key."""
    return {
        setting.key: setting.help for one in classes for setting in settings_of(one).values() if setting.key is not None
    }


def write_config(path: str, values: Mapping[str, Any], comments: Mapping[str, str] = _NO_COMMENTS) -> None:
    """Write values by dotted key as YAML, or as JSON if the file name ends with .json.

    Args:
        path: the file.
        values: the values.
        comments: a comment for each value by its key; JSON has none.

    Raises:
        SettingError: the file cannot be written.
    """
    partial = f"{path}.{os.urandom(8).hex()}.tmp"
    try:
        os.makedirs(os.path.dirname(os.path.abspath(path)), exist_ok=True)
        with open(partial, "w", encoding="utf-8") as file:
            file.write(config_text(values, path, comments))
        os.replace(partial, path)
    except OSError as error:
        failure = f"Cannot write the config file {path}."
        raise SettingError(failure, f"The system reports: {error}.", "Give another --config_file.") from None


def config_text(values: Mapping[str, Any], path: str = "", comments: Mapping[str, str] = _NO_COMMENTS) -> str:
    """The text of a config file with values by dotted key: YAML, or JSON if the file name ends with .json."""
    root = nested(values)
    if path.endswith(".json"):
        import json

        return json.dumps(root, indent=2, sort_keys=True) + "\n"
    return "".join(f"{line}\n" for line in _lines(root, comments)) or "{}\n"


def _lines(table: Mapping[str, Any], comments: Mapping[str, str], prefix: str = "") -> Iterator[str]:
    """Lines of YAML, with the comment of each value above it."""
    import yaml

    for key, value in sorted(table.items()):
        name = f"{prefix}{key}"
        if name in comments:
            yield f"# {comments[name]}"
        if isinstance(value, dict) and value:
            yield f"{key}:"
            yield from (f"  {line}" for line in _lines(value, comments, f"{name}."))
        else:
            yield from str(yaml.safe_dump({key: value}, allow_unicode=True)).splitlines()


def usual_config(best: Mapping[str, Any], mixed_precision: str) -> dict[str, Any]:
    """The default values: one process for each device of this machine.

    Args:
        best: name, number of devices and `distributed_type` of the best device family.
        mixed_precision: value of the setting `mixed_precision`.
    """
    count = max(int(best["count"]), 1)
    return {
        "compute_environment": ComputeEnvironment.LOCAL_MACHINE.value,
        "distributed_type": best["label"] if count > 1 else DistributedType.NO.value,
        "mixed_precision": mixed_precision,
        "num_machines": 1,
        "num_processes": count,
    }


def modernised(path: str, classes: Iterable[type]) -> dict[str, Any]:
    """The values of a config file, with current keys and spellings.

    Raises:
        SettingError: the file is not valid.
    """
    classes = tuple(classes)
    config = read_config(path, classes)
    for error in config.refused.values():
        raise error
    written = config.values
    settings = [setting for settings_class in classes for setting in settings_of(settings_class).values()]
    values = {str(setting.key): written[label(setting)].value for setting in settings if label(setting) in written}
    owned = {setting.key for setting in settings}
    root = read_tables(path)
    for entry in read_document(path):
        key = modern(entry).key
        if key not in owned and entry.value is not None:
            values[key] = _at(root, entry)
    return values


def _at(root: Any, entry: ConfigEntry) -> Any:
    """Value of an entry that no settings class defines, as YAML parses it."""
    for part in entry.key.split("."):
        root = root[part] if isinstance(root, dict) and part in root else entry.value
    return root
