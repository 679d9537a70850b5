"""`accel runs`: `list` names the runs of this machine and of a folder, `show` draws the curves of a run that the
tracker "jsonl" stored, `samples` counts the samples from each source of a mixture, `status` shows its processes, and
`goodput` shows where its time went.

All actions identify a run by its folder, or by the process id of its launcher while it runs.
"""

from __future__ import annotations

import os
import sys
from argparse import ArgumentParser, Namespace
from pathlib import Path
from typing import Final

__all__ = ("COMMAND", "Runs")

_RUN: Final = "The folder of the run (project_dir or logging_dir), or the process id of its launcher"


class Runs:
    """Shows runs: their metrics, and the state of their processes."""

    help = "show the processes of a run, and the curves of stored runs"
    examples = ("status", "list logs")

    def add_arguments(self, parser: ArgumentParser) -> None:
        """Declare the actions and their arguments."""
        actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
        listed = actions.add_parser(
            "list",
            help="list the runs of this machine and those stored in a folder",
            description="List the runs that this user started here with `accel launch`, and those stored in a folder.",
        )
        listed.add_argument(
            "path",
            metavar="FOLDER",
            nargs="?",
            default=".",
            help="Folder of stored runs; by default the current folder.",
        )
        listed.add_argument("--json", action="store_true", help="Print one line of JSON per run.")
        show = actions.add_parser("show", help="show one run", description="Show the curves of one run.")
        show.add_argument("path", metavar="RUN", help=f"{_RUN}; or a .jsonl file. A folder selects its newest run.")
        show.add_argument(
            "--output",
            type=Path,
            help="Picture to write (.png, .svg, .pdf, .html); by default a .png beside the run.",
        )
        show.add_argument("--text", action="store_true", help="Print text only, without a picture.")
        status = actions.add_parser(
            "status",
            help="show the state of each process of a run",
            description=(
                "Show each process of a run: its state and source line, steps per second and memory. Works for "
                "runs that the same user started with `accel launch`, even while they hang. The script needs no change."
            ),
        )
        status.add_argument("run", metavar="RUN", nargs="?", help=f"{_RUN}; by default all runs of this machine.")
        status.add_argument("--watch", action="store_true", help="Repeat every second until the run ends.")
        status.add_argument("--json", action="store_true", help="Print one line of JSON per run.")
        status.add_argument(
            "--stacks",
            action="store_true",
            help="Add the Python stacks of each process of this machine.",
        )

        goodput = actions.add_parser(
            "goodput",
            help="show how a run spent its time",
            description=(
                "Show where the time of a run went, over all its restarts: start-up, data, steps, evaluation, "
                "checkpoints, recomputed work, waiting and down time. The run must use `accel launch "
                "--project_dir` or Accelerator(goodput=True), which record these times."
            ),
        )
        goodput.add_argument("run", metavar="RUN", help=f"{_RUN}.")
        goodput.add_argument("--json", action="store_true", help="Print one line of JSON.")

        samples = actions.add_parser(
            "samples",
            help="show the number of samples from each source of a mixture",
            description="Show how many samples each source gave, its epochs, and its requested and actual share.",
        )
        samples.add_argument("path", metavar="RUN", help=f"{_RUN}; or a .jsonl file. A folder selects its newest run.")
        samples.add_argument("--json", action="store_true", help="Print one line of JSON.")

    def run(self, arguments: Namespace) -> int:
        """Run the action and return the exit code."""
        if arguments.action == "status":
            from accel_tracking.commands.status import show_status

            return show_status(arguments.run, arguments.watch, arguments.json, arguments.stacks)
        if arguments.action == "goodput":
            from accel_tracking.commands.goodput import show_goodput

            return show_goodput(_path(arguments.run), arguments.json)
        if arguments.action == "list":
            from accel_tracking.commands.stored import list_runs

            print(_printable(list_runs(arguments.path, arguments.json)))  # noqa: T201 - what the command is for
            return 0
        if arguments.action == "samples":
            from accel_tracking.commands.samples import describe_samples

            print(_printable(describe_samples(_path(arguments.path), arguments.json)))  # noqa: T201 - what the command is for
            return 0
        return _show(arguments)


def _show(arguments: Namespace) -> int:
    """Print a run as text, and draw it if `--output` is set or matplotlib is installed."""
    from accel_tracking.curves import MATPLOTLIB, describe_run, plot_run
    from accel_tracking.trackers.jsonl import read_run

    run = read_run(_path(arguments.path))
    print(_printable(describe_run(run)))  # noqa: T201 - what the command is for
    draw = arguments.output is not None or (MATPLOTLIB.obstacle() is None and bool(run.curves()))
    if draw and not arguments.text:
        output = arguments.output or run.path.with_suffix(".png")
        plot_run(run, output)
        print(f"Picture written to {output}")  # noqa: T201
    return 0


def _path(run: str) -> str:
    """The path itself, or the folder of the run whose launcher has this process id."""
    if not run.isdecimal() or os.path.exists(run):
        return run
    from accel_state.watch.runs import find_run

    return find_run(run).folder()


def _printable(text: str) -> str:
    """The text with "?" for characters that the terminal cannot print."""
    encoding = sys.stdout.encoding or "ascii"
    return text.encode(encoding, errors="replace").decode(encoding)


COMMAND = Runs()
