"""The navigation of the site: each group of pages folds, and the one of the page that is read is open.

The theme folds pages below other pages, but not the groups, which are most of its length. No script is needed.
"""

from __future__ import annotations

from functools import cache
from typing import Any

from bs4 import BeautifulSoup
from sphinx.application import Sphinx


@cache
def folded(tree: str) -> str:
    """The navigation with each caption and its list as an element that opens; without a page of it, the first is open.

    Args:
        tree: what the theme made of the tables of contents.
    """
    soup = BeautifulSoup(tree, "html.parser")
    groups = []
    for caption in soup.find_all("p", class_="caption"):
        pages = caption.find_next_sibling("ul")
        group, heading = soup.new_tag("details"), soup.new_tag("summary", attrs={"class": "caption"})
        heading.append(caption.get_text())
        caption.replace_with(group)
        group.extend([heading, pages.extract()])
        groups.append(group)
    current = [group for group in groups if group.select_one(".current")]
    for group in current or groups[:1]:
        group["open"] = ""
    return str(soup)


def fold(app: Sphinx, page: str, template: str, context: dict[str, Any], doctree: Any) -> None:
    """Folds the navigation of a page, after the theme has made it."""
    context["furo_navigation_tree"] = folded(context.get("furo_navigation_tree", ""))


def setup(app: Sphinx) -> dict[str, bool]:
    """Connect the hook, after that of the theme."""
    app.connect("html-page-context", fold, priority=900)
    return {"parallel_read_safe": True}
