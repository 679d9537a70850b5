"""Compares the records of an uninterrupted run with those of a resumed run; plain data, without torch."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

__all__ = ("Difference", "Notes", "compare_notes", "controls")

LOSS_TOLERANCE: Final = 1e-4
"""Largest relative difference of losses between numbers of processes, which add float32 terms in another order."""

_ORDER: Final = (
    "loader",
    "generator",
    "loss",
    "gradient",
    "scheduler",
    "optimizer",
    "weights",
    "buffers",
    "registered",
)
"""Groups of state; within a step, a difference in one causes differences in the next."""


@dataclass(frozen=True)
class Difference:
    """A difference between two runs.

    Args:
        step: the optimizer step of the uninterrupted run after which it appears.
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
        when = f"right after loading the checkpoint of step {self.step}" if self.loaded else f"after step {self.step}"
        where = "" if self.rank is None else f" on rank {self.rank}"
        return f"differs first {when}{where}: {self.what}{f' ({self.detail})' if self.detail else ''}"


@dataclass
class Notes:
    """The records of all processes of one run.

    Attributes:
        ranks: the records of each rank, in order of time.
    """

    ranks: list[list[dict[str, Any]]] = field(default_factory=list)

    @classmethod
    def read(cls, folder: Path, processes: int) -> Notes:
        """The records in a folder; empty for a process that recorded nothing."""
        found = []
        for rank in range(processes):
            path = folder / f"rank_{rank}.jsonl"
            lines = path.read_text(encoding="utf-8").splitlines() if path.is_file() else []
            found.append([json.loads(line) for line in lines])
        return cls(found)

    def steps(self, rank: int = 0) -> dict[int, dict[str, Any]]:
        """The records of a rank after steps, by step."""
        return {note["step"]: note for note in self.ranks[rank] if "samples" in note}

    def beginning(self, rank: int = 0) -> dict[str, Any] | None:
        """The record of a rank before its first step."""
        return next((note for note in self.ranks[rank] if "loaded" in note), None)

    def saved(self, at: int, rank: int = 0) -> dict[str, Any]:
        """The record of a rank when the checkpoint of a step was saved."""
        return next(note for note in self.ranks[rank] if "saved" in note and note["step"] == at)

    @property
    def last_step(self) -> int:
        """The last step that all ranks recorded."""
        return min((max(self.steps(rank), default=0) for rank in range(len(self.ranks))), default=0)


def compare_notes(straight: Notes, resumed: Notes, at: int) -> Difference | None:
    """The first difference between a resumed run and the uninterrupted one; None if they are equal.

    Args:
        straight: the uninterrupted run, which saved the checkpoint.
        resumed: the run that loaded it.
        at: the step of the checkpoint.
    """
    if len(straight.ranks) == len(resumed.ranks):
        findings = _equal_world(straight, resumed, at)
    else:
        findings = _other_world(straight, resumed, at)
    return next(findings, None)


def _equal_world(straight: Notes, resumed: Notes, at: int) -> Iterator[Difference]:
    ranks = range(len(straight.ranks))
    for rank in ranks:
        loaded, saved = resumed.beginning(rank), straight.saved(at, rank)
        # Loaders are compared by their batches: a script may skip batches itself.
        # Buffers of other ranks become those of rank 0 in the next forward, or differ after it.
        later = ("loader", "buffers") if rank else ("loader",)
        expected = _without(saved["pieces"], later)
        yield from _pieces(expected, loaded["pieces"] if loaded else {}, at, rank, loaded=True)
    for step in range(at + 1, straight.last_step + 1):
        for rank in ranks:
            one, other = straight.steps(rank)[step], resumed.steps(rank).get(step)
            if other is None:
                yield Difference(step, rank, "the run", "it ended before this step")
                return
            yield from _samples(_ids(one), _ids(other), step, rank)
            yield from _pieces(_with_losses(one), _with_losses(other), step, rank)
    for rank in ranks:
        yield from _variables(straight.steps(rank), resumed.steps(rank), straight.last_step, rank)


def _variables(
    straight: Mapping[int, Any], resumed: Mapping[int, Any], step: int, rank: int, kept: bool = True
) -> Iterator[Difference]:
    """Variables of the script that differ although all prepared objects are equal.

    Args:
        straight, resumed: the records of one rank, by step.
        step: the last step.
        rank: the rank of the records.
        kept: whether to compare objects with a state for training, or the other variables.
    """
    ours = straight.get(step, {}).get("variables", {})
    theirs = resumed.get(step, {}).get("variables", {})
    for name in sorted(ours.keys() & theirs.keys()):
        (one, keeps), (other, _) = ours[name], theirs[name]
        if one != other and keeps is kept:
            yield Difference(
                step, rank, f"the variable {name}", "it is not in the checkpoint; register_for_checkpointing()"
            )


def unsaved_variables(straight: Notes, resumed: Notes) -> list[str]:
    """Plain variables of the script that differ at the end, such as counters, which may or may not matter."""
    step = straight.last_step
    if len(straight.ranks) != len(resumed.ranks):
        return []
    found = _variables(straight.steps(), resumed.steps(), step, 0, kept=False)
    return [finding.what.removeprefix("the variable ") for finding in found]


def _other_world(straight: Notes, resumed: Notes, at: int) -> Iterator[Difference]:
    loaded, saved = resumed.beginning(), straight.saved(at)
    yield from _pieces(saved["full"], loaded["full"] if loaded else {}, at, None, loaded=True)
    after = [step for step in straight.steps() if step > at]
    ours = _global_order([straight.steps(rank) for rank in range(len(straight.ranks))], after)
    theirs = _global_order([resumed.steps(rank) for rank in range(len(resumed.ranks))], list(resumed.steps()))
    # The samples dropped or repeated at the end of an epoch depend on the number of processes.
    common = min(len(ours), len(theirs))
    for position, (one, other) in enumerate(zip(ours[:common], theirs[:common], strict=True)):
        if one[0] != other[0]:
            break
        if one != other:
            yield Difference(at, None, "samples", f"at position {position} of the global order after the checkpoint")
            return
    yield from _losses(straight, resumed, at)


def _global_order(ranks: Sequence[Mapping[int, Any]], steps: Iterable[int]) -> list[tuple[tuple[int, int], str]]:
    """((loader, epoch), id) of the samples of all processes, in global order."""
    found = []
    for step in steps:
        fetched = [note[step]["samples"] for note in ranks if step in note]
        for batches in zip(*fetched, strict=False):
            for number, epoch, ids in batches:
                found += [((number, epoch), one) for one in ids]
    return found


def _losses(straight: Notes, resumed: Notes, at: int) -> Iterator[Difference]:
    """Compare mean losses of steps with the same number of samples."""
    for step in range(at + 1, min(straight.last_step, resumed.last_step) + 1):
        one, other = (_mean_loss(notes, step) for notes in (straight, resumed))
        if one is None or other is None or one[1] != other[1]:
            continue
        if abs(one[0] - other[0]) > LOSS_TOLERANCE * max(abs(one[0]), abs(other[0])):
            yield Difference(step, None, "loss", f"{one[0]:.8g} and {other[0]:.8g}, more than {LOSS_TOLERANCE:g} apart")


def _mean_loss(notes: Notes, step: int) -> tuple[float, int] | None:
    total, samples = 0.0, 0
    for rank in range(len(notes.ranks)):
        note = notes.steps(rank)[step]
        counts = [len(ids) for _, _, ids in note["samples"]]
        if len(counts) != len(note["losses"]):
            return None
        total += sum(loss * count for loss, count in zip(note["losses"], counts, strict=True))
        samples += sum(counts)
    return (total / samples, samples) if samples else None


def _with_losses(note: Mapping[str, Any]) -> dict[str, Any]:
    return {**note["pieces"], "loss": {str(index): repr(loss) for index, loss in enumerate(note["losses"])}}


def _ids(note: Mapping[str, Any]) -> list[Any]:
    return [[number, ids] for number, _, ids in note["samples"]]


def _samples(one: list[Any], other: list[Any], step: int, rank: int) -> Iterator[Difference]:
    if one == other:
        return
    ours, theirs = ({sample for _, ids in side for sample in ids} for side in (one, other))
    detail = "the same ones in another order" if ours == theirs else f"{len(ours - theirs)} of {len(ours)} are others"
    yield Difference(step, rank, "samples", detail)


def _pieces(
    expected: Mapping[str, Mapping[str, str]],
    found: Mapping[str, Mapping[str, str]],
    step: int,
    rank: int | None,
    loaded: bool = False,
) -> Iterator[Difference]:
    for group in sorted(expected, key=_place):
        ours, theirs = expected[group], found.get(group, {})
        if ours == theirs:
            continue
        path = next((path for path in ours if ours[path] != theirs.get(path)), next(iter(theirs.keys() - ours), ""))
        readable = group.startswith(("loader", "loss"))
        detail = f"{ours.get(path)} and {theirs.get(path)}" if readable else ""
        missing = "is missing" if path not in theirs else ""
        yield Difference(step, rank, f"{group}: {path}", detail or missing, loaded)


def _place(group: str) -> tuple[int, str]:
    return next((index for index, name in enumerate(_ORDER) if group.startswith(name)), len(_ORDER)), group


def _without(pieces: Mapping[str, Any], prefixes: tuple[str, ...]) -> dict[str, Any]:
    return {group: paths for group, paths in pieces.items() if not group.startswith(prefixes)}


# ---------------------------------------------------------------- controls


def controls(straight: Notes, resumed: Notes, at: int) -> tuple[list[str], list[str]]:
    """Which pieces of state the script uses, and which of them a checkpoint could omit without a difference.

    A piece is used if it changes during the uninterrupted run. If a checkpoint omits it, the resumed run keeps the
    piece of a new process. If that equals the saved one, this check cannot notice the omission.

    Returns:
        The groups used, and those whose omission would not be noticed.
    """
    used: set[str] = set()
    unseen: set[str] = set()
    for rank in range(len(straight.ranks)):
        begun, steps = straight.beginning(rank), straight.steps(rank)
        loaded = resumed.beginning(rank)
        fresh = (loaded or {}).get("fresh") or {}
        for group, paths in (begun["pieces"] if begun else {}).items():
            if any(note["pieces"].get(group) != paths for note in steps.values()):
                used.add(group)
                if (
                    group in fresh
                    and not (rank and group.startswith("buffers"))
                    and fresh[group] == straight.saved(at, rank)["pieces"].get(group)
                ):
                    unseen.add(group)
    return sorted(used, key=_place), sorted(unseen, key=_place)
