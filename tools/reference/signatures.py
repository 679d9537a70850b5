"""Signatures of functions and classes, with the full address of what annotations name."""

from __future__ import annotations

from collections.abc import Sequence

import griffe

from reference.links import Links

__all__ = ("annotated", "parameters_of", "taken_by")

_Kind = griffe.ParameterKind
_STARS = {_Kind.var_positional: "*", _Kind.var_keyword: "**"}


def annotated(annotation: str | griffe.Expr | None, links: Links) -> str:
    """An annotation as text."""
    if not isinstance(annotation, griffe.Expr):
        return str(annotation)
    return "".join(_full(part, links) for part in annotation.iterate(flat=True))


def _full(part: str | griffe.Expr, links: Links) -> str:
    if isinstance(part, griffe.ExprName) and not isinstance(part.parent, griffe.Expr):
        return links.targets.get(part.canonical_path, str(part))
    return str(part)


def taken_by(item: griffe.Class, links: Links) -> str:
    """What stands between the brackets where an object of a class is made."""
    if item.parameters:
        return _parameters(list(item.parameters)[1:], links)
    if not any(str(base) == "NamedTuple" for base in item.bases):
        return ""
    fields = [one for one in item.members.values() if isinstance(one, griffe.Attribute) and one.annotation is not None]
    return ", ".join(
        _with_default(one.name, one.annotation, one.value, links) for one in fields if "property" not in one.labels
    )


def parameters_of(item: griffe.Function, links: Links) -> str:
    """What stands between the brackets of a function, without `self`."""
    bound = item.parent is not None and item.parent.is_class and "staticmethod" not in item.labels
    return _parameters(list(item.parameters)[int(bound) :], links)


def _parameters(parameters: Sequence[griffe.Parameter], links: Links) -> str:
    parts: list[str] = []
    before: griffe.ParameterKind | None = None
    for one in parameters:
        if before is _Kind.positional_only and one.kind is not _Kind.positional_only:
            parts.append("/")
        if one.kind is _Kind.keyword_only and before not in (_Kind.keyword_only, _Kind.var_positional):
            parts.append("*")
        stars = _STARS.get(one.kind) if one.kind is not None else None
        default = None if stars else one.default
        parts.append((stars or "") + _with_default(one.name, one.annotation, default, links))
        before = one.kind
    return ", ".join([*parts, "/"] if before is _Kind.positional_only else parts)


def _with_default(name: str, annotation: object, default: object, links: Links) -> str:
    if annotation is None:
        return name if default is None else f"{name}={default}"
    typed = f"{name}: {annotated(annotation if isinstance(annotation, griffe.Expr) else str(annotation), links)}"
    return typed if default is None else f"{typed} = {default}"
