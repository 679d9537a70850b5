"""Check that each package declares what it imports, and imports what it declares.

    python tools/check_dependencies.py [packages folder]

An import that is not declared works here by accident, because another package brings the library along; a requirement
that nothing imports is a useless download. A package that needs another one without importing it (a metapackage)
declares it in its pyproject.toml, with the reason:

    [tool.accel.required-without-import]
    accel-cli = "brings the command"

A package that imports a library which none of its extras installs, because the user has it or no index offers it,
declares that too:

    [tool.accel.imported-if-present]
    transformers = "its users bring it"
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from importlib.metadata import packages_distributions
from pathlib import Path
from typing import Any

import tomli
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[1]


@dataclass
class Package:
    """What one package declares, and what its files import."""

    name: str
    required: set[str]
    optional: set[str]
    excused: set[str]
    imported: dict[str, list[str]] = field(default_factory=dict)

    def problems(self) -> Iterator[str]:
        """One line for each disagreement."""
        declared = self.required | self.optional
        for name in sorted(set(self.imported) - declared - {self.name}):
            yield f"{self.name} imports {name} without declaring it ({', '.join(self.imported[name][:3])})"
        for name in sorted(self.required - set(self.imported) - self.excused):
            yield f"{self.name} requires {name} but never imports it"
        for name in sorted(self.excused & set(self.imported)):
            yield f"{self.name} imports {name}, so [tool.accel.required-without-import] must not list it"
        for name in sorted(self.excused - self.required):
            yield f"{self.name} does not require {name}, so [tool.accel.required-without-import] must not list it"


def read_package(folder: Path, owners: dict[str, str]) -> Package:
    """Reads a package's pyproject.toml and all its source files.

    Args:
        folder: contains pyproject.toml and src/.
        owners: which distribution an import name belongs to.
    """
    project: dict[str, Any] = tomli.loads((folder / "pyproject.toml").read_text(encoding="utf-8"))
    extras: dict[str, list[str]] = project["project"].get("optional-dependencies", {})
    own: dict[str, Any] = project.get("tool", {}).get("accel", {})
    package = Package(
        name=project["project"]["name"],
        required=names(project["project"].get("dependencies", [])),
        optional=names(line for lines in extras.values() for line in lines) | set(own.get("imported-if-present", {})),
        excused=set(own.get("required-without-import", {})),
    )
    for place, module in [*entry_points(project["project"]), *imports_of(folder)]:
        if module not in sys.stdlib_module_names:
            name = owners.get(module, canonicalize_name(module))
            package.imported.setdefault(name, []).append(place)
    return package


def entry_points(project: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """The scripts and entry points of a package, and the top-level name that each leads to."""
    groups: dict[str, dict[str, str]] = {"scripts": project.get("scripts", {}), **project.get("entry-points", {})}
    for group, points in groups.items():
        for name, target in points.items():
            yield f"{group}: {name}", target.partition(":")[0].partition(".")[0]


def imports_of(folder: Path) -> Iterator[tuple[str, str]]:
    """The source files of a package, and the top-level names that each imports."""
    paths = sorted((folder / "src").rglob("*.py"))
    # A lazy package imports at run time what its stub lists; other stubs are for type checkers only.
    lazy = [path for path in paths if "lazy_stub(" in path.read_text(encoding="utf-8")]
    for path in (*paths, *(stub for path in lazy if (stub := path.with_suffix(".pyi")).is_file())):
        for module in imported_modules(ast.parse(path.read_text(encoding="utf-8"), str(path))):
            yield str(path.relative_to(folder)), module


def names(requirements: Iterable[str]) -> set[str]:
    """The names in a list of requirements."""
    return {canonicalize_name(Requirement(line).name) for line in requirements}


def imported_modules(node: ast.AST) -> Iterator[str]:
    """Top-level names that a file imports absolutely, wherever in the file."""
    if isinstance(node, ast.Import):
        yield from (alias.name.partition(".")[0] for alias in node.names)
    elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
        yield node.module.partition(".")[0]
    yield from imported_by_name(node)
    for child in executed_parts(node):
        yield from imported_modules(child)


def executed_parts(node: ast.AST) -> Iterable[ast.AST]:
    """The parts of a statement, without those that only type checkers read."""
    if isinstance(node, ast.If) and ast.unparse(node.test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING"):
        return node.orelse
    return ast.iter_child_nodes(node)


def imported_by_name(node: ast.AST) -> Iterator[str]:
    """Top-level names in the texts that a call of `import_module` is given."""
    if not (isinstance(node, ast.Call) and ast.unparse(node.func).endswith("import_module")):
        return
    for part in ast.walk(node):
        if isinstance(part, ast.Constant) and isinstance(part.value, str):
            name, dot, _ = part.value.partition(".")
            if dot and name.isidentifier():
                yield name


def import_owners(packages: Path) -> dict[str, str]:
    """Which distribution owns each top-level import name: what is installed, and the packages themselves."""
    owners: dict[str, str] = {}
    owners.update({module: canonicalize_name(found[0]) for module, found in packages_distributions().items()})
    owners.update({path.name: path.parents[1].name for path in packages.glob("*/src/*") if path.is_dir()})
    return owners


def main(arguments: list[str]) -> int:
    """Prints every disagreement and returns the exit code."""
    packages = Path(arguments[0]) if arguments else ROOT / "packages"
    owners = import_owners(packages)
    folders = sorted(path.parent for path in packages.glob("*/pyproject.toml"))
    problems = [line for folder in folders for line in read_package(folder, owners).problems()]
    for line in problems:
        print(f"dependencies: {line}", file=sys.stderr)
    if not problems:
        print(f"dependencies: {len(folders)} packages declare exactly what they import")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
