"""The wizard of `accel config`: its questions are those that the settings carry, installed backends included."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final

from accel_cli.config.known import says_nothing
from accel_cli.config.prompt import Prompter
from accel_cli.config.resolved import label
from accel_state.settings.schema import BOOLEAN, Setting, settings_of

__all__ = ("AUTOMATIC", "questions")

AUTOMATIC: Final = "automatic"
_YES_OR_NO: Final = ("no", "yes")


def _compiles(answers: Mapping[str, Any]) -> bool:
    return bool(answers["dynamo_config.dynamo_backend"] != "NO")


# Questions that make sense only after certain answers.
_ONLY_IF: Final[Mapping[str, Callable[[Mapping[str, Any]], bool]]] = {
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
_NEEDED: Final = ("main_process_ip",)


def questions(prompter: Prompter, classes: Iterable[type], backends: Mapping[str, type | None]) -> dict[str, Any]:
    """Ask, and return the answers by key of the config file.

    Args:
        prompter: how to ask.
        classes: settings classes of the launcher.
        backends: settings class of each installed backend, None for one without settings.
    """
    answers: dict[str, Any] = {}
    keys = _ask_all(prompter, classes, answers)
    name = prompter.choose("Which backend should own the run?", [AUTOMATIC, *backends], AUTOMATIC)
    if name != AUTOMATIC:
        keys["backend"] = name
        chosen = backends[name]
        keys.update(_ask_all(prompter, () if chosen is None else (chosen,), answers))
    return keys


def _ask_all(prompter: Prompter, classes: Iterable[type], answers: dict[str, Any]) -> dict[str, Any]:
    keys = {}
    for settings_class in classes:
        for known in settings_of(settings_class).values():
            name = label(known)
            relevant = _ONLY_IF.get(name)
            if known.question is None or known.key is None or (relevant is not None and not relevant(answers)):
                continue
            value = answers[name] = _ask(prompter, known, _SUGGESTIONS.get(name))
            if value is not None and not says_nothing(known.key, value):
                keys[known.key] = value
    return keys


def _ask(prompter: Prompter, known: Setting, suggestion: str | None) -> Any:
    question = str(known.question)
    if known.type.parse is BOOLEAN.parse:
        return prompter.choose(question, _YES_OR_NO, _YES_OR_NO[bool(known.default)]) == "yes"
    if known.type.choices:
        return known.parse(prompter.choose(question, known.type.choices, suggestion or known.default), "answer")
    if suggestion is None:
        suggestion = "" if known.default is None else known.type.format(known.default)
    answer = prompter.ask(question, suggestion, lambda text: _problem(known, text))
    return known.parse(answer, "answer") if answer else None


def _problem(known: Setting, text: str) -> str | None:
    """Why a text is not an answer, or None."""
    if not text.strip():
        return "An answer is needed here." if known.name in _NEEDED else None
    try:
        known.type.parse(text)
    except ValueError:
        return f"Give {known.type.name}."
    return None
