"""Installed distributions: versions, read from the names of their metadata folders, and requirements.

`importlib.metadata` would read and parse all metadata, which takes longer than the rest of a command that lists them.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterable

__all__ = ("installed", "requirements", "versions")


def versions(names: Iterable[str]) -> dict[str, str]:
    """Versions of the installed distributions among `names`, in this order.

    Example:
        >>> "pyyaml" in versions(["pyyaml", "no-such-distribution"])
        True
    """
    found = {_normal(name): version for name, version in installed().items()}
    return {name: found[_normal(name)] for name in names if _normal(name) in found}


def installed() -> dict[str, str]:
    """Every installed distribution with its version."""
    found: dict[str, str] = {}
    for folder in dict.fromkeys(sys.path):
        for entry in _entries(folder or os.curdir):
            name, _, version = entry.rpartition(".")[0].partition("-")
            found.setdefault(name.replace("_", "-"), version.partition("-")[0])
    return found


def requirements(distribution: str) -> list[str]:
    """Names of the requirements of an installed distribution, including its extras.

    Example:
        >>> "torch" in requirements("accel-cli")
        True
    """
    for folder in sys.path:
        for entry in _entries(folder or os.curdir):
            if _normal(entry.partition("-")[0]) != _normal(distribution):
                continue
            for name in ("METADATA", "PKG-INFO"):
                try:
                    with open(os.path.join(folder, entry, name), encoding="utf-8", errors="replace") as file:
                        return re.findall(r"^Requires-Dist: *([A-Za-z0-9._-]+)", file.read(), re.MULTILINE)
                except OSError:
                    continue
    return []


def _entries(folder: str) -> list[str]:
    try:
        return [entry for entry in os.listdir(folder) if entry.endswith((".dist-info", ".egg-info"))]
    except OSError:
        return []


def _normal(name: str) -> str:
    return name.lower().replace("-", "_").replace(".", "_")
