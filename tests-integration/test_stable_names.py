"""Extensions import what the page of stable names lists, and the page lists every group of entry points."""

from __future__ import annotations

import ast
import enum
import importlib
import inspect
import re
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest

from accel_plugins.commands.new_backend import COMMAND
from accel_plugins.manifest import PROTOCOL

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "reference" / "stable-names.md"
GUIDES = sorted((ROOT / "docs" / "how-to").glob("write-*.md"))
EXAMPLES = ("accel-backend-example", "accel-backend-pipeline")

ROWS = [
    [re.findall(r"`([^`]+)`", cell) for cell in line.strip("|").split("|")]
    for line in PAGE.read_text(encoding="utf-8").splitlines()
    if line.startswith("| `accel")
]
STABLE = {row[0][0]: set(row[1]) for row in ROWS if len(row) == 2}
GROUPS = {
    line.split("|")[1].strip(" `"): int(line.split("|")[2])
    for line in PAGE.read_text(encoding="utf-8").splitlines()
    if line.startswith("| `accel.")
}


def imports_of(source: str) -> Iterator[tuple[str, str]]:
    """(module, name) of each import from a package of this project."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from ((alias.name, "") for alias in node.names if alias.name.startswith("accel_"))
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("accel_"):
            yield from ((str(node.module), alias.name) for alias in node.names)


def foreign(source: str, own: str) -> list[str]:
    """The imports that the page does not list; `own` is the start of the author's own modules."""
    return [
        f"{module}.{name}"
        for module, name in imports_of(source)
        if not module.startswith(own) and name not in STABLE.get(module, set())
    ]


@pytest.mark.parametrize("module", STABLE)
def test_a_listed_module_publishes_the_listed_names(module: str) -> None:
    published = importlib.import_module(module)
    assert set(published.__all__) >= STABLE[module], "griffe compares what a module publishes"
    assert all(hasattr(published, name) for name in STABLE[module])


def documented(body: list[ast.stmt]) -> dict[str, bool]:
    """Whether a text follows each name that is assigned in a module or a class."""
    found = {}
    for statement, following in zip(body, [*body[1:], ast.Pass()], strict=True):
        targets = statement.targets if isinstance(statement, ast.Assign) else [getattr(statement, "target", None)]
        text = isinstance(following, ast.Expr) and isinstance(following.value, ast.Constant)
        found.update({one.id: text for one in targets if isinstance(one, ast.Name)})
    return found


@pytest.mark.parametrize("module", STABLE)
def test_members_of_enumerations_and_constants_are_documented(module: str) -> None:
    """The site shows a text below a member or a constant."""
    for name in STABLE[module]:
        item = getattr(importlib.import_module(module), name)
        if isinstance(item, type) and issubclass(item, enum.Enum):
            (declared,) = ast.parse(textwrap.dedent(inspect.getsource(item))).body
            assert isinstance(declared, ast.ClassDef)
            assert [member for member, text in documented(declared.body).items() if not text] == []
    if module == "accel_state.settings.schema":
        source = ast.parse(inspect.getsource(importlib.import_module(module)))
        texts = documented(source.body)
        assert [name for name in STABLE[module] if not texts.get(name, True)] == []


@pytest.mark.parametrize("package", EXAMPLES)
def test_example_packages_import_nothing_else(package: str) -> None:
    own = package.replace("-", "_")
    sources = sorted((ROOT / "tests-integration" / package / "src").rglob("*.py"))
    assert sources
    assert [(path.name, found) for path in sources if (found := foreign(path.read_text(encoding="utf-8"), own))] == []


def test_a_new_backend_imports_nothing_else(tmp_path: Path) -> None:
    from argparse import ArgumentParser

    parser = ArgumentParser()
    COMMAND.add_arguments(parser)
    assert COMMAND.run(parser.parse_args(["fancy", "--into", str(tmp_path)])) == 0
    sources = sorted(tmp_path.rglob("*.py"))
    assert [
        (path.name, found)
        for path in sources
        if (found := foreign(path.read_text(encoding="utf-8"), "accel_backend_fancy"))
    ] == []


@pytest.mark.parametrize("guide", GUIDES, ids=lambda path: str(path.stem))
def test_guides_import_nothing_else(guide: Path) -> None:
    blocks = re.findall(r"```python\n(.*?)```", guide.read_text(encoding="utf-8"), re.DOTALL)
    assert blocks
    own = ("accel_abacus", "accel_csv", "accel_batch", "accel_memory_store")
    found = [one for block in blocks for one in foreign(block, "accel_backend_fancy") if not one.startswith(own)]
    assert found == []


def test_every_group_of_entry_points_is_listed_with_its_version() -> None:
    declared = {
        name
        for path in (ROOT / "packages").glob("*/src/**/*.py")
        for name in re.findall(r'PluginGroup\(\s*"(accel\.[a-z_]+)"', path.read_text(encoding="utf-8"))
    }
    assert set(GROUPS) == declared
    assert GROUPS.pop("accel.backends") == PROTOCOL
    assert set(GROUPS.values()) == {1}
