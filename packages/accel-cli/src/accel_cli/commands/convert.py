"""Commands that convert a config file; packages offer what converts in the entry-point group `accel.conversions`."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from accel_cli.command import spelled
from accel_cli.config.file import is_known, read_tables, with_prefix
from accel_cli.config.write import write_config
from accel_state.errors import AlreadyExists, NotFound, SettingError

if TYPE_CHECKING:
    from argparse import ArgumentParser, Namespace

__all__ = ("Convert", "Converter", "current_key", "target_of")


class Converted(Protocol):
    """A converted config file: all its tables, or None when nothing has to change, and what a user should know."""

    @property
    def values(self) -> dict[str, Any] | None:
        """The whole file."""

    @property
    def notes(self) -> tuple[str, ...]:
        """One sentence each."""


class Converter(Protocol):
    """What an entry point of the group leads to; imports no torch."""

    @property
    def help(self) -> str:
        """One line that says what it does."""

    @property
    def result(self) -> str:
        """What the file is for afterwards, for messages."""

    def convert(self, config: Mapping[str, Any], key_of: Callable[[str], str]) -> Converted:
        """The tables of a file; `key_of` gives a key as files spell it today.

        Raises:
            SettingError: the file is for something else.
        """


def current_key(key: str) -> str:
    """A key of a table with its prefix; one that nobody knows as it is."""
    found = with_prefix(key)
    return found if is_known(found) else key


class Convert:
    """One of these commands; see `accel_cli.command.Command`.

    Args:
        name: its name.
        converter: what converts.
    """

    def __init__(self, name: str, converter: Converter) -> None:
        self._name, self._converter = name, converter

    @property
    def help(self) -> str:
        """One line that says what the command does."""
        return self._converter.help

    def add_arguments(self, parser: ArgumentParser) -> None:
        """Which file, and where the converted one goes."""
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
        converted = self._converter.convert(read_tables(arguments.config_file), current_key)
        if converted.values is None:
            print(f"{arguments.config_file} is for {self._converter.result} already; nothing was written.")
            return 0
        for note in converted.notes:
            print(f"accel {self._name}: {note}", file=sys.stderr)
        write_config(target, converted.values)
        print(f"Written to {target}.")
        return 0


def target_of(arguments: Namespace, result: str) -> str:
    """The file to write.

    Args:
        arguments: names of the files, and whether one may be replaced.
        result: what the file is for afterwards.

    Raises:
        NotFound: the file to convert is not there.
        AlreadyExists: writing would lose a file that nobody said may be lost.
        SettingError: no file to write is named.
    """
    asked = f"Cannot convert {arguments.config_file} to {result}."
    if not Path(arguments.config_file).exists():
        raise NotFound(asked, "There is no such file.", "Check the path.")
    target: str = arguments.output_file or arguments.config_file
    if arguments.overwrite or (arguments.output_file and not Path(target).exists()):
        return target
    if arguments.output_file:
        raise AlreadyExists(asked, f"{target} is there already.", "Give another --output_file, or --overwrite.")
    raise SettingError(asked, "No file to write was named.", "Give --output_file, or --overwrite to replace it.")
