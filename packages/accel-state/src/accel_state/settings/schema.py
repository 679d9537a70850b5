"""One definition per setting: its type, default, variable, flag, key and question.

A settings class is a dataclass with fields that `setting(...)` creates. The launcher's flags, the keys of the config
file, the wizard's questions, and the environment variables that the launcher writes and the processes read are all
derived from these definitions. So nothing about a setting is written twice.

    @dataclass
    class Launch:
        num_processes: int | None = setting(
            None, type=INTEGER, flag="--{name}", key="{name}", help="Processes over all machines."
        )

Variables, flags and config files contain names, and a settings class must not import torch. But users of a public
settings class compare its fields with members of torch's enums, or call them. An `ObjectField` supports both: it stores
the name, and creates the object when the field is first read.

    @object_fields(strategy=enum_field("torch.distributed.fsdp:ShardingStrategy"))
    @dataclass
    class Sharding:
        strategy: Any = setting(None, type=choice("FULL_SHARD", "NO_SHARD", fold=str.upper), variable="STRATEGY")

    Sharding("no_shard").strategy            # ShardingStrategy.NO_SHARD
    plain_value(Sharding("no_shard"), "strategy")  # "NO_SHARD"
"""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final, NamedTuple, TypeVar

from accel_state.errors import SettingError
from accel_state.settings.integers import as_int

__all__ = (
    "BOOLEAN",
    "FLOAT",
    "INTEGER",
    "JSON",
    "SWITCH",
    "TEXT",
    "ObjectField",
    "Setting",
    "ValueType",
    "choice",
    "closest",
    "enum_field",
    "field_of",
    "given_value",
    "import_object",
    "int_at_least",
    "listing",
    "member_name",
    "object_fields",
    "plain_value",
    "setting",
    "settings_of",
)

T = TypeVar("T")

_CACHE_PREFIX: Final = "_made_for_"
_NOT_CACHED: Final = object()
_METADATA_KEY: Final = "accel.setting"
_TRUE_TEXTS: Final = frozenset({"1", "y", "yes", "t", "true", "on"})
_FALSE_TEXTS: Final = frozenset({"0", "n", "no", "f", "false", "off"})


class ValueType(NamedTuple):
    """How values of a setting are parsed from text and formatted as text.

    Args:
        name: name of the type in messages, such as "an integer".
        parse: converts text to a value; raises ValueError.
        format: converts a value to text; `parse(format(v)) == v`.
        choices: the allowed texts, or empty if they cannot be listed.
        metavar: name of a value in help texts if there are no choices, such as "N" for a number.
    """

    name: str
    parse: Callable[[str], Any]
    format: Callable[[Any], str] = str
    choices: tuple[str, ...] = ()
    metavar: str = "TEXT"


def _parse_boolean(text: str) -> bool:
    lowered = text.strip().lower()
    if lowered in _TRUE_TEXTS:
        return True
    if lowered in _FALSE_TEXTS:
        return False
    raise ValueError(text)


def _parse_json(text: str) -> Any:
    from accel_state.untrusted import parse_json

    return parse_json(text)


def _format_json(value: Any) -> str:
    import json

    return json.dumps(value, sort_keys=True)


TEXT: Final = ValueType("a text", str)
"""A str, taken as it is."""
INTEGER: Final = ValueType("an integer", int, metavar="N")
"""An int of any size and sign; `int_at_least` has a bound."""
FLOAT: Final = ValueType("a number", float, metavar="N")
"""A float."""


def _format_boolean(value: bool) -> str:
    return "true" if value else "false"


BOOLEAN: Final = ValueType("true or false", _parse_boolean, _format_boolean)
"""A bool, as one of 1, y, yes, t, true, on or 0, n, no, f, false, off in any case."""
SWITCH: Final = BOOLEAN._replace(name="true or false (a switch)")
"""A bool with a flag that takes no value, even if its default is None."""
JSON: Final = ValueType("a JSON value", _parse_json, _format_json)
"""A dict, list, number, text, bool or None, as JSON."""


def choice(*allowed: str, fold: Callable[[str], str] = str.lower, numbered: int = 0) -> ValueType:
    """Type of a setting with a fixed list of names.

    Args:
        allowed: the names.
        fold: changes the case of a text before the comparison.
        numbered: how many of the names, from the first, can also be given as a number, counted from 1.

    Example:
        >>> choice("no", "bf16").parse("BF16")
        'bf16'
    """

    def parse(text: str) -> str:
        folded = fold(text.strip())
        if folded.isdecimal() and 1 <= int(folded) <= numbered:
            return allowed[int(folded) - 1]
        if folded not in allowed:
            raise ValueError(text)
        return folded

    return ValueType("one of " + ", ".join(allowed), parse, str, tuple(allowed))


def int_at_least(least: int) -> ValueType:
    """Type of an int of at least `least`."""

    def parse(text: str) -> int:
        number = int(text)
        if number < least:
            raise ValueError(text)
        return number

    return ValueType(f"an integer of at least {least}", parse, metavar="N")


def listing(item: ValueType = TEXT, separator: str = ",") -> ValueType:
    """Type of a list that is written as text with a separator."""

    def parse(text: str) -> tuple[Any, ...]:
        return tuple(item.parse(part.strip()) for part in text.split(separator) if part.strip())

    return ValueType(
        f"a list ({item.name}, separated by {separator!r})", parse, lambda v: separator.join(map(item.format, v))
    )


class Setting(NamedTuple):
    """The definition of one setting, for all code that reads or writes it.

    In `variable`, `flag` and `key`, `{name}` and `{NAME}` are replaced by the name of the field. So settings can share
    one pattern: `partial(setting, variable="FSDP_{NAME}", flag="--fsdp_{name}", key="fsdp_config.fsdp_{name}")`.

    Args:
        name: attribute name in its settings class.
        type: how its text is parsed and formatted.
        default: the value if none is given.
        variable: environment variable that passes it to the processes, or None.
        aliases: further variables, read after `variable`.
        flag: command-line option with its leading dashes, or None.
        key: key in the config file; dots separate the levels of nested tables.
        question: the wizard's question; None if it does not ask.
        help: one sentence for `--help` and the reference.
        group: heading under which `--help` lists the flag.
        unset: the value that replaces None if no variable is set; see `environ.fill_from_environment`.
        launched: text that a launch writes into `variable` if no value is given, because other libraries read it.
    """

    name: str
    type: ValueType
    default: Any = None
    variable: str | None = None
    aliases: tuple[str, ...] = ()
    flag: str | None = None
    key: str | None = None
    question: str | None = None
    help: str = ""
    group: str = ""
    unset: Any = None
    launched: str | None = None

    def of_field(self, name: str) -> Setting:
        """The definition for the field `name`."""
        variable, flag, key = (
            text and text.replace("{name}", name).replace("{NAME}", name.upper())
            for text in (self.variable, self.flag, self.key)
        )
        return self._replace(name=name, variable=variable, flag=flag, key=key)

    @property
    def variables(self) -> tuple[str, ...]:
        """All environment variables from which it is read; the first one is also written."""
        return ((self.variable,) if self.variable else ()) + self.aliases

    def parse(self, text: str, origin: str) -> Any:
        """Parse a text; the error names its `origin`, such as "$ACCELERATE_USE_CPU".

        Raises:
            SettingError: the text cannot be parsed.
        """
        try:
            return self.type.parse(text)
        except ValueError:
            raise self.refusal(text, origin) from None

    def refusal(self, value: object, origin: str) -> SettingError:
        """The error for an invalid value; it names the closest valid one."""
        near = closest(str(value), self.type.choices)
        remedy = f"Did you mean {near!r}?" if near else f"Give {self.type.name}."
        return SettingError(
            f"Cannot use {self.name}={value!r} ({origin}).", f"{value!r} is not {self.type.name}.", remedy
        )


def setting(
    default: Any = None,
    *,
    type: ValueType = TEXT,  # noqa: A002 - the word argparse uses
    variable: str | None = None,
    aliases: tuple[str, ...] = (),
    flag: str | None = None,
    key: str | None = None,
    question: str | None = None,
    help: str = "",  # noqa: A002 - the word argparse uses
    group: str = "",
    unset: Any = None,
    launched: str | None = None,
) -> Any:
    """A dataclass field that is also a setting; see `Setting` for the arguments."""
    return field_of(Setting("", type, default, variable, aliases, flag, key, question, help, group, unset, launched))


def field_of(definition: Setting) -> Any:
    """A dataclass field for an existing definition, for example of another class."""
    return dataclasses.field(default=definition.default, metadata={_METADATA_KEY: definition})


_definitions: dict[type, Mapping[str, Setting]] = {}


def settings_of(settings_class: type) -> Mapping[str, Setting]:
    """Definitions of a settings class by attribute name, in order."""
    if settings_class not in _definitions:
        _definitions[settings_class] = {
            field.name: field.metadata[_METADATA_KEY].of_field(field.name)
            for field in dataclasses.fields(settings_class)
            if _METADATA_KEY in field.metadata
        }
    return _definitions[settings_class]


def closest(text: str, allowed: Iterable[str]) -> str | None:
    """The allowed text that is most similar to `text`, or None when none is similar."""
    import difflib

    return next(iter(difflib.get_close_matches(text, list(allowed), n=1)), None)


class ObjectField:
    """A field that stores plain data and is read as an object.

    Args:
        keep: called with the settings and an assigned value; returns the plain data to store, or the object itself if
            it has no plain form. It raises `SettingError` for an invalid value. None is stored without a call.
        make: called with the settings and plain data, once for each plain value; returns the object.
        fallback: called with the settings if the field is None; returns the plain data to use instead.
    """

    def __init__(
        self,
        keep: Callable[[Any, Any], Any],
        make: Callable[[Any, Any], Any],
        fallback: Callable[[Any], Any] = lambda settings: None,
    ) -> None:
        self._keep, self._make, self._fallback = keep, make, fallback
        self._name = ""

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __set__(self, settings: Any, value: Any) -> None:
        vars(settings)[self._name] = None if value is None else self._keep(settings, value)

    def __get__(self, settings: Any, owner: type | None = None) -> Any:
        if settings is None:
            return None
        plain = self.plain(settings)
        if plain is None:
            return None
        attributes, slot = vars(settings), _CACHE_PREFIX + self._name
        cached, value = attributes.get(slot, (_NOT_CACHED, None))
        if cached is not plain and cached != plain:
            value = self._make(settings, plain)
            attributes[slot] = (plain, value)
        return value

    def plain(self, settings: Any) -> Any:
        """The plain data of the field, or of the fallback if the field is None."""
        plain = vars(settings).get(self._name)
        return self._fallback(settings) if plain is None else plain


def object_fields(**fields: ObjectField) -> Callable[[type[T]], type[T]]:
    """Class decorator, above `dataclass`, that turns each of these fields into an `ObjectField`."""

    def install(cls: type[T]) -> type[T]:
        for name, field in fields.items():
            field.__set_name__(cls, name)
            setattr(cls, name, field)
        return cls

    return install


def plain_value(settings: Any, name: str) -> Any:
    """The plain data of an `ObjectField`, or the value of any other field."""
    field = _object_field(settings, name)
    return getattr(settings, name) if field is None else field.plain(settings)


def given_value(settings: Any, name: str) -> Any:
    """The plain data that was assigned to a field, without the fallback: None if nothing was assigned."""
    return getattr(settings, name) if _object_field(settings, name) is None else vars(settings).get(name)


def _object_field(settings: Any, name: str) -> ObjectField | None:
    attribute = next((vars(cls)[name] for cls in type(settings).__mro__ if name in vars(cls)), None)
    return attribute if isinstance(attribute, ObjectField) else None


def enum_field(path: str, spelled: Mapping[str, str | None] | None = None, **options: Any) -> ObjectField:
    """A field that stores the name of an enum member; the type of its setting lists the allowed names.

    Members, names and numbers (as int or text, where the type takes numbers) can be assigned.

    Args:
        path: the enum, as "module:name"; imported when the field is first read.
        spelled: member names that differ from the setting's names; None if the object is None.
        options: `fallback` of `ObjectField`.
    """
    other = dict(spelled or {})

    def keep(settings: Any, value: Any) -> Any:
        return _parsed(settings, field._name, member_name(value))

    def make(settings: Any, plain: str) -> Any:
        name = other.get(plain, plain)
        return None if name is None else import_object(path)[name]

    field = ObjectField(keep, make, **options)
    return field


def member_name(value: Any) -> Any:
    """The name of an enum member, without the underscore of private members; other objects unchanged."""
    name = getattr(value, "name", None)
    return name.lstrip("_") if isinstance(name, str) and hasattr(value, "value") else value


def _parsed(settings: Any, name: str, value: Any) -> Any:
    definition = settings_of(type(settings))[name]
    number = as_int(value)
    if number is not None:
        value = str(number)
    if not isinstance(value, str):
        raise definition.refusal(value, "argument")
    return definition.parse(value, "argument")


def import_object(path: str) -> Any:
    """The object at "module:name"."""
    module, _, name = path.partition(":")
    return getattr(importlib.import_module(module), name)
