"""Finds the script, module or program that a launch runs, and checks that it exists before any process starts."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

from accel_cli.launch.interface import Script
from accel_state.errors import Conflict, SettingError

if TYPE_CHECKING:
    from argparse import Namespace
    from importlib.machinery import ModuleSpec

__all__ = ("find_script", "how_to_run", "script_of")


def script_of(arguments: Namespace) -> Script:
    """The script, module or program that a command line of `accel launch` selects.

    Raises:
        SettingError: it does not exist.
    """
    words = arguments.script[arguments.script[:1] == ["--"] :]
    target, *script_arguments = words or [""]
    return find_script(target, script_arguments, arguments.module, arguments.no_python)


def find_script(target: str, arguments: Sequence[str], module: bool, no_python: bool) -> Script:
    """Check and describe the script, module or program that every process will run.

    Args:
        target: path of a script, name of a module with `module`, or a program with `no_python`.
        arguments: its arguments.

    Raises:
        SettingError: it does not exist.
    """
    how = how_to_run(module, no_python)
    _CHECKS[how](target)
    return Script(how, target, tuple(arguments))


def how_to_run(module: bool, no_python: bool) -> str:
    """The value of `Script.how` for a command line.

    Raises:
        Conflict: both --module and --no_python are set.
    """
    if module and no_python:
        raise Conflict(
            "Cannot combine --module and --no_python.",
            "Python runs modules, and --no_python runs a program without Python.",
            "Remove one of them.",
        )
    return "module" if module else "program" if no_python else "script"


def _check_script(target: str) -> None:
    asked = f"Cannot start the script {target}."
    if not target:
        raise SettingError("Cannot launch.", "The script is missing.", "Run: accel launch [options] script.py")
    if not os.path.exists(target):
        where = "" if os.path.isabs(target) else f" in {os.getcwd()}"
        remedy = _as_module(target) or "Check the path."
        raise SettingError(asked, f"There is no such file{where}.", remedy)
    if os.path.isdir(target) and not os.path.exists(os.path.join(target, "__main__.py")):
        raise SettingError(asked, "It is a folder without the file __main__.py.", "Give the path of the file to run.")
    if not os.access(target, os.R_OK):
        raise SettingError(asked, "This user is not allowed to read it.", "Change its permissions.")


def _as_module(target: str) -> str | None:
    """The remedy for a name that looks like a module name."""
    if os.sep in target or target.endswith(".py") or not all(part.isidentifier() for part in target.split(".")):
        return None
    return "Check the path, or add -m to run a module."


def _check_module(target: str) -> None:
    from importlib.util import find_spec

    asked = f"Cannot start the module {target}."
    if not all(part.isidentifier() for part in target.split(".")):
        near = target.removesuffix(".py").replace(os.sep, ".")
        raise SettingError(asked, "This is not a module name.", f"Write it as {near}, or remove -m to run a path.")
    if target.endswith(".py") and os.path.isfile(target):
        raise SettingError(asked, f"{target} is a file.", f"Remove -m, or write {target.removesuffix('.py')}.")
    first = target.partition(".")[0]
    sys.path.insert(0, os.getcwd())
    try:
        spec = find_spec(first)
    except ValueError:
        # The module is imported, but has no information about its source.
        return
    finally:
        del sys.path[0]
    missing = first if spec is None else _missing_part(spec, target)
    if missing.endswith(".__main__"):
        raise SettingError(asked, "It is a package without a __main__ module.", "Give the name of the module to run.")
    if missing:
        raise SettingError(
            asked,
            f"There is no module {missing!r}.",
            "Install it, or launch from the folder that contains it.",
        )


def _missing_part(spec: ModuleSpec, target: str) -> str:
    """The missing part of a dotted name, or the missing `__main__` module; found without importing the package."""
    from importlib.machinery import PathFinder

    names = f"{target}.__main__".split(".")
    for count in range(2, len(names) + 1):
        if spec.submodule_search_locations is None:
            # A module has no submodules, and needs none to run.
            return "" if count == len(names) else ".".join(names[:count])
        if _extends_itself(spec):
            return ""
        found = PathFinder.find_spec(".".join(names[:count]), spec.submodule_search_locations)
        if found is None:
            return ".".join(names[:count])
        spec = found
    return ""


def _extends_itself(spec: ModuleSpec) -> bool:
    """Whether a package may find its submodules in other folders."""
    if spec.origin is None or not spec.origin.endswith(".py"):
        return spec.origin is not None
    try:
        with open(spec.origin, "rb") as file:
            return b"__path__" in file.read()
    except OSError:
        return True


def _check_program(target: str) -> None:
    import shutil

    if shutil.which(target) is None:
        raise SettingError(
            f"Cannot start the program {target}.",
            "There is no such executable file.",
            "Check the path and its permissions.",
        )


_CHECKS: Final = {"script": _check_script, "module": _check_module, "program": _check_program}
