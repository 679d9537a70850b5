"""Finding the files of another library named `accelerate` in our folder, before a program mixes the two."""

from __future__ import annotations

import os
from collections.abc import Iterator
from functools import cache
from typing import Final

from accel_state.errors import Missing
from accelerate.names import HAND_WRITTEN, NAMES, NOT_PROVIDED, VERSION

__all__ = ("check_files", "foreign_files")

_SHOWN = 3


def check_files(folder: str) -> None:
    """Refuse a folder with Python files that are not ours.

    An installer that is told not to remove the original first leaves the files we have no namesake for.

    Args:
        folder: of the package `accelerate`.

    Raises:
        Missing: there are such files.
    """
    found = list(foreign_files(folder))
    if found:
        more = f" and {len(found) - _SHOWN} more" if len(found) > _SHOWN else ""
        raise Missing(
            f"accelerate {VERSION} was imported from {folder}.",
            f"The folder also holds files of another accelerate: {', '.join(sorted(found)[:_SHOWN])}{more}.",
            "Run `pip uninstall -y accelerate` until nothing is left, delete that folder, then run "
            f"`pip install accelerate=={VERSION}` with the wheel built from the accel repository.",
        )


def foreign_files(folder: str, package: str = "accelerate") -> Iterator[str]:
    """Python files in the folder of a package that are not ours, relative to the folder of `accelerate`."""
    try:
        entries = list(os.scandir(folder))
    except OSError:
        # Imported from an archive: nothing can have been written into that.
        return
    inside = "".join(f"{part}/" for part in package.split(".")[1:])
    for entry in entries:
        stem, dot, ending = entry.name.partition(".")
        name = f"{package}.{stem}"
        if dot and ending == "py":
            if stem != "__init__" and name not in _modules():
                yield inside + entry.name
        elif name in _packages():
            yield from foreign_files(entry.path, name)
        elif name not in _BY_HAND and os.path.isfile(os.path.join(entry.path, "__init__.py")):
            yield f"{inside}{entry.name}/__init__.py"


_BY_HAND: Final = frozenset(f"accelerate.{name}" for name in HAND_WRITTEN)


@cache
def _modules() -> frozenset[str]:
    return frozenset((*NAMES, *NOT_PROVIDED)) | _BY_HAND


@cache
def _packages() -> frozenset[str]:
    return frozenset(name.rpartition(".")[0] for name in NAMES)
