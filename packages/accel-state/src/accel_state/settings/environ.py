"""Settings and the environment: reading the variables of a settings class, and writing them for a child process.

Variable names are a public protocol that other libraries read too, so they occur only in the definitions of settings.
Only `publish` writes to the environment of this process.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping
from functools import lru_cache
from typing import Any, Final, NamedTuple, TypeVar

from accel_state.errors import SettingError
from accel_state.settings.schema import Setting, given_value, settings_of

__all__ = (
    "DEFAULT",
    "LAUNCH_RECORD",
    "ORIGINS",
    "REPEATED_RUN",
    "Given",
    "fill_from_environment",
    "from_environment",
    "origins_text",
    "publish",
    "read_setting",
    "resolve",
    "to_environment",
)

S = TypeVar("S")


class Given(NamedTuple):
    """A value and its origin, such as `argument`, `$ACCELERATE_USE_CPU`, `run.yaml:12` or `default`."""

    value: Any
    origin: str


DEFAULT: Final = "default"

_UNQUOTED_TEXT: Final = re.compile(r"[ -$&-+\--9;-~]*")
"""Texts that need no quoting in `ORIGINS`: without separators and non-ASCII characters."""

ORIGINS: Final = "ACCEL_LAUNCH_ORIGINS"
"""Variable in which a launcher passes on the origin of each value: the flag, or the line of a config file."""


LAUNCH_RECORD: Final = "ACCEL_LAUNCH_RECORD"
"""Variable in which `accel launch` passes on, as JSON, its command line and its settings with their sources."""


REPEATED_RUN: Final = "ACCEL_REPEATED_RUN"
"""Variable in which `accel runs repeat` and `replay` ask for another folder and for an end after a step, as JSON."""


def read_setting(setting: Setting, environ: Mapping[str, str] | None = None) -> Given | None:
    """Value of a setting from the first of its variables that is set and not empty, or None.

    Raises:
        SettingError: the value of the variable is invalid.
    """
    source = os.environ if environ is None else environ
    for variable in setting.variables:
        text = source.get(variable, "")
        if text.strip():
            origin = _origins(source.get(ORIGINS, "")).get((variable, text), f"${variable}")
            return Given(setting.parse(text, origin), origin)
    return None


def origins_text(origins: Mapping[tuple[str, str], str]) -> str:
    """Value of `ORIGINS`.

    Args:
        origins: the origin of each value, by the name and the text of its variable. If the variable has another text
            later, another program has set it, and the origin is ignored.

    Example:
        >>> origins_text({("ACCEL_BACKEND", "fsdp2"): "--backend"})
        'ACCEL_BACKEND:fsdp2:--backend'
    """
    rows = ((variable, text, origin) for (variable, text), origin in sorted(origins.items()))
    return ",".join(":".join(map(_quoted, row)) for row in rows)


def _quoted(text: str) -> str:
    """A text without separators; few texts have any, so the slow import of `quote` is deferred."""
    if _UNQUOTED_TEXT.fullmatch(text):
        return text
    from urllib.parse import quote

    return quote(text, safe="", errors="surrogatepass")


def _unquoted(text: str) -> str:
    if "%" not in text:
        return text
    from urllib.parse import unquote

    return unquote(text, errors="surrogatepass")


@lru_cache(maxsize=4)
def _origins(text: str) -> Mapping[tuple[str, str], str]:
    if not text:
        return {}
    rows = (tuple(map(_unquoted, row.split(":"))) for row in text.split(","))
    return {(row[0], row[1]): row[2] for row in rows if len(row) == 3}


def resolve(
    settings_class: type,
    arguments: Mapping[str, Any],
    environ: Mapping[str, str] | None = None,
    file: Mapping[str, Given] | None = None,
) -> dict[str, Given]:
    """The value and origin of every setting of a class: argument, else environment, else config file, else default.

    Args:
        settings_class: a dataclass with `setting` fields.
        arguments: values from code or from flags; None means not given.
        environ: variables to read; by default those of this process.
        file: values of a config file by the name of the setting, with the line as origin.
    """
    resolved = {}
    for name, definition in settings_of(settings_class).items():
        if arguments.get(name) is not None:
            resolved[name] = Given(arguments[name], "argument")
        else:
            fallback = (file or {}).get(name) or Given(definition.default, DEFAULT)
            resolved[name] = read_setting(definition, environ) or fallback
    return resolved


def from_environment(settings_class: type[S], environ: Mapping[str, str] | None = None, **arguments: Any) -> S:
    """An instance of a settings class from the arguments that are not None, the environment and the defaults.

    Raises:
        SettingError: the value of a variable is invalid.
    """
    resolved = resolve(settings_class, arguments, environ)
    others = {name: value for name, value in arguments.items() if name not in resolved}
    return settings_class(**{name: entry.value for name, entry in resolved.items()}, **others)


def fill_from_environment(settings: object, environ: Mapping[str, str] | None = None) -> None:
    """Replace each setting of an instance that is None by the value of its variable, else by `Setting.unset`.

    For classes that read missing arguments of the constructor from the environment.

    Raises:
        SettingError: the value of a variable is invalid.
    """
    for name, definition in settings_of(type(settings)).items():
        if getattr(settings, name) is None:
            configured = read_setting(definition, environ)
            setattr(settings, name, definition.unset if configured is None else configured.value)


def to_environment(settings: object) -> dict[str, str]:
    """Variables that pass an instance of a settings class on to a child process, without settings that are None.

    Raises:
        SettingError: a value is an object without a text form, such as a function or a module.
    """
    variables = {}
    for name, definition in settings_of(type(settings)).items():
        value = given_value(settings, name)
        if definition.variable is None or value is None:
            continue
        # `str` formats any object, but for most of them the text cannot be parsed again.
        if definition.type.format is str and not isinstance(value, (str, int, float, os.PathLike)):
            raise SettingError(
                f"Cannot pass {name} of {type(settings).__name__} on to another process.",
                f"Its variable {definition.variable} contains text, and {name} is a {type(value).__name__}.",
                f"Give {definition.type.name}, or create the settings in the other process.",
            )
        variables[definition.variable] = definition.type.format(value)
    return variables


def publish(variables: Mapping[str, str], remove: Iterable[str] = ()) -> None:
    """Write variables to the environment of this process, for libraries that read them there."""
    for name in remove:
        os.environ.pop(name, None)
    os.environ.update(variables)
