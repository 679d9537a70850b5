"""Compares an uninterrupted run with one that was resumed from its checkpoint: the first difference of each rank."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch

from accel_check.records import Records, StartRecord, StepRecord, read, values_of

__all__ = ("Difference", "Resumed", "compare_resumed", "compare_runs", "unsaved_variables", "used_state")

LOSS_TOLERANCE: Final = 1e-4
"""Largest relative difference of losses between numbers of processes, which add float32 terms in another order."""

_GROUPS_BY_CAUSE: Final = (
    "generator",
    "scheduler",
    "scaler",
    "optimizer",
    "weights",
    "buffers",
    "registered",
    "gradients",
)
"""Groups of state; within a step, a difference in one causes differences in the next."""


@dataclass(frozen=True)
class Difference:
    """A difference between two runs.

    Args:
        step: the optimizer step of the uninterrupted run in which it appears.
        rank: the rank of the process; None for all.
        what: name of the piece of state.
        detail: both values, if they are readable.
        loaded: whether it appears right after loading.
    """

    step: int
    rank: int | None
    what: str
    detail: str = ""
    loaded: bool = False

    def __str__(self) -> str:
        when = f"right after loading the checkpoint of step {self.step}" if self.loaded else f"in step {self.step}"
        where = "" if self.rank is None else f" on rank {self.rank}"
        return f"differs first {when}{where}: {self.what}{f' ({self.detail})' if self.detail else ''}"


@dataclass(frozen=True)
class Resumed:
    """A resumed run beside the uninterrupted one.

    Args:
        straight, resumed: the records of both.
        at: the optimizer step of the checkpoint.
        call: the call of `step` of the uninterrupted run after which the checkpoint was written.
        calls: the number of calls to compare.
    """

    straight: Records
    resumed: Records
    at: int
    call: int
    calls: int

    def pairs(self, rank: int) -> Iterator[tuple[int, StepRecord, StepRecord | None]]:
        """(step of the uninterrupted run, its record, that of the resumed run) after the checkpoint."""
        resumed_calls = self.resumed.calls
        for number in range(1, self.calls + 1):
            one = self.straight.step(rank, self.call + number)
            yield one.number, one, self.resumed.step(rank, number) if number <= resumed_calls else None


def compare_resumed(run: Resumed) -> Difference | None:
    """The first difference between a resumed run and the uninterrupted one; None if they are equal."""
    same = len(run.straight.ranks) == len(run.resumed.ranks)
    return next(_equal_world(run) if same else _other_world(run), None)


def _equal_world(run: Resumed) -> Iterator[Difference]:
    ranks = [facts.rank for facts in run.straight.ranks]
    used = set(used_state(run)[0])
    rows = [list(run.pairs(rank)) for rank in ranks]
    for number in range(run.calls):
        for rank in ranks:
            step, one, other = rows[rank][number]
            if other is None:
                yield Difference(step, rank, "the run", "it ended before this step")
                return
            if not number:
                # Samples that differ move the generators and everything after them.
                yield from _samples(one, other, step, rank)
                yield from _pieces(_kept(one.state, used), _kept(other.state, used), run.at, rank, loaded=True)
            else:
                yield from _samples(one, other, step, rank)
                yield from _pieces(_kept(one.state, used), _kept(other.state, used), step, rank)
            yield from _values("loss", one.losses, other.losses, step, rank)
            yield from _pieces({"gradients": one.digests}, {"gradients": other.digests}, step, rank)
            yield from _values("learning rate", one.rates, other.rates, step, rank)
    for rank in ranks:
        step, one, other = rows[rank][-1]
        if other is not None:
            yield from _variables(one, other, step, rank, keeps=True)


def _kept(state: Mapping[str, Any], used: set[str]) -> dict[str, Any]:
    """The state without generators that the script does not use, which a new process begins with by accident."""
    return {group: paths for group, paths in state.items() if group in used or not group.startswith("generator")}


def _samples(one: StepRecord, other: StepRecord, step: int, rank: int) -> Iterator[Difference]:
    if one.samples == other.samples:
        return
    ours, theirs = ({sample for batch in side.samples for sample in batch} for side in (one, other))
    detail = "the same ones in another order" if ours == theirs else f"{len(ours - theirs)} of {len(ours)} are others"
    yield Difference(step, rank, "samples", detail)


def _values(what: str, one: Sequence[float], other: Sequence[float], step: int, rank: int) -> Iterator[Difference]:
    if list(map(repr, one)) != list(map(repr, other)):
        detail = f"{', '.join(map(repr, one))} and {', '.join(map(repr, other))}"
        yield Difference(step, rank, what, detail)


def _pieces(
    expected: Mapping[str, Mapping[str, str]],
    actual: Mapping[str, Mapping[str, str]],
    step: int,
    rank: int | None,
    loaded: bool = False,
) -> Iterator[Difference]:
    for group in sorted(expected.keys() | actual.keys(), key=_place):
        ours, theirs = dict(expected.get(group, {})), dict(actual.get(group, {}))
        if group in ("weights", "buffers"):
            # A model is seen at its first forward. Buffers of other ranks become those of rank 0 in the next forward.
            if loaded and rank and group == "buffers":
                continue
            ours = {name: value for name, value in ours.items() if name in theirs}
            theirs = {name: value for name, value in theirs.items() if name in ours}
        if ours == theirs:
            continue
        path = next((path for path in ours if ours[path] != theirs.get(path)), next(iter(theirs.keys() - ours), ""))
        one, other = ours.get(path), theirs.get(path)
        readable = max(len(one or ""), len(other or "")) < 16 or "." in f"{one}{other}"
        detail = "is missing" if other is None else f"{one} and {other}" if readable else ""
        yield Difference(step, rank, f"{group}: {path}", detail, loaded)


def _place(group: str) -> tuple[int, str]:
    return next(
        (index for index, name in enumerate(_GROUPS_BY_CAUSE) if group.startswith(name)), len(_GROUPS_BY_CAUSE)
    ), group


def _variables(one: StepRecord, other: StepRecord, step: int, rank: int, keeps: bool) -> Iterator[Difference]:
    """Variables of the script that differ although all known objects are equal."""
    for name in sorted(one.variables.keys() & other.variables.keys()):
        (ours, kept), (theirs, _) = one.variables[name], other.variables[name]
        if ours != theirs and kept is keeps:
            yield Difference(step, rank, f"the variable {name}", "it is not in the checkpoint")


def unsaved_variables(run: Resumed) -> list[str]:
    """Plain variables of the script that differ at the end, such as counters, which may or may not matter."""
    if len(run.straight.ranks) != len(run.resumed.ranks):
        return []
    step, one, other = list(run.pairs(0))[-1]
    if other is None:
        return []
    return [
        difference.what.removeprefix("the variable ") for difference in _variables(one, other, step, 0, keeps=False)
    ]


# ---------------------------------------------------------------- another number of processes


def _other_world(run: Resumed) -> Iterator[Difference]:
    yield from _whole_state(run)
    ours = _global_order(run.straight, range(run.call + 1, run.straight.calls + 1))
    theirs = _global_order(run.resumed, range(1, run.resumed.calls + 1))
    # The samples dropped or repeated at the end of a pass depend on the number of processes.
    for position, (one, other) in enumerate(zip(ours, theirs, strict=False)):
        if one[0] != other[0]:
            break
        if one != other:
            yield Difference(
                run.at, None, "samples", f"at position {position} of the global order after the checkpoint"
            )
            return
    for number in range(1, min(run.calls, run.resumed.calls) + 1):
        loss, resumed = _mean_loss(run.straight.steps(run.call + number)), _mean_loss(run.resumed.steps(number))
        if loss is None or resumed is None or loss[1] != resumed[1]:
            continue
        if abs(loss[0] - resumed[0]) > LOSS_TOLERANCE * max(abs(loss[0]), abs(resumed[0])):
            detail = f"{loss[0]:.8g} and {resumed[0]:.8g}, more than {LOSS_TOLERANCE:g} apart"
            yield Difference(run.at + number, None, "loss", detail)


def _whole_state(run: Resumed) -> Iterator[Difference]:
    """Compare whole tensors before the first step after the checkpoint."""
    ours = [_whole(run.straight, facts.rank, run.call + 1) for facts in run.straight.ranks]
    theirs = [_whole(run.resumed, facts.rank, 1) for facts in run.resumed.ranks]
    for kind in ("buffers", "parameters"):
        for name in getattr(ours[0], kind):
            one = values_of([getattr(start, kind).get(name) for start in ours])[0]
            other = values_of([getattr(start, kind).get(name) for start in theirs])[0]
            if one is None or other is None:
                if kind == "parameters" and other is None and name.startswith("optimizer"):
                    yield Difference(run.at, None, name, "is missing", loaded=True)
            elif one.shape != other.shape or not torch.equal(one, other):
                yield Difference(run.at, None, name, loaded=True)


def _whole(records: Records, rank: int, call: int) -> StartRecord:
    path = records.folder / f"rank_{rank}" / f"state_{call}.pt"
    start: StartRecord = read(path) if path.is_file() else StartRecord()
    return start


def _global_order(records: Records, calls: range) -> list[tuple[str, str]]:
    """(pass, id) of the samples of all processes, in global order."""
    samples = []
    for call in calls:
        steps = records.steps(call)
        for batches in zip(*(zip(step.feeds, step.samples, strict=True) for step in steps), strict=False):
            for feed, ids in batches:
                samples += [(feed, one) for one in ids]
    return samples


def _mean_loss(steps: Sequence[StepRecord]) -> tuple[float, int] | None:
    total, samples = 0.0, 0
    for step in steps:
        counts = list(map(len, step.samples))
        if len(counts) != len(step.losses):
            return None
        total += sum(loss * count for loss, count in zip(step.losses, counts, strict=True))
        samples += sum(counts)
    return (total / samples, samples) if samples else None


# ---------------------------------------------------------------- what a check could have seen


def compare_runs(one: Records, other: Records) -> str | None:
    """How two runs from the same checkpoint differ; None if they are equal."""
    for call in range(1, min(one.calls, other.calls) + 1):
        for rank, (ours, theirs) in enumerate(zip(one.steps(call), other.steps(call), strict=True)):
            if any(getattr(ours, name) != getattr(theirs, name) for name in ("samples", "losses", "digests")):
                return f"computes something else in step {call} on rank {rank}"
    return None


def used_state(run: Resumed) -> tuple[list[str], list[str]]:
    """Which groups of state the script uses, and which of them a checkpoint could omit without a difference.

    A group is used if it changes during the uninterrupted run. If a checkpoint omits it, the resumed run keeps that of
    a new process. If this equals the saved one, the check cannot notice the omission.
    """
    used: set[str] = set()
    unseen: set[str] = set()
    for facts in run.straight.ranks:
        records = [run.straight.step(facts.rank, call) for call in range(1, run.straight.calls + 1)]
        saved = run.straight.step(facts.rank, run.call + 1).state
        resumed = next((one for one in run.resumed.ranks if one.rank == facts.rank), None)
        fresh: dict[str, Any] = {} if resumed is None else resumed.more.get("fresh", {})
        for group in {name for record in records for name in record.state}:
            seen = [record.state.get(group) for record in records]
            if any(one != seen[0] for one in seen):
                used.add(group)
                if group in fresh and not (facts.rank and group == "buffers") and fresh[group] == saved.get(group):
                    unseen.add(group)
    return sorted(used, key=_place), sorted(unseen, key=_place)
