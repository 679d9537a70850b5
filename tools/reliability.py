"""Sweep faults over saving checkpoints and write what was found to docs/reliability.md.

    python tools/reliability.py                 run every sweep in full (ten minutes or more) and write the document
    python tools/reliability.py --only NAME...  run the sweeps whose names contain NAME, and keep the other rows
    python tools/reliability.py --check         exit 1 when the document records a loss, or lacks a sweep

The tests run a tenth or less of each sweep (tests-integration/test_saving_survives_faults.py). To add a sweep, write
it in `tools/reliability_<topic>.py` and give it one line in `SWEEPS`.
"""

# ruff: noqa: E402 - the harness of faults belongs to tests.

from __future__ import annotations

import argparse
import errno
import platform
import re
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Final

ROOT = Path(__file__).resolve().parents[1]
sys.path.append(str(ROOT / "tests-integration"))

import torch
from faults import sweeps

import reliability_containers as containers
import reliability_damaged_files as damaged
import reliability_gadgets as gadgets
import reliability_hangs as hangs
import reliability_runs as runs
import reliability_stores as stores
from mutants_report import PART_OF_MUTANTS
from reliability_data_writes import data_writes

DOCUMENT = ROOT / "docs" / "reliability.md"

Sweep = Callable[[Path, int], sweeps.Tally]

HEAD: Final = """# What saving and waiting survive

`python tools/reliability.py` writes this part. Each row is one kind of fault, injected at every place where it can
happen during a save of a checkpoint. *Survived* means that a restart then found the newest good checkpoint (of the
interrupted save, or the one before it) with correct hashes and continued with the losses of an undisturbed run bit
for bit, that no process hung, and that nothing older was lost. A damaged checkpoint that is accepted counts as lost.

Faults happen at system calls: the harness traces a forked child that saves, and kills it before its k-th file
operation or makes that operation fail. A loss of power is simulated on a model of a disk that keeps flushed data
(contents with their file, names with their folder); of all other data it keeps nothing, the names only, names and
lengths with zeros as contents, or everything. In rows with "no rename-exchange", a filter of the kernel refuses to
exchange two names, as NFS does. Containers are namespaces of the kernel. In rows with "beside loads", each save has one
number in everything that it saves, and another run loads all the time: *survived* means also that each load had the
numbers of one save, and that nothing was left after one more save. A history of an object store has several runs, one
after the other or at once; *survived* means that no checkpoint of which the store acknowledged the last request was
lost, or lost files, to an older one. Rows that begin with "read" are pickles that
attack the reader: there *survived* means that the file was read, or refused with a typed error, without running code,
crashing or hanging. The harness is `tests-integration/faults`.

Writes through `.data` happen before each file that the thread of an asynchronous save writes. The saved state must
then be that of the call.

In rows that begin with "hang", processes wait for another one in `gather`, `wait_for_everyone`, a backward under ddp
and fsdp2, and `save_state`. There *survived* means that each waiting process ended within 5 seconds after its
deadline of 10 seconds (proportionally later on a busy machine), that its output named the process that it waited for,
and that no process and no launcher remained. Links connect network namespaces over a bridge that drops all packets
when cut.

"""


def _job(sweep: Callable[[sweeps.Workload, int], sweeps.Tally], **options: bool) -> Sweep:
    return lambda folder, every: sweep(runs.Run(folder / "project", **options).job(), every)


def _kill(job: sweeps.Workload, every: int) -> sweeps.Tally:
    return sweeps.kill_everywhere(job, every=every)


def _full(job: sweeps.Workload, every: int) -> sweeps.Tally:
    return sweeps.fail_everywhere(job, errno.ENOSPC, every=every)


def _broken(job: sweeps.Workload, every: int) -> sweeps.Tally:
    return sweeps.fail_everywhere(job, errno.EIO, every=every)


def _power(job: sweeps.Workload, every: int) -> sweeps.Tally:
    return sweeps.lose_power(job, every=every)


def _together(hit: int, **options: bool) -> Sweep:
    def sweep(folder: Path, every: int) -> sweeps.Tally:
        return sweeps.kill_everywhere(runs.Together(folder / "project", hit, **options).job(), every=every)

    return sweep


def _told(kind: str, ask: Callable[[runs.Together], str | None]) -> Sweep:
    """One fault for each process."""

    def sweep(folder: Path, every: int) -> sweeps.Tally:
        tally = sweeps.Tally(kind)
        for hit in (0, 1):
            (folder / str(hit)).mkdir()
            tally.count(f"process {hit}", ask(runs.Together(folder / str(hit) / "project", hit)))
        return tally

    return sweep


def _absent(fault: str) -> Sweep:
    return lambda folder, every: hangs.absences(folder, fault, every)


SWEEPS: Final[Mapping[str, Sweep]] = {
    "a new checkpoint, the oldest removed: SIGKILL": _job(_kill),
    "a new checkpoint, the oldest removed: disk full": _job(_full),
    "a new checkpoint, the oldest removed: EIO": _job(_broken),
    "a new checkpoint, the oldest removed: loss of power": _job(_power),
    "over an existing name: SIGKILL": _job(_kill, overwrite=True),
    "over an existing name: disk full": _job(_full, overwrite=True),
    "over an existing name: EIO": _job(_broken, overwrite=True),
    "over an existing name: loss of power": _job(_power, overwrite=True),
    "over an existing name, no rename-exchange: SIGKILL": _job(_kill, overwrite=True, exchange=False),
    "over an existing name, no rename-exchange: disk full": _job(_full, overwrite=True, exchange=False),
    "over an existing name, no rename-exchange: EIO": _job(_broken, overwrite=True, exchange=False),
    "over an existing name, no rename-exchange: loss of power": _job(_power, overwrite=True, exchange=False),
    "while training goes on: SIGKILL": _job(_kill, behind=True),
    "while training goes on: disk full": _job(_full, behind=True),
    "two processes, the first hit: SIGKILL": _together(0),
    "two processes, the second hit: SIGKILL": _together(1),
    "two processes over an existing name, no rename-exchange: SIGKILL": _together(0, overwrite=True, exchange=False),
    "shards of FSDP: SIGKILL": _job(_kill, sharded=True),
    "shards of FSDP: disk full": _job(_full, sharded=True),
    "shards of FSDP: EIO": _job(_broken, sharded=True),
    "shards of FSDP: loss of power": _job(_power, sharded=True),
    "shards of FSDP on two processes, the first hit: SIGKILL": _together(0, sharded=True),
    "shards of FSDP on two processes, the second hit: SIGKILL": _together(1, sharded=True),
    "two processes, one past the deadline": _told("slow process", lambda run: run.slow()),
    "two processes, one with other keys": _told("other keys", lambda run: run.other_keys()),
    "damage afterwards": lambda folder, every: runs.harm(runs.Run(folder / "project")),
    "files of every kind that is read, damaged": lambda folder, every: damaged.sweep(folder, damaged.COUNT // every),
    "folders left behind by dead processes": lambda folder, every: runs.stale_folders(runs.Run(folder / "project")),
    "two writers of one name": lambda folder, every: runs.two_writers(runs.Run(folder / "project"), 10 // every + 1),
    "two writers of one name, no rename-exchange": lambda folder, every: runs.two_writers(
        runs.Run(folder / "project", exchange=False), 10 // every + 1
    ),
    "a second PID namespace with the same host name, beside loads": lambda folder, every: containers.neighbours(
        runs.Run(folder / "project", overwrite=True), every
    ),
    "a second PID namespace, beside loads, no rename-exchange": lambda folder, every: containers.neighbours(
        runs.Run(folder / "project", overwrite=True, exchange=False), every
    ),
    "killed at random moments beside loads": lambda folder, every: containers.kills(
        runs.Run(folder / "project", overwrite=True), every
    ),
    "killed at random moments beside loads, no rename-exchange": lambda folder, every: containers.kills(
        runs.Run(folder / "project", overwrite=True, exchange=False), every
    ),
    "a restarted container with its predecessor's pid": lambda folder, every: containers.restarts(
        runs.Run(folder / "project", overwrite=True, exchange=False), every
    ),
    "an object store with faults": stores.histories,
    "while training goes on: written through `.data`": data_writes,
    "SIGTERM during a save": lambda folder, every: runs.signals(runs.Run(folder / "project"), 20 // every + 1),
    "hang: one process in a Python loop": _absent("loop"),
    "hang: one process stopped, the host of the store too": _absent("stopped"),
    "hang: one process in file IO": _absent("file"),
    "hang: one process in a long C call": _absent("native"),
    "hang: one process ended with exit code 0": _absent("leaves"),
    "hang: link between machines cut, 2 x 1 processes": lambda folder, every: hangs.cuts(folder, 1, every),
    "hang: link between machines cut, 2 x 2 processes": lambda folder, every: hangs.cuts(folder, 2, every),
    "read: gadgets in a `.metadata`": lambda folder, every: gadgets.sweep("metadata", every),
    "read: gadgets in an archive of torch": lambda folder, every: gadgets.sweep("torch", every),
    "read: gadgets in a file of torch before 1.6": lambda folder, every: gadgets.sweep("old torch", every),
}
"""The name of each row, with its sweep; the number counts the operations between two faults."""


def sweep(name: str, every: int = 1) -> sweeps.Tally:
    """Run one sweep in a folder of its own."""
    with tempfile.TemporaryDirectory(prefix="reliability-") as folder:
        return SWEEPS[name](Path(folder), every)


def recorded(text: str) -> dict[str, sweeps.Tally]:
    """The rows of a document, which counts losses and does not describe them."""
    found = re.finditer(r"^\| ([^|*]+) \| ([^|]+) \| (\d+) \| (\d+) \| (\d+) \|$", text, re.MULTILINE)
    return {
        name: sweeps.Tally(kind, int(injected), int(survived), ["recorded before"] * int(lost))
        for name, kind, injected, survived, lost in (row.groups() for row in found)
    }


def document(tallies: Mapping[str, sweeps.Tally]) -> str:
    """The text of the document."""
    rows = [
        f"| {name} | {tally.kind} | {tally.injected} | {tally.survived} | {len(tally.lost)} |"
        for name, tally in tallies.items()
    ]
    injected = sum(tally.injected for tally in tallies.values())
    lost = sum(len(tally.lost) for tally in tallies.values())
    rows.append(f"| **all** | | **{injected}** | **{injected - lost}** | **{lost}** |")
    where = f"Python {platform.python_version()}, torch {torch.__version__}, {platform.system()} {platform.machine()}."
    table = ["| Saved, and hit by | Fault | Injected | Survived | Lost |", "| --- | --- | ---: | ---: | ---: |", *rows]
    return HEAD + "\n".join(table) + f"\n\nMeasured with {where}\n"


def problems(text: str) -> list[str]:
    """What is wrong with a document: sweeps it lacks or does not know, and faults that lost something."""
    rows = recorded(text)
    wrong = [f"{name}: not in the document" for name in SWEEPS if name not in rows]
    wrong += [f"{name}: no sweep of that name" for name in rows if name not in SWEEPS]
    numbers = {name: [row.injected, row.survived, len(row.lost)] for name, row in rows.items()}
    wrong += [f"{name}: {row}" for name, row in numbers.items() if row[2] or not row[0] or row[0] != row[1]]
    return wrong


def selected(only: Sequence[str] | None) -> list[str]:
    """The sweeps whose names contain one of some texts; all without any.

    Raises:
        SystemExit: no name contains a text.
    """
    unknown = [text for text in only or () if not any(text in name for name in SWEEPS)]
    if unknown:
        raise SystemExit(f"No sweep has {unknown[0]!r} in its name. The sweeps: " + "; ".join(SWEEPS))
    return [name for name in SWEEPS if not only or any(text in name for text in only)]


def main() -> int:
    """Write the document, or check it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="only check the document")
    parser.add_argument("--only", nargs="+", metavar="NAME", help="run the sweeps whose names contain this")
    arguments = parser.parse_args()
    if arguments.check:
        wrong = problems(DOCUMENT.read_text(encoding="utf-8"))
        print("\n".join(wrong), end="\n" if wrong else "")
        return 1 if wrong else 0
    tallies: dict[str, sweeps.Tally] = {}
    for name in selected(arguments.only):
        begun = time.monotonic()
        tallies[name] = tally = sweep(name)
        print(
            f"{name}: {tally.injected} injected, {len(tally.lost)} lost, {time.monotonic() - begun:.0f} s", flush=True
        )
        print("".join(f"    {lost}\n" for lost in tally.lost), end="", flush=True)
    before = DOCUMENT.read_text(encoding="utf-8")
    known = {**recorded(before), **tallies} if arguments.only else tallies
    after = document({name: known[name] for name in SWEEPS if name in known})
    DOCUMENT.write_text(after + "".join(before.partition(PART_OF_MUTANTS)[1:]), encoding="utf-8")
    return 1 if any(tally.lost for tally in tallies.values()) else 0


if __name__ == "__main__":
    sys.exit(main())
