"""Command-line options generated from settings, in both spellings: `--num_processes`, `--num-processes`.

A setting that is off by default, or is declared as a switch, becomes a pair of switches, `--cpu` and `--no_cpu`, so
that a flag can override a file. Other bools take `true` or `false`. A setting of several texts may be repeated. The
help text shows neither the opposites nor the spellings with dashes. If two settings share a flag, it sets both.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Final

from accel_cli.command import spelled
from accel_cli.config.resolved import REPEATED, label
from accel_cli.launch.backends import backend_settings
from accel_cli.launch.launchers import launcher_settings
from accel_cli.launch.settings import CARRIED, LAUNCH_CLASSES
from accel_state.settings.environ import Given
from accel_state.settings.schema import BOOLEAN, SWITCH, Setting, settings_of

if TYPE_CHECKING:
    from argparse import ArgumentParser, Namespace

__all__ = (
    "add_launch_arguments",
    "add_settings",
    "carried_classes",
    "destination",
    "flag_rows",
    "flag_values",
    "is_switch",
    "launch_classes",
    "launch_options",
    "setting_of",
    "settings_by_flag",
)

_ALSO: Final = {"--tee": ("-t",), "--num_machines": ("--nnodes",), "--machine_rank": ("--node_rank",)}
"""Further names of flags, as in torchrun."""

_PREFIX: Final = "setting:"


def add_settings(parser: ArgumentParser, classes: Iterable[type]) -> None:
    """Add the flags of every setting of some classes."""
    # The parser of this package adds only the options that the command line contains.
    add: Callable[..., object] = getattr(parser, "declare", parser.add_argument)
    for flag, known in settings_by_flag(classes).items():
        names = _names(known)
        to = destination(flag)
        if not is_switch(known):
            add(*names, dest=to, action=_action(known))
            continue
        add(*names, dest=to, action="store_const", const="true")
        opposites = spelled(f"--no_{flag.removeprefix('--')}")
        add(*opposites, dest=to, action="store_const", const="false")


def flag_rows(classes: Iterable[type]) -> dict[str, list[tuple[str, str]]]:
    """The rows of a help text, with one for each flag, by the heading that the settings define."""
    rows: dict[str, list[tuple[str, str]]] = {}
    for flag, known in settings_by_flag(classes).items():
        value = "" if is_switch(known) else f" {_metavar(known)}"
        also = _ALSO.get(flag, ())
        short = [name for name in also if not name.startswith("--")]
        names = ", ".join((*short, flag, *(name for name in also if name not in short)))
        rows.setdefault(known.group or "General", []).append((names + value, _meaning(known)))
    return rows


def flag_values(parsed: Namespace, classes: Iterable[type]) -> Mapping[str, Given]:
    """Values of the flags that were given, by the label of their setting.

    Raises:
        SettingError: a setting cannot parse the value of its flag.
    """
    values = {}
    for known in _flagged(classes):
        said = getattr(parsed, destination(str(known.flag)), None)
        if said is not None:
            value = tuple(said) if known.type is REPEATED else known.parse(said, str(known.flag))
            values[label(known)] = Given(value, str(known.flag))
    return values


def setting_of(dest: str, classes: Iterable[type]) -> Setting | None:
    """The setting of the flag that is parsed to `dest`."""
    return settings_by_flag(classes).get(dest.removeprefix(_PREFIX))


def settings_by_flag(classes: Iterable[type]) -> dict[str, Setting]:
    """The first setting of each flag."""
    found: dict[str, Setting] = {}
    for known in _flagged(classes):
        found.setdefault(str(known.flag), known)
    return found


def destination(flag: str) -> str:
    """Name of the attribute for a flag in the parsed arguments of `accel launch`."""
    return _PREFIX + flag


def _action(known: Setting) -> str:
    return "append" if known.type is REPEATED else "store"


def is_switch(known: Setting) -> bool:
    """Whether the flag of a setting takes no value."""
    return known.type is SWITCH or (known.type is BOOLEAN and known.default is False)


def _flagged(classes: Iterable[type]) -> Iterator[Setting]:
    for settings_class in classes:
        yield from (known for known in settings_of(settings_class).values() if known.flag is not None)


def _names(known: Setting) -> tuple[str, ...]:
    names = (str(known.flag), *_ALSO.get(str(known.flag), ()))
    return tuple(spelling for name in names for spelling in spelled(name))


def _metavar(known: Setting) -> str:
    if known.type is BOOLEAN:
        return "{true,false}"
    if known.type.choices:
        return "{" + ",".join(known.type.choices) + "}"
    return known.type.metavar


def _meaning(known: Setting) -> str:
    parts = [known.help]
    if known.default not in (None, "", False, ()):
        parts.append(f"Default: {known.type.format(known.default).removesuffix('.0')}.")
    if known.variable is not None:
        parts.append(f"Variable: {known.variable}.")
    return " ".join(parts)


def launch_classes() -> tuple[type, ...]:
    """Settings classes of `accel launch`, of the installed launchers and of the installed backends."""
    return tuple(dict.fromkeys((*LAUNCH_CLASSES, *launcher_settings(), *backend_settings())))


def carried_classes() -> tuple[type, ...]:
    """The settings classes that the started processes read from their environment."""
    return tuple(dict.fromkeys((*CARRIED, *launcher_settings(), *backend_settings())))


def add_launch_arguments(parser: ArgumentParser) -> None:
    """Declare the options of a launch, and the script with its arguments."""
    parser.add_argument(*spelled("--config_file"), metavar="PATH")
    add_settings(parser, launch_classes())
    parser.add_argument("-q", "--quiet", action="store_true")
    parser.add_argument("-m", "--module", action="store_true")
    parser.add_argument(*spelled("--no_python"), action="store_true")
    parser.add_argument("script", nargs="...")


def launch_options(arguments: Namespace) -> tuple[str, ...]:
    """The options of a parsed command line of `accel launch`, in their full spelling, without the script."""
    words = [f"--config_file={arguments.config_file}"] if arguments.config_file is not None else []
    for flag, known in settings_by_flag(launch_classes()).items():
        given = getattr(arguments, destination(flag), None)
        if given is None:
            continue
        if is_switch(known):
            words.append(flag if given == "true" else f"--no_{flag.removeprefix('--')}")
        else:
            words += [f"{flag}={text}" for text in (given if isinstance(given, list) else [given])]
    switches = {"--quiet": arguments.quiet, "--module": arguments.module, "--no_python": arguments.no_python}
    return (*words, *(switch for switch, given in switches.items() if given))
