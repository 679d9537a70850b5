"""Pages of the interface: for each package the names at its top, and those of its modules, as directives of autodoc."""

from __future__ import annotations

import enum
import sys
from collections.abc import Iterable, Iterator
from itertools import groupby

from reference.docstrings import first_sentence
from reference.markdown import code, page, table
from reference.published import LIBRARY, Entry, Links, Modules, absorbed, links_to, published_by

__all__ = ("all_links", "api_pages", "published_in")


def api_pages(modules: Modules, links: Links) -> dict[str, str]:
    """File name to page, for every package."""
    found = published_in(modules)
    pages = {"api/index.md": _index(list(found), modules, links)}
    for package, published in found.items():
        top = [entry for entry in published if entry.at_the_top]
        below = [entry for entry in published if not entry.at_the_top]
        if top:
            pages[f"api/{package}.md"] = _top_page(package, top, bool(below), modules)
        if below:
            name = f"{package}.modules" if top else package
            shown = {_module_of(entry) for entry in top}
            lines = [f"# Modules of {package}", "", "Published names that only modules offer, by module.", ""]
            pages[f"api/{name}.md"] = page([*lines, *_by_module(below, shown)])
    return pages


def published_in(modules: Modules) -> dict[str, list[Entry]]:
    """What is documented of each package."""
    return {name: published_by(name, modules) for name in modules if "." not in name}


def all_links(modules: Modules) -> Links:
    """Links to all that is documented."""
    return links_to(entry for found in published_in(modules).values() for entry in found)


def _index(packages: list[str], modules: Modules, links: Links) -> str:
    rows = [(f"[{code(name)}]({name}.md)", first_sentence(modules[name], links.link)) for name in reversed(packages)]
    toc = ["```{toctree}", ":hidden:", ":glob:", "", *packages, "*", "```"]
    about = "Every published name of every package, from the docstrings. The packages from the highest layer downward:"
    return page(["# Interface", "", about, "", *table(("package", "for"), rows), "", *toc])


def _top_page(package: str, top: list[Entry], has_modules: bool, modules: Modules) -> str:
    names = sorted((entry.name for entry in top), key=str.lower)
    summary = [f".. automodule:: {package}", "", f"The public names of ``{package}``:", ""]
    summary += [".. autosummary::", "   :nosignatures:", "", *(f"   {name}" for name in names)]
    lines = [f"# {package}", "", *_restructured(summary), *_given_on(package, modules)]
    if has_modules:
        lines += [f"Names of its modules: [{package}.modules]({package}.modules.md).", ""]
    return page([*lines, *_by_module(top, {package})])


def _given_on(package: str, modules: Modules) -> list[str]:
    """The packages below all of whose names a package offers too."""
    given = {name: set(getattr(modules[name], "__all__", ())) for name in LIBRARY if name in modules}
    whole = [name for name, names in given.items() if names and names <= given[package] and name != package]
    pages = ", ".join(f"[{code(name)}]({name}.md)" for name in whole)
    return [f"It also gives every name at the top of {pages}.", ""] if whole else []


def _by_module(published: Iterable[Entry], shown: set[str]) -> Iterator[str]:
    """A heading and a block for each module, whose docstring is left out where another page shows it."""
    for module, group in groupby(published, key=_module_of):
        lines = [] if module in shown else [f".. automodule:: {module}", ""]
        for entry in group:
            lines += _directive(entry)
        yield from (f"## {module}", "", *_restructured(lines))


def _module_of(entry: Entry) -> str:
    return entry.home.rpartition(".")[0]


def _directive(entry: Entry) -> Iterator[str]:
    yield f".. auto{entry.kind}:: {entry.address}"
    if entry.kind in ("class", "exception"):
        # A base that its module publishes is documented where it is defined.
        parts = [base for base in absorbed(entry) if entry.at_the_top or not _is_published(base)]
        foreign = [base for base in entry.item.__mro__[1:] if base not in parts]
        yield "   :members:"
        if parts:
            yield f"   :inherited-members: {', '.join(base.__name__ for base in foreign)}"
        if foreign != [object]:
            yield "   :show-inheritance:"
        if issubclass(entry.item, enum.Enum):
            yield "   :undoc-members:"
    yield ""


def _is_published(item: type) -> bool:
    return item.__name__ in getattr(sys.modules[item.__module__], "__all__", ())


def _restructured(lines: Iterable[str]) -> list[str]:
    """A block of reStructuredText, which autodoc writes, in a page of markdown."""
    return ["```{eval-rst}", *lines, "```", ""]
