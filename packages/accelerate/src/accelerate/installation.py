"""Finds another library named `accelerate` in this environment: its files in this package's folder, or its metadata.

pip replaces one by the other. Other installers, and folders that are added to the path, may leave both: files of the
original in this folder, or its metadata beside ours. The import warns if it is in the same folder as ours, an
error about a name that only the other has mentions it, and `accel doctor` lists it.
"""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Final

from accelerate.names import OWN_MODULES, VERSION

if TYPE_CHECKING:
    from accel_cli.doctor.examine import Finding

__all__ = ("clash", "examination", "foreign_files", "other_versions", "warn_of_clash")

_FOLDER: Final = Path(__file__).parent
_SHOWN: Final = 3


def foreign_files(folder: Path) -> list[str]:
    """Python files in the folder of `accelerate` that are not part of this package, relative to it."""
    ours = {name.rpartition(".")[2] for name in OWN_MODULES} | {"__init__"}
    paths = (path.relative_to(folder).with_suffix("") for path in folder.rglob("*.py"))
    strange = (path for path in paths if path.parts[0] not in ours and all(map(str.isidentifier, path.parts)))
    return sorted(f"{path.as_posix()}.py" for path in strange)


def other_versions(folders: Sequence[str]) -> list[str]:
    """Versions of `accelerate`, other than this one, whose metadata are in folders of the path."""
    versions = set()
    for folder in folders:
        try:
            names = os.listdir(folder or ".")
        except OSError:
            continue
        parts = (name.removesuffix(".dist-info").split("-") for name in names if name.endswith(".dist-info"))
        versions |= {part[1] for part in parts if part[0] == "accelerate" and len(part) == 2}
    return sorted(versions - {VERSION})


@cache
def clash(folder: Path = _FOLDER) -> tuple[str, str] | None:
    """Cause and remedy if the folder, or the path of this process, contains another `accelerate`."""
    files = foreign_files(folder)
    more = f" and {len(files) - _SHOWN} more" if len(files) > _SHOWN else ""
    if files:
        cause = f"The folder {folder} also contains files of another accelerate: {', '.join(files[:_SHOWN])}{more}."
    elif versions := other_versions(sys.path):
        cause = f"accelerate {', '.join(versions)} is also installed; {folder} is the one that is imported."
    else:
        return None
    return (
        cause,
        "Run `pip uninstall -y accelerate` until nothing is left, delete that folder, then install the wheel of "
        f"accelerate {VERSION} that the accel repository builds, or the original.",
    )


def warn_of_clash() -> None:
    """Warns at the import, if another `accelerate` was installed into the same folder.

    It looks for two paths, because an import lists no folder.
    """
    original = VERSION.partition("+")[0]
    signs = (_FOLDER / "accelerator.py", _FOLDER.parent / f"accelerate-{original}.dist-info")
    if any(map(Path.exists, signs)) and (reason := clash()) is not None:
        warnings.warn(" ".join(reason), UserWarning, stacklevel=3)


def examination(request: object = None, folder: Path = _FOLDER) -> Iterator[Finding]:
    """The line of `accel doctor` about the folder."""
    from accel_cli.doctor.examine import OK, WARNING, Finding

    problem = clash(folder)
    yield Finding("accelerate", WARNING, *problem) if problem else Finding("accelerate", OK, f"{VERSION} at {folder}")
