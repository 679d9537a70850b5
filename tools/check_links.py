"""Check that links in the documents and READMEs lead to a file, and to a heading in it where they name one.

Sphinx checks only the documents; this also checks the READMEs, and links between the two.

python tools/check_links.py [folder]
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
WHERE = ("*.md", "docs/**/*.md", "packages/*/*.md", "tests-integration/**/*.md")

LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
CODE = re.compile(r"```.*?```|`[^`\n]*`", re.DOTALL)
HEADING = re.compile(r"^#+\s+(.*?)\s*$", re.MULTILINE)
ELSEWHERE = ("http://", "https://", "mailto:")


def anchors(text: str) -> set[str]:
    """The names that a document's headings are linked by: lower case, words joined by dashes."""
    words = (re.sub(r"[^\w\- ]", "", heading.lower()) for heading in HEADING.findall(text))
    return {heading.replace(" ", "-") for heading in words}


def broken_links(document: Path) -> Iterator[str]:
    """One line for each link that leads nowhere."""
    for link in LINK.findall(CODE.sub("", document.read_text(encoding="utf-8"))):
        if link.startswith(ELSEWHERE):
            continue
        path, _, anchor = link.partition("#")
        target = (document.parent / path) if path else document
        if not target.exists():
            yield f"{link}: there is no such file"
        elif anchor and anchor not in anchors(target.read_text(encoding="utf-8")):
            yield f"{link}: the file has no such heading"


def main(arguments: list[str]) -> int:
    """Prints every broken link and returns the exit code."""
    root = Path(arguments[0]).resolve() if arguments else ROOT
    documents = sorted({path for pattern in WHERE for path in root.glob(pattern)})
    problems = [f"{path.relative_to(root)}: {line}" for path in documents for line in broken_links(path)]
    for line in problems:
        print(f"links: {line}", file=sys.stderr)
    if not problems:
        print(f"links: every link in {len(documents)} documents leads somewhere")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
