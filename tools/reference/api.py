"""Pages of the interface: for each package the names it shows at its top, and those of its modules."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import groupby

import griffe

from reference.described import described, first_sentence
from reference.links import Links, links_to
from reference.markdown import code, page, table
from reference.objects import absorbed, shown
from reference.published import Entry, Library, entries

__all__ = ("all_links", "api_pages", "published_in")


def api_pages(library: Library, links: Links) -> dict[str, str]:
    """File name to page, for every package."""
    published = published_in(library)
    pages = {"api/index.md": _index(library, links)}
    for name, package in library.items():
        below = [entry for entry in published[name] if not entry.at_the_top]
        if len(below) < len(published[name]):
            pages[f"api/{name}.md"] = _top_page(package, published[name], library, links)
        if below:
            pages[f"api/{_modules_name(package, published[name])}.md"] = _modules_page(package, below, links)
    return pages


def published_in(library: Library) -> dict[str, list[Entry]]:
    """What is documented of each package."""
    return {name: _visible(entries(package)) for name, package in library.items()}


def all_links(library: Library) -> Links:
    """Links to all that is documented."""
    return links_to(entry for found in published_in(library).values() for entry in found)


def _visible(found: list[Entry]) -> list[Entry]:
    """Without classes that are shown as a part of another one that inherits from them."""
    parts = {base.path for entry in found if entry.at_the_top for base in absorbed(entry.item)}
    return [entry for entry in found if entry.at_the_top or entry.home not in parts]


def _index(library: Library, links: Links) -> str:
    rows = [
        (f"[{code(name)}]({name}.md)", first_sentence(package, links.link))
        for name, package in reversed(library.items())
    ]
    toc = ["```{toctree}", ":hidden:", ":glob:", "", *library, "*", "```"]
    about = "Every published name of every package, from the docstrings. The packages from the highest layer downward:"
    return page(["# Interface", "", about, "", *table(("package", "for"), rows), "", *toc])


def _top_page(package: griffe.Module, found: list[Entry], library: Library, links: Links) -> str:
    top = [entry for entry in found if entry.at_the_top]
    lines = [f"# {package.path}", "", *described(package, links.link)]
    names = [(links.link(entry.address), first_sentence(entry.item, links.link)) for entry in _sorted(top)]
    lines += [f"What `from {package.path} import ...` gives:", "", *table(("name", "for"), names), ""]
    lines += _given_on(package, library)
    if len(top) < len(found):
        lines += [f"Names of its modules: [{package.path}.modules]({package.path}.modules.md).", ""]
    return page([*lines, *_by_module(top, package, links)])


def _modules_name(package: griffe.Module, found: list[Entry]) -> str:
    """The page of what stands in modules: a second one, or the only one of a package that shows nothing at its top."""
    return f"{package.path}.modules" if any(entry.at_the_top for entry in found) else package.path


def _given_on(package: griffe.Module, library: Library) -> list[str]:
    """What a package shows of packages below it."""
    given = {str(name) for name in package.exports or ()}
    names = {name: {str(export) for export in other.exports or ()} for name, other in library.items()}
    whole = [name for name, exports in names.items() if exports and exports <= given and name != package.path]
    pages = ", ".join(f"[{code(name)}]({name}.md)" for name in whole)
    return [f"It also gives every name that is shown at the top of {pages}.", ""] if whole else []


def _modules_page(package: griffe.Module, below: list[Entry], links: Links) -> str:
    about = "Published names that stand in modules only, by module."
    return page([f"# Modules of {package.path}", "", about, "", *_by_module(below, package, links)])


def _by_module(found: Iterable[Entry], package: griffe.Module, links: Links) -> list[str]:
    lines: list[str] = []
    for home, group in groupby(found, key=lambda entry: entry.home.rpartition(".")[0]):
        module = package.modules_collection[home]
        lines += [f"## {home}", "", *described(module, links.link)]
        for entry in group:
            lines += shown(entry, links)
    return lines


def _sorted(found: Iterable[Entry]) -> list[Entry]:
    return sorted(found, key=lambda entry: entry.name.lower())
