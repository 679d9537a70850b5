"""`accel check-resume`: check that a script resumed from a checkpoint computes the same as an uninterrupted run.

The uninterrupted run continues for some steps after the checkpoint was written. New processes load the checkpoint and
run the same steps. What both compute is compared byte for byte.
"""

from __future__ import annotations

import json
import shlex
import tempfile
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from accel_check.launch import ProcessLaunch, add_launch_options, add_script, launch_of, read_numbers, show_progress
from accel_check.report import CODES, EXIT_CODES
from accel_check.runs import CheckedScript, import_libraries, run
from accel_state.errors import SettingError

if TYPE_CHECKING:
    from accel_check.records import Records
    from accel_check.task import ResumeTask

__all__ = ("COMMAND", "CheckResume", "Outcome", "ResumePlan", "check")


@dataclass(frozen=True)
class ResumePlan:
    """How a script runs, is saved and resumed.

    Args:
        at: optimizer steps after which to save and resume.
        processes: world sizes: the first is that of the uninterrupted run, each is that of a resumed run.
        steps: steps to compare after each checkpoint.
        in_window: save one batch after each step, inside an accumulation window.
        resume_args: arguments with which the script loads a checkpoint, with "{checkpoint}" for its path.
        launch: how the processes run it; their number is replaced by those of `processes`.
    """

    at: tuple[int, ...] = (3,)
    processes: tuple[int, ...] = (1,)
    steps: int = 5
    in_window: bool = False
    resume_args: str = ""
    launch: ProcessLaunch = field(default_factory=ProcessLaunch)


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
        unseen: what the check did not see.
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
    unseen: tuple[str, ...] = ()

    def __str__(self) -> str:
        lines = [f"resumed after step {self.at} on {self.processes} processes: {self.verdict}: {self.reason}"]
        if self.used:
            lines.append(
                f"  state that the script uses (the check would notice if it were missing): {', '.join(self.used)}"
            )
        if self.unsaved:
            lines.append(f"  variables that differ and are not in the checkpoint: {', '.join(self.unsaved)}")
        if self.unseen:
            lines.append(f"  the check did not see: {', '.join(self.unseen)}")
        return "\n".join(lines)


class CheckResume:
    """Runs a script without a break and from its checkpoints, and prints the first difference."""

    help = "check that a resumed run computes the same as an uninterrupted one"
    examples = ("train.py", '--at 7 --resume_args "--resume {checkpoint}" train.py')

    def add_arguments(self, parser: ArgumentParser) -> None:
        """Declare the options, then the script and its arguments."""
        parser.description = (
            "Run a training script for some steps, load its checkpoints in new processes, and compare the results of "
            "both runs byte for byte. The script needs no change, and need not use this library."
        )
        parser.epilog = EXIT_CODES
        parser.add_argument(
            "--at",
            type=read_numbers,
            default=(3,),
            help="Optimizer steps after which to save and resume (3,7; default: 3).",
        )
        parser.add_argument(
            "--processes",
            type=read_numbers,
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
            "without them the command saves and loads it through the Accelerator, before the first batch.",
        )
        parser.add_argument("--cpu", action="store_true", help="Run on the CPU, which is the default.")
        parser.add_argument("--json", action="store_true", help="Print one line of JSON for each resumed run.")
        add_launch_options(parser)
        add_script(parser)

    def run(self, arguments: Namespace) -> int:
        """Run the check, print its results and return the exit code."""
        if min((*arguments.at, *arguments.processes, arguments.steps)) < 1:
            raise SettingError(
                "Cannot check a resumed run with a value below 1 in --at, --processes or --steps.",
                "The first checkpoint is saved after step 1, and at least one step follows it.",
                "Give numbers from 1 in --at, --processes and --steps.",
            )
        plan = ResumePlan(
            arguments.at,
            arguments.processes,
            arguments.steps,
            arguments.in_window,
            arguments.resume_args,
            launch_of(arguments, arguments.processes[0]),
        )
        script = CheckedScript(arguments.script, arguments.script_arguments)
        outcomes = check(script, plan, None if arguments.json else show_progress)
        for outcome in outcomes:
            print(json.dumps(vars(outcome)) if arguments.json else outcome)  # noqa: T201 - what the command is for
        verdicts = {outcome.verdict for outcome in outcomes}
        return CODES[next(name for name in ("differs", "not verified", "equal") if name in verdicts)]


def check(script: CheckedScript, plan: ResumePlan, progress: Callable[[str], None] | None = None) -> list[Outcome]:
    """Run a script without interruption, then resume it from each checkpoint, and compare.

    Args:
        script: the script.
        plan: how it runs, is saved and resumed.
        progress: called with a line before each part of the check.

    Raises:
        SettingError: an option of the plan is invalid.
    """
    with tempfile.TemporaryDirectory(prefix="accel-check-resume-") as folder:
        return _Check(script, plan, Path(folder), progress or (lambda text: None)).outcomes()


class _Check:
    """The runs of one check."""

    def __init__(self, script: CheckedScript, plan: ResumePlan, folder: Path, progress: Callable[[str], None]) -> None:
        self._script, self._plan, self._folder, self._progress = script, plan, folder, progress
        self._runs = 0

    def outcomes(self) -> list[Outcome]:
        """Run without interruption, then resume from each step with each number of processes."""
        from accel_check.records import Records

        plan, steps = self._plan, sorted(set(self._plan.at))
        plan.launch.environment(self._script.path)
        self._progress("imports torch")
        import_libraries(self._script)
        task = self._task(steps)
        self._progress(f"runs {plan.processes[0]} processes without interruption")
        straight, failure = self._run(task, self._script, plan.processes[0])
        kept: dict[int, tuple[int, list[str]]] = {}
        for facts in straight.ranks:
            for step, (call, paths) in facts.more.get("kept", {}).items():
                kept.setdefault(step, (call, []))[1].extend(paths)
        failure = failure or self._obstacle(straight, kept, steps)
        if failure is not None:
            reason = f"the uninterrupted run failed: {failure}"
            return [Outcome(at, count, "not verified", reason) for at in steps for count in plan.processes]
        assert isinstance(straight, Records)
        return [self._resumed(straight, at, kept[at], count, task) for at in steps for count in plan.processes]

    def _task(self, steps: Sequence[int]) -> ResumeTask:
        from accel_check.task import ResumeTask

        return ResumeTask(
            tuple(steps),
            steps[-1] + self._plan.steps,
            checkpoints=str(self._folder / "checkpoints"),
            in_window=self._plan.in_window,
            saved_on=self._plan.processes[0],
            resumes_itself=bool(self._plan.resume_args),
        )

    def _obstacle(self, straight: Records, kept: dict[int, Any], steps: Sequence[int]) -> str | None:
        """Why the uninterrupted run cannot be resumed; None if it can."""
        if not straight.calls:
            return "the script makes no step: it trains no model, or steps no optimizer of torch"
        last_made = straight.step(0, straight.calls).number
        missing = [step for step in steps if step not in kept]
        if last_made <= steps[-1]:
            return f"the script made {last_made} steps; give --at less than that"
        if missing and self._plan.resume_args:
            return (
                f"the script wrote nothing through torch.save, safetensors or torch.distributed.checkpoint after step "
                f"{missing[0]}"
            )
        if missing:
            return (
                "the script does not train on a loader that accelerator.prepare() returned, so that the command cannot "
                "save and load between its batches; give --resume_args if it saves and resumes itself"
            )
        return None

    def _resumed(
        self, straight: Records, at: int, kept: tuple[int, list[str]], processes: int, task: ResumeTask
    ) -> Outcome:
        from accel_check.continuation import Resumed, compare_resumed, compare_runs
        from accel_check.scratch import deepest_common

        call, paths = kept
        checkpoint = deepest_common(paths)
        # A script may save less often than after each step.
        step = next(straight.step(0, one).number for one in range(call, 0, -1) if not straight.step(0, one).optimizer)
        calls = min(straight.calls - call, straight.calls, self._calls(straight, call))
        last = straight.step(0, call + calls).number
        script = self._script
        if self._plan.resume_args:
            script = script.with_arguments(
                shlex.split(self._plan.resume_args.replace("{checkpoint}", shlex.quote(checkpoint)))
            )
        task = replace(task, save_at=(), last_step=last, resumed_at=step, checkpoint=checkpoint)
        self._progress(f"resumes {processes} processes after step {step}")
        records, failure = self._run(task, script, processes)
        if failure is None and not records.calls:
            failure = "it makes no step"
        if failure is not None:
            # A backend may refuse another number of processes, with an error.
            verdict = "differs" if processes == self._plan.processes[0] else "not verified"
            return Outcome(step, processes, verdict, f"the resumed run failed: {failure}")
        resumed = Resumed(straight, records, step, call, calls)
        difference = compare_resumed(resumed)
        if difference is None:
            return self._equal(resumed, processes)
        if not difference.loaded and not difference.what.startswith("the variable"):
            again, failure = self._run(task, script, processes)
            if failure is None and (unlike := compare_runs(records, again)) is not None:
                reason = f"two runs from the same checkpoint differ from each other: the second one {unlike}"
                return Outcome(
                    step, processes, "not verified", reason, difference.step, difference.rank, difference.what
                )
        return Outcome(step, processes, "differs", str(difference), difference.step, difference.rank, difference.what)

    def _calls(self, straight: Records, call: int) -> int:
        """Calls of `step` of all optimizers in the compared steps."""
        first = [one for one in range(call + 1, straight.calls + 1) if not straight.step(0, one).optimizer]
        last = first[min(self._plan.steps, len(first)) - 1]
        return last - call

    def _equal(self, run_: Any, processes: int) -> Outcome:
        from accel_check.continuation import LOSS_TOLERANCE, unsaved_variables, used_state

        at = run_.at
        if len(run_.straight.ranks) != len(run_.resumed.ranks):
            reason = f"the loaded state and the order of samples are equal, and losses within {LOSS_TOLERANCE:g}"
            return Outcome(at, processes, "equal", reason)
        unsaved, (used, lost) = tuple(unsaved_variables(run_)), used_state(run_)
        if lost:
            reason = (
                f"a checkpoint without {', '.join(lost)} would look the same: a new process has the state that was "
                f"saved after step {at}. Give another step."
            )
            return Outcome(at, processes, "not verified", reason, used=tuple(used), unsaved=unsaved)
        facts = run_.resumed.ranks[0]
        unseen = [] if facts.reads_loader else ["samples, since the script reads no DataLoader"]
        unseen += [] if "fresh" in facts.more else ["what a new process would have without the checkpoint"]
        reason = f"everything is equal for {run_.calls} steps"
        return Outcome(at, processes, "equal", reason, None, None, "", tuple(used), unsaved, tuple(unseen))

    def _run(self, task: ResumeTask, script: CheckedScript, processes: int) -> tuple[Records, str | None]:
        """The records of one run, and why it failed."""
        from accel_check.records import Records
        from accel_check.task import Task

        self._runs += 1
        folder = self._folder / f"run_{self._runs}"
        launch = replace(self._plan.launch, processes=processes)
        environment = launch.environment(self._script.path)
        whole = Task(str(folder), task.last_step, scratch=str(self._folder / f"scratch_{self._runs}"), resume=task)
        failure = run(whole, script, processes, environment, launch.timeout)
        return Records(folder), failure


COMMAND = CheckResume()
