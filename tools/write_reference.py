"""Write the pages of the reference that are generated from the packages.

    python tools/write_reference.py [folder]     write them, to docs/reference/generated when no folder is given

Each build of the site generates them again, and git does not track them, so they are never outdated. The pages of the
interface contain directives, for which autodoc reads the docstrings. The others are generated from the definitions of
settings, parsers, raising statements and the drop-in's table of names.
"""

from __future__ import annotations

import sys
from pathlib import Path

from reference.api import all_links, api_pages
from reference.commands import commands_page
from reference.dropin import dropin_page
from reference.errors import error_pages
from reference.published import ROOT, read_library
from reference.settings_page import settings_page

PLACE = ROOT / "docs" / "reference" / "generated"


def pages() -> dict[str, str]:
    """File name to content, of every page."""
    modules = read_library()
    links = all_links(modules)
    return {
        **api_pages(modules, links),
        **error_pages(modules, links),
        "commands.md": commands_page(),
        "dropin.md": dropin_page(links),
        "settings.md": settings_page(modules, links),
    }


def write(place: Path, texts: dict[str, str]) -> None:
    """Writes these files into a folder and removes all others; a file that did not change keeps its date."""
    for path in sorted(place.rglob("*.md")):
        if path.relative_to(place).as_posix() not in texts:
            path.unlink()
    for name, text in texts.items():
        path = place / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if not path.exists() or path.read_text(encoding="utf-8") != text:
            path.write_text(text, encoding="utf-8")


def main(arguments: list[str]) -> int:
    """Writes all pages and returns the exit code."""
    place = Path(arguments[0]).resolve() if arguments else PLACE
    texts = pages()
    write(place, texts)
    print(f"reference: {len(texts)} pages in {place}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
