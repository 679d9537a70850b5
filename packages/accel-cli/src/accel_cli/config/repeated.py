"""Settings that hold several texts: a flag that may be given more than once, a list in a file."""

from __future__ import annotations

from typing import Final

from accel_state.settings.schema import JSON, ValueType

__all__ = ("REPEATED",)


def _parse(text: str) -> tuple[str, ...]:
    if not text.startswith("["):
        return (text,)
    return tuple(map(str, JSON.parse(text)))


REPEATED: Final = ValueType("a text, or a list of texts", _parse, lambda texts: JSON.format(list(texts)))
"""Texts that may hold anything, so no separator divides them."""
