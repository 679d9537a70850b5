"""`_shared_state` of the state classes: their content as a mapping, which programs read, and clear to begin again."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

__all__ = ("SharedState", "StateContent")


class StateContent(dict[str, Any]):
    """The content of a state at one moment; assignments to items do not change the state.

    Args:
        values: the content.
        reset: ends the state.
    """

    def __init__(self, values: Mapping[str, Any], reset: Callable[[], None]) -> None:
        super().__init__(values)
        self._reset = reset

    def clear(self) -> None:
        """End the state, so that the next one can be created with other arguments."""
        self._reset()
        super().clear()


class SharedState:
    """Class attribute that returns the content of a state; it is empty exactly while there is no state.

    Args:
        read: returns the content.
        reset: ends the state.

    Example:
        >>> values = {"device": "cpu"}
        >>> class View:
        ...     _shared_state = SharedState(lambda: values, values.clear)
        >>> View._shared_state
        {'device': 'cpu'}
        >>> View._shared_state.clear()
        >>> View._shared_state
        {}
    """

    def __init__(self, read: Callable[[], Mapping[str, Any]], reset: Callable[[], None]) -> None:
        self._read = read
        self._reset = reset

    def __get__(self, instance: object, owner: type | None = None) -> StateContent:
        return StateContent(self._read(), self._reset)
