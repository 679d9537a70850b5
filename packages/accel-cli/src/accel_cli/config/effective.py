"""What each setting is, where that came from and what it overrode: flag, then environment, then file, then default."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from accel_state.settings.environ import DEFAULT, Given, read
from accel_state.settings.schema import Setting, settings_of

__all__ = ("Effect", "Effective", "effective")

S = TypeVar("S")


@dataclass(frozen=True)
class Effect:
    """One setting with everything that was said about it.

    Args:
        setting: the definition.
        candidates: values with their origins, the one that counts first; the default is always the last.
    """

    setting: Setting
    candidates: tuple[Given, ...]

    @property
    def value(self) -> Any:
        """The value that counts."""
        return self.candidates[0].value

    @property
    def origin(self) -> str:
        """Where the value came from."""
        return self.candidates[0].origin

    @property
    def given(self) -> bool:
        """Whether anybody gave a value, even one that equals the default."""
        return len(self.candidates) > 1

    @property
    def overridden(self) -> tuple[Given, ...]:
        """What was given elsewhere and does not count."""
        return self.candidates[1:-1]


class Effective(Mapping[str, Effect]):
    """The effect of every setting of some classes, by setting name."""

    def __init__(self, effects: Mapping[str, Effect]) -> None:
        self._effects = dict(effects)

    def __getitem__(self, name: str) -> Effect:
        return self._effects[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._effects)

    def __len__(self) -> int:
        return len(self._effects)

    def instance(self, settings_class: type[S]) -> S:
        """An instance of one of the classes, with the values that count."""
        return settings_class(**{name: self[name].value for name in settings_of(settings_class)})

    def variables(self, settings_class: type) -> dict[str, str]:
        """Variables that carry what was given for a class; what is only a default is not passed on as if asked for."""
        effects = [self[name] for name in settings_of(settings_class)]
        return {
            effect.setting.variable: effect.setting.kind.format(effect.value)
            for effect in effects
            if effect.given and effect.setting.variable is not None and effect.value is not None
        }


def effective(
    classes: Iterable[type],
    flags: Mapping[str, Given],
    environ: Mapping[str, str],
    file: Mapping[str, Given],
    surroundings: Mapping[str, Given] | None = None,
) -> Effective:
    """Put the sources together.

    Args:
        classes: settings classes; no two of them share a setting's name.
        flags: values of the command line by setting name.
        environ: variables to read.
        file: values of the config file by setting name.
        surroundings: values that variables of a batch system imply; after the variables that name a setting.

    Raises:
        SettingError: a variable holds something that is not of its setting's kind.
    """
    effects = {}
    for settings_class in classes:
        for name, known in settings_of(settings_class).items():
            implied = (surroundings or {}).get(name)
            sources = (flags.get(name), read(known, environ), implied, file.get(name))
            said = tuple(given for given in sources if given is not None)
            effects[name] = Effect(known, (*said, Given(known.default, DEFAULT)))
    return Effective(effects)
