"""Names that the package offers: they exist, and checkers see the same list."""

from __future__ import annotations

import ast
import importlib
from pathlib import Path

import pytest

PACKAGES = ("accel_data",)


@pytest.mark.parametrize("package", PACKAGES)
def test_every_public_name_exists_and_checkers_see_the_same_list(package: str) -> None:
    module = importlib.import_module(package)
    tree = ast.parse(Path(str(module.__file__)).read_text(encoding="utf-8"))
    seen = {
        (node.module, alias.name)
        for block in tree.body
        if isinstance(block, ast.If)
        for node in ast.walk(block)
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    assert {name for _, name in seen} == set(module.__all__)
    for owner, name in seen:
        assert getattr(module, name) is getattr(importlib.import_module(str(owner)), name)
    with pytest.raises(AttributeError, match="no_such_name"):
        _ = module.no_such_name
