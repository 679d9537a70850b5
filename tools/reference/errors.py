"""The catalogue of errors: each class, when it is met, and what it says at each place that makes it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from accel_state.errors import AccelError
from reference.api import published_in
from reference.docstrings import first_sentence, opening
from reference.markdown import code, fence, page, prose, table
from reference.published import Entry, Links, Modules
from reference.raised import Site, sites

__all__ = ("error_pages", "errors_of")

_ABOUT = """Every error that is raised on purpose is a child of `AccelError` and of the builtin that fits it, so
`except ValueError` keeps working. A message has three parts: what failed, what stands in the way, and what to do.
The page of each class has every message, so that the site's search finds the text of one; ‹...› stands for what is
filled in."""


def error_pages(modules: Modules, links: Links) -> dict[str, str]:
    """File name to page: an overview, and one page for each class."""
    entries = errors_of(modules)
    found: dict[str, list[Site]] = {entry.name: [] for entry in entries}
    for site in sites(frozenset(found)):
        found[site.error].append(site)
    rows = [
        (
            f"[{entry.name}]({entry.name}.md)",
            ", ".join(_builtins(entry)),
            first_sentence(entry.item, links.link),
            str(len(found[entry.name])),
        )
        for entry in entries
    ]
    toc = ["```{toctree}", ":hidden:", "", *(entry.name for entry in entries), "```"]
    head = ("class", "child of", "when", "places")
    others = [
        (links.link(entry.address), ", ".join(_builtins(entry)), first_sentence(entry.item, links.link))
        for entry in _others(modules)
    ]
    apart = ["## Outside of this tree", "", *table(head[:3], others), ""]
    pages = {"errors/index.md": page(["# Errors", "", prose(_ABOUT), "", *table(head, rows), "", *apart, *toc])}
    pages |= {f"errors/{entry.name}.md": _page(entry, found[entry.name], links) for entry in entries}
    return pages


def errors_of(modules: Modules) -> list[Entry]:
    """Every published class of errors, the base first, then as they are defined from the lowest package upward."""
    return [entry for entry in _exceptions(modules) if issubclass(entry.item, AccelError)]


def _others(modules: Modules) -> list[Entry]:
    """Published errors and warnings that are not children of the base."""
    return [entry for entry in _exceptions(modules) if not issubclass(entry.item, AccelError)]


def _exceptions(modules: Modules) -> Iterator[Entry]:
    for published in published_in(modules).values():
        yield from (entry for entry in published if entry.kind == "exception")


def _builtins(entry: Entry) -> list[str]:
    return [code(base.__name__) for base in entry.item.__bases__]


def _page(entry: Entry, found: Sequence[Site], links: Links) -> str:
    lines = [
        f"# {entry.name}",
        "",
        prose(opening(entry.item), links.link),
        "",
        f"Defined as {links.link(entry.address)}.",
        "",
    ]
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
