"""The wizard of `accel config`: the settings define its questions, including those of installed backends.

In a terminal it shows menus if questionary is installed; otherwise it asks in plain lines.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final, Protocol

from accel_cli.config.file import is_default
from accel_cli.config.resolved import label
from accel_state.errors import SettingError
from accel_state.settings.installed import importable
from accel_state.settings.schema import BOOLEAN, Setting, settings_of

__all__ = (
    "AUTOMATIC",
    "Lines",
    "Menus",
    "Prompter",
    "prompter",
    "questions",
)


class Prompter(Protocol):
    """Asks the user a question."""

    def choose(self, question: str, options: Sequence[str], default: str) -> str:
        """One of the options."""

    def ask(self, question: str, default: str, problem: Callable[[str], str | None]) -> str:
        """Ask for a text, until `problem` returns None for it."""


def prompter() -> Prompter:
    """The prompter that this terminal supports."""
    in_terminal = sys.stdin.isatty() and sys.stdout.isatty()
    return Menus() if in_terminal and importable("questionary") else Lines()


class Menus:
    """Asks with menus of the library questionary."""

    def choose(self, question: str, options: Sequence[str], default: str) -> str:
        """Ask for one of the options, selected with the arrow keys."""
        import questionary

        return str(questionary.select(question, choices=list(options), default=default).unsafe_ask())

    def ask(self, question: str, default: str, problem: Callable[[str], str | None]) -> str:
        """Ask for a text; an error is shown while the user types."""
        import questionary

        def check(text: str) -> bool | str:
            return problem(text) or True

        return str(questionary.text(question, default=default, validate=check).unsafe_ask())


class Lines:
    """Reads each answer as a line of standard input; an empty line selects the default."""

    def choose(self, question: str, options: Sequence[str], default: str) -> str:
        """Ask for one of the options, by its number or its name."""
        print(question)
        for number, option in enumerate(options, start=1):
            print(f"  {number}. {option}")

        def problem(text: str) -> str | None:
            is_option = text in options or (text.isdecimal() and 1 <= int(text) <= len(options))
            return None if is_option else f"Enter a number from 1 to {len(options)}, or a name from the list."

        answer = self.ask("Number or name:", default, problem)
        return answer if answer in options else options[int(answer) - 1]

    def ask(self, question: str, default: str, problem: Callable[[str], str | None]) -> str:
        """Ask for a text until `problem` has no objection; an empty answer is the default."""
        while True:
            try:
                answer = input(f"{question} [{default}] " if default else f"{question} ").strip() or default
            except EOFError:
                failure = f"Cannot ask the question {question!r}."
                remedy = "Answer in a terminal, or run `accel config default`."
                raise SettingError(failure, "The input ended before the answer.", remedy) from None
            wrong = problem(answer)
            if wrong is None:
                return answer
            print(wrong)


AUTOMATIC: Final = "automatic"
_YES_OR_NO: Final = ("no", "yes")


def _compiles(answers: Mapping[str, Any]) -> bool:
    return bool(answers["dynamo_config.dynamo_backend"] != "NO")


# Questions that make sense only after certain answers.
_CONDITIONS: Final[Mapping[str, Callable[[Mapping[str, Any]], bool]]] = {
    "machine_rank": lambda answers: bool(answers["num_machines"] > 1),
    "main_process_ip": lambda answers: bool(answers["num_machines"] > 1),
    "main_process_port": lambda answers: bool(answers["num_machines"] > 1),
    "gpu_ids": lambda answers: not answers.get("cpu"),
    "dynamo_config.dynamo_mode": _compiles,
    "dynamo_config.dynamo_use_fullgraph": _compiles,
    "dynamo_config.dynamo_use_dynamic": _compiles,
    "dynamo_config.dynamo_use_regional_compilation": _compiles,
}

_SUGGESTIONS: Final = {
    "num_processes": "1",
    "gpu_ids": "all",
    "main_process_port": "29500",
    "dynamo_config.dynamo_backend": "NO",
    "dynamo_config.dynamo_mode": "default",
}
_REQUIRED_ANSWERS: Final = ("main_process_ip",)


def questions(prompter: Prompter, classes: Iterable[type], backends: Mapping[str, type | None]) -> dict[str, Any]:
    """Ask all questions, and return the answers by key of the config file.

    Args:
        prompter: asks the user.
        classes: settings classes of the launcher.
        backends: settings class of each installed backend; None for a backend without settings.
    """
    answers: dict[str, Any] = {}
    keys = _ask_all(prompter, classes, answers)
    name = prompter.choose("Which backend do you want to use?", [AUTOMATIC, *backends], AUTOMATIC)
    if name != AUTOMATIC:
        keys["backend"] = name
        chosen = backends[name]
        keys.update(_ask_all(prompter, () if chosen is None else (chosen,), answers))
    return keys


def _ask_all(prompter: Prompter, classes: Iterable[type], answers: dict[str, Any]) -> dict[str, Any]:
    keys = {}
    for settings_class in classes:
        for setting in settings_of(settings_class).values():
            name = label(setting)
            relevant = _CONDITIONS.get(name)
            if setting.question is None or setting.key is None or (relevant is not None and not relevant(answers)):
                continue
            value = answers[name] = _ask(prompter, setting, _SUGGESTIONS.get(name))
            if value is not None and not is_default(setting.key, value):
                keys[setting.key] = value
    return keys


def _ask(prompter: Prompter, setting: Setting, suggestion: str | None) -> Any:
    question = str(setting.question)
    if setting.type.parse is BOOLEAN.parse:
        return prompter.choose(question, _YES_OR_NO, _YES_OR_NO[bool(setting.default)]) == "yes"
    if setting.type.choices:
        return setting.parse(prompter.choose(question, setting.type.choices, suggestion or setting.default), "answer")
    if suggestion is None:
        suggestion = "" if setting.default is None else setting.type.format(setting.default)
    answer = prompter.ask(question, suggestion, lambda text: _problem(setting, text))
    return setting.parse(answer, "answer") if answer else None


def _problem(setting: Setting, text: str) -> str | None:
    """The reason why a text is not a valid answer, or None."""
    if not text.strip():
        return "This question needs an answer." if setting.name in _REQUIRED_ANSWERS else None
    try:
        setting.type.parse(text)
    except ValueError:
        return f"Enter {setting.type.name}."
    return None
