"""Commands that convert a config file; packages provide converters in the entry-point group `accel.conversions`."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from accel_cli.command import spelled
from accel_cli.config.file import ConfigEntry, modern, read_tables
from accel_cli.config.write import write_config
from accel_state.errors import AlreadyExists, NotFound, SettingError
from accel_state.settings.schema import settings_of
from accel_state.untrusted import printable

if TYPE_CHECKING:
    from argparse import ArgumentParser, Namespace

__all__ = ("Convert", "Converter", "current_key", "target_of")


class Converter(Protocol):
    """The interface of an entry point of the group; it must not import torch."""

    @property
    def help(self) -> str:
        """One line that says what the command does."""

    @property
    def result(self) -> str:
        """What the converted file is for; used in messages."""

    def convert(
        self, config: Mapping[str, Any], key_of: Callable[[str], str]
    ) -> tuple[dict[str, Any] | None, tuple[str, ...]]:
        """Convert the tables of a file.

        Args:
            config: the tables of the file.
            key_of: returns the current spelling of a key.

        Returns:
            The whole file, or None if nothing has to change; and notes for the user, one sentence each.

        Raises:
            SettingError: the file is not of the kind that this converter reads.
        """


def current_key(key: str) -> str:
    """The current spelling of a key; an unknown key is returned unchanged."""
    from accel_cli.launch.launchers import launch_classes

    current = modern(ConfigEntry(key, None, 0)).key
    keys = {setting.key for settings_class in launch_classes() for setting in settings_of(settings_class).values()}
    return current if current in keys else key


class Convert:
    """A command that converts a config file; see `accel_cli.command.Command`.

    Args:
        name: name of the command.
        converter: converts the file.
    """

    def __init__(self, name: str, converter: Converter) -> None:
        self._name, self._converter = name, converter

    examples = ("--config_file old.yaml --output_file new.yaml", "--config_file old.yaml --overwrite")

    @property
    def help(self) -> str:
        """One line that says what the command does."""
        return self._converter.help

    def add_arguments(self, parser: ArgumentParser) -> None:
        """Declare the input file and the output file."""
        parser.add_argument(*spelled("--config_file"), required=True, metavar="PATH", help="File to convert.")
        parser.add_argument("--overwrite", action="store_true", help="Overwrite an existing file.")
        parser.add_argument(
            *spelled("--output_file"),
            metavar="PATH",
            help="File to write; with --overwrite, the converted file by default.",
        )

    def run(self, arguments: Namespace) -> int:
        """Write the converted file."""
        target = target_of(arguments, self._converter.result)
        tables, notes = self._converter.convert(read_tables(arguments.config_file), current_key)
        if tables is None:
            print(f"{arguments.config_file} is already for {self._converter.result}; nothing was written.")
            return 0
        for note in notes:
            print(printable(f"accel {self._name}: {note}", keep="\n\t"), file=sys.stderr)
        write_config(target, tables)
        print(f"Written to {target}.")
        return 0


def target_of(arguments: Namespace, result: str) -> str:
    """Determine the file to write.

    Args:
        arguments: the parsed command line.
        result: what the converted file is for.

    Raises:
        NotFound: the file to convert does not exist.
        AlreadyExists: the output file exists, and `--overwrite` is not set.
        SettingError: no output file is specified.
    """
    failure = f"Cannot convert {arguments.config_file} to {result}."
    if not Path(arguments.config_file).exists():
        raise NotFound(failure, "There is no such file.", "Check the path.")
    target: str = arguments.output_file or arguments.config_file
    if arguments.overwrite or (arguments.output_file and not Path(target).exists()):
        return target
    if arguments.output_file:
        raise AlreadyExists(
            failure, f"{target} already exists.", "Give another --output_file, or --overwrite to replace it."
        )
    raise SettingError(
        failure, "No output file is specified.", "Give --output_file, or --overwrite to replace the file itself."
    )
