"""`accel to-fsdp2`: convert a config file from FSDP version 1 to version 2."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Final

from accel_cli.command import spelled
from accel_state.errors import AlreadyExists, NotFound, SettingError

if TYPE_CHECKING:
    from argparse import ArgumentParser, Namespace

__all__ = ("COMMAND", "ToFSDP2", "target_of")


class ToFSDP2:
    """The command; see `accel_cli.command.Command`."""

    help = "convert a config file from FSDP version 1 to version 2"

    def add_arguments(self, parser: ArgumentParser) -> None:
        """Which file, and where the converted one goes."""
        parser.add_argument(*spelled("--config_file"), required=True, metavar="PATH", help="The file to convert.")
        parser.add_argument("--overwrite", action="store_true", help="Write over a file that is there.")
        parser.add_argument(
            *spelled("--output_file"),
            metavar="PATH",
            help="The file to write; the same with --overwrite when not given.",
        )

    def run(self, arguments: Namespace) -> int:
        """Write the converted file."""
        from accel_cli.config.document import read_tables
        from accel_cli.config.fsdp2 import convert
        from accel_cli.config.write import write_config

        target = target_of(arguments)
        converted = convert(read_tables(arguments.config_file))
        if converted.values is None:
            print(f"{arguments.config_file} is for FSDP version 2 already; nothing was written.")
            return 0
        for note in converted.notes:
            print(f"accel to-fsdp2: {note}", file=sys.stderr)
        write_config(target, converted.values)
        print(f"Written to {target}.")
        return 0


def target_of(arguments: Namespace) -> str:
    """The file to write.

    Raises:
        NotFound: the file to convert is not there.
        AlreadyExists: writing would lose a file that nobody said may be lost.
        SettingError: no file to write is named.
    """
    asked = f"Cannot convert {arguments.config_file} to FSDP version 2."
    if not Path(arguments.config_file).exists():
        raise NotFound(asked, "There is no such file.", "Check the path.")
    target: str = arguments.output_file or arguments.config_file
    if arguments.overwrite or (arguments.output_file and not Path(target).exists()):
        return target
    if arguments.output_file:
        raise AlreadyExists(asked, f"{target} is there already.", "Give another --output_file, or --overwrite.")
    raise SettingError(asked, "No file to write was named.", "Give --output_file, or --overwrite to replace it.")


COMMAND: Final = ToFSDP2()
