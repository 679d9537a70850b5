"""Messages and settings for the search, which shows those that match above all other results.

The search of Sphinx ranks pages by their words. A message or the name of a setting is what people paste, so both are
looked up by themselves: `first-results.js` gets the list, and `search-first.js` shows what matches.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from docutils import nodes
from sphinx.application import Sphinx

MESSAGES = "reference/error-index"
SETTINGS = "reference/generated/settings"
LIST = "first-results.js"


def name_rows(app: Sphinx, doctree: nodes.document) -> None:
    """Gives each setting an anchor of its own."""
    if app.env.docname == SETTINGS:
        for section in doctree.findall(nodes.section):
            for row in rows_of(section):
                row["ids"].append(nodes.make_id(f"{section['names'][0]} {row[0].astext()}"))


def rows_of(section: nodes.section) -> Iterator[nodes.row]:
    """The rows of a section's own tables, without their heads."""
    for table in section.children:
        for body in table.findall(nodes.tbody) if isinstance(table, nodes.table) else ():
            yield from body.findall(nodes.row)


def messages(app: Sphinx) -> Iterator[dict[str, Any]]:
    """Each message of the index with its address."""
    for reference in app.env.tocs[MESSAGES].findall(nodes.reference):
        if "." in reference.astext() or "…" in reference.astext():
            address = app.builder.get_target_uri(MESSAGES) + reference["anchorname"]
            yield {"kind": "message", "text": reference.astext(), "address": address}


def settings(app: Sphinx) -> Iterator[dict[str, Any]]:
    """Each setting with its address, its meaning, and the ways to set it."""
    page = app.builder.get_target_uri(SETTINGS)
    for section in app.env.get_doctree(SETTINGS).findall(nodes.section):
        for row in rows_of(section):
            cells = [cell.astext() for cell in row.children]
            ways = [literal.astext() for literal in row.children[-1].findall(nodes.literal)] if len(cells) == 5 else []
            owner = section.next_node(nodes.title).astext().removesuffix(" in scripts")
            yield {
                "kind": "setting",
                "text": cells[0],
                "names": [cells[0], *ways],
                "about": f"{owner}: {cells[1].partition('. ')[0]}",
                "address": f"{page}#{row['ids'][-1]}",
            }


def write_list(app: Sphinx, error: Exception | None) -> None:
    """Writes the list when the pages are complete."""
    if error is None and app.builder.format == "html" and {MESSAGES, SETTINGS} <= app.env.all_docs.keys():
        found = [*messages(app), *settings(app)]
        text = f"const FIRST_RESULTS = {json.dumps(found, ensure_ascii=False)};\n"
        Path(app.outdir, "_static", LIST).write_text(text, encoding="utf-8")


def add_scripts(app: Sphinx, page: str, template: str, context: dict[str, Any], doctree: Any) -> None:
    """Adds both files to the page of the search alone."""
    if page == "search":
        app.add_js_file(LIST)
        app.add_js_file("search-first.js")


def setup(app: Sphinx) -> dict[str, bool]:
    """Connect the hooks."""
    app.connect("doctree-read", name_rows)
    app.connect("html-page-context", add_scripts)
    app.connect("build-finished", write_list)
    return {"parallel_read_safe": True}
