"""`accel check-plan`: check in one process whether a script builds, divides and fits on many ranks."""

from __future__ import annotations

import importlib
import importlib.util
import json
import tempfile
from argparse import ArgumentParser, ArgumentTypeError, Namespace
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from accel_check.launch import ProcessLaunch, add_launch_options, add_script, launch_of, read_numbers, show_progress
from accel_check.report import CODES, EXIT_CODES
from accel_check.runs import CheckedScript, import_libraries, run_forked, run_path
from accel_state.errors import SettingError

if TYPE_CHECKING:
    from accel_check.fake_world import PlanRecord

__all__ = ("COMMAND", "CheckPlan", "PlanReport", "add_options", "check", "run_with")


@dataclass
class PlanReport:
    """The result of a check.

    Args:
        verdict: "equal" if the plan is sound, "differs" if it is not, or "not verified".
        reason: one sentence.
        backend: the backend that `--backend` named.
        findings: what is wrong.
        ranks: the ranks that were tried.
        collectives: for each operation, the "calls" of the first rank in a step, and the "bytes" that it reads.
        memory: bytes at the peak of a step on the first rank, by purpose, and their "Total".
        read: places where the script reads values, which were 1.0 or False.
        written: files that the script wrote.
    """

    verdict: str
    reason: str
    backend: str = ""
    findings: list[str] = field(default_factory=list)
    ranks: list[int] = field(default_factory=list)
    collectives: dict[str, dict[str, int]] = field(default_factory=dict)
    memory: dict[str, int] = field(default_factory=dict)
    read: list[str] = field(default_factory=list)
    written: list[str] = field(default_factory=list)

    @property
    def code(self) -> int:
        """The exit code of the command."""
        return CODES[self.verdict]

    def __str__(self) -> str:
        verdict = "sound" if self.verdict == "equal" else self.verdict
        lines = [f"{f'{self.backend}: ' if self.backend else ''}{verdict}: {self.reason}"]
        lines += [f"  {finding}" for finding in self.findings]
        if self.ranks:
            lines.append(f"  tried the ranks {', '.join(map(str, self.ranks))}")
        lines += [
            f"  {name}: {total['calls']} in a step, {_mib(total['bytes'])}" for name, total in self.collectives.items()
        ]
        lines += [f"  memory, {name.lower()}: {_mib(size)}" for name, size in self.memory.items() if size]
        if self.read:
            lines.append(f"  values that the script reads were 1.0 or False: {', '.join(self.read)}")
        lines += [f"  the script wrote {path}" for path in self.written]
        return "\n".join(lines)


class CheckPlan:
    """Checks in one process whether a script builds, divides and fits on many ranks, and prints what each needs."""

    help = "check in one process whether a script builds, divides and fits on many"
    examples = ("--processes 64 --memory 80GiB train.py", "--processes 8 --ranks 3,7 train.py --lr 0.01")

    def add_arguments(self, parser: ArgumentParser) -> None:
        """Declare the options, then the script and its arguments."""
        parser.description = (
            "Run two optimizer steps of a training script as some ranks of a world that is not there, with tensors "
            "that have shapes and no values. The script needs no change, and need not use this library."
        )
        parser.epilog = EXIT_CODES.replace("equal", "sound").replace("differs", "not sound")
        add_options(parser)
        add_launch_options(parser)
        add_script(parser)

    def run(self, arguments: Namespace) -> int:
        """Run the check, print its report and return the exit code."""
        return run_with(arguments, CheckedScript(arguments.script, arguments.script_arguments))


def add_options(parser: Any) -> None:
    """Declare the options of a plan, except those of a launch."""
    parser.add_argument("--processes", type=int, help="The number of processes (default: product of the axes, or 1).")
    parser.add_argument("--ranks", type=read_numbers, default=(), help="Further ranks to try, such as 3,17.")
    parser.add_argument("--memory", type=_size, metavar="SIZE", help="Memory of a device, such as 80GiB.")
    parser.add_argument("--json", action="store_true", help="Print each report as one line of JSON.")


def run_with(arguments: Namespace, script: CheckedScript) -> int:
    """Check the plan of each backend that the options name, print the reports, and return the exit code."""
    launch = launch_of(arguments, arguments.processes, default=1)
    if any(not 0 <= rank < launch.processes for rank in arguments.ranks):
        raise SettingError(
            f"Cannot try the ranks {', '.join(map(str, arguments.ranks))}.",
            f"A plan of {launch.processes} processes has the ranks 0 to {launch.processes - 1}.",
            "Give ranks among them.",
        )
    progress = None if arguments.json else show_progress
    codes = set()
    for backend in launch.backend.split(","):
        report = check(script, replace(launch, backend=backend.strip()), arguments.ranks, arguments.memory, progress)
        print(json.dumps(asdict(report)) if arguments.json else report)  # noqa: T201 - what the command is for
        codes.add(report.code)
    return next(code for code in (CODES["differs"], CODES["not verified"], CODES["equal"]) if code in codes)


def check(
    script: CheckedScript,
    launch: ProcessLaunch,
    ranks: Sequence[int] = (),
    memory: int | None = None,
    progress: Callable[[str], None] | None = None,
) -> PlanReport:
    """Run two steps of a script as some ranks, and compare what they call.

    Args:
        script: the script.
        launch: how processes would run it.
        ranks: further ranks to try, beside the first, its neighbour along each axis of its meshes, and the last.
        memory: bytes of a device; None for no limit.
        progress: called with a line before each part of the check.

    Raises:
        SettingError: an option of the launch is invalid.
    """
    tell, last = progress or (lambda text: None), launch.processes - 1
    with tempfile.TemporaryDirectory(prefix="accel-check-plan-") as folder:
        runs = _Runs(script, launch, Path(folder))
        tell("imports torch")
        import_libraries(script)
        importlib.import_module("accel_check.fake_world")
        tell(f"runs rank 0 of {launch.processes}, and tracks its memory")
        (first,) = runs.records([0], tracks_memory=True)
        if first.failure and not first.needs_values:
            # The tracker cannot follow every model.
            (first,) = runs.records([0], tracks_memory=False)
        records = [first]
        others = sorted({*first.neighbours, min(1, last), last, *ranks} - {0})
        if others and not first.failure:
            tell(f"runs the ranks {', '.join(map(str, others))}")
            # Tracking makes a run several times slower.
            records += runs.records(others, tracks_memory=False)
    report = _judged(records, launch.processes, memory)
    report.backend = launch.backend
    return report


class _Runs:
    """The runs of one check."""

    def __init__(self, script: CheckedScript, launch: ProcessLaunch, folder: Path) -> None:
        self._script, self._launch, self._folder = script, launch, folder
        self._environment = launch.environment(script.path)

    def records(self, ranks: Sequence[int], tracks_memory: bool) -> list[PlanRecord]:
        """What some ranks do, each in a process of its own."""
        from accel_check.fake_world import PlanRecord
        from accel_check.records import read

        world = str(self._launch.processes)
        place = {"WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world, "GROUP_RANK": "0"}
        if self._launch.processes > 1:
            place |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
        for rank in ranks:
            self._path(rank).unlink(missing_ok=True)
        failure = run_forked(
            self._folder,
            {**self._environment, **place},
            ranks,
            lambda rank: self._record(rank, tracks_memory),
            self._launch.timeout,
        )
        return [
            read(self._path(rank)) if self._path(rank).is_file() else PlanRecord(rank, failure=failure or "it ended")
            for rank in ranks
        ]

    def _path(self, rank: int) -> Path:
        return self._folder / f"rank_{rank}.pt"

    def _record(self, rank: int, tracks_memory: bool) -> int:
        """Run the script in this process as a rank, and write its record."""
        import torch

        from accel_check.fake_world import FakeRank
        from accel_check.records import write_record

        torch.set_num_threads(1)
        folder, scratch = f"{Path(self._script.path).resolve().parent}/", str(self._folder / "scratch")
        fake = FakeRank(rank, self._launch.processes, folder, scratch, tracks_memory)
        if importlib.util.find_spec("accel_torch") is not None:
            from accel_check.planned_session import plan_sessions

            plan_sessions(fake, scratch)
        write_record(self._path(rank), fake.run(lambda: run_path(self._script)))
        return 0


def _judged(records: list[PlanRecord], processes: int, memory: int | None) -> PlanReport:
    first = records[0]
    totals: dict[str, Counter[str]] = {}
    for one in first.collectives:
        totals.setdefault(one.operation, Counter()).update(calls=1, bytes=one.bytes)
    report = PlanReport("equal", f"two steps run on {processes} processes", ranks=[one.rank for one in records])
    report.collectives = {name: dict(total) for name, total in totals.items()}
    report.memory, report.read = dict(first.memory), sorted({place for one in records for place in one.read})
    report.written = sorted({path for one in records for path in one.written})
    failed = next((one for one in records if one.failure or not one.steps), None)
    if failed is not None:
        unknown = failed.needs_values or not failed.failure
        report.verdict = "not verified" if unknown else "differs"
        report.reason = f"rank {failed.rank} fails: {failed.failure or 'the script steps no optimizer of torch'}"
        if "batch_size" in failed.failure or "division by zero" in failed.failure or "num_samples=0" in failed.failure:
            report.reason += f"; does the script divide a number by {processes} processes, so that it is 0?"
        report.findings = _unlike(records, whole=False)
        return report
    report.findings = [*_unreduced(first, processes), *_unlike(records)]
    peak = first.memory.get("Total", 0)
    if memory is not None and peak > memory:
        report.findings.append(f"the peak is {_mib(peak)}: {_mib(peak - memory)} more than a device has")
    if report.findings:
        report.verdict, report.reason = "differs", f"the plan for {processes} processes is not sound"
    elif memory is not None and not peak:
        report.verdict, report.reason = "not verified", "torch's memory tracker cannot follow the model"
    elif memory is not None:
        report.reason += f", and the peak of {_mib(peak)} fits"
    return report


def _unreduced(record: PlanRecord, processes: int) -> list[str]:
    """Gradients that no collective reduces, or that are reduced more often than backward runs."""
    if record.alike >= processes:
        return []
    faults = []
    if missing := [name for name, count in record.reduced.items() if not count]:
        faults.append(f"no collective reduces the gradient of {_listed(missing)}")
    often = {name: count for name, count in record.reduced.items() if count > max(record.backwards, 1)}
    for count in sorted(set(often.values())):
        names = _listed([name for name, one in often.items() if one == count])
        passes = "1 backward pass" if record.backwards == 1 else f"{record.backwards} backward passes"
        faults.append(f"the gradient of {names} is reduced {count} times in a step of {passes}")
    held, sent = record.sharded
    if held and not sent:
        faults.append("no collective reduces the gradients of sharded parameters")
    return faults


def _unlike(records: Sequence[PlanRecord], whole: bool = True) -> list[str]:
    """The first collective that differs between ranks; with `whole`, a rank that calls fewer differs as well."""
    first = records[0]
    for other in records[1:]:
        ours = [(one.operation, one.elements) for one in (*first.first, *first.collectives)]
        calls = [*other.first, *other.collectives]
        theirs = [(one.operation, one.elements) for one in calls]
        if ours == theirs:
            continue
        at = next((at for at, pair in enumerate(zip(ours, theirs, strict=False)) if pair[0] != pair[1]), None)
        if at is None and not whole:
            continue
        if at is None:
            return [
                f"rank {first.rank} calls {len(ours)} collectives in two steps, and rank {other.rank} {len(theirs)}"
            ]
        place = f" ({calls[at].place})" if calls[at].place else ""
        (one, size), (two, another) = ours[at], theirs[at]
        return [
            f"collective {at + 1} is {one} of {size} elements on rank {first.rank}, and {two} of {another} on rank "
            f"{other.rank}{place}"
        ]
    return []


def _listed(names: Sequence[str]) -> str:
    more = f" and of {len(names) - 3} more parameters" if len(names) > 3 else ""
    return ", ".join(names[:3]) + more


def _mib(size: int) -> str:
    return f"{size / 2**20:,.1f} MiB"


def _size(text: str) -> int:
    """Bytes, from "80GiB".

    Raises:
        ArgumentTypeError: it is not a number with a unit.
    """
    units = {"GIB": 2**30, "MIB": 2**20, "KIB": 2**10, "GB": 10**9, "MB": 10**6, "KB": 10**3, "B": 1}
    for unit, size in units.items():
        number = text.upper().removesuffix(unit).strip()
        if text.upper().endswith(unit) and number.replace(".", "", 1).isdigit():
            return int(float(number) * size)
    raise ArgumentTypeError(f"{text!r} is not a size, such as 80GiB")


COMMAND = CheckPlan()
