"""`accel backends`: lists the installed backends, their packages, and whether they work on this machine.

Only the probe imports torch.
"""

from __future__ import annotations

import os
import textwrap
from collections.abc import Iterable
from typing import TYPE_CHECKING, Final

from accel_cli.launch.backends import BackendRow, ask_backends, backend_rows
from accel_state.untrusted import printable

if TYPE_CHECKING:
    from argparse import ArgumentParser, Namespace

__all__ = ("COMMAND", "HEAD", "Backends", "table_cells")

HEAD: Final = ("name", "version", "package", "tier", "here")


def table_cells(listed: Iterable[BackendRow]) -> list[tuple[str, ...]]:
    """The cells of a row, in the order of `HEAD`."""
    return [
        (
            row.name,
            row.version,
            row.package,
            "?" if row.tier is None else str(row.tier),
            f"cannot be used: {row.obstacle}" if row.obstacle else row.state,
        )
        for row in listed
    ]


_LEGEND: Final = (
    "A single process without options uses the 'default' backend. "
    "`accel launch --backend NAME` selects an 'available' one; the document on what is supported explains the tiers."
)


class Backends:
    """Prints a table of the backends, and the traceback of each that failed."""

    help = "list the installed backends, their packages, and whether they work here"
    examples = ("", "--json")

    def add_arguments(self, parser: ArgumentParser) -> None:
        """Declare the output options."""
        parser.add_argument("--json", action="store_true", help="Print JSON.")
        parser.add_argument(
            "--no_probe",
            "--no-probe",
            action="store_true",
            help="Do not check whether the backends work; does not need torch.",
        )

    def run(self, arguments: Namespace) -> int:
        """Print the table, and the traceback of each backend that failed."""

        answers, obstacle = ({}, "") if arguments.no_probe else ask_backends(os.environ)
        listed = backend_rows(answers)
        if arguments.json:
            import json

            print(json.dumps([row._asdict() for row in listed], indent=2))
        else:
            _show(listed)
        if obstacle:
            import sys

            problem = "they could not be asked whether they can be used"
            print(printable(f"accel backends: {problem}: {obstacle}"), file=sys.stderr)
        return 0


def _show(listed: list[BackendRow]) -> None:
    from accel_cli.terminal import columns

    print("\n".join(columns(HEAD, table_cells(listed), HEAD[-1])))
    for row in listed:
        if row.failure:
            print(f"\n{row.name} ({row.package} {row.version}) failed:")
            print(textwrap.indent(printable(row.failure.rstrip(), keep="\n\t"), "    "))
    print(f"\n{_LEGEND}")


COMMAND: Final = Backends()
