"""Checks that a package with lazily imported names lists the same names everywhere.

For example:

    def test_public_names():
        check_public_names("my_package")
"""

from __future__ import annotations

import ast
import importlib
from pathlib import Path
from types import ModuleType

__all__ = ("check_public_names",)


def check_public_names(package: str) -> None:
    """Assert that `__all__`, `dir`, attributes and type checkers agree on the names of a package.

    Each name of `__all__` is listed once, is in `dir`, and is imported in the stub of the package, which imports no
    other name. The attribute is the object in the module that the stub names. A name that is not listed is not an
    attribute.

    Args:
        package: name of the package, such as "accel_ops"; it is imported.

    Raises:
        AssertionError: they differ.
    """
    module = importlib.import_module(package)
    owners = _imported_for_type_checkers(module)
    assert len(set(module.__all__)) == len(module.__all__), f"{package}.__all__ lists a name twice"
    assert set(owners) == set(module.__all__), f"type checkers and {package}.__all__ differ"
    assert set(owners) <= set(dir(module)), f"dir({package}) lacks names"
    for name, (owner, original) in owners.items():
        held = getattr(importlib.import_module(owner), original)
        assert held is not None, f"{owner}.{original} is None"
        assert getattr(module, name) is held, f"{package}.{name} is not {owner}.{original}"
    message = ""
    try:
        module.no_such_name  # noqa: B018
    except AttributeError as error:
        message = str(error)
    assert "no_such_name" in message, f"{package}.no_such_name raises no AttributeError that names it"


def _imported_for_type_checkers(module: ModuleType) -> dict[str, tuple[str, str]]:
    """The names that type checkers see, each with its module and its name there."""
    stub = ast.parse(Path(str(module.__file__)).with_suffix(".pyi").read_text(encoding="utf-8"))
    origins = {}
    for statement in stub.body:
        if isinstance(statement, ast.ImportFrom) and statement.module is not None:
            for alias in statement.names:
                names = importlib.import_module(statement.module).__all__ if alias.name == "*" else [alias.name]
                origins.update({alias.asname or name: (statement.module, name) for name in names})
    return origins
