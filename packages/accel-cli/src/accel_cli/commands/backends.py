"""`accel backends`: which backends are installed, where they come from, and whether they can be used here."""

from __future__ import annotations

import os
import textwrap
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from argparse import ArgumentParser, Namespace

    from accel_cli.backends.listing import Row

__all__ = ("COMMAND", "Backends")

_END: Final = (
    "A single process without options uses the 'default' backend. "
    "`accel launch --backend NAME` selects an 'available' one; the document on what is supported explains the tiers."
)


class Backends:
    """The command; see `accel_cli.command.Command`."""

    help = "list the installed backends, their packages, and whether they can be used here"

    def add_arguments(self, parser: ArgumentParser) -> None:
        """How to show them."""
        parser.add_argument("--json", action="store_true", help="Print JSON.")
        parser.add_argument(
            "--no_probe", "--no-probe", action="store_true", help="Do not ask them; torch is not needed."
        )

    def run(self, arguments: Namespace) -> int:
        """Print the table, and the traceback of each that failed."""
        from accel_cli.backends.listing import ask, rows

        answers, obstacle = ({}, "") if arguments.no_probe else ask(os.environ)
        listed = rows(answers)
        if arguments.json:
            import json

            print(json.dumps([row._asdict() for row in listed], indent=2))
        else:
            _show(listed)
        if obstacle:
            import sys

            print(f"accel backends: they could not be asked whether they can be used: {obstacle}", file=sys.stderr)
        return 0


def _show(listed: list[Row]) -> None:
    from accel_cli.backends.listing import HEAD, table
    from accel_cli.terminal import columns

    print("\n".join(columns(HEAD, table(listed), HEAD[-1])))
    for row in listed:
        if row.failure:
            print(f"\n{row.name} ({row.package} {row.version}) failed:")
            print(textwrap.indent(row.failure.rstrip(), "    "))
    print(f"\n{_END}")


COMMAND: Final = Backends()
