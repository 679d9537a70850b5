"""The small changes that mutation testing makes to a module, each with the exact bytes that it replaces.

Not changed: docstrings, annotations, `__all__`, `TYPE_CHECKING` blocks, overloads, texts (f-strings,
messages of errors, `__repr__` and `__str__`) and calls of a logger.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

__all__ = ("Change", "changes", "compiles")

_COMPARED: Final[dict[type[ast.cmpop], tuple[str, str]]] = {
    ast.Lt: ("<", "<="),
    ast.LtE: ("<=", "<"),
    ast.Gt: (">", ">="),
    ast.GtE: (">=", ">"),
    ast.Eq: ("==", "!="),
    ast.NotEq: ("!=", "=="),
    ast.Is: ("is", "is not"),
    ast.IsNot: ("is not", "is"),
    ast.In: ("in", "not in"),
    ast.NotIn: ("not in", "in"),
}
_COMPUTED: Final[dict[type[ast.operator], tuple[str, str]]] = {
    ast.Add: ("+", "-"),
    ast.Sub: ("-", "+"),
    ast.Mult: ("*", "//"),
    ast.Div: ("/", "*"),
    ast.FloorDiv: ("//", "*"),
    ast.Mod: ("%", "*"),
    ast.Pow: ("**", "*"),
    ast.BitOr: ("|", "&"),
    ast.BitAnd: ("&", "|"),
    ast.LShift: ("<<", ">>"),
    ast.RShift: (">>", "<<"),
}
_CALLED: Final = {"min": "max", "max": "min", "any": "all", "all": "any"}
_TEXTS: Final = ("__repr__", "__str__")


@dataclass(frozen=True)
class Change:
    """One change of a source.

    Args:
        operator: its kind.
        start: the first byte that is replaced.
        stop: the byte after the last.
        new: the text in their place.
        lines: first and last line of the statement, or of the head of a compound one.
        once: whether the statement runs when the module is imported, and not when a function is called.
    """

    operator: str
    start: int
    stop: int
    new: str
    lines: tuple[int, int]
    once: bool

    def apply(self, source: bytes) -> bytes:
        """The changed source."""
        return source[: self.start] + self.new.encode() + source[self.stop :]


def changes(source: bytes) -> list[Change]:
    """All changes of a source, in the order of their places; a few of them may not compile."""
    finder = _Finder(source)
    finder.visit(ast.parse(source))
    return sorted(finder.found, key=lambda change: (change.start, change.stop, change.operator, change.new))


def compiles(source: bytes) -> bool:
    """Whether a source is Python."""
    try:
        compile(source, "mutant", "exec", dont_inherit=True)
    except (SyntaxError, ValueError):
        return False
    return True


class _Finder(ast.NodeVisitor):
    def __init__(self, source: bytes) -> None:
        self.source = source
        self.found: list[Change] = []
        lines = source.splitlines(keepends=True)
        self._begins = [0, *(sum(map(len, lines[: count + 1])) for count in range(len(lines)))]
        self._lines = (1, 1)
        self._depth = 0

    # ------------------------------------------------------------ places
    def _start(self, node: ast.expr | ast.stmt | ast.keyword) -> int:
        return self._begins[node.lineno - 1] + node.col_offset

    def _stop(self, node: ast.expr | ast.stmt | ast.keyword) -> int:
        assert node.end_lineno is not None
        assert node.end_col_offset is not None
        return self._begins[node.end_lineno - 1] + node.end_col_offset

    def _note(self, operator: str, start: int, stop: int, new: str) -> None:
        self.found.append(Change(operator, start, stop, new, self._lines, not self._depth))

    def _replace(self, operator: str, node: ast.expr | ast.stmt, new: str) -> None:
        self._note(operator, self._start(node), self._stop(node), new)

    def _text(self, node: ast.expr) -> str:
        return self.source[self._start(node) : self._stop(node)].decode()

    def _swap(self, operator: str, left: ast.expr, right: ast.expr, words: tuple[str, str]) -> None:
        """Replace the operator between two operands."""
        between = self.source[self._stop(left) : self._start(right)].decode()
        place = re.search(r"\s+".join(map(re.escape, words[0].split())), between)
        if place is not None:
            begin = self._stop(left)
            start, stop = (len(between[:offset].encode()) for offset in place.span())
            self._note(operator, begin + start, begin + stop, words[1])

    # ------------------------------------------------------------ statements
    def visit(self, node: ast.AST) -> None:
        if not isinstance(node, ast.stmt):
            super().visit(node)
            return
        before = self._lines
        body = getattr(node, "body", None) or getattr(node, "cases", None)
        first = body[0] if body else None
        last = node.end_lineno or node.lineno
        if first is not None:
            last = max((getattr(first, "lineno", 0) or first.pattern.lineno) - 1, node.lineno)
        self._lines = (node.lineno, last)
        super().visit(node)
        self._lines = before

    def _remove(self, node: ast.stmt) -> None:
        if self._depth:
            self._replace("removed statement", node, "pass")

    def visit_FunctionDef(self, node: ast.FunctionDef | ast.AsyncFunctionDef) -> None:
        if node.name in _TEXTS or any(ast.unparse(mark).endswith("overload") for mark in node.decorator_list):
            return
        depth, self._depth = self._depth, 0
        for outside in (*node.decorator_list, *node.args.defaults, *filter(None, node.args.kw_defaults)):
            self.visit(outside)
        self._depth = depth + 1
        self._visit_all(node.body)
        self._depth = depth

    visit_AsyncFunctionDef = visit_FunctionDef  # noqa: N815 - the name that ast looks up

    def visit_Lambda(self, node: ast.Lambda) -> None:
        self._visit_all([*node.args.defaults, node.body])

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        self._visit_all([*node.decorator_list, *node.body])

    def _visit_all(self, nodes: Sequence[ast.AST]) -> None:
        for node in nodes:
            self.visit(node)

    def visit_If(self, node: ast.If) -> None:
        if "TYPE_CHECKING" in ast.unparse(node.test):
            self._visit_all(node.orelse)
            return
        self._visit_branch(node)

    def visit_While(self, node: ast.While) -> None:
        self._visit_branch(node)

    def visit_IfExp(self, node: ast.IfExp) -> None:
        self._visit_branch(node)

    def _visit_branch(self, node: ast.If | ast.While | ast.IfExp) -> None:
        self._negate(node.test)
        self.generic_visit(node)

    def visit_comprehension(self, node: ast.comprehension) -> None:
        for test in node.ifs:
            self._negate(test)
        self.generic_visit(node)

    def _negate(self, test: ast.expr) -> None:
        if not isinstance(test, ast.Constant):
            self._replace("negated condition", test, f"(not ({self._text(test)}))")

    def visit_Raise(self, node: ast.Raise) -> None:
        self._remove(node)

    def visit_Assert(self, node: ast.Assert) -> None:
        pass

    def visit_Delete(self, node: ast.Delete) -> None:
        self._remove(node)

    def visit_Return(self, node: ast.Return) -> None:
        if node.value is None or (isinstance(node.value, ast.Constant) and node.value.value is None):
            return
        self._replace("return value", node, "return None")
        self.visit(node.value)

    def visit_Expr(self, node: ast.Expr) -> None:
        if isinstance(node.value, ast.Constant):
            return
        if isinstance(node.value, ast.Call):
            if re.match(r"(_?log|_?logger|logging)\b", ast.unparse(node.value.func)):
                return
            self._remove(node)
        self.visit(node.value)

    def visit_Assign(self, node: ast.Assign) -> None:
        if any(isinstance(target, ast.Name) and target.id in ("__all__", "__slots__") for target in node.targets):
            return
        self._remove(node)
        self.generic_visit(node)

    def visit_AugAssign(self, node: ast.AugAssign) -> None:
        self._remove(node)
        self._swap_computed(node.op, node.target, node.value, "=")
        self.visit(node.value)

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        if node.value is not None and "TypeAlias" not in ast.unparse(node.annotation):
            self._remove(node)
            self.visit(node.value)

    # ------------------------------------------------------------ expressions
    def visit_JoinedStr(self, node: ast.JoinedStr) -> None:
        pass

    def visit_Compare(self, node: ast.Compare) -> None:
        operands = [node.left, *node.comparators]
        for left, right, operator in zip(operands, operands[1:], node.ops, strict=False):
            self._swap("comparison", left, right, _COMPARED[type(operator)])
        self.generic_visit(node)

    def visit_BoolOp(self, node: ast.BoolOp) -> None:
        words = ("and", "or") if isinstance(node.op, ast.And) else ("or", "and")
        for left, right in zip(node.values, node.values[1:], strict=False):
            self._swap("and/or", left, right, words)
        self.generic_visit(node)

    def visit_UnaryOp(self, node: ast.UnaryOp) -> None:
        if isinstance(node.op, ast.Not):
            self._replace("negated condition", node, f"bool({self._text(node.operand)})")
        self.generic_visit(node)

    def visit_BinOp(self, node: ast.BinOp) -> None:
        self._swap_computed(node.op, node.left, node.right)
        self.generic_visit(node)

    def _swap_computed(self, operator: ast.operator, left: ast.expr, right: ast.expr, suffix: str = "") -> None:
        if type(operator) in _COMPUTED and not any(_is_text(side) for side in (left, right)):
            old, new = _COMPUTED[type(operator)]
            self._swap("arithmetic", left, right, (old + suffix, new + suffix))

    def visit_Constant(self, node: ast.Constant) -> None:
        if isinstance(node.value, bool):
            self._replace("boolean", node, str(not node.value))
        elif isinstance(node.value, int):
            self._replace("constant", node, str(node.value + 1))
            self._replace("constant", node, str(node.value - 1) if node.value else "-1")
        elif isinstance(node.value, float):
            self._replace("constant", node, repr(node.value + 1.0))

    def visit_Slice(self, node: ast.Slice) -> None:
        if node.lower is not None:
            self._replace("slice", node.lower, f"({self._text(node.lower)}) + 1")
        if node.upper is not None:
            self._replace("slice", node.upper, f"({self._text(node.upper)}) - 1")
        self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> None:
        if isinstance(node.func, ast.Name) and node.func.id in _CALLED:
            self._replace("min/max, any/all", node.func, _CALLED[node.func.id])
        for keyword in node.keywords:
            if keyword.arg is not None:
                self._note("removed argument", *self._with_comma(keyword), "")
        self.generic_visit(node)

    def _with_comma(self, keyword: ast.keyword) -> tuple[int, int]:
        """The bytes of an argument and of the comma after it, else of the one before it."""
        start, stop = self._start(keyword), self._stop(keyword)
        after = re.match(rb"\s*,\s*", self.source[stop:])
        if after is not None:
            return start, stop + after.end()
        before = re.search(rb",\s*$", self.source[:start])
        return (before.start() if before is not None else start), stop


def _is_text(node: ast.expr) -> bool:
    return isinstance(node, ast.JoinedStr) or (isinstance(node, ast.Constant) and isinstance(node.value, (str, bytes)))
