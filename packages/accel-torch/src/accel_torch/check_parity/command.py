"""`accel check-parity`: check that a plan of several processes computes the same as one process.

The script runs under the plan for some steps. Then one process runs it with the same global batches. With dropout
disabled, the losses, gradients, norms, parameters and buffers of each step are compared; then the dropout masks.
"""

from __future__ import annotations

import json
import shlex
import tempfile
from argparse import ArgumentParser, ArgumentTypeError, Namespace
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Final

from accel_state.errors import SettingError
from accel_torch.observed_runs import DIFFERS, EQUAL, NOT_VERIFIED, check_script, launch

if TYPE_CHECKING:
    from accel_torch.check_parity.comparison import ParityFinding
    from accel_torch.check_parity.notes import ParityTask, RunNotes

__all__ = ("COMMAND", "CheckParity", "ParityPlan", "ParityReport", "check")

_CODES: Final = {"equal": EQUAL, "differs": DIFFERS, "not verified": NOT_VERIFIED}
_AXES: Final = ("dp_replicate", "dp_shard", "tp", "cp", "sp")


@dataclass(frozen=True)
class ParityPlan:
    """A plan: how several processes run a script.

    Args:
        processes: the number of processes.
        backend: name of the backend, as `accel backends` lists it; if empty, the script's backend.
        axes: sizes of mesh axes by name, such as {"dp_shard": 2, "tp": 2}.
        mixed_precision: mixed precision of both runs; if empty, the script's.
        launch: further options of `accel launch`.
        timeout: seconds after which a run is stopped.
    """

    processes: int = 2
    backend: str = ""
    axes: dict[str, int] = field(default_factory=dict)
    mixed_precision: str = ""
    launch: tuple[str, ...] = ()
    timeout: float = 600.0

    def options(self) -> list[str]:
        """The options of `accel launch` under the plan."""
        made = ["--cpu", *(["--backend", self.backend] if self.backend else []), *self._precision()]
        if self.axes:
            made.append("--use_parallelism_config")
        for name, size in self.axes.items():
            made += [f"--parallelism_config_{name}_size", str(size)]
        if self.axes.get("sp", 1) > 1 and self.backend != "deepspeed":
            made += ["--parallelism_config_sp_backend", "torch"]
        return [*made, *self.launch]

    def options_of_one(self) -> list[str]:
        """The options of `accel launch` for one process."""
        return ["--cpu", *self._precision()]

    def _precision(self) -> list[str]:
        return ["--mixed_precision", self.mixed_precision] if self.mixed_precision else []


@dataclass
class ParityReport:
    """The result of a check.

    Args:
        verdict: "equal", "differs" or "not verified".
        reason: one sentence.
        findings: the differences of the first step with any, causes before consequences.
        steps: the number of steps compared.
        remarks: further observations that also apply to one process.
    """

    verdict: str
    reason: str
    findings: list[ParityFinding] = field(default_factory=list)
    steps: int = 0
    remarks: list[str] = field(default_factory=list)

    @property
    def code(self) -> int:
        """The exit code of the command."""
        return _CODES[self.verdict]

    @property
    def parameter(self) -> str:
        """The first parameter or buffer that differs; empty if unknown."""
        return next((finding.parameter for finding in self.findings if finding.parameter), "")

    @property
    def module(self) -> str:
        """The first module that differs; empty if unknown."""
        return next((finding.module for finding in self.findings if finding.module), "")

    def __str__(self) -> str:
        lines = [f"{self.verdict}: {self.reason}"]
        lines += [f"  {finding}" for finding in self.findings]
        lines += [f"  also: {remark}" for remark in self.remarks]
        return "\n".join(lines)

    def as_json(self) -> str:
        """The report as one line of JSON."""
        return json.dumps({**asdict(self), "parameter": self.parameter, "module": self.module})


class CheckParity:
    """The command; see `accel_cli.command.Command`."""

    help = "check that a plan of several processes computes the same as one process"

    def add_arguments(self, parser: ArgumentParser) -> None:
        """Declare the options, then the script and its arguments."""
        parser.description = (
            "Run a training script under a plan on the CPU, then in one process with the same global batches, and "
            "compare the results of each optimizer step. The script needs no change."
        )
        parser.epilog = f"Exit code {EQUAL}: equal; {DIFFERS}: differs; {NOT_VERIFIED}: not verified."
        parser.add_argument("--processes", type=int, help="Processes of the plan (default: product of the axes, or 2).")
        parser.add_argument("--backend", default="", help="Backend, as `accel backends` lists it, or axes.")
        parser.add_argument(
            "--axes",
            type=_axes,
            default={},
            metavar="NAME=SIZE,...",
            help="Sizes of mesh axes, such as dp_shard=2,tp=2.",
        )
        parser.add_argument("--steps", type=int, default=5, help="Optimizer steps to compare (default: 5).")
        parser.add_argument("--mixed_precision", default="", help="Mixed precision of both runs (no, fp16, bf16).")
        parser.add_argument(
            "--launch",
            default="",
            metavar="OPTIONS",
            help="Further options of `accel launch` for the plan, written as --launch='--use_fsdp --fsdp_version 2'.",
        )
        parser.add_argument(
            "--timeout", type=float, default=600.0, help="Seconds after which a run is stopped (default: 600)."
        )
        parser.add_argument("--json", action="store_true", help="Print the report as one line of JSON.")
        parser.add_argument("script", help="The training script.")
        parser.add_argument("script_arguments", nargs="...", help="Arguments of the script.")

    def run(self, arguments: Namespace) -> int:
        """Run the check, print its report and return the exit code."""
        backend, axes = arguments.backend, dict(arguments.axes)
        if "=" in backend:
            try:
                backend, axes = "", {**_axes(backend), **axes}
            except ArgumentTypeError as error:
                raise SettingError(f"Cannot use --backend {backend}.", str(error), "Write dp_shard=2,tp=2.") from None
        processes = arguments.processes or (_product(axes.values()) if axes else 2)
        if min(processes, arguments.steps) < 1:
            raise SettingError(
                "Cannot check a plan with a number of processes or steps below 1.",
                "Both numbers must be at least 1.",
                "Give numbers from 1 in --processes and --steps.",
            )
        check_script(arguments.script)
        launch_options = tuple(shlex.split(arguments.launch))
        plan = ParityPlan(processes, backend, axes, arguments.mixed_precision, launch_options, arguments.timeout)
        report = check([arguments.script, *arguments.script_arguments], plan, arguments.steps)
        print(report.as_json() if arguments.json else report)  # noqa: T201 - what the command is for
        return report.code


def check(script: list[str], plan: ParityPlan, steps: int, source: str = "") -> ParityReport:
    """Run a script under a plan and in one process, and compare.

    Args:
        script: the script's path and its arguments.
        plan: how several processes run it.
        steps: optimizer steps to compare.
        source: file whose reads of clocks and ranks are recorded; if empty, the script.
    """
    with tempfile.TemporaryDirectory(prefix="accel-check-parity-") as folder:
        return _Check(script, plan, steps, Path(folder), source or script[0]).report()


class _Check:
    """The runs of one check."""

    def __init__(self, script: list[str], plan: ParityPlan, steps: int, folder: Path, source: str) -> None:
        self._script, self._plan, self._steps, self._folder, self._source = script, plan, steps, folder, source

    def report(self) -> ParityReport:
        """Run under the plan, then in one process, and compare."""
        from accel_torch.check_parity.comparison import compare_masks, compare_runs, remarks
        from accel_torch.check_parity.notes import ParityTask

        planned = ParityTask(str(self._folder / "plan"), self._source, self._steps)
        plan, failure = self._run(planned, self._plan.processes, self._plan.options())
        failure = failure or _nothing_to_compare(plan, self._plan.processes)
        if failure:
            return ParityReport("not verified", f"the run under the plan failed: {failure}")
        alone = replace(
            planned, notes=str(self._folder / "one"), steps=min(self._steps, plan.last_step), plan=planned.notes
        )
        reference, failure = self._run_alone(alone)
        if failure or reference.last_step < 1:
            failure = failure or "it makes no optimizer step"
            return ParityReport("not verified", f"the run of one process failed: {failure}")
        compared = min(plan.last_step, reference.last_step, self._steps)
        unstable = self._unstable(alone, reference)
        findings = compare_runs(plan, reference)
        if unstable:
            return ParityReport("not verified", unstable, findings, compared)
        unsure = self._unsure(findings, alone, plan, reference) if findings else None
        if unsure:
            return ParityReport("not verified", unsure, findings, compared)
        notes = remarks(plan, reference)
        findings = findings or compare_masks(plan)
        if findings:
            reason = f"{self._plan.processes} processes do not compute what one process computes"
            return ParityReport("differs", reason, findings, compared, notes)
        if reference.ranks[0].drew:
            notes.append("the script draws random numbers outside dropout, but computes the same")
        if any("does not move" in note for note in notes):
            return ParityReport("not verified", "every step computes the same", [], compared, notes)
        return ParityReport(
            "equal",
            f"{self._plan.processes} processes compute what one process computes, for {compared} steps",
            [],
            compared,
            notes,
        )

    def _unsure(
        self, findings: list[ParityFinding], alone: ParityTask, plan: RunNotes, reference: RunNotes
    ) -> str | None:
        """Why findings cannot be attributed to the plan; None if they can."""
        step = findings[0].step
        if step in reference.ranks[0].drew:
            return (
                f"the script draws random numbers in step {step} outside dropout, and several processes draw others "
                "than one process"
            )
        return self._decided_by_rank(alone, plan, reference)

    def _unstable(self, alone: ParityTask, reference: RunNotes) -> str | None:
        """What the script computes differently with another clock and other seeds; None if nothing."""
        from accel_torch.check_parity.comparison import compare_references

        again, failure = self._run_alone(replace(alone, notes=str(self._folder / "varied"), varied=True))
        what = f"a second run fails: {failure}" if failure else compare_references(reference, again)
        if what is None:
            return None
        reads = [read for read in reference.ranks[0].reads if "clock" in read[0] or "seed" in read[0]]
        sources = _listed(reads) or "something outside of torch, numpy and random"
        return f"two runs of one process differ from each other ({what}): the script uses {sources}"

    def _decided_by_rank(self, alone: ParityTask, plan: RunNotes, reference: RunNotes) -> str | None:
        """How the script's results depend on its rank; None if they do not."""
        from accel_torch.check_parity.comparison import compare_references

        reads = [
            read for facts in plan.ranks for read in facts.reads if "clock" not in read[0] and "seed" not in read[0]
        ]
        if not reads:
            return None
        task = replace(alone, notes=str(self._folder / "other_rank"), rank=self._plan.processes - 1)
        other, failure = self._run_alone(task)
        if failure or compare_references(reference, other, after_start=True) is None:
            return None
        return f"the script computes other results on another rank: it reads {_listed(reads)}"

    def _run_alone(self, task: ParityTask) -> tuple[RunNotes, str | None]:
        return self._run(task, 1, self._plan.options_of_one())

    def _run(self, task: ParityTask, processes: int, options: list[str]) -> tuple[RunNotes, str | None]:
        """The records of one run, and why it failed."""
        from accel_torch.check_parity.notes import RunNotes

        failure = launch(
            "accel_torch.check_parity.recording",
            task.write(),
            self._script,
            processes=processes,
            options=options,
            timeout=self._plan.timeout,
        )
        return RunNotes(Path(task.notes)), failure


def _nothing_to_compare(plan: RunNotes, processes: int) -> str | None:
    """Why the records of a plan cannot be compared; None if they can."""
    if len(plan.ranks) < processes:
        return f"{processes - len(plan.ranks)} of its processes recorded nothing"
    facts = plan.ranks[0]
    if not facts.models:
        return "the script never calls accelerator.prepare() with a model"
    if plan.last_step < 1:
        return "the script never steps an optimizer that prepare() returned"
    if not facts.reads_loader and _inputs_differ(plan):
        reads = _listed([read for read in facts.reads if "clock" not in read[0] and "seed" not in read[0]])
        shared = f"; it reads {reads}" if reads else ""
        return (
            "the script does not train on a loader that accelerator.prepare() returned, so one process cannot use "
            f"the samples of all{shared}"
        )
    return None


def _inputs_differ(plan: RunNotes) -> bool:
    """Whether processes with different shards of the data call the model with different inputs."""
    inputs = {}
    for facts in plan.ranks:
        note = plan.step(facts.rank, 1)
        inputs[facts.data] = None if note is None else note.inputs
    return any(one != inputs[plan.ranks[0].data] for one in inputs.values())


def _listed(reads: Iterable[list[str]]) -> str:
    return ", ".join(dict.fromkeys(f"{what} ({place})" if place else what for what, place in reads))


def _axes(text: str) -> dict[str, int]:
    found = {}
    for part in text.split(","):
        name, _, size = part.partition("=")
        name = name.strip().removesuffix("_size")
        if name not in _AXES or not size.strip().isdigit():
            raise ArgumentTypeError(
                f"{part!r} is not an axis and its size, such as tp=2; the axes are {', '.join(_AXES)}"
            )
        found[name] = int(size)
    return found


def _product(sizes: Iterable[int]) -> int:
    made = 1
    for size in sizes:
        made *= size
    return made


COMMAND = CheckParity()
