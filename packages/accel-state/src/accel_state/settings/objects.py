"""Fields that settings keep as plain data and that users read as objects of a library.

Variables, flags and config files hold names, and a settings class has to start without torch. Its users compare a field
with a member of one of torch's enums, or call it. A `Shown` field serves both: it keeps the name, and makes the object
when it is first read.

    @shown(strategy=member("torch.distributed.fsdp:ShardingStrategy"))
    @dataclass
    class Sharding:
        strategy: Any = setting(None, kind=choice("FULL_SHARD", "NO_SHARD", fold=str.upper), variable="STRATEGY")

    Sharding("no_shard").strategy            # ShardingStrategy.NO_SHARD
    plain_value(Sharding("no_shard"), "strategy")  # "NO_SHARD"
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from typing import Any, Final, TypeVar

from accel_state.settings.schema import settings_of

__all__ = ("Shown", "given_value", "imported", "member", "member_name", "plain_value", "shown")

T = TypeVar("T")
_MADE: Final = "_made_for_"
_NOTHING: Final = object()


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
