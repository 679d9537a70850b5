"""Parts of docstrings in Google style, for the tables of the reference; autodoc and napoleon show them whole."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from typing import Any

from sphinx.ext.napoleon.docstring import GoogleDocstring

from reference.markdown import Link, code, prose

__all__ = ("argument_meanings", "first_sentence", "opening", "unknown_arguments")

_SECTION = re.compile(r"^(?:Args|Attributes|Example|Raises|Returns|Yields):$", re.MULTILINE)
_ARGUMENT = re.compile(r"^:param ([\w*\\]+):\s*(.*(?:\n .*)*)", re.MULTILINE)


def first_sentence(item: object, link: Link = code) -> str:
    """What an object is for, in one line of markdown."""
    return prose(" ".join(opening(item).partition("\n\n")[0].split()), link)


def opening(item: object) -> str:
    """The text of a docstring before its first section."""
    return _SECTION.split(inspect.getdoc(item) or "")[0].strip()


def argument_meanings(item: object, link: Link = code) -> dict[str, str]:
    """What a docstring says about each argument, by its name."""
    fields = _ARGUMENT.findall(str(GoogleDocstring(inspect.cleandoc(item.__doc__ or ""))))
    return {name.replace("\\", "").lstrip("*"): prose(" ".join(said.split()), link) for name, said in fields}


def unknown_arguments(item: type | Callable[..., Any]) -> list[str]:
    """Names that a docstring describes as arguments, and that the object does not take."""
    bases = inspect.getmro(item) if isinstance(item, type) else ()
    takers = [base.__dict__[name] for base in bases for name in ("__init__", "__new__") if name in vars(base)] or [item]
    functions = (one for one in map(inspect.unwrap, takers) if inspect.isfunction(one) or inspect.ismethod(one))
    taken = {name for function in functions for name in inspect.signature(function).parameters}
    taken |= {name for base in bases for name in (*vars(base), *inspect.get_annotations(base))}
    return [name for name in argument_meanings(item) if name not in taken]
