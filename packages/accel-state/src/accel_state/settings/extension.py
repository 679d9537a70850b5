"""Extensions: the entry points of installed distributions in our groups, found without importing them.

`importlib.metadata` reads and parses the metadata of every distribution. This module looks only at the
`entry_points.txt` files on `sys.path` that mention one of our groups, which is about fifty times faster.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from functools import lru_cache
from typing import Any, NamedTuple

from accel_state.settings.installed import folder_names

__all__ = ("Extension", "add_library", "extensions", "forget", "is_library")

_PREFIX = "[accel."

_libraries = {"contextlib", "functools", "logging", "threading", "torch", "typing_extensions"}


def is_library(module: str) -> bool:
    """Whether a module is part of torch, of these packages or of a loaded extension, and not the user's.

    Example:
        >>> is_library("accel_ops.collectives"), is_library("train")
        (True, False)
    """
    package = module.partition(".")[0]
    return package in _libraries or package.startswith("accel_")


def add_library(package: str) -> None:
    """Count a top-level package as a library in `is_library`; `Extension.load` does so for its own package."""
    _libraries.add(package)


class Extension(NamedTuple):
    """One entry point: `name = target` in a group of a distribution.

    Args:
        group: for example "accel.backends".
        name: the name with which users select it.
        target: "module:attribute".
        origin: name and version of the distribution, such as "accel-plugins 0.1.0".
    """

    group: str
    name: str
    target: str
    origin: str

    def load(self) -> Any:
        """Import the module and return the attribute; import errors propagate."""
        import importlib

        module, _, attribute = self.target.partition(":")
        add_library(module.partition(".")[0])
        found: Any = importlib.import_module(module)
        for part in attribute.split(".") if attribute else ():
            found = getattr(found, part)
        return found


def extensions(group: str) -> tuple[Extension, ...]:
    """Extensions of a group in the order of `sys.path`; duplicates with the same name and target are left out."""
    return tuple(found for found in _scan(tuple(sys.path)) if found.group == group)


def forget() -> None:
    """Search again at the next call, because the running process has installed a package."""
    _scan.cache_clear()


@lru_cache(maxsize=4)
def _scan(path: tuple[str, ...]) -> tuple[Extension, ...]:
    found: dict[tuple[str, str, str], Extension] = {}
    for folder in dict.fromkeys(path):
        for origin, text in _metadata(folder or os.curdir):
            for extension in _parse(text, origin):
                found.setdefault((extension.group, extension.name, extension.target), extension)
    return tuple(found.values())


def _metadata(folder: str) -> Iterator[tuple[str, str]]:
    """Origin and text of each entry-point file in a folder that mentions one of our groups."""
    for name in sorted(name for name in folder_names(folder) or () if name.endswith((".dist-info", ".egg-info"))):
        try:
            # Without file objects and decoding: most of the hundreds of files do not mention our groups.
            file = os.open(f"{folder}/{name}/entry_points.txt", os.O_RDONLY)
        except OSError:
            continue
        try:
            content = os.read(file, os.fstat(file).st_size)
            text = content.decode() if _PREFIX.encode() in content else ""
        except (OSError, UnicodeDecodeError):
            continue
        finally:
            os.close(file)
        if text:
            distribution, _, version = name.rsplit(".", 1)[0].rpartition("-")
            yield f"{distribution.replace('_', '-')} {version}", text


def _parse(text: str, origin: str) -> Iterator[Extension]:
    group = ""
    for line in map(str.strip, text.splitlines()):
        if line.startswith("[") and line.endswith("]"):
            group = line[1:-1].strip()
        elif group.startswith(_PREFIX[1:]) and "=" in line and not line.startswith(("#", ";")):
            name, _, target = line.partition("=")
            yield Extension(group, name.strip(), target.split("[")[0].strip(), origin)
