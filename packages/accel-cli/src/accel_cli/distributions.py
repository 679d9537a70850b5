"""Versions of installed distributions, read from the names of their metadata folders."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable

__all__ = ("installed", "versions")


def versions(names: Iterable[str]) -> dict[str, str]:
    """Version of each distribution that is installed, in the order of `names`.

    `importlib.metadata` would read all of their metadata; the folder's name says enough.

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


def _entries(folder: str) -> list[str]:
    try:
        return [entry for entry in os.listdir(folder) if entry.endswith((".dist-info", ".egg-info"))]
    except OSError:
        return []


def _normal(name: str) -> str:
    return name.lower().replace("-", "_").replace(".", "_")
