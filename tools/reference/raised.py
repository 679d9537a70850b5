"""Where errors of this project are made, and what their three parts say, read from the sources."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from reference.published import ROOT

__all__ = ("Site", "sites")

_LONGEST = 30
_TEXTS = (ast.Constant, ast.JoinedStr, ast.BinOp, ast.IfExp)


class Site(NamedTuple):
    """One place that makes an error.

    Args:
        error: name of the class.
        module: the module it stands in.
        function: the class and function it stands in, or empty.
        parts: what was asked, the obstacle and the remedy; ‹...› stands for what is filled in.
    """

    error: str
    module: str
    function: str
    parts: tuple[str, ...]

    @property
    def blanks(self) -> int:
        """How much is filled in."""
        return sum(part.count("‹") for part in self.parts)


def sites(errors: frozenset[str], root: Path = ROOT) -> list[Site]:
    """Every place in the packages that makes an error of these classes, by module and line."""
    found = []
    for path in sorted(root.glob("packages/*/src/**/*.py")):
        module = ".".join(path.with_suffix("").relative_to(root).parts[3:]).removesuffix(".__init__")
        tree = ast.parse(path.read_text(encoding="utf-8"))
        found += list(_calls(tree, errors, Place(module, "", _texts(tree))))
    return found


class Place(NamedTuple):
    """Where a call stands: module, function, and the texts that its names stand for."""

    module: str
    function: str
    texts: Mapping[str, ast.expr]


def _calls(node: ast.AST, errors: frozenset[str], place: Place) -> Iterator[Site]:
    if isinstance(node, (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
        function = f"{place.function}.{node.name}".lstrip(".")
        # Names of a class are not seen in its methods, and a parameter hides a name around its function.
        own = {} if isinstance(node, ast.ClassDef) else {**dict.fromkeys(_parameters(node)), **_texts(node)}
        texts = {name: text for name, text in {**place.texts, **own}.items() if text is not None}
        place = Place(place.module, function, texts)
    if isinstance(node, ast.Call) and _name(node.func) in errors and node.args:
        arguments = [*node.args, *(keyword.value for keyword in node.keywords)]
        parts = tuple(_text(argument, place.texts) for argument in arguments[:3])
        yield Site(_name(node.func), place.module, place.function, parts)
    for below in ast.iter_child_nodes(node):
        yield from _calls(below, errors, place)


def _parameters(function: ast.FunctionDef | ast.AsyncFunctionDef) -> list[str]:
    arguments = function.args
    return [one.arg for one in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)]


def _texts(node: ast.Module | ast.FunctionDef | ast.AsyncFunctionDef) -> dict[str, ast.expr]:
    """Names that stand for one text in what belongs to a module or function directly."""
    found: dict[str, list[ast.expr]] = {}
    for below in ast.walk(node) if not isinstance(node, ast.Module) else node.body:
        if isinstance(below, (ast.Assign, ast.AnnAssign)) and below.value is not None:
            for target in below.targets if isinstance(below, ast.Assign) else [below.target]:
                if isinstance(target, ast.Name):
                    found.setdefault(target.id, []).append(below.value)
    return {name: values[0] for name, values in found.items() if len(values) == 1 and isinstance(values[0], _TEXTS)}


def _name(function: ast.expr) -> str:
    if isinstance(function, ast.Attribute):
        return function.attr
    return function.id if isinstance(function, ast.Name) else ""


def _text(node: ast.expr, texts: Mapping[str, ast.expr]) -> str:
    """The text of an expression, with what is known only while the program runs between ‹›."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        return "".join(_text(value, texts) for value in node.values)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return _text(node.left, texts) + _text(node.right, texts)
    if isinstance(node, ast.IfExp):
        return " / ".join(filter(None, (_text(node.body, texts), _text(node.orelse, texts))))
    if isinstance(node, ast.FormattedValue):
        return _text(node.value, texts)
    if isinstance(node, ast.Name) and node.id in texts:
        return _text(texts[node.id], {name: text for name, text in texts.items() if name != node.id})
    return _blank(node)


def _blank(node: ast.expr) -> str:
    text = ast.unparse(node)
    return f"‹{text}›" if len(text) <= _LONGEST else "‹…›"
