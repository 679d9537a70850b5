"""`accel check-plan`: check in one process whether a script builds, divides and fits on many ranks."""

from __future__ import annotations

import importlib
import json
import os
import tempfile
from argparse import ArgumentParser, ArgumentTypeError, Namespace
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from accel_check.check_parity import show_progress
from accel_check.report import CODES, EXIT_CODES
from accel_check.runs import CheckedScript, import_libraries, run_forked, run_path
from accel_state.errors import SettingError

if TYPE_CHECKING:
    from accel_check.fake_world import PlanRecord

__all__ = ("COMMAND", "CheckPlan", "PlanReport", "check")


@dataclass
class PlanReport:
    """The result of a check.

    Args:
        verdict: "equal" if the plan is sound, "differs" if it is not, or "not verified".
        reason: one sentence.
        findings: what is wrong.
        ranks: the ranks that were tried.
        collectives: for each operation, how often the first rank calls it in a step, and the bytes that it reads.
        memory: bytes at the peak of a step on the first rank, by purpose.
        read: places where the script reads values, which were 1.0 or False.
    """

    verdict: str
    reason: str
    findings: list[str] = field(default_factory=list)
    ranks: list[int] = field(default_factory=list)
    collectives: dict[str, tuple[int, int]] = field(default_factory=dict)
    memory: dict[str, int] = field(default_factory=dict)
    read: list[str] = field(default_factory=list)

    @property
    def code(self) -> int:
        """The exit code of the command."""
        return CODES[self.verdict]

    def __str__(self) -> str:
        lines = [f"{'sound' if self.verdict == 'equal' else self.verdict}: {self.reason}"]
        lines += [f"  {finding}" for finding in self.findings]
        if self.ranks:
            lines.append(f"  tried the ranks {', '.join(map(str, self.ranks))}")
        lines += [f"  {name}: {count} in a step, {_mib(size)}" for name, (count, size) in self.collectives.items()]
        lines += [f"  memory, {name.lower()}: {_mib(size)}" for name, size in self.memory.items() if size]
        if self.read:
            lines.append(f"  values that the script reads were 1.0 or False: {', '.join(self.read)}")
        return "\n".join(lines)


class CheckPlan:
    """The command; see `accel_cli.command.Command`."""

    help = "check in one process whether a script builds, divides and fits on many"
    examples = ("--processes 64 --memory 80GiB train.py", "--processes 8 --ranks 3,7 train.py --lr 0.01")

    def add_arguments(self, parser: ArgumentParser) -> None:
        """Declare the options, then the script and its arguments."""
        parser.description = (
            "Run two optimizer steps of a training script as some ranks of a world that is not there, with tensors "
            "that have shapes and no values. The script starts from the variables of torchrun, without the Accelerator."
        )
        parser.epilog = EXIT_CODES.replace("equal", "sound").replace("differs", "not sound")
        parser.add_argument("--processes", type=int, required=True, help="The number of processes.")
        parser.add_argument("--ranks", type=_numbers, default=(), help="Further ranks to try, such as 3,17.")
        parser.add_argument("--memory", type=_size, metavar="SIZE", help="Memory of a device, such as 80GiB.")
        parser.add_argument(
            "--timeout", type=float, default=600.0, help="Seconds after which a rank is stopped (default: 600)."
        )
        parser.add_argument("--json", action="store_true", help="Print the report as one line of JSON.")
        parser.add_argument("script", help="The training script.")
        parser.add_argument("script_arguments", nargs="...", help="Arguments of the script.")

    def run(self, arguments: Namespace) -> int:
        """Run the check, print its report and return the exit code."""
        if arguments.processes < 1 or any(not 0 <= rank < arguments.processes for rank in arguments.ranks):
            raise SettingError(
                f"Cannot check a plan of {arguments.processes} processes.",
                "It has the ranks from 0 to one less than that number.",
                "Give at least one process, and ranks among them.",
            )
        script = CheckedScript(arguments.script, arguments.script_arguments)
        progress = None if arguments.json else show_progress
        report = check(script, arguments.processes, arguments.ranks, arguments.memory, arguments.timeout, progress)
        print(json.dumps(asdict(report)) if arguments.json else report)  # noqa: T201 - what the command is for
        return report.code


def check(
    script: CheckedScript,
    processes: int,
    ranks: Sequence[int] = (),
    memory: int | None = None,
    timeout: float = 600.0,
    progress: Callable[[str], None] | None = None,
) -> PlanReport:
    """Run two steps of a script as some ranks, and compare what they call.

    Args:
        script: the script.
        processes: the number of processes.
        ranks: further ranks to try, beside the first, its neighbour along each axis of its meshes, and the last.
        memory: bytes of a device; None for no limit.
        timeout: seconds after which a rank is stopped.
        progress: called with a line before each part of the check.
    """
    tell = progress or (lambda text: None)
    tell("imports torch")
    import_libraries(script)
    importlib.import_module("accel_check.fake_world")
    with tempfile.TemporaryDirectory(prefix="accel-check-plan-") as folder:
        runs = _Runs(script, processes, Path(folder), timeout)
        tell(f"runs rank 0 of {processes}, and tracks its memory")
        (first,) = runs.records([0], tracks_memory=True)
        if first.failure and not first.needs_values:
            # The tracker cannot follow every model.
            (first,) = runs.records([0], tracks_memory=False)
        records = [first]
        others = sorted({*first.neighbours, min(1, processes - 1), processes - 1, *ranks} - {0})
        if others and not first.failure:
            tell(f"runs the ranks {', '.join(map(str, others))}")
            # Tracking makes a run several times slower.
            records += runs.records(others, tracks_memory=False)
    return _judged(records, processes, memory)


class _Runs:
    """The runs of one check."""

    def __init__(self, script: CheckedScript, processes: int, folder: Path, timeout: float) -> None:
        self._script, self._processes, self._folder, self._timeout = script, processes, folder, timeout

    def records(self, ranks: Sequence[int], tracks_memory: bool) -> list[PlanRecord]:
        """What some ranks do, each in a process of its own."""
        from accel_check.fake_world import PlanRecord
        from accel_check.records import read

        place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1", "WORLD_SIZE": str(self._processes)}
        place |= {"LOCAL_WORLD_SIZE": str(self._processes), "GROUP_RANK": "0"}
        for rank in ranks:
            self._path(rank).unlink(missing_ok=True)
        failure = run_forked(
            self._folder, {**os.environ, **place}, ranks, lambda rank: self._record(rank, tracks_memory), self._timeout
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
        from accel_check.sessions import refuse_sessions

        torch.set_num_threads(1)
        refuse_sessions()
        fake = FakeRank(rank, self._processes, f"{Path(self._script.path).resolve().parent}/", tracks_memory)
        write_record(self._path(rank), fake.run(lambda: run_path(self._script)))
        return 0


def _judged(records: list[PlanRecord], processes: int, memory: int | None) -> PlanReport:
    first = records[0]
    counts: Counter[str] = Counter(one.operation for one in first.collectives)
    sizes: Counter[str] = Counter()
    for one in first.collectives:
        sizes[one.operation] += one.bytes
    report = PlanReport("equal", f"two steps run on {processes} processes", ranks=[one.rank for one in records])
    report.collectives = {name: (count, sizes[name]) for name, count in counts.items()}
    report.memory, report.read = dict(first.memory), sorted({place for one in records for place in one.read})
    failed = next((one for one in records if one.failure or not one.steps), None)
    if failed is not None:
        unknown = failed.needs_values or "Accelerator" in failed.failure or not failed.failure
        report.verdict = "not verified" if unknown else "differs"
        report.reason = f"rank {failed.rank} fails: {failed.failure or 'the script steps no optimizer of torch'}"
        if "batch_size" in failed.failure or "division by zero" in failed.failure or "num_samples=0" in failed.failure:
            report.reason += f"; does the script divide a number by {processes} processes, so that it is 0?"
        return report
    report.findings = [*_unreduced(first, processes), *_unlike(records)]
    peak = first.memory.get("Total", 0)
    if memory is not None and peak > memory:
        report.findings.append(f"the peak is {_mib(peak)}: {_mib(peak - memory)} more than a device has")
    if memory is not None and not peak:
        report.verdict, report.reason = (
            "not verified",
            "torch's memory tracker cannot follow the model",
        )
    if report.findings:
        report.verdict, report.reason = "differs", f"the plan for {processes} processes is not sound"
    elif memory is not None and peak:
        report.reason += f", and the peak of {_mib(peak)} fits"
    return report


def _unreduced(record: PlanRecord, processes: int) -> list[str]:
    """Gradients that no collective reduces, or that are reduced more often than backward runs."""
    if record.alike >= processes:
        return []
    found = [f"no collective reduces the gradient of {name}" for name, count in record.reduced.items() if not count]
    found += [
        f"the gradient of {name} is reduced {count} times in a step of {record.backwards} backward passes"
        for name, count in record.reduced.items()
        if count > max(record.backwards, 1)
    ]
    held, sent = record.sharded
    if held and not sent and record.alike == 1:
        found.append("no collective reduces the gradients of sharded parameters")
    return found


def _unlike(records: Sequence[PlanRecord]) -> list[str]:
    """The first collective that differs between ranks."""
    first = records[0]
    for other in records[1:]:
        ours = [(one.operation, one.elements) for one in (*first.first, *first.collectives)]
        theirs = [(one.operation, one.elements) for one in (*other.first, *other.collectives)]
        if ours == theirs:
            continue
        calls: list[Any] = [*other.first, *other.collectives]
        at = next((at for at, pair in enumerate(zip(ours, theirs, strict=False)) if pair[0] != pair[1]), None)
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


def _mib(size: int) -> str:
    return f"{size / 2**20:,.1f} MiB"


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(","))


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
