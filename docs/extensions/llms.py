"""Writes `llms.txt` and `llms-full.txt` beside the pages of the site, for language models.

The first lists the pages with their titles and first sentences, the second has the text of all of them.
"""

from __future__ import annotations

import re
from pathlib import Path

from sphinx.application import Sphinx

TITLE = re.compile(r"^# (.+)$", re.MULTILINE)
NOT_TEXT = re.compile(r"<!--.*?-->|^(:::|```|\||!\[|#|:|\(|- )", re.MULTILINE | re.DOTALL)
FIRST = ("index", "tutorials/", "how-to/", "reference/", "explanation/", "reports/", "adr/")


def described(text: str) -> tuple[str, str]:
    """The title of a page, and the first paragraph of its text."""
    title = TITLE.search(text)
    rest = text[title.end() :] if title else text
    paragraphs = (
        " ".join(part.split()) for part in rest.split("\n\n") if part.strip() and not NOT_TEXT.match(part.strip())
    )
    return (title[1] if title else ""), next(paragraphs, "")


def rank(name: str) -> tuple[int, str]:
    """Position of a page: the start, tutorials, guides, reference, then the rest."""
    return next((at for at, prefix in enumerate(FIRST) if name.startswith(prefix)), len(FIRST)), name


def write_texts(app: Sphinx, error: Exception | None) -> None:
    """Write both files when the pages are complete."""
    if error is not None or app.builder.format != "html":
        return
    pages = sorted(app.env.found_docs, key=rank)
    lines, whole = [f"# {app.config.project}", "", f"> {described(source(app, 'index'))[1]}", "", "## Pages", ""], []
    for name in pages:
        text = source(app, name)
        title, about = described(text)
        lines.append(f"- [{title or name}]({app.builder.get_target_uri(name)})" + (f": {about}" if about else ""))
        whole.append(f"<!-- {name} -->\n\n{text.strip()}\n")
    Path(app.outdir, "llms.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")
    Path(app.outdir, "llms-full.txt").write_text("\n".join(whole), encoding="utf-8")


def source(app: Sphinx, name: str) -> str:
    """The text of a page as it was written."""
    return Path(app.env.doc2path(name)).read_text(encoding="utf-8")


def setup(app: Sphinx) -> dict[str, bool]:
    """Register the extension."""
    app.connect("build-finished", write_texts)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
