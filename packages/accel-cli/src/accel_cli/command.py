"""The commands of `accel`: their interface, and their list.

Built-in commands are rows of a table. Other packages add commands through the entry-point group `accel.commands`, whose
objects have the members of `Command`, and converters of config files through `accel.conversions`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final, Protocol

from accel_state.errors import Missing, SettingError
from accel_state.plugins import Interface, Plugin, PluginGroup
from accel_state.settings.schema import closest

if TYPE_CHECKING:
    from argparse import ArgumentParser, Namespace

__all__ = (
    "BUILT_IN",
    "COMMANDS",
    "CONVERSIONS",
    "Command",
    "described",
    "find_command",
    "installed_commands",
    "spelled",
)

_OWN_PACKAGE: Final = "accel-cli"
_CONVERT_TARGET: Final = "accel_cli.commands.convert:Convert"
"""The command for a converter; this module must not import the module of a command."""

BUILT_IN: Final = (
    ("launch", "accel_cli.commands.launch:COMMAND", "start a script on one or many processes"),
    ("config", "accel_cli.commands.config:COMMAND", "write or show a config file"),
    ("explain", "accel_cli.commands.explain:COMMAND", "show the settings of a launch and the source of each"),
    ("doctor", "accel_cli.commands.doctor:COMMAND", "find problems of a run before it starts"),
    ("test", "accel_cli.commands.test:COMMAND", "test processes, collectives, loaders and training on this machine"),
    ("runs", "accel_cli.commands.runs:COMMAND", "show, compare, report, repeat and replay runs"),
    ("backends", "accel_cli.commands.backends:COMMAND", "list the installed backends and whether they work here"),
    ("env", "accel_cli.commands.env:COMMAND", "show versions and settings for a bug report"),
    ("checkpoint", "accel_cli.commands.checkpoint:COMMAND", "list, verify, prune, describe and copy checkpoints"),
    ("mcp", "accel_cli.commands.mcp:COMMAND", "serve run status, reports, settings and checks to a language model"),
    ("completion", "accel_cli.commands.completion:COMMAND", "print a completion script for a shell"),
    ("tpu-config", "accel_cli.commands.tpu_config:COMMAND", "run commands on every machine of a TPU pod"),
)
"""Name, target and one line of help of each command of this package."""


_PACKAGES_OF_SEPARATE_COMMANDS: Final = dict.fromkeys(("check-parity", "check-plan", "check-resume"), "accel-check")
"""Commands of this project in packages of their own, which a user may call without having the package."""


_LAUNCH_SYNONYMS: Final = ("execute", "run", "start", "train")
"""Words for what `accel launch` does."""


class Command(Protocol):
    """One command of `accel`.

    The list of commands loads the commands of other packages for their `help`, so their modules must not import torch.
    """

    @property
    def help(self) -> str:
        """One line that says what the command does."""

    def add_arguments(self, parser: ArgumentParser) -> None:
        """Declare the command's arguments.

        A command may also have `examples`, a tuple of arguments that work; its help text ends with them.
        """

    def run(self, arguments: Namespace) -> int:
        """Do the work and return the exit code; an `AccelError` becomes a message and exit code 2."""


def spelled(flag: str) -> tuple[str, ...]:
    """The spellings of a flag: with underscores and, if different, with dashes.

    Example:
        >>> spelled("--num_processes")
        ('--num_processes', '--num-processes')
    """
    return tuple(dict.fromkeys((flag, flag.replace("_", "-"))))


COMMANDS: Final[PluginGroup[Command]] = PluginGroup(
    "accel.commands",
    "command",
    interface=Interface(members=("help", "add_arguments", "run")),
    own="first",
    built_in=tuple(Plugin("accel.commands", name, target, _OWN_PACKAGE) for name, target, _ in BUILT_IN),
)
"""All commands but conversions; no package replaces those of this project."""

CONVERSIONS: Final[PluginGroup[Any]] = PluginGroup(
    "accel.conversions", "conversion", interface=Interface(members=("help", "result", "convert"))
)
"""Converters for config files; each becomes a command."""


def installed_commands() -> dict[str, Plugin]:
    """Every command and conversion by name, the built-in ones first; none is loaded."""
    commands: dict[str, Plugin] = {}
    for plugin in (*COMMANDS.plugins(), *CONVERSIONS.plugins()):
        commands.setdefault(plugin.name, plugin)
    return commands


def described(command: Plugin) -> str:
    """The line for a command in the list of commands: its help and, if it is another package's, the package's name."""
    if command.origin == _OWN_PACKAGE:
        return next(line for name, _, line in BUILT_IN if name == command.name)
    group: PluginGroup[Any] = COMMANDS if command.group == COMMANDS.group else CONVERSIONS
    loaded = group.load(command)
    about = "cannot be loaded" if loaded.value is None else str(loaded.value.help)
    return f"{about} (from {command.origin})"


def find_command(name: str) -> Command:
    """Load a command.

    Raises:
        SettingError: there is no command with that name; the message names the nearest.
        Missing: it belongs to a package that is not installed.
        PluginError: several packages provide it, or it cannot be loaded.
    """
    failure, commands, conversions = f"Cannot run `accel {name}`.", COMMANDS.names(), CONVERSIONS.names()
    if name not in commands and closest(name, (*commands, *conversions, *_LAUNCH_SYNONYMS)) in _LAUNCH_SYNONYMS:
        raise SettingError(failure, "There is no such command.", "Did you mean `accel launch`? It starts a script.")
    if name in _PACKAGES_OF_SEPARATE_COMMANDS and name not in commands:
        raise Missing(
            failure,
            f"It belongs to {_PACKAGES_OF_SEPARATE_COMMANDS[name]}, which is not installed.",
            f"Run `pip install {_PACKAGES_OF_SEPARATE_COMMANDS[name]}`.",
        )
    if name in commands or name not in conversions:
        return COMMANDS.find(name, failure, conversions).get(failure)
    convert: Callable[[str, Any], Command] = Plugin(COMMANDS.group, name, _CONVERT_TARGET, _OWN_PACKAGE).load()
    return convert(name, CONVERSIONS.find(name, failure).get(failure))
