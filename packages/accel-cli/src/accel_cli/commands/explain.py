"""`accel explain`: shows the settings of a launch and the source of each."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Final

from accel_cli.command import spelled
from accel_cli.config.resolved import ResolvedSetting, ResolvedSettings
from accel_cli.terminal import columns
from accel_state.untrusted import printable

if TYPE_CHECKING:
    from argparse import ArgumentParser, Namespace

    from accel_cli.launch.interface import LaunchRequest

__all__ = (
    "COMMAND",
    "Explain",
    "as_data",
    "choices",
    "difference",
    "difference_table",
    "settings_table",
)


def as_data(settings: ResolvedSettings) -> list[dict[str, Any]]:
    """Every setting as plain data, for JSON output."""
    return [
        {
            "setting": name,
            "value": effect.value,
            "origin": effect.origin,
            "overrode": [{"value": candidate.value, "origin": candidate.origin} for candidate in effect.overridden],
            "flag": effect.definition.flag,
            "variable": effect.definition.variable,
            "key": effect.definition.key,
        }
        for name, effect in settings.items()
    ]


def settings_table(settings: ResolvedSettings, everything: bool = True) -> list[str]:
    """Every setting as a line of a table, or only the settings that the user gave."""
    rows = [
        (
            name,
            shown(effect, effect.value),
            effect.origin,
            ", ".join(f"{shown(effect, candidate.value)} ({candidate.origin})" for candidate in effect.overridden),
        )
        for name, effect in settings.items()
        if everything or effect.is_set
    ]
    return columns(("setting", "value", "from", "instead of"), rows) if rows else ["Every setting has its default."]


def difference(one: ResolvedSettings, other: ResolvedSettings) -> list[dict[str, Any]]:
    """Settings with different values, with both values and origins."""
    return [
        {
            "setting": name,
            "values": [one[name].value, other[name].value],
            "origins": [one[name].origin, other[name].origin],
        }
        for name in _differing(one, other)
    ]


def difference_table(one: ResolvedSettings, other: ResolvedSettings, names: tuple[str, str]) -> list[str]:
    """Settings with different values as lines of a table; `names` are the names of the two columns."""
    rows = [(name, *(_with_origin(side[name]) for side in (one, other))) for name in _differing(one, other)]
    return columns(("setting", *names), rows) if rows else ["There is no difference."]


def shown(effect: ResolvedSetting, value: Any) -> str:
    """A value as a file or a command line spells it; `-` for no value."""
    return "-" if value in (None, ()) else effect.definition.type.format(value)


def _with_origin(effect: ResolvedSetting) -> str:
    return f"{shown(effect, effect.value)} ({effect.origin})"


def _differing(one: ResolvedSettings, other: ResolvedSettings) -> Iterator[str]:
    return (name for name in one if one[name].value != other[name].value)


class Explain:
    """Prints a table of settings with their sources, and what the launch would start."""

    help = "show the settings of a launch, the source of each, and the launcher"
    examples = ("-- --num_processes 4 --mixed_precision bf16", "--config_file one.yaml --diff other.yaml")

    def add_arguments(self, parser: ArgumentParser) -> None:
        """Declare the config files to show and to compare, and the arguments of the launch."""
        parser.usage = f"{parser.prog} [--all] [--config_file PATH] [--diff PATH] [--json] [-- launch arguments]"
        parser.add_argument(
            *spelled("--config_file"),
            metavar="PATH",
            help="Config file; by default the one that `accel config` writes.",
        )
        parser.add_argument("--diff", metavar="PATH", help="Config file to compare with; only differences are shown.")
        parser.add_argument("--all", action="store_true", help="Include settings with default values.")
        parser.add_argument("--json", action="store_true", help="Print all settings as JSON.")
        parser.add_argument("launch", nargs="...", help="Arguments of `accel launch`, after --.")

    def run(self, arguments: Namespace) -> int:
        """Print the table."""
        from accel_cli.launch.request import request_of

        words = arguments.launch[arguments.launch[:1] == ["--"] :]
        request = request_of(words, os.environ, arguments.config_file)
        if arguments.diff is None:
            rows: list[dict[str, Any]] = as_data(request.settings)
            lines = [*choices(request), "", *settings_table(request.settings, arguments.all)]
        else:
            other = request_of(words, os.environ, arguments.diff)
            names = (request.config.path if request.config else "no file", arguments.diff)
            rows = difference(request.settings, other.settings)
            lines = difference_table(request.settings, other.settings, names)
        if arguments.json:
            import json

            print(json.dumps(rows, indent=2))
        else:
            print("\n".join(lines))
            _print_notes(request)
        return 0


def choices(request: LaunchRequest) -> list[str]:
    """The launcher and the backend of the run, each with the reason for its selection."""
    backend = request.settings["backend"]
    chosen, reason = "selected by each process when it starts", "`accel backends` lists them"
    if backend.value is not None:
        chosen, reason = backend.value, backend.origin
    elif request.backend is not None and request.selection is not None:
        chosen, reason = request.backend, request.selection.source.origin
    lines = (f"launcher: {request.launcher.name} ({request.launcher_reason})", f"backend: {chosen} ({reason})")
    return [printable(line) for line in lines]


def _print_notes(request: LaunchRequest) -> None:
    from accel_cli.launch.notes import notes

    for note in notes(request):
        print(printable(f"Note: {note}", keep="\n\t"))


COMMAND: Final = Explain()
