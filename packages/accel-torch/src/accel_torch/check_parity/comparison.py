"""Finds what differs between a run under a plan and one process with the same global batches.

Within a step, samples are compared first, then the outputs of forward, gradients, norms, learning rates, parameters and
buffers, because a difference in one causes differences in the next. The comparison ends at the first step with a
difference.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Final

import torch
from torch import Tensor

from accel_torch.check_parity import causes
from accel_torch.check_parity.notes import RunNotes, StepNotes
from accel_torch.check_parity.tolerances import Tolerance, update_tolerance

__all__ = ("ParityFinding", "compare_masks", "compare_references", "compare_runs", "remarks")

_FLIPPED_ROWS: Final = 0.1
_FLIPPED_SHARE: Final = 0.6
"""Fraction of the rows of a gradient in which single terms may be missing, and that fraction of its largest element."""

_ACCIDENT: Final = 1e-5
"""Probability below which equal dropout masks are not a coincidence."""


@dataclass(frozen=True)
class ParityFinding:
    """One difference.

    Args:
        step: optimizer step, 0 before the first.
        what: "samples", "output", "loss", "gradient", "norm", "clipped gradient", "learning rate", "parameter",
            "buffer" or "dropout".
        cause: likely cause, as a sentence without a full stop.
        module: the first module that differs.
        parameter: the first parameter or buffer that differs.
        ratio: value found divided by value expected, if one is a multiple of the other.
        detail: both values, or the size of the difference.
        others: further names that differ in the same way.
    """

    step: int
    what: str
    cause: str
    module: str = ""
    parameter: str = ""
    ratio: float | None = None
    detail: str = ""
    others: tuple[str, ...] = ()

    def __str__(self) -> str:
        when = f"in step {self.step}" if self.step else "before the first step"
        name = self.parameter or self.module
        ratio = "" if self.ratio is None else f", ratio {self.ratio:.4g}"
        detail = f" ({self.detail})" if self.detail else ""
        more = f"; so do {len(self.others)} others" if self.others else ""
        return f"{when}: {self.what}{f' of {name}' if name else ''} differs{ratio}{detail}{more}: {self.cause}"


def compare_runs(plan: RunNotes, reference: RunNotes) -> list[ParityFinding]:
    """The differences of the first step that has any; empty if all steps are equal.

    Args:
        plan: records of all processes.
        reference: records of one process.
    """
    comparison = _Comparison(plan, reference)
    for step in range(min(plan.last_step, reference.last_step) + 1):
        findings = list(comparison.start() if step == 0 else comparison.step(step))
        if findings:
            return findings
    return []


class _Comparison:
    """One comparison."""

    def __init__(self, plan: RunNotes, reference: RunNotes) -> None:
        self._plan, self._reference, self._ranks = plan, reference, plan.ranks
        first = reference.step(0, 1)
        modules = {} if first is None else first.modules
        self._order = {name: number for number, name in enumerate(modules)}
        self._terms = {name: float(seen[4]) for name, seen in modules.items()}
        self._tolerance = Tolerance(plan.ranks[0].precision, self._terms)

    # ------------------------------------------------------------------ the state before the first step

    def start(self) -> Iterator[ParityFinding]:
        """Compare the initial states."""
        expected, found = self._notes(0)
        for what, kind in (("parameter", "parameters"), ("buffer", "buffers")):
            values = getattr(expected, kind)
            tensors = {name: [getattr(note, kind).get(name) for note in found] for name in values}
            wrong = [
                name
                for name, value in values.items()
                if any(one is not None and _differs(one, value, _rounding(value)) for one in tensors[name])
            ]
            if wrong:
                name = wrong[0]
                cause = causes.cause_of_start(tensors[name], values[name])
                yield self._finding(0, what, cause, name, others=wrong[1:])

    # ------------------------------------------------------------------ one step

    def step(self, step: int) -> Iterator[ParityFinding]:
        """Compare the results of one step."""
        expected, found = self._notes(step)
        yield from self._samples(step, expected, found)
        buffers = list(self._buffers(step, expected, found))
        outputs = list(self._outputs(step, expected, found))
        # Forward both changes buffers and uses them.
        yield from sorted([*buffers, *outputs], key=lambda one: self._order.get(one.module, len(self._order)))
        losses = list(self._losses(step, expected, found))
        yield from losses
        forward = [*outputs, *losses]
        gradients = self._gradients(step, "gradient", expected.gradients, [note.gradients for note in found], forward)
        yield from gradients
        norms = list(self._norms(step, expected, found))
        yield from norms
        # An engine that clips within its step provides only the norm.
        clipped = expected.clipped if any(note.clipped for note in found) else {}
        scaled = self._gradients(step, "clipped gradient", clipped, [note.clipped for note in found], norms)
        if clipped and not gradients:
            yield from scaled
        yield from self._rates(step, expected, found)
        if not (gradients or norms or scaled):
            yield from self._parameters(step, expected, found)

    def _notes(self, step: int) -> tuple[StepNotes, list[StepNotes]]:
        expected = self._reference.step(0, step)
        found = [self._plan.step(facts.rank, step) for facts in self._ranks]
        assert expected is not None
        return expected, [note for note in found if note is not None]

    def _samples(self, step: int, expected: StepNotes, found: Sequence[StepNotes]) -> Iterator[ParityFinding]:
        first: dict[int, tuple[int, list[Any]]] = {}
        for facts, note in zip(self._ranks, found, strict=True):
            ids = [one[2] for one in note.samples]
            rank, theirs = first.setdefault(facts.data, (facts.rank, ids))
            if theirs != ids:
                detail = f"ranks {rank} and {facts.rank}"
                cause = "processes that must read the same samples (tp, cp, sp) read different ones"
                yield ParityFinding(step, "samples", cause, detail=detail)
                return
        if not self._ranks[0].reads_loader:
            if len(first) > 1:
                cause = "processes train on the same samples: their loader was not returned by prepare()"
                yield ParityFinding(step, "samples", cause)
            return
        own = [one[2] for one in expected.samples]
        slices = [first[place][1] for place in sorted(first)]
        joined = [[one for batch in column for one in batch] for column in zip(*slices, strict=False)]
        if own and own not in (slices[0], joined):
            yield ParityFinding(step, "samples", "the main process reads other samples than one process would")
        yield from self._shared_samples(step, first)

    def _shared_samples(self, step: int, slices: dict[int, tuple[int, list[list[str]]]]) -> Iterator[ParityFinding]:
        """Samples that two shards of the global batch both have, although no shard contains a sample twice."""
        if self._data_repeats:
            return
        seen: dict[str, int] = {}
        for rank, batches in slices.values():
            ids = [one for batch in batches for one in batch]
            if len(set(ids)) < len(ids):
                return
            for one in ids:
                if one in seen:
                    count = len({*seen} & {*ids})
                    detail = f"{count} of {len(ids)} samples of rank {rank} are those of rank {seen[one]}"
                    cause = "processes train on the same samples, so they learn no more than one process"
                    yield ParityFinding(step, "samples", cause, detail=detail)
                    return
            seen |= dict.fromkeys(ids, rank)

    @cached_property
    def _data_repeats(self) -> bool:
        """Whether the data set itself has equal samples, so that shards may share some without an error.

        A process reads no sample twice in an epoch. So equal samples on one process are equal in the data set, unless
        all processes read the same ones in every step.
        """
        read: list[list[Any]] = []
        for facts in self._ranks:
            notes = [self._plan.step(facts.rank, step) for step in range(1, self._plan.last_step + 1)]
            read.append([one for note in notes if note is not None for one in note.samples])
        if all(samples == read[0] for samples in read):
            return False
        for samples in read:
            ids = [(loader, epoch, one) for loader, epoch, batch in samples for one in batch]
            if len(set(ids)) < len(ids):
                return True
        return False

    def _outputs(self, step: int, expected: StepNotes, found: Sequence[StepNotes]) -> Iterator[ParityFinding]:
        """Modules whose outputs differ in their sum or sum of squares over all processes."""
        wrong = []
        for name, (calls, count, total, squares, _) in expected.modules.items():
            seen = [note.modules.get(name) for note in found]
            parts = [one for one in seen if one is not None and one[0] == calls]
            elements = sum(one[1] for one in parts)
            if len(parts) < len(found) or not count or elements % count:
                continue
            # The number of processes that have each element.
            copies = elements / count
            relative = self._tolerance.relative(torch.float32, name)
            allowed = relative * (count * squares) ** 0.5, 2 * relative * squares
            sums = sum(one[2] for one in parts) / copies, sum(one[3] for one in parts) / copies
            if not (abs(sums[0] - total) <= allowed[0] and abs(sums[1] - squares) <= allowed[1]):
                wrong.append((name, (sums[1] / squares) ** 0.5 if squares else None))
        if wrong:
            name, ratio = wrong[0]
            cause = "forward computes something else in this module, or in code that computes its inputs"
            others = tuple(other for other, _ in wrong[1:])
            yield ParityFinding(step, "output", cause, module=name, others=others, detail=_size(ratio))

    def _losses(self, step: int, expected: StepNotes, found: Sequence[StepNotes]) -> Iterator[ParityFinding]:
        for index, value in enumerate(expected.losses):
            losses = [note.losses[index] for note in found if index < len(note.losses)]
            if len(losses) < len(found):
                yield ParityFinding(step, "loss", "processes run backward less often than one process")
                return
            mean = sum(losses) / len(losses)
            allowed = self._tolerance.relative(torch.float32) * max(abs(value), 1e-3, *(abs(one) for one in losses))
            if abs(mean - value) <= allowed:
                continue
            ratio = mean / value if value else None
            detail = f"mean over the processes {mean:.6g}, one process {value:.6g}"
            yield ParityFinding(
                step, "loss", _cause_of_loss(ratio, self._ranks[0].data_count), ratio=ratio, detail=detail
            )
            return

    def _gradients(
        self,
        step: int,
        what: str,
        expected: dict[str, Tensor],
        found: Sequence[dict[str, Tensor]],
        forward: Sequence[ParityFinding],
    ) -> list[ParityFinding]:
        allowed = self._tolerance.of_gradients(expected)
        wrong = {}
        for name, value in expected.items():
            tensors = [gradients.get(name) for gradients in found]
            if all(one is None for one in tensors) and not value.any():
                continue
            if any(one is None or self._gradient_differs(one, value, allowed[name]) for one in tensors):
                wrong[name] = tensors
        if not wrong:
            return []
        name = self._first(list(wrong), expected, found, forward)
        cause = causes.cause_of_gradient(wrong[name], expected[name], allowed[name], self._ranks)
        one = next((one for one in wrong[name] if one is not None and _differs(one, expected[name], 0.0)), None)
        like = causes.likeness(one, expected[name]) if one is not None else causes.Likeness(0.0, 1.0)
        finding = self._finding(step, what, cause, name, like, [other for other in wrong if other != name])
        if one is not None and not like.is_multiple and one.shape == expected[name].shape:
            apart = float((one.double() - expected[name].double()).abs().max())
            finding = replace(finding, detail=f"{like.text}; off by {apart:.3g}, and {allowed[name]:.3g} is allowed")
        return [finding]

    def _gradient_differs(self, one: Tensor, other: Tensor, allowed: float) -> bool:
        """Whether a gradient differs by more than rounding, and in mixed precision by more than single units.

        If the input of a ReLU is zero up to rounding, its sign may differ. The gradients of that unit, one row of a
        weight, then lack one of their terms. An error of a plan changes most rows.
        """
        if not _differs(one, other, allowed):
            return False
        if not self._tolerance.is_mixed or one.shape != other.shape or not other.ndim or not one.isfinite().all():
            return True
        apart = (one.double() - other.double()).abs()
        rows = int((apart > allowed).reshape(len(other), -1).any(1).sum())
        return rows > len(other) * _FLIPPED_ROWS or float(apart.max()) > _FLIPPED_SHARE * float(other.abs().max())

    def _first(
        self,
        wrong: list[str],
        expected: dict[str, Tensor],
        found: Sequence[dict[str, Tensor]],
        forward: Sequence[ParityFinding],
    ) -> str:
        """The parameter to report: the first in backward order, unless all are scaled equally or forward differs."""
        ordered = sorted(wrong, key=self._place)
        module = next((one.module for one in forward if one.module), None)
        if module is not None:
            return next((name for name in ordered if name.startswith(f"{module}.")), ordered[0])
        if forward or (len(wrong) == len(expected) and self._scaled_alike(wrong, expected, found)):
            return ordered[0]
        return ordered[-1]

    def _scaled_alike(self, wrong: list[str], expected: dict[str, Tensor], found: Sequence[dict[str, Tensor]]) -> bool:
        ratios = [
            causes.likeness(gradients[name], expected[name])
            for gradients in found[:1]
            for name in wrong
            if name in gradients and gradients[name].shape == expected[name].shape
        ]
        return len(ratios) == len(wrong) and all(causes.is_near(one.ratio, ratios[0].ratio or 0.0) for one in ratios)

    def _place(self, name: str) -> int:
        """The position in forward order of a parameter's module."""
        return self._order.get(name.rpartition(".")[0], len(self._order))

    def _norms(self, step: int, expected: StepNotes, found: Sequence[StepNotes]) -> Iterator[ParityFinding]:
        for index, value in enumerate(expected.norms):
            norms = [note.norms[index] for note in found if index < len(note.norms)]
            allowed = self._tolerance.relative(torch.float32) * abs(value)
            if norms and not all(abs(norm - value) <= allowed for norm in norms):
                ratio = next(norm for norm in norms if not abs(norm - value) <= allowed) / value if value else None
                detail = f"{', '.join(f'{norm:.6g}' for norm in norms)} by process, one process {value:.6g}"
                yield ParityFinding(step, "norm", causes.cause_of_norm(norms, value), ratio=ratio, detail=detail)
                return

    def _rates(self, step: int, expected: StepNotes, found: Sequence[StepNotes]) -> Iterator[ParityFinding]:
        for facts, note in zip(self._ranks, found, strict=True):
            for one, other in zip(note.rates, expected.rates, strict=False):
                if abs(one - other) > 1e-6 * max(abs(other), 1e-12):
                    detail = f"{one:.6g} on rank {facts.rank}, one process {other:.6g}"
                    cause = (
                        "it depends on the number of processes or on the rank, or its schedule steps more or less often"
                    )
                    yield ParityFinding(
                        step, "learning rate", cause, ratio=one / other if other else None, detail=detail
                    )
                    return

    def _parameters(self, step: int, expected: StepNotes, found: Sequence[StepNotes]) -> Iterator[ParityFinding]:
        # One process continues from the parameters of the plan's main process.
        before = self._plan.step(0, step - 1)
        assert before is not None
        gradients = expected.clipped or expected.gradients
        allowed = self._tolerance.of_gradients(gradients)
        wrong = {}
        for name, value in expected.parameters.items():
            tensors = [note.parameters.get(name) for note in found]
            if name not in before.parameters or before.parameters[name].shape != value.shape:
                continue
            relative = self._tolerance.relative(value.dtype, name.rpartition(".")[0])
            if name in gradients:
                # The gradients are equal up to rounding.
                seen = [(note.clipped or note.gradients).get(name) for note in found]
                apart = [_apart(one, gradients[name]) for one in seen if one is not None]
                allowed[name] = max([allowed[name], *apart])
            own = update_tolerance(
                before.parameters[name], value, gradients.get(name), allowed.get(name, 0.0), relative
            )
            if any(one is not None and _differs(one, value, own) for one in tensors):
                wrong[name] = tensors, own
        if wrong:
            name = min(wrong, key=self._place)
            tensors, own = wrong[name]
            cause, like = causes.cause_of_parameter(tensors, before.parameters[name], expected.parameters[name], own)
            yield self._finding(step, "parameter", cause, name, like, [other for other in wrong if other != name])

    def _buffers(self, step: int, expected: StepNotes, found: Sequence[StepNotes]) -> Iterator[ParityFinding]:
        wrong = {}
        for name, value in expected.buffers.items():
            tensors = [note.buffers.get(name) for note in found]
            size = float(value.abs().max()) if value.numel() and value.is_floating_point() else 0.0
            allowed = self._tolerance.relative(value.dtype) * size if value.is_floating_point() else 0.0
            if any(one is None or _differs(one, value, allowed) for one in tensors):
                wrong[name] = tensors
        if wrong:
            name = min(wrong, key=self._place)
            yield self._finding(
                step, "buffer", causes.cause_of_buffer(name), name, others=[other for other in wrong if other != name]
            )

    def _finding(
        self,
        step: int,
        what: str,
        cause: str,
        name: str,
        like: causes.Likeness | None = None,
        others: Sequence[str] = (),
    ) -> ParityFinding:
        ratio = like.ratio if like is not None and like.is_multiple else None
        detail = like.text if like is not None and ratio is None else ""
        return ParityFinding(step, what, cause, name.rpartition(".")[0], name, ratio, detail, tuple(others))


def compare_references(one: RunNotes, other: RunNotes, after_start: bool = False) -> str | None:
    """The first difference between two runs of one process; None if they are equal.

    Args:
        one, other: the runs.
        after_start: ignore the initial states.
    """
    for step in range(int(after_start), min(one.last_step, other.last_step) + 1):
        first, second = one.step(0, step), other.step(0, step)
        assert first is not None
        assert second is not None
        for kind in ("losses", "rates"):
            if getattr(first, kind) != getattr(second, kind):
                return f"the {kind.removesuffix('es') if kind == 'losses' else 'learning rate'} in step {step}"
        for kind in ("gradients", "parameters"):
            ours, theirs = getattr(first, kind), getattr(second, kind)
            for name in ours:
                if name not in theirs or not torch.equal(ours[name], theirs[name]):
                    return f"{kind.removesuffix('s')} {name} {f'in step {step}' if step else 'before the first step'}"
    return None if one.last_step == other.last_step else "the number of steps"


def compare_masks(plan: RunNotes) -> list[ParityFinding]:
    """Compare the dropout masks of the step after the compared ones.

    Processes that compute the same activations must drop the same elements; other processes must drop other elements.
    """
    step = plan.last_step
    notes = [note for facts in plan.ranks if (note := plan.step(facts.rank, step)) is not None]
    if len(notes) < len(plan.ranks) or not all(note.masks for note in notes):
        return []
    for call in range(min(len(note.masks) for note in notes)):
        for index, facts in enumerate(plan.ranks):
            for other in range(index):
                one, two = notes[index].masks[call], notes[other].masks[call]
                if one[3] != two[3] or (one[2] ** 2 + (1 - one[2]) ** 2) ** one[3] > _ACCIDENT:
                    continue
                replicated = facts.data == plan.ranks[other].data and one[0] == two[0]
                pair = f"ranks {plan.ranks[other].rank} and {facts.rank}"
                if replicated and one[1] != two[1]:
                    cause = "processes with the same activations drop different elements: give them the same seed"
                    return [ParityFinding(step, "dropout", cause, module=one[4], detail=pair)]
                if not replicated and one[1] == two[1]:
                    cause = (
                        "processes with different samples drop the same elements: call set_seed(seed, "
                        "device_specific=True) after the model is constructed, so that each process draws other masks"
                    )
                    return [ParityFinding(step, "dropout", cause, module=one[4], detail=pair)]
    return []


def remarks(plan: RunNotes, reference: RunNotes) -> list[str]:
    """Further observations that also apply to one process."""
    found = []
    missing = reference.ranks[0].without_gradient
    if missing:
        more = f" and {len(missing) - 3} more" if len(missing) > 3 else ""
        found.append(f"parameters without a gradient, or with a zero gradient: {', '.join(missing[:3])}{more}")
    losses = [note.losses for step in range(1, reference.last_step + 1) if (note := reference.step(0, step))]
    if len(losses) > 1 and all(one == losses[0] for one in losses):
        found.append(f"the loss does not change: it is {losses[0]} in every step")
    return found


def _differs(one: Tensor, other: Tensor, allowed: float | Tensor) -> bool:
    if one.shape != other.shape:
        return True
    if not other.is_floating_point():
        return not torch.equal(one, other)
    # NaN and infinity differ from every number.
    return not bool((((one.double() - other.double()).abs() <= allowed) | (one == other)).all())


def _apart(one: Tensor, other: Tensor) -> float:
    same = one.shape == other.shape and other.numel() and other.is_floating_point()
    return float((one.double() - other.double()).abs().max()) if same else 0.0


def _rounding(tensor: Tensor) -> float:
    if not tensor.is_floating_point() or not tensor.numel():
        return 0.0
    return 4 * torch.finfo(tensor.dtype).eps * float(tensor.abs().max())


def _size(ratio: float | None) -> str:
    return "" if ratio is None else f"its size is {ratio:.4g} of that in one process"


def _cause_of_loss(ratio: float | None, count: int) -> str:
    if causes.is_near(ratio, 1 / count) and count > 1:
        return "the loss is a sum over the samples of a process, and the processes average gradients"
    if causes.is_near(ratio, count) and count > 1:
        return "the loss is multiplied by the number of processes"
    return (
        "each process divides by its own number of tokens or samples, so that those of small slices count more; "
        "or forward computes something else"
    )
