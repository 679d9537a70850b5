"""A part of the sweeps in docs/reports/reliability.md, and that report itself."""

from __future__ import annotations

import multiprocessing
import pickle
from collections.abc import Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import pytest
from faults import sweeps, tracing

import reliability
from accel_state.errors import NotOffered
from injected import reading
from injected.killing import Life

TRACED = tracing.obstacle(errors=True)

# One sweep for each class of faults runs here. Those of hangs wait for deadlines; accel-ops and accel-cli have quick
# tests of hangs. Of the kinds of runs, each is hit by SIGKILL; a full disk, a failing call and a loss of power hit the
# runs in which what follows them differs: the others go through the same code after them. A file system without
# rename-exchange is that of one kill, one writer and one neighbour. Of two processes, the quick tests hit the second.
SLOW = (
    "hang",
    "a new checkpoint, the oldest removed: EIO",
    "over an existing name: EIO",
    "over an existing name, no rename-exchange: EIO",
    "over an existing name, no rename-exchange: disk full",
    "over an existing name, no rename-exchange: loss of power",
    "shards of FSDP: EIO",
    "shards of FSDP: disk full",
    "shards of FSDP: loss of power",
    "shards of FSDP on two processes",
    "two processes, the first",
    "two processes over",
    "a second PID namespace with the same host name",
    "killed at random moments beside loads, no rename-exchange",
)
SWEEPS = [pytest.param(name, marks=pytest.mark.slow if name.startswith(SLOW) else ()) for name in reliability.SWEEPS]

# A place costs a process or two that resume, train and save.
EVERY: Mapping[str, int] = {
    "shards": 36,
    "two processes": 36,
    "files of every kind": 36,
    "read: gadgets in a `.metadata`": 53,
    "read": 101,
    "killed at random moments of continuous": 54,
    "": 18,
}
"""One place in so many is hit, by the first word that the name of a sweep begins with."""


@pytest.fixture(scope="module")
def forking() -> Iterator[ProcessPoolExecutor]:
    """A process of its own to fork from: torch computes no gradients in a fork of one whose threads computed some."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as process:
        yield process


@pytest.mark.skipif(TRACED is not None, reason=str(TRACED))
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", SWEEPS)
def test_fault_sweep_loses_no_checkpoint(forking: ProcessPoolExecutor, name: str) -> None:
    every = next(places for words, places in EVERY.items() if name.startswith(words))
    try:
        tally = forking.submit(reliability.sweep, name, every=every).result(timeout=850)
    except NotOffered as reason:
        pytest.skip(str(reason))

    assert tally.lost == []
    assert tally.injected == tally.survived > 0


def test_the_document_tells_of_every_sweep_and_of_no_loss() -> None:
    assert reliability.problems(reliability.REPORT.read_text(encoding="utf-8")) == []


def test_a_loss_or_a_missing_sweep_is_noticed() -> None:
    names = list(reliability.SWEEPS)
    well = {name: sweeps.Tally("a fault", 3, 3) for name in names}
    assert reliability.problems(reliability.document(well)) == []

    lost = {**well, names[0]: sweeps.Tally("a fault", 3, 2, ["it was gone"])}
    assert reliability.problems(reliability.document(lost)) == [f"{names[0]}: [3, 2, 1]"]
    assert reliability.problems(reliability.document({names[0]: well[names[0]]})) == [
        f"{name}: not in the document" for name in names[1:]
    ]
    never = {**well, names[1]: sweeps.Tally("a fault")}
    assert reliability.problems(reliability.document(never)) == [f"{names[1]}: [0, 0, 0]"]


def test_some_sweeps_can_run_again_while_the_other_rows_stay() -> None:
    name, other = list(reliability.SWEEPS)[:2]
    tallies = {name: sweeps.Tally("a fault", 3, 2, ["it was gone"]), other: sweeps.Tally("another", 4, 4)}
    read = reliability.recorded(reliability.document(tallies))

    assert {row: (one.kind, one.injected, one.survived, len(one.lost)) for row, one in read.items()} == {
        name: ("a fault", 3, 2, 1),
        other: ("another", 4, 4, 0),
    }
    assert reliability.selected(None) == list(reliability.SWEEPS)
    assert reliability.selected([name]) == [name]
    with pytest.raises(SystemExit, match="No sweep has 'nothing of the kind'"):
        reliability.selected(["nothing of the kind"])


def read_unchecked(folder: Path) -> list[str | None]:
    """What is wrong with pickles that run code, end the process, and do nothing, for a reader that checks nothing."""
    form = reading.READERS["metadata"]._replace(read=lambda path: pickle.loads(path.read_bytes()))
    watched = reading.Watched(form, folder)
    attack = reading.code_in_a_field(f"os.mkdir({str(folder / 'it ran')!r})")
    return reading.read_each(watched.read, [attack, b"cos\n_exit\n(K\x07tR.", b"N."], watched.hook)


def test_a_reader_that_runs_code_or_dies_is_noticed(forking: ProcessPoolExecutor, tmp_path: Path) -> None:
    found = forking.submit(read_unchecked, tmp_path).result(timeout=200)
    assert "os.mkdir" in str(found[0])
    assert found[1:] == ["it ended with 7", None]


def test_a_run_that_went_on_elsewhere_or_saved_too_late_is_noticed() -> None:
    life = Life(resumed=5, losses={6: "0x1", 7: "0x2"}, taken=[8, 10, 12])
    assert life.wrong(5, {}, {8, 10}) is None
    assert life.wrong(8, {}, set()) == "it took up after step 5, and step 8 was saved"
    assert life.wrong(5, {7: "0x3"}, set()) == "the loss of step 7 is another one than before"
    assert life.wrong(5, {}, {8}) == "the save of step 10 was not complete when the next one began"
