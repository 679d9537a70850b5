"""Sweep faults over saving, loading and waiting, and write what was found to docs/reports/reliability.md.

    python tools/reliability.py                 run every sweep in full (an hour or more) and write the report
    python tools/reliability.py --only NAME...  run the sweeps whose names contain NAME, and keep the other rows
    python tools/reliability.py --every 20      try one of so many places, and leave the report as it is
    python tools/reliability.py --check         exit 1 when the report records a loss, or lacks a sweep

The tests run a tenth or less of each sweep (tests-integration/test_saving_survives_faults.py). To add a sweep, write
it in a module of `injected/` and give it one line in `SWEEPS`.
"""

# ruff: noqa: E402 - the harness of faults belongs to tests.

from __future__ import annotations

import argparse
import platform
import re
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final

ROOT = Path(__file__).resolve().parents[1]
sys.path.append(str(ROOT / "tests-integration"))

import torch
from faults.sweeps import Tally

from injected import reading, saving, stores, waiting
from injected.killing import continuous_kills

REPORT = ROOT / "docs" / "reports" / "reliability.md"

Sweep = Callable[[Path, int], Tally]

HEAD: Final = """# What saving and waiting survive

`nox -s reliability` writes this page. Each row is one kind of fault, injected at every place where it can happen
during a save of a checkpoint. *Survived* means that a restart then found the newest good checkpoint (of the
interrupted save, or the one before it) with correct hashes and continued with the losses of an undisturbed run bit for
bit, that no process hung, and that nothing older was lost. A damaged checkpoint that is accepted counts as lost.

Faults happen at system calls: the harness traces a forked child that saves, and kills it before its k-th file
operation or makes that operation fail. A loss of power is simulated on a model of a disk that keeps flushed data
(contents with their file, names with their folder); of all other data it keeps nothing, the names only, names and
lengths with zeros as contents, or everything. In rows with "no rename-exchange", a filter of the kernel refuses to
exchange two names, as NFS does. Containers are namespaces of the kernel. In rows with "beside loads", each save has
one number in everything that it saves, and another run loads all the time: *survived* means also that each load had
the numbers of one save, and that nothing was left after one more save. In the row of continuous saves, runs are killed
one after the other: *survived* means that a run took up at the newest complete checkpoint, that every state taken
before the last one was complete, and that steps that were made twice had the same losses. A history of an object store
has several runs, one after the other or at once; *survived* means that no checkpoint of which the store acknowledged
the last request was lost, or lost files, to an older one. Rows that begin with "read" are pickles that attack the
reader: there *survived* means that the file was read, or refused with a typed error, without running code, crashing or
hanging. The harness is `tests-integration/faults`.

Writes through `.data` happen before each file that the thread of an asynchronous save writes. The saved state must
then be that of the call.

In rows that begin with "hang", processes wait for another one in `gather`, `wait_for_everyone`, a backward under ddp
and fsdp2, and `save_state`. There *survived* means that each waiting process ended within 5 seconds after its deadline
of 10 seconds (proportionally later on a busy machine), that its output named the process that it waited for, and that
no process and no launcher remained. Links connect network namespaces over a bridge that drops all packets when cut.

"""


_SAVES: Final[Mapping[str, Mapping[str, bool]]] = {
    "a new checkpoint, the oldest removed": {},
    "over an existing name": {"overwrite": True},
    "over an existing name, no rename-exchange": {"overwrite": True, "exchange": False},
    "shards of FSDP": {"sharded": True},
}
"""Kinds of saves that every fault of `saving.FAULTS` hits, with the options of their runs."""


def _save(fault: str, **options: Any) -> Sweep:
    return partial(saving.everywhere, fault=fault, **options)


SWEEPS: Final[Mapping[str, Sweep]] = {
    **{f"{kind}: {fault}": _save(fault, **options) for kind, options in _SAVES.items() for fault in saving.FAULTS},
    "while training goes on: SIGKILL": _save("SIGKILL", behind=True),
    "while training goes on: disk full": _save("disk full", behind=True),
    "two processes, the first hit: SIGKILL": _save("SIGKILL", processes=2),
    "two processes, the second hit: SIGKILL": _save("SIGKILL", processes=2, hit=1),
    "two processes over an existing name, no rename-exchange: SIGKILL": _save(
        "SIGKILL", processes=2, overwrite=True, exchange=False
    ),
    "shards of FSDP on two processes, the first hit: SIGKILL": _save("SIGKILL", processes=2, sharded=True),
    "shards of FSDP on two processes, the second hit: SIGKILL": _save("SIGKILL", processes=2, hit=1, sharded=True),
    "two processes, one past the deadline": partial(saving.refusals, kind="slow process"),
    "two processes, one with other keys": partial(saving.refusals, kind="other keys"),
    "damage afterwards": saving.damage,
    "files of every kind that is read, damaged": reading.damaged_files,
    "folders left behind by dead processes": saving.stale_folders,
    "two writers of one name": saving.two_writers,
    "two writers of one name, no rename-exchange": partial(saving.two_writers, exchange=False),
    "a second PID namespace with the same host name, beside loads": saving.neighbours,
    "a second PID namespace, beside loads, no rename-exchange": partial(saving.neighbours, exchange=False),
    "killed at random moments beside loads": saving.kills,
    "killed at random moments beside loads, no rename-exchange": partial(saving.kills, exchange=False),
    "killed at random moments of continuous saves": continuous_kills,
    "a restarted container with its predecessor's pid": saving.restarts,
    "an object store with faults": stores.histories,
    "while training goes on: written through `.data`": saving.data_writes,
    "SIGTERM during a save": saving.signals,
    "hang: one process in a Python loop": partial(waiting.absences, fault="loop"),
    "hang: one process stopped, the host of the store too": partial(waiting.absences, fault="stopped"),
    "hang: one process in file IO": partial(waiting.absences, fault="file"),
    "hang: one process in a long C call": partial(waiting.absences, fault="native"),
    "hang: one process ended with exit code 0": partial(waiting.absences, fault="leaves"),
    "hang: link between machines cut, 2 x 1 processes": partial(waiting.cuts, processes=1),
    "hang: link between machines cut, 2 x 2 processes": partial(waiting.cuts, processes=2),
    "read: gadgets in a `.metadata`": partial(reading.attacks, reader="metadata"),
    "read: gadgets in an archive of torch": partial(reading.attacks, reader="torch"),
    "read: gadgets in a file of torch before 1.6": partial(reading.attacks, reader="old torch"),
}
"""The name of each row, with its sweep; the number counts the places between two faults."""


def sweep(name: str, every: int = 1) -> Tally:
    """Run one sweep in a folder of its own."""
    with tempfile.TemporaryDirectory(prefix="reliability-") as folder:
        return SWEEPS[name](Path(folder), every)


def recorded(text: str) -> dict[str, Tally]:
    """The rows of a report, which counts losses and does not describe them."""
    rows = re.findall(r"^\| ([^|*]+) \| ([^|]+) \| (\d+) \| (\d+) \| (\d+) \|$", text, re.MULTILINE)
    return {
        name: Tally(kind, int(injected), int(survived), ["recorded before"] * int(lost))
        for name, kind, injected, survived, lost in rows
    }


def document(tallies: Mapping[str, Tally]) -> str:
    """The text of the report."""
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
    """What is wrong with a report: sweeps it lacks or does not know, and faults that lost something."""
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
    """Write the report, or check it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="only check the report")
    parser.add_argument("--only", nargs="+", metavar="NAME", help="run the sweeps whose names contain this")
    parser.add_argument("--every", type=int, default=1, help="try one of so many places, and write nothing")
    arguments = parser.parse_args()
    if arguments.check:
        wrong = problems(REPORT.read_text(encoding="utf-8"))
        print("\n".join(wrong), end="\n" if wrong else "")
        return 1 if wrong else 0
    tallies: dict[str, Tally] = {}
    for name in selected(arguments.only):
        begun = time.monotonic()
        tallies[name] = tally = sweep(name, arguments.every)
        seconds = time.monotonic() - begun
        print(f"{name}: {tally.injected} injected, {len(tally.lost)} lost, {seconds:.0f} s", flush=True)
        print("".join(f"    {lost}\n" for lost in tally.lost), end="", flush=True)
    if arguments.every == 1:
        known = {**recorded(REPORT.read_text(encoding="utf-8")), **tallies} if arguments.only else tallies
        REPORT.write_text(document({name: known[name] for name in SWEEPS if name in known}), encoding="utf-8")
    return 1 if any(tally.lost for tally in tallies.values()) else 0


if __name__ == "__main__":
    sys.exit(main())
