"""What a package must require of a sibling: the versions that have every name it uses.

Seen are imports, what is asked of an imported module or class by a dot, parameters that a call names, and texts that
name an address (`"accel_ops.rng:set_seed"`). Not seen is what is asked of an object that a call
gave. A use counts as newer only where the current version has it and the older one does not, so what neither shows
raises nothing.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import griffe
from packaging.requirements import Requirement
from packaging.specifiers import Specifier, SpecifierSet
from packaging.version import Version

from releasing.workspace import Package, series_end, short


@dataclass(frozen=True)
class Sibling:
    """A package that another requires, as the one that requires it may get it."""

    package: Package
    released: Sequence[Version]
    """Versions that have a tag, oldest first."""
    coming: Version | None
    """The version that is released in the same go, which has everything that the current files have."""
    names: Callable[[Version | None], griffe.Module]
    """Gives the names of a released version, and of the current files for None."""

    def offered(self) -> list[Version]:
        """Every version that there is or will be, oldest first."""
        return [*self.released, *([self.coming] if self.coming else [])]

    def at(self, version: Version) -> griffe.Module:
        """The names of one of the versions that are offered."""
        return self.names(None if version == self.coming else version)


@dataclass(frozen=True)
class Bound:
    """A range that has to change, and why."""

    sibling: str
    specifier: SpecifierSet
    reason: str

    def __str__(self) -> str:
        return f"{self.sibling}{in_order(self.specifier)}: {self.reason}"


class Unreleased(Exception):
    """A name is used that no version of the sibling has, not even the one to come."""


def needed(package: Package, sibling: Sibling) -> Bound | None:
    """The range that a package needs of a sibling where the one it declares is not right.

    Raises:
        Unreleased: no version has all the names that are used.
    """
    declared = declared_range(package, sibling.package)
    offered = sibling.offered()
    inside = [version for version in offered if declared.contains(version, prereleases=True)]
    reasons, specifier = [], declared
    lowest, missing = first_that_fits(package, sibling, inside or offered)
    if missing:
        specifier = replaced(specifier, ">=", short(lowest))
        reasons.append(missing)
    if offered and not declared.contains(offered[-1], prereleases=True):
        specifier = replaced(specifier, "<", short(series_end(offered[-1])))
        reasons.append(f"{offered[-1]} is outside of {in_order(declared)}")
    return Bound(sibling.package.name, specifier, "; ".join(reasons)) if reasons else None


def first_that_fits(package: Package, sibling: Sibling, candidates: Sequence[Version]) -> tuple[Version, str]:
    """The oldest version with all names that are used, and what the one before it lacks (nothing: it is the oldest)."""
    current = sibling.names(None)
    wanted = {use: place for use, place in uses(package, sibling.package).items() if has(current, use)}
    lacks = ""
    later = [version for version in sibling.offered() if not candidates or version >= candidates[0]]
    for version in later:
        missing = sorted(use for use in wanted if not has(sibling.at(version), use))
        if not missing:
            return version, lacks
        lacks = told(missing, wanted, version)
    raise Unreleased(lacks or f"{sibling.package.name} has no version yet")


def told(missing: Sequence[Use], wanted: dict[Use, str], version: Version) -> str:
    """A sentence about names that a version does not have."""
    others = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
    return f"{wanted[missing[0]]} uses {missing[0]}{others}, which {version} does not have"


def declared_range(package: Package, other: Package) -> SpecifierSet:
    """What all lines of a package together say of another."""
    combined = SpecifierSet()
    for line in lines_about(package, other.name):
        combined &= line.specifier
    return combined


def lines_about(package: Package, name: str) -> Iterator[Requirement]:
    """The requirements of a package that name another one."""
    return (line for line in package.requirements if line.name == name)


def replaced(specifier: SpecifierSet, operator: str, version: str) -> SpecifierSet:
    """A range with another lower (`>=`) or upper (`<`) bound."""
    kept = [part for part in specifier if part.operator != operator]
    return SpecifierSet(",".join(map(str, [*kept, Specifier(f"{operator}{version}")])))


def in_order(specifier: SpecifierSet) -> str:
    """A range with its lower bound first, as the pyproject files have it."""
    return ",".join(sorted(map(str, specifier), key=lambda part: not part.startswith(">")))


# ---------------------------------------------------------------- names
ADDRESS = re.compile(r"[a-z_]\w*(?:\.\w+)*(?::\w+(?:\.\w+)*)?")


@dataclass(frozen=True, order=True)
class Use:
    """A dotted name that is used, with the parameter that is named in a call of it."""

    path: str
    parameter: str = ""

    def __str__(self) -> str:
        return f"{self.path}({self.parameter}=)" if self.parameter else self.path


@dataclass
class _Reader(ast.NodeVisitor):
    """Collects the uses of one module in one file."""

    module: str
    bound: dict[str, str] = field(default_factory=dict)
    uses: set[Use] = field(default_factory=set)

    def of_module(self, path: str) -> bool:
        return path == self.module or path.startswith(f"{self.module}.")

    def visit_Import(self, node: ast.Import) -> None:
        for alias in node.names:
            if self.of_module(alias.name):
                self.uses.add(Use(alias.name))
                name = alias.asname or self.module
                self.bound[name] = alias.name if alias.asname else self.module

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        if node.level == 0 and node.module and self.of_module(node.module):
            for alias in node.names:
                path = node.module if alias.name == "*" else f"{node.module}.{alias.name}"
                self.uses.add(Use(path))
                self.bound[alias.asname or alias.name] = path

    def visit_Attribute(self, node: ast.Attribute) -> None:
        path = self.dotted(node)
        if path:
            self.uses.add(Use(path))
        self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> None:
        path = self.dotted(node.func)
        if path:
            self.uses.update(Use(path, keyword.arg) for keyword in node.keywords if keyword.arg)
        self.generic_visit(node)

    def visit_Constant(self, node: ast.Constant) -> None:
        if isinstance(node.value, str) and ADDRESS.fullmatch(node.value):
            path = node.value.replace(":", ".")
            if self.of_module(path):
                self.uses.add(Use(path))

    def visit_Dict(self, node: ast.Dict) -> None:
        for key, value in zip(node.keys, node.values, strict=True):
            if isinstance(key, ast.Constant) and isinstance(key.value, str) and self.of_module(key.value):
                self.uses.update(Use(f"{key.value}.{name}") for name in texts(value))
        self.generic_visit(node)

    def dotted(self, node: ast.expr) -> str:
        """The full name of what an expression names, or nothing."""
        if isinstance(node, ast.Name):
            return self.bound.get(node.id, "")
        if isinstance(node, ast.Attribute):
            before = self.dotted(node.value)
            return f"{before}.{node.attr}" if before else ""
        return ""


def texts(node: ast.expr) -> Iterator[str]:
    """The texts that a tuple or list holds."""
    for part in getattr(node, "elts", ()):
        if isinstance(part, ast.Constant) and isinstance(part.value, str):
            yield part.value


def uses(package: Package, other: Package) -> dict[Use, str]:
    """What a package uses of another, and the first file that does."""
    found: dict[Use, str] = {}
    for path in sorted(package.source.rglob("*.py")):
        for use in uses_in(path, other.module):
            found.setdefault(use, str(path.relative_to(package.folder)))
    return found


def uses_in(path: Path, module: str) -> list[Use]:
    """What one file uses of a module; its imports are read first, wherever they stand."""
    tree = ast.parse(path.read_text(encoding="utf-8"), str(path))
    reader = _Reader(module)
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            reader.visit(node)
    reader.visit(tree)
    return sorted(reader.uses)


def has(root: griffe.Module, use: Use) -> bool:
    """Whether a version of a package shows a name, and the parameter where one is named."""
    found: griffe.Object | griffe.Alias = root
    for name in use.path.split(".")[1:]:
        try:
            members = found.all_members if found.is_class else found.members
            found = members[name]
        except (KeyError, griffe.AliasResolutionError, griffe.CyclicAliasError):
            return False
    return not use.parameter or takes(found, use.parameter)


def takes(found: griffe.Object | griffe.Alias, parameter: str) -> bool:
    """Whether something that is called has a parameter of this name."""
    try:
        target = found.final_target if isinstance(found, griffe.Alias) else found
    except (griffe.AliasResolutionError, griffe.CyclicAliasError):
        return False
    parameters = getattr(target, "parameters", None)
    return parameters is not None and parameter in {item.name for item in parameters}
