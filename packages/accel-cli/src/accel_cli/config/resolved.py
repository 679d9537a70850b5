"""The value of each setting, its source and what it overrides: flag, then environment, then file, then default."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final, NamedTuple, TypeVar

from accel_state.settings.environ import DEFAULT, Given, read_setting
from accel_state.settings.schema import JSON, Setting, ValueType, settings_of

__all__ = (
    "REPEATED",
    "Ignored",
    "ResolvedSetting",
    "ResolvedSettings",
    "label",
    "resolve_settings",
)


def _parse(text: str) -> tuple[str, ...]:
    if not text.startswith("["):
        return (text,)
    return tuple(map(str, JSON.parse(text)))


REPEATED: Final = ValueType("a text, or a list of texts", _parse, lambda texts: JSON.format(list(texts)))
"""A list of texts that may contain any character, so that no separator is possible."""


S = TypeVar("S")


def label(setting: Setting) -> str:
    """Unique name of a setting among all classes; for a backend's setting, its key in the file or its flag."""
    if setting.key is not None:
        return setting.key if "." in setting.key else setting.name
    return setting.name if setting.flag is None else setting.flag.removeprefix("--")


class ResolvedSetting(NamedTuple):
    """One setting with the values from all sources.

    Args:
        definition: the setting.
        candidates: values with their origins, by priority: the first is effective, and the default is always last.
    """

    definition: Setting
    candidates: tuple[Given, ...]

    @property
    def value(self) -> Any:
        """The value that the run uses: that of the first candidate."""
        return self.candidates[0].value

    @property
    def origin(self) -> str:
        """The source of the effective value."""
        return self.candidates[0].origin

    @property
    def is_set(self) -> bool:
        """Whether the user gave a value, even one equal to the default."""
        return len(self.candidates) > 1

    @property
    def of_file(self) -> bool:
        """Whether a config file gave the effective value."""
        return self.is_set and not self.origin.startswith(("--", "$"))

    @property
    def text(self) -> str:
        """Name, value and source, as messages show them."""
        return f"{self.definition.name}={self.value} ({self.origin})"

    @property
    def overridden(self) -> tuple[Given, ...]:
        """Given values that the effective one overrides."""
        return self.candidates[1:-1]


class Ignored(NamedTuple):
    """A given value that is not used.

    Args:
        name: label of its setting.
        candidate: the value.
        reason: why it is not used, as the end of a sentence.
    """

    name: str
    candidate: Given
    reason: str


class ResolvedSettings(Mapping[str, ResolvedSetting]):
    """The values of every setting of some classes, by label; if two settings share a label, the first is shown."""

    def __init__(self, by_class: Mapping[type, Mapping[str, ResolvedSetting]]) -> None:
        self._by_class = by_class
        self._effects: dict[str, ResolvedSetting] = {}
        for effects in by_class.values():
            for effect in effects.values():
                self._effects.setdefault(label(effect.definition), effect)

    def __getitem__(self, name: str) -> ResolvedSetting:
        return self._effects[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._effects)

    def __len__(self) -> int:
        return len(self._effects)

    def classes_without(self, classes: Iterable[type]) -> tuple[type, ...]:
        """The settings classes, without some of them."""
        return tuple(one for one in self._by_class if one not in classes)

    def instance(self, settings_class: type[S]) -> S:
        """An instance of one of the classes, with the effective values."""
        return settings_class(**{name: effect.value for name, effect in self._by_class[settings_class].items()})

    def without(self, ignored: Iterable[Ignored]) -> ResolvedSettings:
        """The settings without some of the given values."""
        dropped = {(one.name, one.candidate.origin) for one in ignored}

        def rest(effect: ResolvedSetting) -> ResolvedSetting:
            name = label(effect.definition)
            kept = tuple(candidate for candidate in effect.candidates if (name, candidate.origin) not in dropped)
            return effect._replace(candidates=kept)

        by_class = {
            one: {name: rest(effect) for name, effect in effects.items()} for one, effects in self._by_class.items()
        }
        return ResolvedSettings(by_class)

    def launched(self, settings_class: type) -> dict[str, str]:
        """Variables of a class that a launch sets for other libraries although no value is given."""
        return {
            effect.definition.variable: effect.definition.launched
            for effect in self._by_class[settings_class].values()
            if not effect.is_set and effect.definition.variable is not None and effect.definition.launched is not None
        }

    def variables(self, settings_class: type) -> dict[str, str]:
        """Variables that pass the given values of a class to the processes; defaults are not passed on."""
        effects = self._by_class[settings_class]
        variables = {
            effect.definition.variable: effect.definition.type.format(effect.value)
            for effect in effects.values()
            if effect.is_set and effect.definition.variable is not None and effect.value is not None
        }
        further = getattr(settings_class, "further_variables", None)
        if further is not None:
            values = {name: effect.candidates[0] for name, effect in effects.items() if effect.is_set}
            variables.update(further(values))
        return variables

    def origins(self, settings_class: type) -> dict[str, str]:
        """The source of each value that `variables` passes on, by variable."""
        return {
            effect.definition.variable: effect.origin
            for effect in self._by_class[settings_class].values()
            if effect.is_set and effect.definition.variable is not None
        }


def resolve_settings(
    classes: Iterable[type],
    flags: Mapping[str, Given],
    environ: Mapping[str, str],
    file: Mapping[str, Given],
    cluster: Mapping[str, Given] | None = None,
) -> ResolvedSettings:
    """Combine all sources of the settings.

    Args:
        classes: settings classes.
        flags: values of the command line by label.
        environ: variables to read.
        file: values of the config file by label.
        cluster: values from the variables of a batch system; variables of a setting have priority over them.

    Raises:
        SettingError: a setting cannot parse the value of its variable.
    """

    def effect(setting: Setting) -> ResolvedSetting:
        name = label(setting)
        sources = (flags.get(name), read_setting(setting, environ), (cluster or {}).get(name), file.get(name))
        said = tuple(source for source in sources if source is not None)
        return ResolvedSetting(setting, (*said, Given(setting.default, DEFAULT)))

    return ResolvedSettings(
        {one: {name: effect(setting) for name, setting in settings_of(one).items()} for one in classes}
    )
