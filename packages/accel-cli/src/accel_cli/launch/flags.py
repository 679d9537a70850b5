"""Command-line flags grown from the definitions of settings, in both spellings: `--num_processes`, `--num-processes`.

A setting that is true or false becomes a switch with its opposite, `--cpu` and `--no_cpu`, so that a flag can undo what
a file says. Opposites and spellings with dashes are understood without a line of help of their own.
"""

from __future__ import annotations

from argparse import SUPPRESS, ArgumentParser, Namespace
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final

from accel_cli.command import spelled
from accel_state.settings.environ import Given
from accel_state.settings.schema import BOOLEAN, TEXT, Setting, settings_of

__all__ = ("add_settings", "flag_values")

_SHORT: Final = {"tee": ("-t",)}
_PREFIX: Final = "setting:"


def add_settings(parser: ArgumentParser, classes: Iterable[type]) -> None:
    """Add the flags of every setting of some classes, under the headings the settings name."""
    groups: dict[str, Any] = {}
    for known in _flagged(classes):
        heading = known.group or "General"
        if heading not in groups:
            groups[heading] = parser.add_argument_group(heading)
        _add(groups[heading], known)


def flag_values(parsed: Namespace, classes: Iterable[type]) -> Mapping[str, Given]:
    """Values of the flags that were given, by setting name.

    Raises:
        SettingError: a flag's text is not of its setting's kind.
    """
    values = {}
    for known in _flagged(classes):
        text = getattr(parsed, _PREFIX + known.name, None)
        if text is not None:
            values[known.name] = Given(known.parse(text, str(known.flag)), str(known.flag))
    return values


def _flagged(classes: Iterable[type]) -> Iterator[Setting]:
    for settings_class in classes:
        yield from (known for known in settings_of(settings_class).values() if known.flag is not None)


def _add(group: Any, known: Setting) -> None:
    destination = _PREFIX + known.name
    names, hidden = _names(known)
    if known.kind is not BOOLEAN:
        options = {"dest": destination, "default": SUPPRESS, "metavar": _metavar(known)}
        group.add_argument(*names, help=_help(known), **options)
        if hidden:
            group.add_argument(*hidden, help=SUPPRESS, **options)
        return
    switch = {"dest": destination, "default": SUPPRESS, "action": "store_const"}
    group.add_argument(*names, const="true", help=_help(known), **switch)
    if hidden:
        group.add_argument(*hidden, const="true", help=SUPPRESS, **switch)
    opposite = f"--no_{names[-1].removeprefix('--')}"
    group.add_argument(*spelled(opposite), const="false", help=SUPPRESS, **switch)


def _names(known: Setting) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Spellings that the help shows, and those that it does not."""
    shown, *others = spelled(str(known.flag))
    return (*_SHORT.get(known.name, ()), shown), tuple(others)


def _metavar(known: Setting) -> str:
    if known.kind.choices:
        return "{" + ",".join(known.kind.choices) + "}"
    return "TEXT" if known.kind is TEXT else "N"


def _help(known: Setting) -> str:
    parts = [known.help]
    if known.default not in (None, "", False):
        parts.append(f"Default: {known.kind.format(known.default)}.")
    if known.variable is not None:
        parts.append(f"Variable: {known.variable}.")
    return " ".join(parts).replace("%", "%%")
