"""Config files without questions: the usual one for this machine, and an old one in today's form."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from accel_cli.config.document import Entry, read_document, read_tables
from accel_cli.config.file import modern, read_config
from accel_cli.config.resolved import label
from accel_state.labels import ComputeEnvironment, DistributedType
from accel_state.settings.schema import settings_of

__all__ = ("modernised", "usual_config")


def usual_config(best: Mapping[str, Any], mixed_precision: str) -> dict[str, Any]:
    """One process for each device of this machine.

    Args:
        best: name, number of devices and `distributed_type` of the best device family.
        mixed_precision: as the setting takes it.
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
    """What a config file says, under today's keys and in today's spelling.

    Raises:
        SettingError: the file cannot be used.
    """
    classes = tuple(classes)
    given = read_config(path, classes).values
    settings = [known for settings_class in classes for known in settings_of(settings_class).values()]
    values = {str(known.key): given[label(known)].value for known in settings if label(known) in given}
    owned = {known.key for known in settings}
    root = read_tables(path)
    for entry in read_document(path):
        key = modern(entry).key
        if key not in owned and entry.value is not None:
            values[key] = _at(root, entry)
    return values


def _at(root: Any, entry: Entry) -> Any:
    """Value of an entry as YAML reads it, which nobody here owns."""
    for part in entry.key.split("."):
        root = root[part] if isinstance(root, dict) and part in root else entry.value
    return root
