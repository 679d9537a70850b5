"""Classes whose attributes programs replace.

Programs that were written for another library replace attributes which that library reads. A package that knows their
names registers a listener here.
"""

from __future__ import annotations

from abc import ABCMeta
from collections.abc import Callable, Mapping
from typing import Any, Final

__all__ = ("Replaceable", "add_listener")

_listeners: Final[list[Callable[[type, Mapping[str, Any], bool], None]]] = []


def add_listener(listener: Callable[[type, Mapping[str, Any], bool], None]) -> None:
    """Call `listener(class, attributes, new)` for each later assignment, and for each class that is created.

    It is called three frames below the line of the assignment or of the `class` statement.
    """
    _listeners.append(listener)


class Replaceable(ABCMeta):
    """Metaclass of a class whose attributes programs replace; a subclass of it may also be an abstract class."""

    def __init__(cls, name: str, bases: tuple[type, ...], namespace: dict[str, Any], **kwargs: Any) -> None:
        super().__init__(name, bases, namespace, **kwargs)
        for listener in _listeners:
            listener(cls, namespace, True)

    def __setattr__(cls, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        for listener in _listeners:
            listener(cls, {name: value}, False)
