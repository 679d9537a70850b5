"""`accel runs show PATH`: the curves of a run that the tracker 'jsonl' kept."""

from __future__ import annotations

import sys
from argparse import ArgumentParser, Namespace
from pathlib import Path

__all__ = ("COMMAND", "Runs")


class Runs:
    """Shows runs kept as JSON lines."""

    help = "show the curves of runs that were kept as JSON lines"

    def add_arguments(self, parser: ArgumentParser) -> None:
        """Declare `show` and its arguments."""
        actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
        show = actions.add_parser("show", help="show one run", description="Show the curves of one run.")
        show.add_argument("path", type=Path, help="a .jsonl file, or a folder whose newest run is shown")
        show.add_argument(
            "--output",
            type=Path,
            help="picture to write (.png, .svg, .pdf, .html); beside the run as .png when left out",
        )
        show.add_argument("--text", action="store_true", help="text only, write no picture")

    def run(self, arguments: Namespace) -> int:
        """Print the run as text, and draw it when matplotlib is installed or a picture was asked for."""
        from accel_tracking.curves import describe_run
        from accel_tracking.plot import MATPLOTLIB, plot_run
        from accel_tracking.run_file import read_run

        run = read_run(arguments.path)
        print(_printable(describe_run(run)))  # noqa: T201 - what the command is for
        wanted = arguments.output is not None or (MATPLOTLIB.obstacle() is None and bool(run.curves()))
        if wanted and not arguments.text:
            output = arguments.output or run.path.with_suffix(".png")
            plot_run(run, output)
            print(f"drawn in {output}")  # noqa: T201
        return 0


def _printable(text: str) -> str:
    """The text with what the terminal cannot show replaced."""
    encoding = sys.stdout.encoding or "ascii"
    return text.encode(encoding, errors="replace").decode(encoding)


COMMAND = Runs()
