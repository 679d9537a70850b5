"""Draw the diagrams of the documents from the import graph of the packages.

    python tools/draw_diagrams.py            write them to docs/reference/diagrams
    python tools/draw_diagrams.py --check    exit 1 when one of them is not what would be drawn

They are kept in the repository, so that a README can show them.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path

from reference.diagrams import DIAGRAMS, diagrams


def stale(folder: Path, pictures: Mapping[str, str]) -> list[str]:
    """Names of the files that are not what would be drawn."""
    return [
        name
        for name, picture in pictures.items()
        if not (folder / name).is_file() or (folder / name).read_text(encoding="utf-8") != picture
    ]


def main(arguments: list[str], folder: Path = DIAGRAMS) -> int:
    """Draws or checks, and returns the exit code."""
    pictures = diagrams()
    changed = stale(folder, pictures)
    if arguments == ["--check"]:
        for name in changed:
            print(f"diagrams: {name} is not what is true; run: python tools/draw_diagrams.py", file=sys.stderr)
        return 1 if changed else 0
    folder.mkdir(parents=True, exist_ok=True)
    for name in changed:
        (folder / name).write_text(pictures[name], encoding="utf-8")
        print(folder / name)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
