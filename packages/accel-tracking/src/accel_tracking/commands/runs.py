"""`accel runs`: the curves of a run that the tracker 'jsonl' kept, and what the processes of a run do now.

Both actions name a run in the same way: by its folder, or by the process id of its launcher while it goes on.
"""

from __future__ import annotations

import os
import sys
from argparse import ArgumentParser, Namespace
from pathlib import Path
from typing import Final

__all__ = ("COMMAND", "Runs")

_RUN: Final = "the folder of the run (project_dir or logging_dir), or the process id of its launcher"


class Runs:
    """Shows runs: what they do, and what they logged."""

    help = "show what the processes of a run do, and the curves of runs that were kept as JSON lines"

    def add_arguments(self, parser: ArgumentParser) -> None:
        """Declare the actions and their arguments."""
        actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
        show = actions.add_parser("show", help="show one run", description="Show the curves of one run.")
        show.add_argument("path", metavar="RUN", help=f"{_RUN}, whose newest curves are shown; or a .jsonl file")
        show.add_argument(
            "--output",
            type=Path,
            help="picture to write (.png, .svg, .pdf, .html); beside the run as .png when left out",
        )
        show.add_argument("--text", action="store_true", help="text only, write no picture")
        status = actions.add_parser(
            "status",
            help="show what each process of a run does now",
            description=(
                "Show what each process of a run does now: its state and line, steps per second and memory. The run "
                "was started by `accel launch`, by the same user; it may hang, and its script need not know of this."
            ),
        )
        status.add_argument("run", metavar="RUN", nargs="?", help=f"{_RUN}; all runs of this machine when left out")
        status.add_argument("--watch", action="store_true", help="show it again every second, until the run ends")
        status.add_argument("--json", action="store_true", help="one JSON object a line, for each run")
        status.add_argument(
            "--stacks",
            action="store_true",
            help="also the Python stack of each process of this machine (by py-spy where it is installed)",
        )

    def run(self, arguments: Namespace) -> int:
        """Do what was asked for and return the exit code."""
        if arguments.action == "status":
            from accel_tracking.commands.status import show_status

            return show_status(arguments.run, arguments.watch, arguments.json, arguments.stacks)
        return _show(arguments)


def _show(arguments: Namespace) -> int:
    """Print a run as text, and draw it when matplotlib is installed or a picture was asked for."""
    from accel_tracking.curves import describe_run
    from accel_tracking.plot import MATPLOTLIB, plot_run
    from accel_tracking.run_file import read_run

    run = read_run(_path(arguments.path))
    print(_printable(describe_run(run)))  # noqa: T201 - what the command is for
    wanted = arguments.output is not None or (MATPLOTLIB.obstacle() is None and bool(run.curves()))
    if wanted and not arguments.text:
        output = arguments.output or run.path.with_suffix(".png")
        plot_run(run, output)
        print(f"drawn in {output}")  # noqa: T201
    return 0


def _path(run: str) -> str:
    """The path that a run is named by, or the folder of the one whose launcher has this process id."""
    if not run.isdecimal() or os.path.exists(run):
        return run
    from accel_state.run_status.find import find_run

    return find_run(run).folder()


def _printable(text: str) -> str:
    """The text with what the terminal cannot show replaced."""
    encoding = sys.stdout.encoding or "ascii"
    return text.encode(encoding, errors="replace").decode(encoding)


COMMAND = Runs()
