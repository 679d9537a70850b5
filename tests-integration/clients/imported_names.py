"""The names that packages import from `accelerate`, and whether each of them resolves.

    python imported_names.py SOURCE...

A source is a wheel, a source distribution (.tar.gz), a folder, or the name of an installed distribution. Prints one
line for each name, with tabs between: the address, whether it resolves ("yes" or "no"), and files that ask for it. It
imports `accelerate` alone, so the packages need not be installed, and no GPU is needed. Ends with 1 and names the file
when one that imports from `accelerate` is written for a later Python than this.
"""

from __future__ import annotations

import ast
import importlib
import io
import re
import sys
import tarfile
import zipfile
from collections.abc import Iterator
from importlib.metadata import files
from pathlib import Path

_REPLACING = ("patch", "setattr")
_IMPORT = re.compile(r"^\s*(from|import)\s+accelerate\b", re.MULTILINE)


def sources_of(source: str) -> Iterator[tuple[str, str]]:
    """Name and text of each Python file of a source."""
    path = Path(source)
    if path.suffix == ".whl":
        with zipfile.ZipFile(path) as wheel:
            read = {name: wheel.read(name) for name in wheel.namelist() if name.endswith(".py")}
    elif path.suffix == ".gz":
        with tarfile.open(path) as archive:
            members = [member for member in archive if member.isfile() and member.name.endswith(".py")]
            read = {member.name: (archive.extractfile(member) or io.BytesIO()).read() for member in members}
    elif path.is_dir():
        read = {str(file.relative_to(path)): file.read_bytes() for file in path.rglob("*.py") if file.is_file()}
    else:
        installed = {str(file): Path(str(file.locate())) for file in files(source) or () if file.suffix == ".py"}
        read = {name: place.read_bytes() for name, place in installed.items() if place.is_file()}
    for name, content in read.items():
        yield name, content.decode("utf-8", "replace")


def addresses_in(text: str) -> set[str]:
    """The addresses that the text of a module imports from `accelerate`, reads in it, or replaces in it.

    Raises SyntaxError or ValueError for a text that this Python cannot read, if it imports from `accelerate`.
    """
    if "accelerate" not in text:
        return set()
    try:
        nodes = list(ast.walk(ast.parse(text)))
    except (SyntaxError, ValueError):
        if _IMPORT.search(text):
            raise
        return set()
    modules = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    found = set(modules)
    for node in nodes:
        if isinstance(node, ast.ImportFrom) and not node.level:
            found |= {f"{node.module}.{alias.name}".removesuffix(".*") for alias in node.names}
        elif isinstance(node, ast.Call) and _last_name(node.func) in _REPLACING and node.args:
            first = node.args[0]
            found |= {first.value} if isinstance(first, ast.Constant) and isinstance(first.value, str) else set()
        elif isinstance(node, ast.Attribute) and any(_is_below_accelerate(module) for module in modules):
            found.add(_dotted(node))
    return {address for address in found if _is_below_accelerate(address)}


def resolves(address: str) -> bool:
    """Whether an address is that of a module or of an attribute of one; of attributes of a class, the class counts."""
    parts = address.split(".")
    for count in range(len(parts), 0, -1):
        try:
            module = importlib.import_module(".".join(parts[:count]))
        except ImportError:
            continue
        return count == len(parts) or hasattr(module, parts[count])
    return False


def _is_below_accelerate(address: str) -> bool:
    return address.partition(".")[0] == "accelerate"


def _dotted(node: ast.expr) -> str:
    if isinstance(node, ast.Attribute):
        inner = _dotted(node.value)
        return f"{inner}.{node.attr}" if inner else ""
    return node.id if isinstance(node, ast.Name) else ""


def _last_name(node: ast.expr) -> str:
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


def main(sources: list[str]) -> int:
    """Print the names that the sources import."""
    asking: dict[str, list[str]] = {}
    unread = []
    for source in sources:
        for file, text in sources_of(source):
            try:
                addresses = addresses_in(text)
            except (SyntaxError, ValueError) as reason:
                unread.append(f"{file}: {reason}")
                continue
            for address in addresses:
                asking.setdefault(address, []).append(file)
    for address, by in sorted(asking.items()):
        sys.stdout.write(f"{address}\t{'yes' if resolves(address) else 'no'}\t{' '.join(sorted(by)[:3])}\n")
    sys.stderr.write("".join(f"cannot be read: {line}\n" for line in unread))
    return 1 if unread else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
