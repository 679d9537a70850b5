"""Classes, functions and values as directives of Sphinx's Python domain, which gives each an address to link to.

Names in annotations are written with the full address of what they mean, so that no namesake is linked;
`python_use_unqualified_type_names` shows them short again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import griffe

from reference.described import described
from reference.links import Links
from reference.markdown import code, directive
from reference.published import Entry
from reference.signatures import annotated, parameters_of, taken_by

__all__ = ("absorbed", "is_exception", "shown")

_LONGEST_VALUE = 80
_NOT_LISTED = ("no-contents-entry", "")
"""Keeps a name out of the contents of its page, which every page of the site would copy."""
_LABELS = ("classmethod", "staticmethod", "async")
_KIND_IN_CLASS = {"py:function": "py:method", "py:data": "py:attribute"}

Options = list[tuple[str, str]]
Shape = tuple[str, str, Options]


def shown(entry: Entry, links: Links) -> list[str]:
    """The directive of one published name."""
    kind, argument, options = _shape(entry.item, entry.name, links)
    options.insert(0, ("module", entry.module))
    if entry.home != entry.address:
        options.insert(1, ("canonical", entry.home))
    if not entry.at_the_top:
        options.append(_NOT_LISTED)
    body = described(entry.item, links.link)
    inner: list[str] = []
    if isinstance(entry.item, griffe.Class):
        body = [*_bases(entry.item, links), *body, *_values(entry.item)]
        inner = list(_members(entry.item, links, () if entry.at_the_top else (_NOT_LISTED,)))
    return directive(kind, argument, options, [*body, *inner], depth=1 if inner else 0)


def absorbed(item: griffe.Object) -> list[griffe.Class]:
    """The bases of a class in its own package, whose members are shown as its own."""
    if not isinstance(item, griffe.Class):
        return []
    return [base for base in item.mro() if base.package.path == item.package.path]


def _bases(item: griffe.Class, links: Links) -> list[str]:
    """Of what a class is a child, but for bases that are shown as a part of it."""
    parts = {base.path for base in absorbed(item)}
    bases = [base for base in item.bases if isinstance(base, griffe.Expr) and base.canonical_path not in parts]
    return ["Child of " + ", ".join(links.link(annotated(base, links)) for base in bases) + ".", ""] if bases else []


def _values(item: griffe.Class) -> list[str]:
    """The members of an enumeration."""
    if not any("Enum" in str(base) for one in (item, *item.mro()) for base in one.bases):
        return []
    values = [member for member in item.members.values() if isinstance(member, griffe.Attribute) and member.value]
    rows = [f"- {code(member.name)} = {code(str(member.value))}" for member in values if member.name.isupper()]
    return ["**Values**", "", *rows, ""] if rows else []


def _members(item: griffe.Class, links: Links, listed: tuple[tuple[str, str], ...]) -> Iterator[str]:
    for member in _public(item):
        kind, argument, options = _shape(member, member.name, links)
        yield from directive(
            _KIND_IN_CLASS.get(kind, kind), argument, [*options, *listed], described(member, links.link), depth=0
        )


def _public(item: griffe.Class) -> list[griffe.Object]:
    """Documented public members, its own first, then those of bases in its package."""
    found: dict[str, griffe.Object] = {}
    for source in (item, *absorbed(item)):
        for name, member in source.members.items():
            public = not name.startswith("_") or (name in ("__call__", "__enter__") and member.has_docstring)
            if public and member.has_docstring and not member.is_alias and isinstance(member, griffe.Object):
                found.setdefault(name, member)
    return [member for member in found.values() if not isinstance(member, (griffe.Class, griffe.Module))]


def _shape(item: griffe.Object, name: str, links: Links) -> Shape:
    """Directive, signature and options of an object."""
    return _SHAPES[item.kind.value](item, name, links)


def _class(item: griffe.Object, name: str, links: Links) -> Shape:
    taken = taken_by(item, links) if isinstance(item, griffe.Class) else ""
    return ("py:exception" if is_exception(item) else "py:class"), f"{name}({taken})" if taken else name, []


def is_exception(item: griffe.Object) -> bool:
    """Whether something is a class of errors or warnings, by the names of its bases."""
    if not isinstance(item, griffe.Class):
        return False
    last = {str(base).rpartition(".")[2] for one in (item, *item.mro()) for base in one.bases}
    return any(name.endswith(("Error", "Exception", "Warning")) for name in last)


def _function(item: griffe.Object, name: str, links: Links) -> Shape:
    assert isinstance(item, griffe.Function)
    options: Options = [(label, "") for label in _LABELS if label in item.labels]
    returned = f" -> {annotated(item.returns, links)}" if item.returns is not None else ""
    return "py:function", f"{name}({parameters_of(item, links)}){returned}", options


def _attribute(item: griffe.Object, name: str, links: Links) -> Shape:
    assert isinstance(item, griffe.Attribute)
    options: Options = []
    if item.annotation is not None and str(item.annotation) != "Final":
        options.append(("type", annotated(item.annotation, links)))
    value = "" if item.value is None else " ".join(str(item.value).split())
    if "property" in item.labels:
        return "py:property", name, options
    if value and len(value) <= _LONGEST_VALUE:
        options.append(("value", value))
    return "py:data", name, options


_SHAPES: dict[str, Callable[[griffe.Object, str, Links], Shape]] = {
    "class": _class,
    "function": _function,
    "attribute": _attribute,
}
