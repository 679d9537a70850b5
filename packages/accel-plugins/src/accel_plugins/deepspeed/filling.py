"""What the run knows goes in place of "auto" in DeepSpeed's configuration; what contradicts it is refused.

One function does it, at every moment at which something becomes known: when the settings are read, and when models,
optimizers and loaders are prepared.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final, NamedTuple

from accel_plugins.deepspeed.document import HfDeepSpeedConfig
from accel_state.errors import Conflict, SettingError

__all__ = ("AUTO", "Fact", "contradictions", "fill", "refuse", "remaining")

AUTO: Final = "auto"


class Fact(NamedTuple):
    """Something that the run knows about one entry.

    Args:
        key: the dotted key of the entry.
        value: what is known.
        source: where it is known from, as users would name it: "DeepSpeedPlugin(zero_stage=2)".
        needed: add the entry where the configuration has none.
        binding: the configuration may not say something else; otherwise this is a suggestion.
    """

    key: str
    value: Any
    source: str
    needed: bool = False
    binding: bool = True


def fill(document: HfDeepSpeedConfig, facts: Iterable[Fact]) -> None:
    """Put facts where the configuration says "auto", or lacks an entry that is needed.

    Raises:
        Conflict: the configuration says something else than a fact; all of them are named.
    """
    known = list(facts)
    refuse(contradictions(document, known))
    for fact in known:
        present = document.get_value(fact.key)
        if present == AUTO or (present is None and fact.needed):
            document.set_value(fact.key, fact.value)
    document.set_stage_and_offload()


def contradictions(document: HfDeepSpeedConfig, facts: Iterable[Fact]) -> list[str]:
    """One line for each fact that the configuration contradicts."""
    return [
        f"{fact.key} is {present!r} in the DeepSpeed configuration, and {fact.value!r} by {fact.source}"
        for fact in facts
        if fact.binding
        and (present := document.get_value(fact.key)) not in (None, AUTO)
        and not _same(present, fact.value)
    ]


def refuse(lines: list[str]) -> None:
    """Raise for what `contradictions` found.

    Raises:
        Conflict: there is anything.
    """
    if lines:
        raise Conflict(
            "Cannot configure DeepSpeed from two sources.",
            f"They contradict each other: {'; '.join(lines)}.",
            'Let both say the same, or write "auto" in the configuration.',
        )


def remaining(document: HfDeepSpeedConfig) -> None:
    """Refuse a configuration that still says "auto" somewhere.

    Raises:
        SettingError: it does; all such entries are named.
    """
    left = sorted(_auto_keys(document.config))
    if left:
        raise SettingError(
            "DeepSpeed was to start.",
            f'Nothing here knows what to put in place of "auto" for {", ".join(left)}.',
            "Write numbers there. Sizes of ZeRO stage 3 follow from model.config.hidden_size, learning rates from a "
            "DummyOptim, schedules from a DummyScheduler.",
        )


def _auto_keys(table: Mapping[str, Any], before: str = "") -> Iterator[str]:
    for name, value in table.items():
        if isinstance(value, Mapping):
            yield from _auto_keys(value, f"{before}{name}.")
        elif value == AUTO:
            yield before + name


def _same(one: Any, other: Any) -> bool:
    """Whether two values say the same, be they numbers or texts of numbers."""
    if one == other:
        return True
    if isinstance(one, bool) or isinstance(other, bool):
        return str(one).lower() == str(other).lower()
    try:
        return float(one) == float(other)
    except (TypeError, ValueError):
        return False
