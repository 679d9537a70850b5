"""A strategy that writes down what it is asked, for tests of whoever drives a strategy."""

from __future__ import annotations

from typing import Any, Final

from accel_plugins.strategy import Strategy

__all__ = ("QUESTIONS", "FakeStrategy")

QUESTIONS: Final = frozenset(
    name for name, value in vars(Strategy).items() if callable(value) and not name.startswith("_")
)
"""Names of the methods of a strategy."""


class FakeStrategy(Strategy):
    """Answers like one process.

    Attributes:
        calls: names of the called methods, in order.
    """

    def __init__(self, context: Any, config: Any = None) -> None:
        self.calls: list[str] = []
        super().__init__(context, config)

    def __getattribute__(self, name: str) -> Any:
        if name in QUESTIONS:
            self.calls.append(name)
        return super().__getattribute__(name)
