"""`accel runs`: what runs do, what they did, what differs between them, and the same run once more.

Every action takes a run in the same way: by its folder, or by the process id of its launcher while it runs.
"""

from __future__ import annotations

import os
import sys
from argparse import ArgumentParser, Namespace, RawDescriptionHelpFormatter
from collections.abc import Callable
from pathlib import Path
from typing import Final, NamedTuple

__all__ = ("ACTIONS", "COMMAND", "Runs", "run_folder")

_RUN_HELP: Final = "The folder of the run (project_dir or logging_dir), or the process id of its launcher"
_RUN_OR_FILE_HELP: Final = f"{_RUN_HELP}; or a .jsonl file. A folder selects its newest run."


class Action(NamedTuple):
    """One action of `accel runs`.

    Args:
        name: its name.
        help: one line for the list of actions.
        question: which question it answers, and how.
        examples: arguments of two calls.
        declare: adds its arguments to a parser.
        run: does the work and returns the exit code.
    """

    name: str
    help: str
    question: str
    examples: tuple[str, str]
    declare: Callable[[ArgumentParser], None]
    run: Callable[[Namespace], int]


class Runs:
    """Passes its arguments on to one of the actions."""

    help = "show, compare, report, repeat and replay runs"
    examples = ("status", "list logs")

    def add_arguments(self, parser: ArgumentParser) -> None:
        """Declare the actions and their arguments."""
        actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
        for action in ACTIONS:
            examples = "\n".join(f"  accel runs {action.name} {words}".rstrip() for words in action.examples)
            declared = actions.add_parser(
                action.name,
                help=action.help,
                description=action.question,
                epilog=f"examples:\n{examples}",
                formatter_class=RawDescriptionHelpFormatter,
            )
            action.declare(declared)

    def run(self, arguments: Namespace) -> int:
        """Run the action and return the exit code."""
        return next(action for action in ACTIONS if action.name == arguments.action).run(arguments)


def run_folder(run: str) -> str:
    """The path itself, or the folder of the run whose launcher has this process id."""
    if not run.isdecimal() or os.path.exists(run):
        return run
    from accel_state.watch.runs import find_run

    return find_run(run).folder()


def _print(text: str) -> None:
    """Print a text, with "?" for characters that the terminal cannot print."""
    encoding = sys.stdout.encoding or "ascii"
    print(text.encode(encoding, errors="replace").decode(encoding))


def _json(parser: ArgumentParser, what: str = "one line of JSON") -> None:
    parser.add_argument("--json", action="store_true", help=f"Print {what}.")


# ---------------------------------------------------------------------- what there is


def _declare_list(parser: ArgumentParser) -> None:
    parser.add_argument(
        "path", metavar="FOLDER", nargs="?", default=".", help="Folder of stored runs; by default the current folder."
    )
    _json(parser, "one line of JSON per run")


def _list(arguments: Namespace) -> int:
    from accel_cli.runs.tables import list_runs

    _print(list_runs(arguments.path, arguments.json))
    return 0


def _declare_show(parser: ArgumentParser) -> None:
    parser.add_argument("path", metavar="RUN", help=_RUN_OR_FILE_HELP)
    parser.add_argument(
        "--output", type=Path, help="Picture to write (.png, .svg, .pdf, .html); by default a .png beside the run."
    )
    parser.add_argument("--text", action="store_true", help="Print text only, without a picture.")


def _show(arguments: Namespace) -> int:
    from accel_tracking.curves import MATPLOTLIB, describe_run, plot_run
    from accel_tracking.trackers.jsonl import read_run

    run = read_run(run_folder(arguments.path))
    _print(describe_run(run))
    draw = arguments.output is not None or (MATPLOTLIB.obstacle() is None and bool(run.curves()))
    if draw and not arguments.text:
        output = arguments.output or run.path.with_suffix(".png")
        plot_run(run, output)
        _print(f"Picture written to {output}")
    return 0


def _declare_status(parser: ArgumentParser) -> None:
    parser.add_argument("run", metavar="RUN", nargs="?", help=f"{_RUN_HELP}; by default all runs of this machine.")
    parser.add_argument("--watch", action="store_true", help="Repeat every second until the run ends.")
    _json(parser, "one line of JSON per run")
    parser.add_argument("--stacks", action="store_true", help="Add the Python stacks of each process of this machine.")


def _status(arguments: Namespace) -> int:
    from accel_cli.runs.status import show_status

    return show_status(arguments.run, arguments.watch, arguments.json, arguments.stacks)


def _declare_goodput(parser: ArgumentParser) -> None:
    parser.add_argument("run", metavar="RUN", help=f"{_RUN_HELP}.")
    _json(parser)


def _goodput(arguments: Namespace) -> int:
    from accel_cli.runs.tables import show_goodput

    return show_goodput(run_folder(arguments.run), arguments.json)


def _declare_samples(parser: ArgumentParser) -> None:
    parser.add_argument("path", metavar="RUN", help=_RUN_OR_FILE_HELP)
    _json(parser)


def _samples(arguments: Namespace) -> int:
    from accel_tracking.sample_counts import describe_samples

    _print(describe_samples(run_folder(arguments.path), arguments.json))
    return 0


# ---------------------------------------------------------------------- comparing and running again


def _declare_diff(parser: ArgumentParser) -> None:
    parser.add_argument("runs", metavar="RUN", nargs=2, help=f"{_RUN_HELP}.")
    _json(parser)


def _diff(arguments: Namespace) -> int:
    from accel_cli.runs.tables import show_difference

    one, other = map(run_folder, arguments.runs)
    return show_difference(one, other, arguments.json)


def _declare_repeat(parser: ArgumentParser) -> None:
    parser.add_argument("run", metavar="RUN", help=f"{_RUN_HELP}.")
    parser.add_argument("--steps", type=int, metavar="N", help="End after step N of the run.")
    parser.add_argument("--output", metavar="FOLDER", help="Folder of the new run; by default one beside the run.")
    parser.add_argument("--start", action="store_true", help="Start it; otherwise the command is only printed.")


def _repeat(arguments: Namespace) -> int:
    from accel_cli.runs.repeat import repeat_run

    return repeat_run(run_folder(arguments.run), arguments.output, arguments.steps, arguments.start)


def _declare_report(parser: ArgumentParser) -> None:
    parser.add_argument("runs", metavar="RUN", nargs="+", help=f"{_RUN_HELP}.")
    parser.add_argument(
        "-o", "--output", type=Path, default=Path("report.html"), help="HTML file to write; by default report.html."
    )
    parser.add_argument("--watch", action="store_true", help="Write it again every 5 seconds until the run ends.")


def _report(arguments: Namespace) -> int:
    from accel_cli.report.page import show_report

    return show_report([run_folder(run) for run in arguments.runs], arguments.output, arguments.watch)


def _declare_replay(parser: ArgumentParser) -> None:
    parser.add_argument("run", metavar="RUN", help=f"{_RUN_HELP}.")
    parser.add_argument("--step", type=int, metavar="N", required=True, help="Number of the step, from 1.")
    parser.add_argument("--output", metavar="FOLDER", help="Folder for both replays; by default beside the run.")
    _json(parser)


def _replay(arguments: Namespace) -> int:
    from accel_cli.runs.replay import show_replay

    return show_replay(run_folder(arguments.run), arguments.step, arguments.output, arguments.json)


ACTIONS: Final = (
    Action(
        "list",
        "name the runs of this machine and those stored in a folder",
        "Which runs are there? Names those that this user started here with `accel launch`,\n"
        "and those stored in a folder.",
        ("", "runs --json"),
        _declare_list,
        _list,
    ),
    Action(
        "show",
        "show the curves of one run",
        'How did its metrics develop? Prints the curves of a run that the tracker "jsonl" stored, and draws them.',
        ("runs/digits", "runs/digits --output curves.svg"),
        _declare_show,
        _show,
    ),
    Action(
        "status",
        "show the state of each process of a run",
        "What does each process do now? Shows its state and source line, steps per second and memory, of runs\n"
        "that the same user started with `accel launch`, even while they hang. The script needs no change.",
        ("", "runs/digits --stacks"),
        _declare_status,
        _status,
    ),
    Action(
        "goodput",
        "show how a run spent its time",
        "Where did the time go? Shows start-up, data, steps, evaluation, checkpoints, recomputed work, waiting and\n"
        "down time over all restarts, of runs with `accel launch --project_dir` or Accelerator(goodput=True).",
        ("runs/digits", "runs/digits --json"),
        _declare_goodput,
        _goodput,
    ),
    Action(
        "samples",
        "show the number of samples from each source of a mixture",
        "Which data did it read? Shows how many samples each source gave, its epochs, and its requested and\n"
        "actual share.",
        ("runs/mixed", "runs/mixed --json"),
        _declare_samples,
        _samples,
    ),
    Action(
        "report",
        "write one HTML file about one run or several",
        "What happened in it? Writes a page that needs nothing else: curves of all runs with zoom and smoothing,\n"
        "goodput with failures, restarts, saves and bad steps, memory, seconds by category, checkpoints, settings and\n"
        "differences.",
        ("runs/digits -o digits.html", "runs/a runs/b --watch"),
        _declare_report,
        _report,
    ),
    Action(
        "diff",
        "show what differs between two runs",
        "Why are their results not the same? Names what differs in code, settings, packages, data and world, the\n"
        "most telling first, and the first step at which metrics differ.\n"
        "Exit code 1 if anything differs, 0 if nothing does.",
        ("runs/a runs/b", "runs/a runs/b --json"),
        _declare_diff,
        _diff,
    ),
    Action(
        "repeat",
        "start the same run once more in a new folder",
        "Does it come out the same? Prints the recorded command with its settings and seeds and, with --start, starts\n"
        "it in a new folder and compares the metrics. Warns about what cannot be repeated.",
        ("runs/digits", "runs/digits --steps 100 --start"),
        _declare_repeat,
        _repeat,
    ),
    Action(
        "replay",
        "make one step of a run twice more",
        "Why was this step bad? Starts the recorded command twice from the newest automatic checkpoint before the\n"
        "step, and says whether the step repeats bit-equal, and whether it is bad again (data or numerics) or not\n"
        "(hardware or a race). Exit code 0 if it repeats and is good, else 1.",
        ("runs/digits --step 4711", "runs/digits --step 4711 --json"),
        _declare_replay,
        _replay,
    ),
)
"""The actions, in the order of the help text."""

COMMAND: Final = Runs()
