"""Check that no module replaces a method of an object of ours at run time.

    python tools/check_replaced_methods.py [files or folders]

A method that another object replaces cannot be read where it is defined, and two objects that replace it undo each
other. What follows an object enters a list of hooks instead (`accel_torch.hooks`). Methods of classes of torch and of
other libraries may be replaced, in processes that a check starts itself.

The check knows the names of all methods in the sources. It finds an assignment to such a name, and a call of `setattr`,
on an object other than `self`, where the new value is a function, or is made from the old method.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
CHECKED = ("packages/accel-torch/src", "packages/accelerate/src")
OWN = ("accel_", "accelerate")

Function = ast.FunctionDef | ast.AsyncFunctionDef


def modules(places: Iterable[Path]) -> Iterator[tuple[Path, ast.Module]]:
    """The files of some places, parsed."""
    for place in places:
        for path in sorted(place.rglob("*.py")) if place.is_dir() else [place]:
            yield path, ast.parse(path.read_text(encoding="utf-8"))


def method_names(trees: Iterable[ast.Module]) -> set[str]:
    """The names of methods; without those that are a property or an annotated attribute of any class."""
    methods: set[str] = set()
    attributes: set[str] = set()
    for tree in trees:
        for item in (item for node in ast.walk(tree) if isinstance(node, ast.ClassDef) for item in node.body):
            if isinstance(item, Function):
                is_method = not any("property" in ast.unparse(each) for each in item.decorator_list)
                (methods if is_method else attributes).add(item.name)
            elif isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name):
                attributes.add(item.target.id)
    return methods - attributes


class Replacements(ast.NodeVisitor):
    """Finds the statements of one module that replace a method.

    Args:
        methods: the names of methods of ours.
        foreign: the names that the module imports from other libraries.

    Attributes:
        found: the statements.
    """

    def __init__(self, methods: set[str], foreign: set[str]) -> None:
        self._methods, self._foreign = methods, foreign
        self._functions: list[set[str]] = [set()]
        self.found: list[ast.AST] = []

    def _visit_function(self, node: Function) -> None:
        self._functions.append(
            {each.name for each in ast.walk(node) if isinstance(each, Function) and each is not node}
        )
        self.generic_visit(node)
        self._functions.pop()

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        self._visit_function(node)

    def visit_AsyncFunctionDef(self, node: ast.AsyncFunctionDef) -> None:
        self._visit_function(node)

    def visit_Assign(self, node: ast.Assign) -> None:
        for target, value in _pairs(node):
            if (
                isinstance(target, ast.Attribute)
                and target.attr in self._methods
                and self._is_other(target.value)
                and (self._is_function(value) or _reads(value, target.attr))
            ):
                self.found.append(node)
        self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> None:
        if isinstance(node.func, ast.Name) and node.func.id == "setattr" and self._is_other(node.args[0]):
            name, value = node.args[1:]
            known = isinstance(name, ast.Constant) and name.value in self._methods
            if (known and self._is_function(value)) or _gets(value, node.args[0]):
                self.found.append(node)
        self.generic_visit(node)

    def _is_other(self, owner: ast.expr) -> bool:
        """Whether it is neither `self` nor an object of another library."""
        while isinstance(owner, ast.Attribute):
            owner = owner.value
            if isinstance(owner, ast.Name) and owner.id in ("self", "cls"):
                return True
        return not (isinstance(owner, ast.Name) and owner.id in {"self", "cls", *self._foreign})

    def _is_function(self, value: ast.expr) -> bool:
        if isinstance(value, ast.Name):
            return value.id in set().union(*self._functions)
        return isinstance(value, ast.Lambda) or (
            isinstance(value, ast.Attribute) and isinstance(value.value, ast.Name) and value.attr in self._methods
        )


def _pairs(node: ast.Assign) -> Iterator[tuple[ast.expr, ast.expr]]:
    for target in node.targets:
        if isinstance(target, ast.Tuple) and isinstance(node.value, ast.Tuple):
            yield from zip(target.elts, node.value.elts, strict=True)
        else:
            yield target, node.value


def _reads(value: ast.expr, name: str) -> bool:
    """Whether a value is made from a method: its name is read, and not called."""
    called = {id(each.func) for each in ast.walk(value) if isinstance(each, ast.Call)}
    read = (each for each in ast.walk(value) if isinstance(each, ast.Attribute) and each.attr == name)
    return any(id(each) not in called for each in read)


def _gets(value: ast.expr, owner: ast.expr) -> bool:
    """Whether a value is made from `getattr` of the same object."""
    return any(
        isinstance(each, ast.Call)
        and isinstance(each.func, ast.Name)
        and each.func.id == "getattr"
        and ast.dump(each.args[0]) == ast.dump(owner)
        for each in ast.walk(value)
    )


def foreign_names(tree: ast.Module) -> set[str]:
    """The names that a module imports from other libraries."""
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {(each.asname or each.name).split(".")[0] for each in node.names if not each.name.startswith(OWN)}
        elif isinstance(node, ast.ImportFrom) and not (node.module or "").startswith(OWN):
            names |= {each.asname or each.name for each in node.names}
    return names


def replacements(places: Sequence[Path]) -> list[str]:
    """The statements that replace a method, each as "file:line: statement"."""
    methods = method_names(tree for _, tree in modules(sorted(ROOT.glob("packages/*/src"))))
    lines = []
    for path, tree in modules(places):
        visitor = Replacements(methods, foreign_names(tree))
        visitor.visit(tree)
        lines += [f"{path}:{getattr(node, 'lineno', 0)}: {ast.unparse(node)}" for node in visitor.found]
    return lines


def main(arguments: Sequence[str]) -> int:
    """Print the statements, and return 1 if there are any."""
    found = replacements([Path(argument) for argument in arguments] or [ROOT / place for place in CHECKED])
    for line in found:
        print(line)
    if found:
        print("These replace methods at run time. Enter a hook instead: see accel_torch/hooks.py.")
    return 1 if found else 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
