"""The package is made of what other packages publish, as one of somebody else would be."""

from __future__ import annotations

import ast
import importlib
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("torchft")

import accel_torchft

MODULES = sorted(Path(accel_torchft.__file__).parent.glob("*.py"))

# torchft publishes no way to begin a round of local steps anew, nor the weights with which one began.
PRIVATE_OF_TORCHFT = {"_local_step", "_fragments"}

# What Python publishes under a private name, so that it collides with no field of a named tuple.
OF_NAMED_TUPLES = {"_replace"}


def imported(module: Path) -> Iterator[tuple[str, str]]:
    """Module and name of everything that a module imports from another package of this project."""
    for node in ast.walk(ast.parse(module.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("accel_"):
            yield from (
                (node.module, alias.name) for alias in node.names if not node.module.startswith("accel_torchft")
            )
        elif isinstance(node, ast.Import):
            assert not any(alias.name.startswith("accel_") for alias in node.names), "import names, not modules"


@pytest.mark.parametrize("module", MODULES, ids=lambda path: path.stem)
def test_every_imported_name_is_published(module: Path) -> None:
    for source, name in imported(module):
        assert not any(part.startswith("_") for part in [*source.split("."), name]), (source, name)
        assert name in importlib.import_module(source).__all__, (source, name)


def test_the_rule_looks_at_something() -> None:
    assert ("accel_plugins", "Strategy") in imported(next(path for path in MODULES if path.stem == "strategy"))


@pytest.mark.parametrize("module", MODULES, ids=lambda path: path.stem)
def test_private_attributes_are_those_of_the_object_itself(module: Path) -> None:
    for node in ast.walk(ast.parse(module.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Attribute) and node.attr.startswith("_") and not node.attr.startswith("__"):
            owner = node.value.func if isinstance(node.value, ast.Call) else node.value
            own = isinstance(owner, ast.Name) and owner.id in ("self", "super")
            assert own or node.attr in PRIVATE_OF_TORCHFT | OF_NAMED_TUPLES, f"{module.name}:{node.lineno}: {node.attr}"
