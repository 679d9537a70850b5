"""`accel check-parity`: check that several processes compute what one process computes with the same samples."""

from __future__ import annotations

import tempfile
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from accel_check.launch import ProcessLaunch, add_launch_options, add_script, launch_of, show_progress
from accel_check.report import EXIT_CODES, ParityReport
from accel_check.runs import CheckedScript, import_libraries, run
from accel_state.errors import SettingError

if TYPE_CHECKING:
    from accel_check.records import Records

__all__ = ("COMMAND", "CheckParity", "check")


class CheckParity:
    """Runs a script on several processes and on one, compares their steps, and prints the differences."""

    help = "check that several processes compute the same as one process"
    examples = ("train.py", "--processes 4 train.py --lr 0.01")

    def add_arguments(self, parser: ArgumentParser) -> None:
        """Declare the options, then the script and its arguments."""
        parser.description = (
            "Run a training script in several processes on the CPU, then in one process with the same samples, and "
            "compare each optimizer step. The script needs no change, and need not use this library."
        )
        parser.epilog = EXIT_CODES
        parser.add_argument(
            "--processes", type=int, help="The number of processes (default: product of the axes, or 2)."
        )
        parser.add_argument("--steps", type=int, default=5, help="Optimizer steps to compare (default: 5).")
        parser.add_argument("--json", action="store_true", help="Print the report as one line of JSON.")
        add_launch_options(parser)
        add_script(parser)

    def run(self, arguments: Namespace) -> int:
        """Run the check, print its report and return the exit code."""
        launch = launch_of(arguments, arguments.processes)
        if arguments.steps < 1:
            raise SettingError(
                "Cannot compare fewer steps than 1.", "Nothing would be compared.", "Give a number from 1 in --steps."
            )
        script = CheckedScript(arguments.script, arguments.script_arguments)
        report = check(script, launch, arguments.steps, None if arguments.json else show_progress)
        print(report.as_json() if arguments.json else report)  # noqa: T201 - what the command is for
        return report.code


def check(
    script: CheckedScript, launch: ProcessLaunch, steps: int, progress: Callable[[str], None] | None = None
) -> ParityReport:
    """Run a script in several processes and in one, and compare.

    Args:
        script: the script.
        launch: how several processes run it.
        steps: optimizer steps to compare.
        progress: called with a line before each part of the check.

    Raises:
        SettingError: an option of the launch is invalid.
    """
    with tempfile.TemporaryDirectory(prefix="accel-check-parity-") as folder:
        return _Check(script, launch, steps, Path(folder), progress or (lambda text: None)).report()


class _Check:
    """The runs of one check."""

    def __init__(
        self, script: CheckedScript, launch: ProcessLaunch, steps: int, folder: Path, progress: Callable[[str], None]
    ) -> None:
        self._script, self._launch, self._steps, self._folder, self._progress = script, launch, steps, folder, progress

    def report(self) -> ParityReport:
        """Run in several processes, then in one, and compare."""
        environments = [
            self._launch.environment(self._script.path),
            self._launch.alone().environment(self._script.path),
        ]
        self._progress("imports torch")
        import_libraries(self._script)
        # 64 bits have next to no rounding; a script that sets narrower numbers fails, and runs as it is.
        wide = self._launch.mixed_precision in ("", "no")
        report = self._runs("float64", environments) if wide else None
        return report if report is not None else self._runs("float32", environments, last=True)  # type: ignore[return-value]

    def _runs(self, precision: str, environments: list[dict[str, str]], last: bool = False) -> ParityReport | None:
        """The report of both runs; None if one fails and another precision is to be tried."""
        from accel_check.records import Records

        several, one = self._folder / precision / "several", self._folder / precision / "one"
        count = self._launch.processes
        self._progress(f"runs {count} processes in {precision}")
        failure = self._run(several, "", count, environments[0], precision)
        if failure is not None:
            return ParityReport("not verified", f"the run of {count} processes failed: {failure}") if last else None
        records = Records(several)
        obstacle = _nothing_to_compare(records, count)
        if obstacle is not None:
            return ParityReport("not verified", obstacle, written=_written(records))
        self._progress("runs one process with the same samples")
        failure = self._run(one, str(several), 1, environments[1], precision)
        reference = Records(one)
        if failure is not None or not reference.calls:
            failure = failure or "it makes no optimizer step"
            return ParityReport("not verified", f"the run of one process failed: {failure}") if last else None
        return self._compared(records, reference, precision)

    def _compared(self, several: Records, one: Records, precision: str) -> ParityReport:
        from accel_check.comparison import compare_runs, limits_of, remarks

        calls, written = min(several.calls, one.calls), _written(several)
        compared = max(one.step(0, call).number for call in range(1, calls + 1))
        notes = remarks(several, one)
        shapes = one.ranks[0].more.get("other shapes") or []
        if shapes:
            reason = f"parameters have other shapes in one process, such as {shapes[0]}: the script divides them itself"
            return ParityReport("not verified", reason, [], compared, precision, notes, written)
        other_rows = _other_rows(several, one)
        findings = compare_runs(several, one, limits_of(several, one))
        if other_rows and not any(finding.step == 0 for finding in findings):
            return ParityReport("not verified", other_rows, findings, compared, precision, notes, written)
        drew = [one.step(0, call).number for call in range(1, calls + 1) if one.step(0, call).drew]
        if findings and findings[0].step in drew and findings[0].what not in ("samples", "dropout"):
            reason = (
                f"the script draws random numbers in step {findings[0].step} outside dropout, and several processes "
                "draw others than one process"
            )
            return ParityReport("not verified", reason, findings, compared, precision, notes, written)
        if findings:
            reason = f"{self._launch.processes} processes do not compute what one process computes"
            return ParityReport("differs", reason, findings, compared, precision, notes, written)
        if any("does not change: it is [" in note for note in notes):
            return ParityReport("not verified", "every step computes the same", [], compared, precision, notes, written)
        reason = f"{self._launch.processes} processes compute what one process computes, for {compared} steps"
        return ParityReport("equal", reason, [], compared, precision, notes, written)

    def _run(
        self, folder: Path, follows: str, world: int, environment: Mapping[str, str], precision: str
    ) -> str | None:
        from accel_check.task import Task

        scratch = str(folder.with_name(f"{folder.name}_scratch"))
        task = Task(str(folder), self._steps, follows, precision == "float64", scratch)
        return run(task, self._script, world, environment, self._launch.timeout)


def _nothing_to_compare(records: Records, processes: int) -> str | None:
    """Why the records of several processes cannot be compared; None if they can."""
    if len(records.ranks) < processes:
        return f"{processes - len(records.ranks)} of {processes} processes recorded nothing"
    if not records.ranks[0].models:
        return "the script trains no model: no module is called in training mode with gradients"
    if not records.calls:
        return "the script never steps an optimizer of torch"
    return None


def _other_rows(several: Records, one: Records) -> str | None:
    """Why one process did not read what several read, where no loader was followed; None if it did."""
    if several.ranks[0].reads_loader:
        return None
    readers = [facts.rank for facts in several.representatives()]
    for call in range(1, min(several.calls, one.calls) + 1):
        theirs = [row for rank in readers for row in several.step(rank, call).rows]
        own = one.step(0, call).rows
        if sorted(own) != sorted(theirs):
            return (
                f"the script reads no DataLoader, and in step {call} one process gives its model other rows than "
                f"{several.ranks[0].world} processes do: let the global batch not depend on the world size"
            )
    return None


def _written(records: Records) -> list[str]:
    return sorted({path for facts in records.ranks for path in facts.written})


COMMAND = CheckParity()
