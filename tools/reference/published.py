"""What the packages publish: the names in `__all__`, each with the place where it is defined and one where it is shown.

Read from the sources by griffe, so nothing is imported. A name that a package shows at its top is documented under that
address; every other name under the address of its module.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import griffe

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
    "accel_torch",
    "accelerate",
)
"""The packages from the lowest upward."""

_OWN = ("accelerate.address.", "accelerate.legacy.")


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
    loader.resolve_aliases(implicit=False, external=False)
    return {name: module for name, module in read.items() if isinstance(module, griffe.Module)}


def modules_of(module: griffe.Module) -> Iterator[griffe.Module]:
    """A module and all below it, in alphabetical order."""
    yield module
    for _, below in sorted(module.modules.items()):
        if isinstance(below, griffe.Module):
            yield from modules_of(below)


def entries(package: griffe.Module) -> list[Entry]:
    """Every published name of a package, once, in the order of the modules they are defined in.

    Of the drop-in, whose other modules only repeat names, those that it defines for the scripts it is for.
    """
    top = {item.path: f"{package.path}.{name}" for name, item in _named(package)}
    modules = list(modules_of(package))
    addresses: dict[str, list[str]] = {}
    items: dict[str, griffe.Object] = {}
    for module in modules:
        for name, item in _named(module):
            if package.path == "accelerate" and not item.path.startswith(_OWN):
                continue
            addresses.setdefault(item.path, []).append(f"{module.path}.{name}")
            items[item.path] = item
    order = {module.path: place for place, module in enumerate(modules)}
    found = []
    for home, item in items.items():
        address = top.get(home, home)
        found.append(Entry(address, home, address.rpartition(".")[0], item, tuple(addresses[home])))
    return sorted(found, key=lambda entry: order[entry.home.rpartition(".")[0]])


def _named(module: griffe.Module) -> Iterator[tuple[str, griffe.Object]]:
    """The names in `__all__` that are defined in this package, and what they stand for."""
    for name in sorted({str(name) for name in module.exports or ()}):
        member = module.members.get(name)
        if isinstance(member, griffe.Alias):
            inside = member.target_path.startswith(f"{module.package.path}.")
            member = member.final_target if inside and member.resolved else None
        if isinstance(member, griffe.Object) and not isinstance(member, griffe.Module):
            yield name, member
