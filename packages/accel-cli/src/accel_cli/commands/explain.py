"""`accel explain`: every resolved setting of a launch, and where it comes from."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any, Final

from accel_cli.command import spelled

if TYPE_CHECKING:
    from argparse import ArgumentParser, Namespace

    from accel_cli.launch.request import Request

__all__ = ("COMMAND", "Explain")


class Explain:
    """The command; see `accel_cli.command.Command`."""

    help = "show every setting of a launch and where it comes from"

    def add_arguments(self, parser: ArgumentParser) -> None:
        """A config file, another one to compare with, and the arguments of a launch."""
        parser.usage = f"{parser.prog} [--config_file PATH] [--diff PATH] [--json] [-- launch arguments]"
        parser.add_argument(*spelled("--config_file"), metavar="PATH", help="Config file; the user's own if any.")
        parser.add_argument("--diff", metavar="PATH", help="Config file to compare with; shows only what differs.")
        parser.add_argument("--json", action="store_true", help="Print JSON.")
        parser.add_argument("launch", nargs="...", help="After --, what `accel launch` would be given.")

    def run(self, arguments: Namespace) -> int:
        """Print the table."""
        from accel_cli.config import explain
        from accel_cli.launch.request import request_of

        words = arguments.launch[arguments.launch[:1] == ["--"] :]
        request = request_of(words, os.environ, arguments.config_file)
        if arguments.diff is None:
            rows: list[dict[str, Any]] = explain.as_data(request.settings)
            lines = explain.table(request.settings)
        else:
            other = request_of(words, os.environ, arguments.diff)
            names = (request.config.path if request.config else "no file", arguments.diff)
            rows = explain.difference(request.settings, other.settings)
            lines = explain.difference_table(request.settings, other.settings, names)
        if arguments.json:
            import json

            print(json.dumps(rows, indent=2))
        else:
            print("\n".join(lines))
            _print_notes(request)
        return 0


def _print_notes(request: Request) -> None:
    from accel_cli.launch.request import notes

    for note in notes(request):
        print(f"Note: {note}")


COMMAND: Final = Explain()
