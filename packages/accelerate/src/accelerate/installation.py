"""Finds the files of another library named `accelerate` in this package's folder.

If the original was not uninstalled first, its files may remain in the folder. They cannot be imported; an error about
one of their names mentions them, and `accel doctor` lists them.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Final

from accelerate.names import OWN_MODULES, VERSION

if TYPE_CHECKING:
    from accel_cli.doctor.examine import Finding

__all__ = ("clash", "examination", "foreign_files")

_FOLDER: Final = Path(__file__).parent
_SHOWN: Final = 3


def foreign_files(folder: Path) -> list[str]:
    """Python files in the folder of `accelerate` that are not part of this package, relative to it."""
    ours = {name.rpartition(".")[2] for name in OWN_MODULES} | {"__init__"}
    paths = (path.relative_to(folder).with_suffix("") for path in folder.rglob("*.py"))
    strange = (path for path in paths if path.parts[0] not in ours and all(map(str.isidentifier, path.parts)))
    return sorted(f"{path.as_posix()}.py" for path in strange)


@cache
def clash(folder: Path = _FOLDER) -> tuple[str, str] | None:
    """Cause and remedy if the folder contains files of another `accelerate`."""
    found = foreign_files(folder)
    if not found:
        return None
    more = f" and {len(found) - _SHOWN} more" if len(found) > _SHOWN else ""
    return (
        f"The folder {folder} also contains files of another accelerate: {', '.join(found[:_SHOWN])}{more}.",
        "Run `pip uninstall -y accelerate` until nothing is left, delete that folder, then install the wheel of "
        f"accelerate {VERSION} that the accel repository builds.",
    )


def examination(request: object = None, folder: Path = _FOLDER) -> Iterator[Finding]:
    """The line of `accel doctor` about the folder."""
    from accel_cli.doctor.examine import OK, WARNING, Finding

    found = clash(folder)
    yield Finding("accelerate", WARNING, *found) if found else Finding("accelerate", OK, f"{VERSION} at {folder}")
