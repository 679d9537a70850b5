"""Check that links in the documents and READMEs lead to a file, and to a heading in it where they name one.

Sphinx checks only the documents; this also checks the READMEs, and links between the two. The READMEs of packages are
also shown on the package index, where a relative link leads nowhere: they name the address of the repository.

python tools/check_links.py [folder]
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path

import tomli

ROOT = Path(__file__).resolve().parents[1]
WHERE = ("*.md", ".github/*.md", "docs/**/*.md", "packages/*/*.md", "tests-integration/**/*.md")

LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
CODE = re.compile(r"```.*?```|`[^`\n]*`", re.DOTALL)
HEADING = re.compile(r"^#+\s+(.*?)\s*$", re.MULTILINE)
ELSEWHERE = ("http://", "https://", "mailto:")


def anchors(text: str) -> set[str]:
    """The names that a document's headings are linked by: lower case, words joined by dashes."""
    words = (re.sub(r"[^\w\- ]", "", heading.lower()) for heading in HEADING.findall(text))
    return {heading.replace(" ", "-") for heading in words}


def files_of_repository(root: Path) -> str:
    """How the address of a file of the repository begins; empty if the repository names none."""
    path = root / "pyproject.toml"
    settings = tomli.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    address = settings.get("tool", {}).get("accel", {}).get("repository", "")
    return f"{address}/blob/main/" if address else ""


def broken_links(document: Path, root: Path) -> Iterator[str]:
    """One line for each link that leads nowhere."""
    own = files_of_repository(root)
    published = document.name == "README.md" and document.parent.parent == root / "packages"
    for link in LINK.findall(CODE.sub("", document.read_text(encoding="utf-8"))):
        inside = bool(own) and link.startswith(own)
        if link.startswith(ELSEWHERE) and not inside:
            continue
        path, _, anchor = link.removeprefix(own if inside else "").partition("#")
        target = (root if inside else document.parent) / path if path else document
        if published and path and not inside:
            yield f"{link}: the package index shows this file, so the link needs the whole address"
        elif not target.exists():
            yield f"{link}: there is no such file"
        elif anchor and anchor not in anchors(target.read_text(encoding="utf-8")):
            yield f"{link}: the file has no such heading"


def main(arguments: list[str]) -> int:
    """Prints every broken link and returns the exit code."""
    root = Path(arguments[0]).resolve() if arguments else ROOT
    documents = sorted({path for pattern in WHERE for path in root.glob(pattern)})
    problems = [f"{path.relative_to(root)}: {line}" for path in documents for line in broken_links(path, root)]
    for line in problems:
        print(f"links: {line}", file=sys.stderr)
    if not problems:
        print(f"links: every link in {len(documents)} documents leads somewhere")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
