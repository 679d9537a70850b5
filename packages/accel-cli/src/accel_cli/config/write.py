"""Writing config files, all at once: a file is either the old one or the new one."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from accel_state.errors import SettingError

__all__ = ("nested", "write_config")


def nested(values: Mapping[str, Any]) -> dict[str, Any]:
    """Values by dotted key as tables within tables; lists and plain values only.

    Example:
        >>> nested({"num_processes": 2, "fsdp_config.fsdp_version": 2})
        {'num_processes': 2, 'fsdp_config': {'fsdp_version': 2}}
    """
    root: dict[str, Any] = {}
    for key, value in values.items():
        *tables, name = key.split(".")
        table = root
        for part in tables:
            table = table.setdefault(part, {})
        table[name] = list(value) if isinstance(value, tuple) else value
    return root


def write_config(path: str, values: Mapping[str, Any]) -> None:
    """Write values by dotted key as YAML, or as JSON when the file's name says so.

    Raises:
        SettingError: the file cannot be written.
    """
    partial = f"{path}.{os.urandom(8).hex()}.tmp"
    try:
        os.makedirs(os.path.dirname(os.path.abspath(path)), exist_ok=True)
        with open(partial, "w", encoding="utf-8") as file:
            file.write(_text(path, nested(values)))
        os.replace(partial, path)
    except OSError as error:
        asked = f"Cannot write the config file {path}."
        raise SettingError(asked, f"The system refused: {error}.", "Give another --config_file.") from None


def _text(path: str, root: Mapping[str, Any]) -> str:
    if path.endswith(".json"):
        import json

        return json.dumps(root, indent=2, sort_keys=True) + "\n"
    import yaml

    return str(yaml.safe_dump(dict(root), sort_keys=True, allow_unicode=True))
