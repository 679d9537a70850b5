"""One definition per setting: its type, default, variable, flag, key and question.

A settings class is a plain dataclass whose fields are made with `setting(...)`. The launcher's flags, the config file's
keys, the wizard's questions, the child's environment and the running process are all grown from these definitions, so
nothing about a setting is written twice.

    @dataclass
    class Launch:
        num_processes: int | None = setting(
            None, kind=INTEGER, flag="--num_processes", key="num_processes", help="Processes over all machines."
        )

Variables, flags and config files hold names, and a settings class must not load torch; users of a public settings
class compare its fields with members of torch's enums, or call them. A `Shown` field serves both: it keeps the name,
and makes the object when it is first read.

    @shown(strategy=member("torch.distributed.fsdp:ShardingStrategy"))
    @dataclass
    class Sharding:
        strategy: Any = setting(None, kind=choice("FULL_SHARD", "NO_SHARD", fold=str.upper), variable="STRATEGY")

    Sharding("no_shard").strategy            # ShardingStrategy.NO_SHARD
    plain_value(Sharding("no_shard"), "strategy")  # "NO_SHARD"
"""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final, NamedTuple, TypeVar

from accel_state.errors import SettingError

__all__ = (
    "BOOLEAN",
    "FLOAT",
    "INTEGER",
    "JSON",
    "SWITCH",
    "TEXT",
    "Kind",
    "Setting",
    "Shown",
    "choice",
    "closest",
    "given_value",
    "imported",
    "listing",
    "member",
    "member_name",
    "plain_value",
    "setting",
    "settings_of",
    "shown",
    "table",
    "taken",
    "whole",
)

T = TypeVar("T")

_MADE: Final = "_made_for_"
_NOTHING: Final = object()
_METADATA_KEY: Final = "accel.setting"
_TRUE: Final = frozenset({"1", "y", "yes", "t", "true", "on"})
_FALSE: Final = frozenset({"0", "n", "no", "f", "false", "off"})


class Kind(NamedTuple):
    """How the values of a setting are read from text and written as text.

    Args:
        name: what a message calls it, such as "an integer".
        parse: text to value; raises ValueError.
        format: value to text; `parse(format(v)) == v`.
        choices: the allowed texts, or empty when they cannot be listed.
    """

    name: str
    parse: Callable[[str], Any]
    format: Callable[[Any], str] = str
    choices: tuple[str, ...] = ()


def _parse_boolean(text: str) -> bool:
    lowered = text.strip().lower()
    if lowered in _TRUE:
        return True
    if lowered in _FALSE:
        return False
    raise ValueError(text)


def _parse_json(text: str) -> Any:
    from accel_state.untrusted import parse_json

    return parse_json(text)


def _format_json(value: Any) -> str:
    import json

    return json.dumps(value, sort_keys=True)


TEXT: Final = Kind("a text", str)
INTEGER: Final = Kind("an integer", int)
FLOAT: Final = Kind("a number", float)
BOOLEAN: Final = Kind("true or false", _parse_boolean, lambda value: "true" if value else "false")
SWITCH: Final = BOOLEAN._replace(name="true or false (a switch)")
"""A truth value whose flag stands alone, also where it is open by default."""
JSON: Final = Kind("a JSON value", _parse_json, _format_json)


def choice(*allowed: str, fold: Callable[[str], str] = str.lower, numbered: int = 0) -> Kind:
    """Kind of a setting that takes one of a few names; case is folded first.

    Args:
        allowed: the names.
        fold: how the case of a text is changed before it is compared.
        numbered: how many of the names, from the first, can also be given by their number, counted from 1.

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

    return Kind("one of " + ", ".join(allowed), parse, str, tuple(allowed))


def whole(least: int) -> Kind:
    """Kind of an integer that is at least `least`."""

    def parse(text: str) -> int:
        number = int(text)
        if number < least:
            raise ValueError(text)
        return number

    return Kind(f"an integer of at least {least}", parse)


def listing(item: Kind = TEXT, separator: str = ",") -> Kind:
    """Kind of a list written as text with a separator."""

    def parse(text: str) -> tuple[Any, ...]:
        return tuple(item.parse(part.strip()) for part in text.split(separator) if part.strip())

    return Kind(
        f"a list ({item.name}, separated by {separator!r})", parse, lambda v: separator.join(map(item.format, v))
    )


class Setting(NamedTuple):
    """Everything that is known about one setting, whoever reads or writes it.

    Args:
        name: attribute name in its settings class.
        kind: how its text is read and written.
        default: the value when nobody gave one.
        variable: environment variable that carries it to the processes, or None.
        aliases: further variables that are read after `variable`.
        flag: command-line option, with its leading dashes, or None.
        key: key in the config file; dots lead into nested tables.
        question: what the wizard asks, or None when it does not ask.
        help: one sentence for `--help` and the reference.
        group: heading under which flags are listed.
        unset: what a default of None stands for when no variable says otherwise; see `environ.fill`.
    """

    name: str
    kind: Kind
    default: Any = None
    variable: str | None = None
    aliases: tuple[str, ...] = ()
    flag: str | None = None
    key: str | None = None
    question: str | None = None
    help: str = ""
    group: str = ""
    unset: Any = None

    @property
    def variables(self) -> tuple[str, ...]:
        """All environment variables that are read, the one that is written first."""
        return ((self.variable,) if self.variable else ()) + self.aliases

    def parse(self, text: str, origin: str) -> Any:
        """Value of `text`; `origin` says in the error where the text stood.

        Raises:
            SettingError: the text is not of this setting's kind.
        """
        try:
            return self.kind.parse(text)
        except ValueError:
            raise self.refusal(text, origin) from None

    def refusal(self, given: object, origin: str) -> SettingError:
        """The error for a value that does not fit, naming the closest allowed one."""
        near = closest(str(given), self.kind.choices)
        remedy = f"Did you mean {near!r}?" if near else f"Give {self.kind.name}."
        return SettingError(
            f"{self.name}={given!r} was asked for ({origin}).", f"It has to be {self.kind.name}.", remedy
        )


def setting(
    default: Any = None,
    *,
    kind: Kind = TEXT,
    variable: str | None = None,
    aliases: tuple[str, ...] = (),
    flag: str | None = None,
    key: str | None = None,
    question: str | None = None,
    help: str = "",  # noqa: A002 - the word argparse uses
    group: str = "",
    unset: Any = None,
) -> Any:
    """Dataclass field that is also a setting; see `Setting` for the arguments."""
    return taken(Setting("", kind, default, variable, aliases, flag, key, question, help, group, unset))


def taken(known: Setting) -> Any:
    """Dataclass field for a setting whose definition stands in another class."""
    return dataclasses.field(default=known.default, metadata={_METADATA_KEY: known})


_known: dict[type, Mapping[str, Setting]] = {}


def table(cls: type[T]) -> type[T]:
    """Make a settings class of what would otherwise be a dataclass, in a fiftieth of the time.

    For the many classes that the command line only reads definitions from. An instance takes values by name, and has
    the defaults of the others.

    Example:
        >>> @table
        ... class Ports:
        ...     first: int = setting(1024, kind=INTEGER, flag="--first_port")
        >>> Ports(first=80).first, Ports().first, list(settings_of(Ports))
        (80, 1024, ['first'])
    """
    fields = {name: value for name, value in vars(cls).items() if isinstance(value, dataclasses.Field)}
    _known[cls] = {name: field.metadata[_METADATA_KEY]._replace(name=name) for name, field in fields.items()}
    for name, known in _known[cls].items():
        setattr(cls, name, known.default)
    setattr(cls, "__init__", _take)  # noqa: B010 - a checker would compare it with the class's own
    return cls


def _take(self: object, **values: Any) -> None:
    unknown = values.keys() - settings_of(type(self)).keys()
    if unknown:
        raise TypeError(f"{type(self).__name__} has no {', '.join(sorted(unknown))}")
    vars(self).update(values)


def settings_of(settings_class: type) -> Mapping[str, Setting]:
    """Settings of a settings class by attribute name, in order of definition."""
    if settings_class not in _known:
        _known[settings_class] = {
            field.name: field.metadata[_METADATA_KEY]._replace(name=field.name)
            for field in dataclasses.fields(settings_class)
            if _METADATA_KEY in field.metadata
        }
    return _known[settings_class]


def closest(given: str, allowed: Iterable[str]) -> str | None:
    """The allowed text that is most like `given`, or None when none is near."""
    import difflib

    return next(iter(difflib.get_close_matches(given, list(allowed), n=1)), None)


class Shown:
    """A field that keeps plain data and is read as an object.

    Args:
        keep: from the settings and a value that was given to what is kept: plain data, or the object itself when it has
            no plain form. It raises `SettingError` for a value that cannot be used. None is kept as it is.
        make: from the settings and plain data to the object. It is called once for each plain value; None for None.
        fallback: plain data where None is kept, by the other settings.
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

    def __set__(self, settings: Any, given: Any) -> None:
        vars(settings)[self._name] = None if given is None else self._keep(settings, given)

    def __get__(self, settings: Any, owner: type | None = None) -> Any:
        if settings is None:
            return None
        plain = self.plain(settings)
        if plain is None:
            return None
        held, slot = vars(settings), _MADE + self._name
        known, made = held.get(slot, (_NOTHING, None))
        if known is not plain and known != plain:
            made = self._make(settings, plain)
            held[slot] = (plain, made)
        return made

    def plain(self, settings: Any) -> Any:
        """What is kept, or what stands for None."""
        kept = vars(settings).get(self._name)
        return self._fallback(settings) if kept is None else kept


def shown(**fields: Shown) -> Callable[[type[T]], type[T]]:
    """Class decorator above `dataclass`: these fields keep plain data and are read as objects."""

    def install(cls: type[T]) -> type[T]:
        for name, field in fields.items():
            field.__set_name__(cls, name)
            setattr(cls, name, field)
        return cls

    return install


def plain_value(settings: Any, name: str) -> Any:
    """The plain data behind a field; its value where the field has no other form."""
    field = _shown_field(settings, name)
    return getattr(settings, name) if field is None else field.plain(settings)


def given_value(settings: Any, name: str) -> Any:
    """What a field keeps: None where nothing was given, whatever is read then."""
    return getattr(settings, name) if _shown_field(settings, name) is None else vars(settings).get(name)


def _shown_field(settings: Any, name: str) -> Shown | None:
    found = next((vars(cls)[name] for cls in type(settings).__mro__ if name in vars(cls)), None)
    return found if isinstance(found, Shown) else None


def member(path: str, spelled: Mapping[str, str | None] | None = None, **options: Any) -> Shown:
    """A field that keeps the name of a member of an enum, of those that the kind of its setting allows.

    Members, names and numbers (as int or text, where the kind takes numbers) are accepted.

    Args:
        path: the enum, as "module:name"; imported when the field is first read.
        spelled: names whose member is spelled otherwise; None where the object is None.
        options: `fallback` of `Shown`.
    """
    other = dict(spelled or {})

    def keep(settings: Any, given: Any) -> Any:
        return _parsed(settings, field._name, member_name(given))

    def make(settings: Any, plain: str) -> Any:
        name = other.get(plain, plain)
        return None if name is None else imported(path)[name]

    field = Shown(keep, make, **options)
    return field


def member_name(given: Any) -> Any:
    """The name of a member of an enum, without the underscore of those that are not announced; others as they are."""
    name = getattr(given, "name", None)
    return name.lstrip("_") if isinstance(name, str) and hasattr(given, "value") else given


def _parsed(settings: Any, name: str, given: Any) -> Any:
    known = settings_of(type(settings))[name]
    if isinstance(given, int) and not isinstance(given, bool):
        given = str(given)
    if not isinstance(given, str):
        raise known.refusal(given, "argument")
    return known.parse(given, "argument")


def imported(path: str) -> Any:
    """The object at "module:name"."""
    module, _, name = path.partition(":")
    return getattr(importlib.import_module(module), name)
