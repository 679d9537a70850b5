"""The commands of `accel`: their interface, and a list that needs no command to be loaded.

Built-in commands are rows of a table. Other packages add commands through the entry-point group `accel.commands`. Each
target is an object with the members of `Command`.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, Final, Protocol

from accel_state.errors import PluginError, SettingError
from accel_state.plugins import Plugin, plugins_of

if TYPE_CHECKING:
    from argparse import ArgumentParser, Namespace

__all__ = ("BUILT_IN", "CONVERSIONS", "GROUP", "Command", "described", "find_command", "offers", "spelled")

GROUP: Final = "accel.commands"
CONVERSIONS: Final = "accel.conversions"
"""Entry-point group of converters for config files; each becomes a command."""

BUILT_IN: Final = (
    ("launch", "accel_cli.commands.launch:COMMAND", "start a script on one or many processes"),
    ("config", "accel_cli.commands.config:COMMAND", "write or show a config file"),
    ("explain", "accel_cli.commands.explain:COMMAND", "show the settings of a launch and the source of each"),
    ("doctor", "accel_cli.commands.doctor:COMMAND", "find problems of a run before it starts"),
    ("test", "accel_cli.commands.test:COMMAND", "test processes, collectives, loaders and training on this machine"),
    ("backends", "accel_cli.commands.backends:COMMAND", "list the installed backends and whether they work here"),
    ("env", "accel_cli.commands.env:COMMAND", "show versions and settings for a bug report"),
    ("checkpoint", "accel_cli.commands.checkpoint:COMMAND", "list, verify, prune, describe and copy checkpoints"),
    ("completion", "accel_cli.commands.completion:COMMAND", "print a completion script for a shell"),
    ("tpu-config", "accel_cli.commands.tpu_config:COMMAND", "run commands on every machine of a TPU pod"),
)
"""Name, target and one line of help of each command of this package."""


class Command(Protocol):
    """One command of `accel`.

    A command with many options may also define `manual(prog) -> str`, which writes its help text without a parser.
    """

    @property
    def help(self) -> str:
        """One line that says what the command does."""

    def add_arguments(self, parser: ArgumentParser) -> None:
        """Declare the command's arguments."""

    def run(self, arguments: Namespace) -> int:
        """Do the work and return the exit code; an `AccelError` becomes a message and exit code 2."""


def spelled(flag: str) -> tuple[str, ...]:
    """The spellings of a flag: with underscores and, if different, with dashes.

    Example:
        >>> spelled("--num_processes")
        ('--num_processes', '--num-processes')
    """
    return tuple(dict.fromkeys((flag, flag.replace("_", "-"))))


def offers() -> dict[str, tuple[Plugin, str]]:
    """Every command by name: its entry point and its line of help; a built-in command is never replaced."""
    found = {name: (Plugin(GROUP, name, target, "accel-cli"), said) for name, target, said in BUILT_IN}
    for extension in (*plugins_of(GROUP), *plugins_of(CONVERSIONS)):
        found.setdefault(extension.name, (extension, f"(from {extension.origin})"))
    return found


def described(name: str) -> str:
    """The line for a command in the list of commands: its help and, if it is another package's, the package's name.

    No command is loaded: for a command of another package, the text that its class assigns to `help` is read.
    """
    extension, said = offers()[name]
    return said if extension.origin == "accel-cli" else f"{_help_in_source(extension.target)} {said}".lstrip()


def _help_in_source(target: str) -> str:
    """The text of `help` in the class of "module:object", or an empty text if it is not a literal in the source."""
    import ast

    module, _, name = target.partition(":")
    try:
        with open(_source_of(module), "rb") as file:
            body = ast.parse(file.read()).body
    except (OSError, SyntaxError, ValueError):
        return ""
    made = {
        spelled_out.id: node.value.func.id
        for node in body
        if isinstance(node, (ast.Assign, ast.AnnAssign))
        and isinstance(node.value, ast.Call)
        and isinstance(node.value.func, ast.Name)
        for spelled_out in (node.targets if isinstance(node, ast.Assign) else [node.target])
        if isinstance(spelled_out, ast.Name)
    }
    for node in body:
        if isinstance(node, ast.ClassDef) and node.name == made.get(name):
            for line in node.body:
                if isinstance(line, ast.Assign) and any(getattr(one, "id", "") == "help" for one in line.targets):
                    text = getattr(line.value, "value", None)
                    return text if isinstance(text, str) else ""
    return ""


def _source_of(module: str) -> str:
    """Find the file of a module without importing its packages."""
    from importlib.machinery import PathFinder

    names, folders, found = module.split("."), None, None
    for count in range(1, len(names) + 1):
        found = PathFinder.find_spec(".".join(names[:count]), folders)
        folders = found.submodule_search_locations if found is not None else None
        if found is None or (folders is None and count < len(names)):
            raise FileNotFoundError(module)
    return str(found.origin) if found is not None else ""


def find_command(name: str) -> Command:
    """Load a command.

    Raises:
        SettingError: there is no command with that name.
        PluginError: several distributions provide it, or it could not be loaded.
    """
    known = offers()
    if name not in known:
        raise _unknown(name, known)
    extension, _ = known[name]
    rivals = [] if extension.origin == "accel-cli" else [e for e in plugins_of(extension.group) if e.name == name]
    if len(rivals) > 1:
        raise PluginError(
            f"Cannot load the command `accel {name}`.",
            f"Several packages provide it: {', '.join(rival.origin for rival in rivals)}.",
            "Uninstall all but one of them.",
        )
    try:
        loaded: Any = extension.load()
    except Exception as error:
        raise PluginError(
            f"Cannot load the command `accel {name}`.",
            f"{extension.target} of {extension.origin} could not be loaded: {type(error).__name__}: {error}",
            f"Repair or reinstall {extension.origin.split()[0]}.",
        ) from error
    command: Command = _as_command(name, loaded) if extension.group == CONVERSIONS else loaded
    return command


def _as_command(name: str, converter: Any) -> Command:
    convert = Plugin(GROUP, name, "accel_cli.commands.convert:Convert", "accel-cli").load()
    made: Command = convert(name, converter)
    return made


def _unknown(name: str, known: Iterable[str]) -> SettingError:
    from accel_state.settings.schema import closest

    near = closest(name, known)
    return SettingError(
        f"Cannot run `accel {name}`.",
        "There is no such command.",
        f"Did you mean `accel {near}`?" if near else "`accel --help` lists the commands.",
    )
