"""Telling every resolved setting: its value, where it came from and what it overrode; and how two differ."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from accel_cli.config.resolved import ResolvedSetting, ResolvedSettings
from accel_cli.table import columns

__all__ = ("as_data", "difference", "difference_table", "table")


def as_data(settings: ResolvedSettings) -> list[dict[str, Any]]:
    """Every setting as plain data, for programs."""
    return [
        {
            "setting": name,
            "value": effect.value,
            "origin": effect.origin,
            "overrode": [{"value": given.value, "origin": given.origin} for given in effect.overridden],
            "flag": effect.setting.flag,
            "variable": effect.setting.variable,
            "key": effect.setting.key,
        }
        for name, effect in settings.items()
    ]


def table(settings: ResolvedSettings) -> list[str]:
    """Every setting as a line of a table."""
    rows = [
        (
            name,
            shown(effect, effect.value),
            effect.origin,
            ", ".join(f"{shown(effect, given.value)} ({given.origin})" for given in effect.overridden),
        )
        for name, effect in settings.items()
    ]
    return columns(("setting", "value", "from", "instead of"), rows)


def difference(one: ResolvedSettings, other: ResolvedSettings) -> list[dict[str, Any]]:
    """Settings whose values differ, with both values and origins."""
    return [
        {
            "setting": name,
            "values": [one[name].value, other[name].value],
            "origins": [one[name].origin, other[name].origin],
        }
        for name in _differing(one, other)
    ]


def difference_table(one: ResolvedSettings, other: ResolvedSettings, names: tuple[str, str]) -> list[str]:
    """Settings whose values differ as lines of a table; `names` are those of the two columns."""
    rows = [(name, *(_with_origin(side[name]) for side in (one, other))) for name in _differing(one, other)]
    return columns(("setting", *names), rows) if rows else ["There is no difference."]


def shown(effect: ResolvedSetting, value: Any) -> str:
    """A value as in a file or on a command line; `-` for no value."""
    return "-" if value in (None, ()) else effect.setting.type.format(value)


def _with_origin(effect: ResolvedSetting) -> str:
    return f"{shown(effect, effect.value)} ({effect.origin})"


def _differing(one: ResolvedSettings, other: ResolvedSettings) -> Iterator[str]:
    return (name for name in one if one[name].value != other[name].value)
