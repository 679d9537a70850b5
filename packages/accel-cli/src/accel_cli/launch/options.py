"""Command-line options generated from settings, in both spellings: `--num_processes`, `--num-processes`.

A setting that is off by default, or is declared as a switch, becomes a pair of switches, `--cpu` and `--no_cpu`, so
that a flag can override a file. Other bools take `true` or `false`. A setting of several texts may be repeated. The
help text shows neither the opposites nor the spellings with dashes. If two settings share a flag, it sets both.
"""

from __future__ import annotations

from argparse import SUPPRESS
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, Final

from accel_cli.command import spelled
from accel_cli.config.resolved import REPEATED, label
from accel_cli.launch.backends import SwitchSettings
from accel_cli.launch.launchers import launch_classes
from accel_cli.launch.settings import WITHOUT_EFFECT
from accel_state.settings.environ import Given
from accel_state.settings.schema import BOOLEAN, SWITCH, Setting, settings_of

if TYPE_CHECKING:
    from argparse import ArgumentParser, Namespace

__all__ = (
    "ESSENTIAL",
    "add_launch_arguments",
    "add_settings",
    "destination",
    "flag_values",
    "is_switch",
    "launch_options",
    "setting_of",
    "settings_by_flag",
)

ESSENTIAL: Final = (
    *("--num_processes", "--num_machines", "--machine_rank", "--main_process_ip", "--main_process_port", "--gpu_ids"),
    *("--cpu", "--mixed_precision", "--gradient_accumulation_steps", "--backend"),
    *("--launcher", "--max_restarts", "--preflight", "--prefix_output", "--hang_timeout", "--grace_period"),
)
"""Flags of the short help text: those that most runs need, besides the switches that select a backend."""

_FURTHER_SPELLINGS: Final = {"--tee": ("-t",), "--num_machines": ("--nnodes",), "--machine_rank": ("--node_rank",)}
"""Further names of flags, as in torchrun."""

_DESTINATION_PREFIX: Final = "setting:"


def add_settings(parser: ArgumentParser, classes: Iterable[type], shown: Iterable[str] | None = None) -> None:
    """Add the flags of every setting of some classes, below the headings that the settings define.

    Args:
        parser: the parser.
        classes: settings classes.
        shown: flags in the help text; by default all.
    """
    groups: dict[str, Any] = {}
    for flag, setting in settings_by_flag(classes).items():
        heading = setting.group or "General"
        group = groups.get(heading) or groups.setdefault(heading, parser.add_argument_group(heading))
        options: dict[str, Any] = {"dest": destination(flag)}
        if not is_switch(setting):
            options |= {"action": "append" if setting.type is REPEATED else "store", "metavar": _metavar(setting)}
        else:
            options |= {"action": "store_const", "const": "true"}
            parser.add_argument(
                *spelled(f"--no_{flag.removeprefix('--')}"), **{**options, "const": "false"}, help=SUPPRESS
            )
        text = _meaning(setting).replace("%", "%%") if shown is None or flag in shown else SUPPRESS
        group.add_argument(*_names(setting), **options, help=text)


def add_launch_arguments(parser: ArgumentParser, everything: bool = False) -> None:
    """Declare the options of a launch, and the script with its arguments.

    Args:
        parser: the parser.
        everything: whether the help text shows every option, not only those that most runs need.
    """
    parser.usage = f"{parser.prog} [options] script [options of the script]"
    if not everything:
        every = f"`{parser.prog} --help-all` shows every option, including those of further launchers and backends."
        parser.epilog = every
    switches = (str(setting.flag) for setting in settings_of(SwitchSettings).values())
    parser.add_argument(
        *spelled("--config_file"),
        metavar="PATH",
        help="Config file; by default the one that `accel config` writes, if it exists.",
    )
    for names, text in (
        (("-m", "--module"), "Run a Python module instead of a script, as python -m does."),
        (spelled("--no_python"), "Run an executable program instead of a Python script."),
        (("-q", "--quiet"), "Print nothing but the traceback of a failure."),
        (("--help-all",), "Show every option."),
    ):
        parser.add_argument(*names, action="store_true", help=text)
    for hidden in ("--help_all", *(name for flag in WITHOUT_EFFECT for name in spelled(flag))):
        parser.add_argument(hidden, action="store_true", help=SUPPRESS)
    add_settings(parser, launch_classes(), None if everything else {*ESSENTIAL, *switches})
    parser.add_argument("script", nargs="...", help=SUPPRESS)


def flag_values(parsed: Namespace, classes: Iterable[type]) -> Mapping[str, Given]:
    """Values of the flags that were given, by the label of their setting.

    Raises:
        SettingError: a setting cannot parse the value of its flag.
    """
    values = {}
    for setting in _flagged(classes):
        said = getattr(parsed, destination(str(setting.flag)), None)
        if said is not None:
            value = tuple(said) if setting.type is REPEATED else setting.parse(said, str(setting.flag))
            values[label(setting)] = Given(value, str(setting.flag))
    return values


def launch_options(arguments: Namespace) -> tuple[str, ...]:
    """The options of a parsed command line of `accel launch`, in their full spelling, without the script."""
    words = [f"--config_file={arguments.config_file}"] if arguments.config_file is not None else []
    for flag, setting in settings_by_flag(launch_classes()).items():
        value = getattr(arguments, destination(flag), None)
        if value is None:
            continue
        if is_switch(setting):
            words.append(flag if value == "true" else f"--no_{flag.removeprefix('--')}")
        else:
            words += [f"{flag}={text}" for text in (value if isinstance(value, list) else [value])]
    switches = {"--quiet": arguments.quiet, "--module": arguments.module, "--no_python": arguments.no_python}
    return (*words, *(switch for switch, is_on in switches.items() if is_on))


def setting_of(dest: str, classes: Iterable[type]) -> Setting | None:
    """The setting of the flag that is parsed to `dest`."""
    return settings_by_flag(classes).get(dest.removeprefix(_DESTINATION_PREFIX))


def settings_by_flag(classes: Iterable[type]) -> dict[str, Setting]:
    """The first setting of each flag."""
    settings: dict[str, Setting] = {}
    for setting in _flagged(classes):
        settings.setdefault(str(setting.flag), setting)
    return settings


def destination(flag: str) -> str:
    """Name of the attribute for a flag in the parsed arguments of `accel launch`."""
    return _DESTINATION_PREFIX + flag


def is_switch(setting: Setting) -> bool:
    """Whether the flag of a setting takes no value."""
    return setting.type is SWITCH or (setting.type is BOOLEAN and setting.default is False)


def _flagged(classes: Iterable[type]) -> Iterator[Setting]:
    for settings_class in classes:
        yield from (setting for setting in settings_of(settings_class).values() if setting.flag is not None)


def _names(setting: Setting) -> tuple[str, ...]:
    also = _FURTHER_SPELLINGS.get(str(setting.flag), ())
    names = (*(name for name in also if not name.startswith("--")), str(setting.flag), *also)
    return tuple(dict.fromkeys(spelling for name in names for spelling in spelled(name)))


def _metavar(setting: Setting) -> str:
    if setting.type is BOOLEAN:
        return "{true,false}"
    if setting.type.choices:
        return "{" + ",".join(setting.type.choices) + "}"
    return setting.type.metavar


def _meaning(setting: Setting) -> str:
    parts = [setting.help]
    if setting.default not in (None, "", False, ()):
        parts.append(f"Default: {setting.type.format(setting.default).removesuffix('.0')}.")
    if setting.variable is not None:
        parts.append(f"Variable: {setting.variable}.")
    return " ".join(parts)
