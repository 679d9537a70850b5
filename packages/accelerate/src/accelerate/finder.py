"""How Python finds the old modules: an entry of `accelerate.__path__` for the table of names instead of a folder.

The same callers use it as the finder of a folder: `import`, `importlib.util.find_spec`, `importlib.reload`,
`pkgutil.walk_packages` and `python -m`.
"""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING, Any, Final

from accel_state.errors import Missing
from accelerate.address import serve, why_not
from accelerate.names import NAMES, OWN_MODULES, PACKAGES, owners, stub_path

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from importlib.machinery import ModuleSpec
    from types import CodeType, ModuleType

__all__ = ("Finder", "NamesLoader", "Refusal", "install")

_FOLDER: Final = os.path.dirname(os.path.dirname(__file__))
_ENTRY: Final = "<names of {}>"
_PACKAGES: Final = {_ENTRY.format(package): package for package in PACKAGES}

# A process that is spawned by one of these commands imports the command's module again, under another name.
_COMMAND: Final = """\
if __name__ == "__main__":
    from {owner.module} import {owner.name}
    raise SystemExit({owner.name}())
"""


def install(folders: Iterable[str]) -> list[str]:
    """Register the finder, and return the search path for modules of `accelerate`.

    Args:
        folders: the search path so far. Files of another `accelerate` there do not hide this project's old modules.
    """
    if not any(getattr(hook, "__module__", None) == __name__ for hook in sys.path_hooks):
        sys.path_hooks.append(_hook)
    entry = _ENTRY.format("accelerate")
    return [entry, *(folder for folder in folders if folder != entry)]


def _hook(entry: str) -> Finder:
    if entry not in _PACKAGES:
        raise ImportError(f"{entry} is not a path entry of this library")
    return Finder(_PACKAGES[entry])


class Finder:
    """Finds the modules directly below an old package, as `importlib.abc.PathEntryFinder` describes it.

    Args:
        package: its address.
    """

    def __init__(self, package: str) -> None:
        self.package = package

    def find_spec(self, name: str, target: ModuleType | None = None) -> ModuleSpec | None:
        """The spec of a module; importing an unavailable module raises an error with the reason.

        Python also asks for a module when a package has no attribute that `from package import name` wants.
        """
        from importlib.machinery import ModuleSpec

        if name in NAMES:
            loader: Any = NamesLoader()
            spec = ModuleSpec(name, loader, origin=os.path.join(_FOLDER, stub_path(name)))
            spec.has_location = True
            if name in PACKAGES:
                spec.submodule_search_locations = [_ENTRY.format(name)]
            return spec
        reason = None if name in OWN_MODULES else why_not(name)
        loader = Refusal(reason) if reason else None
        return loader and ModuleSpec(name, loader)

    def iter_modules(self, prefix: str = "") -> Iterator[tuple[str, bool]]:
        """Name of each module, and whether it is a package."""
        for address in NAMES:
            package, _, name = address.rpartition(".")
            if package == self.package:
                yield prefix + name, address in PACKAGES


class NamesLoader:
    """Creates a module with its names of the table."""

    def create_module(self, spec: ModuleSpec) -> None:
        """Return None, so that Python creates the module."""

    def exec_module(self, module: ModuleType) -> None:
        """Make the module serve its names."""
        serve(module.__name__)

    def get_code(self, name: str) -> CodeType:
        """The code that `python -m` runs."""
        owner = owners(name).get("main")
        return compile(_COMMAND.format(owner=owner) if owner else "", os.path.join(_FOLDER, stub_path(name)), "exec")

    def get_source(self, name: str) -> str:
        """The stub, which `inspect` shows if no stub file was written."""
        from accelerate.names.stubs import stub

        return stub(name)


class Refusal:
    """Explains why a module, or a name imported from a package, is unavailable.

    Args:
        reason: the three parts of the message.
    """

    def __init__(self, reason: tuple[str, str, str]) -> None:
        self.reason = reason

    def create_module(self, spec: ModuleSpec) -> Any:
        """Raise the error with the reason.
        Raises:
            Missing: always.
        """
        raise Missing(*self.reason)

    def exec_module(self, module: ModuleType) -> None:
        """Not called: `create_module` has raised the error."""
