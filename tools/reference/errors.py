"""The catalogue of errors: each class, when it is met, and what it says at each place that makes it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import griffe

from reference.api import published_in
from reference.described import described
from reference.links import Links
from reference.markdown import code, fence, page, prose, table
from reference.objects import is_exception
from reference.published import Entry, Library
from reference.raised import Site, sites

__all__ = ("error_pages", "errors_of")

_BASE = "accel_state.errors.AccelError"
_ABOUT = """Every error that is raised on purpose is a child of `AccelError` and of the builtin that fits it, so
`except ValueError` keeps working. A message has three parts: what failed, what stands in the way, and what to do.
The page of each class has every message, so that the site's search finds the text of one; ‹...› stands for what is
filled in."""


def error_pages(library: Library, links: Links) -> dict[str, str]:
    """File name to page: an overview, and one page for each class."""
    entries = errors_of(library)
    found: dict[str, list[Site]] = {entry.name: [] for entry in entries}
    for site in sites(frozenset(found)):
        found[site.error].append(site)
    rows = [
        (
            f"[{entry.name}]({entry.name}.md)",
            ", ".join(_builtins(entry)),
            _when(entry, links),
            str(len(found[entry.name])),
        )
        for entry in entries
    ]
    toc = ["```{toctree}", ":hidden:", "", *(entry.name for entry in entries), "```"]
    head = ("class", "child of", "when", "places")
    others = [
        (links.link(entry.address), ", ".join(_builtins(entry)), _when(entry, links)) for entry in _others(library)
    ]
    apart = ["## Outside of this tree", "", *table(head[:3], others), ""]
    pages = {"errors/index.md": page(["# Errors", "", prose(_ABOUT), "", *table(head, rows), "", *apart, *toc])}
    pages |= {f"errors/{entry.name}.md": _page(entry, found[entry.name], links) for entry in entries}
    return pages


def errors_of(library: Library) -> list[Entry]:
    """Every published class of errors, the base first, then as they are defined from the lowest package upward."""
    return [entry for entry in _classes(library) if _in_the_tree(entry.item)]


def _others(library: Library) -> list[Entry]:
    """Published errors and warnings that are not children of the base."""
    return [entry for entry in _classes(library) if is_exception(entry.item) and not _in_the_tree(entry.item)]


def _classes(library: Library) -> Iterator[Entry]:
    for published in published_in(library).values():
        yield from (entry for entry in published if isinstance(entry.item, griffe.Class))


def _in_the_tree(item: griffe.Object) -> bool:
    return isinstance(item, griffe.Class) and _BASE in (item.path, *(base.path for base in item.mro()))


def _builtins(entry: Entry) -> list[str]:
    return [code(str(base)) for base in entry.item.bases] if isinstance(entry.item, griffe.Class) else []


def _when(entry: Entry, links: Links) -> str:
    return described(entry.item, links.link)[0] if entry.item.docstring else ""


def _page(entry: Entry, found: Sequence[Site], links: Links) -> str:
    lines = [f"# {entry.name}", "", *described(entry.item, links.link), f"Defined as {links.link(entry.address)}.", ""]
    whole = (site for site in found if len(site.parts) == 3)
    example = min(whole, key=lambda site: (site.blanks, -sum(map(len, site.parts))), default=None)
    if example is not None:
        text = "\n  ".join(example.parts)
        lines += [f"For example, from {code(example.module)}:", "", *fence(f"{entry.name}: {text}"), ""]
    rows = [(_place(site), *(prose(part) for part in (*site.parts, "", "")[:3])) for site in found]
    if rows:
        lines += [
            "## Messages",
            "",
            *table(("made in", "what failed", "what stands in the way", "what to do"), rows),
        ]
    return page(lines)


def _place(site: Site) -> str:
    return code(site.module) + (f" {code(site.function)}" if site.function else "")
