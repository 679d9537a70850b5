"""Finds the script, module or program that a launch runs, and checks that it exists before any process starts."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING, Final

from accel_cli.launch.interface import Script
from accel_state.errors import Conflict, SettingError
from accel_state.settings.schema import closest

if TYPE_CHECKING:
    from argparse import Namespace

__all__ = ("check_script", "script_of")


def script_of(arguments: Namespace) -> Script:
    """The script, module or program that a command line of `accel launch` selects; it may not exist.

    Raises:
        Conflict: both --module and --no_python are set.
    """
    if arguments.module and arguments.no_python:
        raise Conflict(
            "Cannot combine --module and --no_python.",
            "Python runs modules, and --no_python runs a program without Python.",
            "Remove one of them.",
        )
    how = "module" if arguments.module else "program" if arguments.no_python else "script"
    target, *rest = arguments.script[arguments.script[:1] == ["--"] :] or [""]
    return Script(how, target, tuple(rest))


def check_script(script: Script) -> None:
    """Check that the script, module or program exists.

    Raises:
        SettingError: it does not.
    """
    _CHECKS[script.how](script.target)


def _check_script(target: str) -> None:
    failure = f"Cannot start the script {target}."
    if not target:
        raise SettingError("Cannot launch.", "The script is missing.", "Run: accel launch [options] script.py")
    if not os.path.exists(target):
        where = "" if os.path.isabs(target) else f" in {os.getcwd()}"
        named = os.sep not in target and not target.endswith(".py") and _is_module_name(target)
        near = _near(target)
        remedy = "Check the path, or add -m to run a module." if named else "Check the path."
        remedy = f"Did you mean {near}?" if near else remedy
        raise SettingError(failure, f"There is no such file{where}.", remedy)
    if os.path.isdir(target) and not os.path.exists(os.path.join(target, "__main__.py")):
        raise SettingError(failure, "It is a folder without the file __main__.py.", "Give the path of the file to run.")
    if not os.access(target, os.R_OK):
        raise SettingError(failure, "This user is not allowed to read it.", "Change its permissions.")


def _near(target: str) -> str | None:
    """The file beside it with the most similar name."""
    folder, name = os.path.split(target)
    try:
        near = closest(name, os.listdir(folder or "."))
    except OSError:
        return None
    return None if near is None else os.path.join(folder, near)


def _is_module_name(target: str) -> bool:
    return all(part.isidentifier() for part in target.split("."))


def _check_module(target: str) -> None:
    """Check the first part of a dotted name: to find the others, Python would import the package."""
    from importlib.util import find_spec

    failure = f"Cannot start the module {target}."
    if not _is_module_name(target):
        near = target.removesuffix(".py").replace(os.sep, ".")
        raise SettingError(failure, "This is not a module name.", f"Write it as {near}, or remove -m to run a path.")
    if target.endswith(".py") and os.path.isfile(target):
        raise SettingError(failure, f"{target} is a file.", f"Remove -m, or write {target.removesuffix('.py')}.")
    first = target.partition(".")[0]
    sys.path.insert(0, os.getcwd())
    try:
        exists = find_spec(first) is not None
    except ValueError:
        # The module is imported, but has no information about its source.
        exists = True
    finally:
        del sys.path[0]
    if not exists:
        remedy = "Install it, or launch from the folder that contains it."
        raise SettingError(failure, f"There is no module {first!r}.", remedy)


def _check_program(target: str) -> None:
    import shutil

    if shutil.which(target) is None:
        raise SettingError(
            f"Cannot start the program {target}.",
            "There is no such executable file.",
            "Check the path and its permissions.",
        )


_CHECKS: Final = {"script": _check_script, "module": _check_module, "program": _check_program}
