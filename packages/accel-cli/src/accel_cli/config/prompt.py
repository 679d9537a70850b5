"""Asking in a terminal: menus with arrow keys, and plain lines where there is no terminal or no library for menus."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Protocol

from accel_state.errors import SettingError
from accel_state.settings.installed import importable

__all__ = ("Lines", "Menus", "Prompter", "prompter")


class Prompter(Protocol):
    """A way to ask."""

    def choose(self, question: str, options: Sequence[str], default: str) -> str:
        """One of the options."""

    def ask(self, question: str, default: str, problem: Callable[[str], str | None]) -> str:
        """A text for which `problem` says None."""


def prompter() -> Prompter:
    """The way that this terminal allows."""
    in_terminal = sys.stdin.isatty() and sys.stdout.isatty()
    return Menus() if in_terminal and importable("questionary") else Lines()


class Menus:
    """Menus of the library questionary."""

    def choose(self, question: str, options: Sequence[str], default: str) -> str:
        """One of the options, chosen with the arrow keys."""
        import questionary

        return str(questionary.select(question, choices=list(options), default=default).unsafe_ask())

    def ask(self, question: str, default: str, problem: Callable[[str], str | None]) -> str:
        """A text; what is wrong with it is shown while it is typed."""
        import questionary

        def check(text: str) -> bool | str:
            return problem(text) or True

        return str(questionary.text(question, default=default, validate=check).unsafe_ask())


class Lines:
    """One line of standard input for each answer; an empty one takes the default."""

    def choose(self, question: str, options: Sequence[str], default: str) -> str:
        """One of the options, by its number or its name."""
        print(question)
        for number, option in enumerate(options, start=1):
            print(f"  {number}. {option}")

        def problem(text: str) -> str | None:
            known = text in options or (text.isdecimal() and 1 <= int(text) <= len(options))
            return None if known else f"Give a number from 1 to {len(options)}, or a name."

        answer = self.ask("Which one?", default, problem)
        return answer if answer in options else options[int(answer) - 1]

    def ask(self, question: str, default: str, problem: Callable[[str], str | None]) -> str:
        """A text."""
        while True:
            try:
                answer = input(f"{question} [{default}] " if default else f"{question} ").strip() or default
            except EOFError:
                asked = f"Cannot ask the question {question!r}."
                remedy = "Answer in a terminal, or run `accel config default`."
                raise SettingError(asked, "The input ended before the answer.", remedy) from None
            wrong = problem(answer)
            if wrong is None:
                return answer
            print(wrong)
