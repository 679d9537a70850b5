"""A part of the sweeps in docs/reliability.md, and that document itself."""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor

import pytest
from faults import sweeps, tracing

import reliability
from accel_state.errors import NotOffered

TRACED = tracing.obstacle(errors=True)

# Those of hangs wait for deadlines; accel-ops and accel-cli have quick tests of hangs. Of the kinds of runs, each is
# hit by SIGKILL; a failing call and a loss of power hit the runs in which what follows them differs: the others go
# through the same code after them. Of two processes, the quick tests hit the second.
SLOW = (
    "hang",
    "a new checkpoint, the oldest removed: EIO",
    "over an existing name: EIO",
    "over an existing name, no rename-exchange: EIO",
    "over an existing name, no rename-exchange: loss of power",
    "shards of FSDP: EIO",
    "shards of FSDP on two processes",
    "two processes, the first",
    "two processes over",
)
SWEEPS = [
    pytest.param(name, marks=pytest.mark.slow if name.startswith(SLOW) else ())
    for name in reliability.SWEEPS
    if not name.startswith("read")
]

# One place in so many is hit. A place costs a process or two that resume, train and save.
EVERY, EVERY_OF_SEVERAL = 18, 36


@pytest.fixture(scope="module")
def forking() -> Iterator[ProcessPoolExecutor]:
    """A process of its own to fork from: torch computes no gradients in a fork of one whose threads computed some."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as process:
        yield process


@pytest.mark.skipif(TRACED is not None, reason=str(TRACED))
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", SWEEPS)
def test_fault_sweep_loses_no_checkpoint(forking: ProcessPoolExecutor, name: str) -> None:
    every = EVERY_OF_SEVERAL if name.startswith(("shards", "two processes", "files of every kind")) else EVERY
    try:
        tally = forking.submit(reliability.sweep, name, every=every).result(timeout=850)
    except NotOffered as reason:
        pytest.skip(str(reason))

    assert tally.lost == []
    assert tally.injected == tally.survived > 0


def test_the_document_tells_of_every_sweep_and_of_no_loss() -> None:
    assert reliability.problems(reliability.DOCUMENT.read_text(encoding="utf-8")) == []


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
