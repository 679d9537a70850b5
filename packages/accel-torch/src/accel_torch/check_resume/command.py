"""`accel check-resume`: check that a script resumed from a checkpoint computes the same as an uninterrupted run.

The uninterrupted run continues for some steps after saving the checkpoint. New processes load the checkpoint and run
the same steps. The results of both are compared byte for byte: samples, losses, gradients, weights, optimizer
states, random-number generators.
"""

from __future__ import annotations

import json
import shlex
import tempfile
from argparse import ArgumentParser, Namespace
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from accel_state.errors import SettingError
from accel_torch.check_resume.comparison import LOSS_TOLERANCE, Notes, compare_notes, controls, unsaved_variables
from accel_torch.check_resume.task import Task
from accel_torch.observed_runs import DIFFERS, EQUAL, NOT_VERIFIED, check_script, launch

__all__ = ("COMMAND", "CheckResume")

_CODES: Final = {"equal": EQUAL, "differs": DIFFERS, "not verified": NOT_VERIFIED}


@dataclass
class Outcome:
    """The result for one resumed run.

    Args:
        at: step of the checkpoint.
        processes: world size of the resumed run.
        verdict: "equal", "differs" or "not verified".
        reason: one sentence.
        step, rank, what: step, rank and name of the first difference.
        used: groups of state that the script uses.
        unsaved: plain variables of the script that differ and are not in the checkpoint.
    """

    at: int
    processes: int
    verdict: str
    reason: str
    step: int | None = None
    rank: int | None = None
    what: str = ""
    used: tuple[str, ...] = ()
    unsaved: tuple[str, ...] = ()


class CheckResume:
    """The command; see `accel_cli.command.Command`."""

    help = "check that a resumed run computes the same as an uninterrupted one"

    def add_arguments(self, parser: ArgumentParser) -> None:
        """Declare the options, then the script and its arguments."""
        parser.description = (
            "Run a training script for some steps and save checkpoints, load them in new processes, and compare the "
            "results of both runs byte for byte. The script needs no change."
        )
        parser.epilog = f"Exit code {EQUAL}: equal; {DIFFERS}: differs; {NOT_VERIFIED}: not verified."
        parser.add_argument(
            "--at",
            type=_numbers,
            default=(3,),
            help="Optimizer steps after which to save and resume (3,7; default: 3).",
        )
        parser.add_argument(
            "--processes",
            type=_numbers,
            default=(1,),
            help="World sizes: the first is that of the uninterrupted run, each is that of a resumed run (2,3; "
            "default: 1).",
        )
        parser.add_argument(
            "--in_window",
            action="store_true",
            help="Save one batch after each step, inside an accumulation window.",
        )
        parser.add_argument("--steps", type=int, default=5, help="Steps to compare after each checkpoint (default: 5).")
        parser.add_argument(
            "--resume_args",
            default="",
            metavar="ARGUMENTS",
            help="Arguments with which the script loads a checkpoint, such as '--resume_from {checkpoint}'; "
            "without them the command loads it before the first batch.",
        )
        parser.add_argument("--cpu", action="store_true", help="Run on the CPU.")
        parser.add_argument("--mixed_precision", help="Mixed precision of the runs (no, fp16, bf16, fp8).")
        parser.add_argument("--backend", help="Backend of the runs, as `accel backends` lists it.")
        parser.add_argument(
            "--launch",
            default="",
            metavar="OPTIONS",
            help="Further options of `accel launch`, written as --launch='--use_fsdp --fsdp_version 2'.",
        )
        parser.add_argument(
            "--timeout", type=float, default=600.0, help="Seconds after which a run is stopped (default: 600)."
        )
        parser.add_argument("--json", action="store_true", help="Print one line of JSON for each resumed run.")
        parser.add_argument("script", help="The training script.")
        parser.add_argument("script_arguments", nargs="...", help="Arguments of the script.")

    def run(self, arguments: Namespace) -> int:
        """Run the check, print its results and return the exit code."""
        if min((*arguments.at, *arguments.processes, arguments.steps)) < 1:
            raise SettingError(
                "Cannot check a resumed run with a value below 1 in --at, --processes or --steps.",
                "The first checkpoint is saved after step 1, and at least one step follows it.",
                "Give numbers from 1 in --at, --processes and --steps.",
            )
        check_script(arguments.script)
        with tempfile.TemporaryDirectory(prefix="accel-check-resume-") as folder:
            outcomes = _Check(arguments, Path(folder)).outcomes()
        for outcome in outcomes:
            print(json.dumps(vars(outcome)) if arguments.json else _described(outcome))  # noqa: T201 - what the command is for
        verdicts = {outcome.verdict for outcome in outcomes}
        return _CODES[next(name for name in ("differs", "not verified", "equal") if name in verdicts)]


class _Check:
    """The runs of one check."""

    def __init__(self, arguments: Namespace, folder: Path) -> None:
        self._arguments, self._folder = arguments, folder
        self._straight = Notes()
        self._runs = 0

    def outcomes(self) -> list[Outcome]:
        """Run without interruption, then resume from each step with each number of processes."""
        arguments, steps = self._arguments, sorted(set(self._arguments.at))
        task = Task("", str(self._folder / "checkpoints"), steps[-1] + arguments.steps, tuple(steps))
        task = replace(task, saved_on=arguments.processes[0], in_window=arguments.in_window)
        straight, failure = self._run(task, arguments.processes[0])
        made = straight.last_step
        if failure is None and not made:
            failure = "the script does not train on a prepared loader, so its steps cannot be counted"
        elif made and made <= steps[-1]:
            failure = f"the script made {made} steps; give --at less than that{f'; {failure}' if failure else ''}"
        if failure is not None:
            reason = f"the uninterrupted run failed: {failure}"
            return [Outcome(at, count, "not verified", reason) for at in steps for count in arguments.processes]
        self._straight = straight
        return [self._resumed(at, count, task) for at in steps for count in arguments.processes]

    def _resumed(self, at: int, processes: int, straight: Task) -> Outcome:
        last = min(at + self._arguments.steps, self._straight.last_step)
        filled = self._arguments.resume_args.replace("{checkpoint}", shlex.quote(straight.folder_of(at)))
        task = replace(straight, last_step=last, save_at=(), resumed_at=at, resume_arguments=tuple(shlex.split(filled)))
        expected = _until(self._straight, last)
        notes, failure = self._run(task, processes)
        if failure is not None:
            # A backend may refuse another number of processes, with an error.
            verdict = "differs" if processes == self._arguments.processes[0] else "not verified"
            return Outcome(at, processes, verdict, f"the resumed run failed: {failure}")
        finding = compare_notes(expected, notes, at)
        if finding is None:
            return self._equal(expected, notes, at, processes)
        if not finding.loaded and not finding.what.startswith("the variable"):
            again, failure = self._run(task, processes)
            if failure is None and (unlike := compare_runs(notes, again)) is not None:
                reason = f"two runs from the same checkpoint differ from each other: the second one {unlike}"
                return Outcome(at, processes, "not verified", reason, finding.step, finding.rank, finding.what)
        return Outcome(at, processes, "differs", str(finding), finding.step, finding.rank, finding.what)

    def _equal(self, expected: Notes, notes: Notes, at: int, processes: int) -> Outcome:
        unsaved = tuple(unsaved_variables(expected, notes))
        if len(expected.ranks) != len(notes.ranks):
            reason = f"the loaded state and the order of samples are equal, and losses within {LOSS_TOLERANCE:g}"
            return Outcome(at, processes, "equal", reason)
        used, unseen = controls(self._straight, notes, at)
        if unseen:
            reason = (
                f"a checkpoint without {', '.join(unseen)} would look the same: a new process has the state that was "
                f"saved after step {at}. Give another step."
            )
            return Outcome(at, processes, "not verified", reason, used=tuple(used), unsaved=unsaved)
        reason = f"everything is equal for {expected.last_step - at} steps"
        return Outcome(at, processes, "equal", reason, used=tuple(used), unsaved=unsaved)

    def _options(self) -> list[str]:
        """The options of `accel launch`."""
        arguments = self._arguments
        chosen = {"--mixed_precision": arguments.mixed_precision, "--backend": arguments.backend}
        named = [word for flag, value in chosen.items() if value for word in (flag, value)]
        return [*(["--cpu"] if arguments.cpu else []), *named, *shlex.split(arguments.launch)]

    def _run(self, task: Task, processes: int) -> tuple[Notes, str | None]:
        """The records of one run, and why it failed."""
        arguments = self._arguments
        self._runs += 1
        folder = self._folder / f"run_{self._runs}"
        folder.mkdir()
        replace(task, notes=str(folder)).write(folder / "task.json")
        failure = launch(
            "accel_torch.check_resume.recording",
            folder / "task.json",
            [arguments.script, *arguments.script_arguments],
            processes=processes,
            options=self._options(),
            timeout=arguments.timeout,
        )
        return Notes.read(folder, processes), failure


def compare_runs(one: Notes, other: Notes) -> str | None:
    """How two runs from the same checkpoint differ; None if they are equal."""
    for step in range(1, one.last_step + 1):
        for rank in range(len(one.ranks)):
            ours, theirs = one.steps(rank).get(step), other.steps(rank).get(step)
            if ours is None:
                continue
            if theirs is None or any(ours[name] != theirs[name] for name in ("samples", "losses", "pieces")):
                return f"computes something else in step {step} on rank {rank}"
    return None


def _until(notes: Notes, last: int) -> Notes:
    """The records of a run up to a step, as if it had ended there."""
    return Notes([[note for note in rank if note["step"] <= last] for rank in notes.ranks])


def _described(outcome: Outcome) -> str:
    lines = [f"resumed after step {outcome.at} on {outcome.processes} processes: {outcome.verdict}: {outcome.reason}"]
    if outcome.used:
        lines.append(
            f"  state that the script uses (the check would notice if it were missing): {', '.join(outcome.used)}"
        )
    if outcome.unsaved:
        lines.append(f"  variables that differ and are not in the checkpoint: {', '.join(outcome.unsaved)}")
    return "\n".join(lines)


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(","))


COMMAND = CheckResume()
