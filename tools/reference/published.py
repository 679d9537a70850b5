"""What the packages publish: the names in `__all__`, each with the place where it is defined and one where it is shown.

Read from the sources by griffe, so nothing is imported. A name that a package shows at its top is documented under that
address; every other name under the address of its module.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

import griffe

from accelerate.names import NAMES, owners

__all__ = ("LIBRARY", "ROOT", "Entry", "Library", "entries", "modules_of", "read_library")

ROOT = Path(__file__).resolve().parents[2]

LIBRARY = (
    "accel_state",
    "accel_ops",
    "accel_data",
    "accel_bigmodel",
    "accel_tracking",
    "accel_plugins",
    "accel_cli",
    "accel_ray",
    "accel_torchft",
    "accel_torch",
    "accelerate",
)
"""The packages from the lowest upward."""

_OWN = ("accelerate.address.", "accelerate.legacy.")
"""What the drop-in defines itself; its other names are those of the packages below, at old addresses."""


class Entry(NamedTuple):
    """One published name.

    Args:
        address: where users import it from.
        home: where it is defined.
        module: the module of its address.
        item: what griffe read.
        others: further addresses in the same package that lead to it.
    """

    address: str
    home: str
    module: str
    item: griffe.Object
    others: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """The last part of the address."""
        return self.address.rpartition(".")[2]

    @property
    def at_the_top(self) -> bool:
        """Whether the package itself shows it."""
        return "." not in self.module


Library = dict[str, griffe.Module]


def read_library(root: Path = ROOT, packages: tuple[str, ...] = LIBRARY) -> Library:
    """Every package by its name, lowest first."""
    loader = griffe.GriffeLoader(search_paths=sorted(root.glob("packages/*/src")), docstring_parser="google")
    read = {name: loader.load(name) for name in packages}
    for package in read.values():
        for module in modules_of(package) if isinstance(package, griffe.Module) else ():
            _read_stub(module, read)
    loader.resolve_aliases(implicit=False, external=False)
    return {name: module for name, module in read.items() if isinstance(module, griffe.Module)}


def _read_stub(module: griffe.Module, library: Mapping[str, griffe.Object | griffe.Alias]) -> None:
    """Give a lazy package the `__all__` that it takes from its stub."""
    stub = module.filepath.with_suffix(".pyi") if isinstance(module.filepath, Path) else None
    if stub is None or "lazy_stub" not in module.imports or not stub.is_file():
        return
    names: list[str] = []
    for line in ast.parse(stub.read_text(encoding="utf-8")).body:
        if isinstance(line, ast.ImportFrom):
            names += [alias.name for alias in line.names if alias.name != "*"]
            if line.names[0].name == "*":
                other = library[str(line.module)]
                names += map(str, other.exports or () if isinstance(other, griffe.Module) else ())
    module.exports = list(names)


def modules_of(module: griffe.Module) -> Iterator[griffe.Module]:
    """A module and all below it, in alphabetical order."""
    yield module
    for _, below in sorted(module.modules.items()):
        if isinstance(below, griffe.Module):
            yield from modules_of(below)


def entries(package: griffe.Module) -> list[Entry]:
    """Every published name of a package, once, in the order of the modules they are defined in."""
    top = {item.path: f"{package.path}.{name}" for name, item in _named(package)}
    modules = list(modules_of(package))
    if package.path == "accelerate":
        return _of_the_drop_in(modules)
    addresses: dict[str, list[str]] = {}
    items: dict[str, griffe.Object] = {}
    for module in modules:
        for name, item in _named(module):
            addresses.setdefault(item.path, []).append(f"{module.path}.{name}")
            items[item.path] = item
    order = {module.path: place for place, module in enumerate(modules)}
    found = []
    for home, item in items.items():
        address = top.get(home, home)
        found.append(Entry(address, home, address.rpartition(".")[0], item, tuple(addresses[home])))
    return sorted(found, key=lambda entry: order[entry.home.rpartition(".")[0]])


def _of_the_drop_in(modules: list[griffe.Module]) -> list[Entry]:
    """What it defines for the scripts it is for; the table of names has the old addresses."""
    shown: dict[str, list[str]] = {}
    for address in NAMES:
        for name, owner in owners(address).items():
            shown.setdefault(f"{owner.module}.{owner.name}", []).append(f"{address}.{name}")
    found = []
    for module in modules:
        for _, item in _named(module):
            if item.path.startswith(_OWN) and item.module.path == module.path:
                others = shown.get(item.path, ())
                address = next((other for other in others if other.count(".") == 1), item.path)
                found.append(Entry(address, item.path, address.rpartition(".")[0], item, tuple(others)))
    return found


def _named(module: griffe.Module) -> Iterator[tuple[str, griffe.Object]]:
    """The names in `__all__` that are defined in this package, and what they stand for."""
    for name in sorted({str(name) for name in module.exports or ()}):
        member = module.members.get(name)
        if isinstance(member, griffe.Alias):
            inside = member.target_path.startswith(f"{module.package.path}.")
            member = member.final_target if inside and member.resolved else None
        if isinstance(member, griffe.Object) and not isinstance(member, griffe.Module):
            yield name, member
