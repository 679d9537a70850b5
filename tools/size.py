"""Count code lines, files and public names of each package, beside the counts that `tools/sizes.json` records.

    python tools/size.py            print the counts, and what changed since they were recorded
    python tools/size.py --write    record the counts

A code line has a token that is neither a comment nor part of the docstring of a module, class or function. Public names
are those in `__all__`.
"""

from __future__ import annotations

import ast
import io
import json
import sys
import tokenize
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final, NamedTuple

ROOT: Final = Path(__file__).resolve().parents[1]
RECORD: Final = ROOT / "tools" / "sizes.json"

_NO_CODE: Final = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENCODING,
    tokenize.ENDMARKER,
}


class Size(NamedTuple):
    """The size of a package or a file."""

    code_lines: int
    files: int
    public_names: int

    def plus(self, other: Size) -> Size:
        """The sum of two sizes."""
        return Size(*(one + another for one, another in zip(self, other, strict=True)))


NOTHING: Final = Size(0, 0, 0)


def size_of_file(text: str) -> Size:
    """The size of one source file."""
    tree = ast.parse(text)
    docstrings = set(_docstring_lines(tree))
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in _NO_CODE:
            lines.update(range(token.start[0], token.end[0] + 1))
    return Size(len(lines - docstrings), 1, len(_published(tree)))


def _docstring_lines(tree: ast.AST) -> Iterator[int]:
    """The lines of the docstrings of modules, classes and functions."""
    for node in ast.walk(tree):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            first = node.body[0] if node.body and ast.get_docstring(node, clean=False) is not None else None
            if first is not None:
                yield from range(first.lineno, (first.end_lineno or first.lineno) + 1)


def _published(tree: ast.Module) -> Sequence[ast.expr]:
    for node in tree.body:
        if isinstance(node, ast.Assign) and any(getattr(one, "id", "") == "__all__" for one in node.targets):
            return node.value.elts if isinstance(node.value, (ast.Tuple, ast.List)) else ()
    return ()


def sizes(root: Path = ROOT) -> dict[str, Size]:
    """The size of each package."""
    counts: dict[str, Size] = {}
    for path in sorted(root.glob("packages/*/src/**/*.py")):
        package = path.relative_to(root).parts[1]
        counts[package] = counts.get(package, NOTHING).plus(size_of_file(path.read_text(encoding="utf-8")))
    return counts


def table(counts: dict[str, Size], recorded: dict[str, Size]) -> Iterator[str]:
    """The lines of the report."""
    yield f"{'package':<18}{'code lines':>12}{'files':>7}{'public names':>14}{'  since recorded':>18}"
    names = sorted({*counts, *recorded})
    rows = [(name, counts.get(name, NOTHING), recorded.get(name, NOTHING)) for name in names]
    total = [("all", _sum(counts), _sum(recorded))]
    for name, now, before in [*rows, *total]:
        change = now.code_lines - before.code_lines
        yield f"{name:<18}{now.code_lines:>12,}{now.files:>7}{now.public_names:>14,}{change:>+18,}"


def _sum(counts: dict[str, Size]) -> Size:
    total = NOTHING
    for size in counts.values():
        total = total.plus(size)
    return total


def read_record(path: Path = RECORD) -> dict[str, Size]:
    """The recorded sizes; empty without a record."""
    if not path.is_file():
        return {}
    entries = json.loads(path.read_text(encoding="utf-8"))
    return {name: Size(**entry) for name, entry in entries.items()}


def main(arguments: Sequence[str], root: Path = ROOT, record: Path = RECORD) -> int:
    """Print the report, or record the counts; return the exit code."""
    if list(arguments) not in ([], ["--write"]):
        print("size: the only option is --write", file=sys.stderr)
        return 2
    counts = sizes(root)
    print("\n".join(table(counts, read_record(record))))
    if arguments:
        entries = {name: size._asdict() for name, size in counts.items()}
        record.write_text(json.dumps(entries, indent=2) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
