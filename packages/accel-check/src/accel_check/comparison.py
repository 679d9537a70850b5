"""Finds what differs between a run of several processes and one process that read the same samples.

Within a step, samples are compared first, then the outputs of forward, gradients, norms, learning rates, parameters and
buffers, because a difference in one causes differences in the next. The comparison ends at the first step with a
difference.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Final

import torch
from torch import Tensor

from accel_check import causes
from accel_check.records import Records, StepRecord, TensorPart, values_of

__all__ = ("Limits", "ParityFinding", "compare_runs", "remarks")


@dataclass(frozen=True)
class Limits:
    """The largest differences that count as rounding, as fractions of the norm of a tensor.

    Args:
        gradient: of gradients, norms, outputs and buffers.
        update: of what a parameter has moved since the first step.
    """

    gradient: float
    update: float

    @classmethod
    def of(cls, dtypes: set[torch.dtype], low_precision: bool) -> Limits:
        """The limits for the narrowest numbers of a run."""
        if low_precision or dtypes & {torch.float16, torch.bfloat16}:
            return cls(6e-2, 0.4)
        if torch.float32 in dtypes:
            return cls(2e-4, 5e-2)
        return cls(1e-7, 1e-5)


_SMALL_NORM_SHARE: Final = 1e-2
"""The smallest norm of a gradient that is compared by its own size, as a fraction of the largest in the model."""


@dataclass(frozen=True)
class ParityFinding:
    """One difference.

    Args:
        step: optimizer step, 0 before the first.
        what: "samples", "output", "loss", "gradient", "norm", "learning rate", "parameter", "buffer" or "dropout".
        cause: likely cause, as a sentence without a full stop.
        module: the first module that differs.
        parameter: the first parameter or buffer that differs.
        ratio: value found divided by value expected, if one is a multiple of the other.
        detail: both values, or the size of the difference.
        others: further names that differ in the same way.
        ranks: the ranks that differ; empty for all.
    """

    step: int
    what: str
    cause: str
    module: str = ""
    parameter: str = ""
    ratio: float | None = None
    detail: str = ""
    others: tuple[str, ...] = ()
    ranks: tuple[int, ...] = ()

    def __str__(self) -> str:
        when = f"in step {self.step}" if self.step else "before the first step"
        name = self.parameter or self.module
        ratio = "" if self.ratio is None else f", ratio {self.ratio:.4g}"
        detail = f" ({self.detail})" if self.detail else ""
        more = f"; so do {len(self.others)} others" if self.others else ""
        where = f" on {'ranks' if len(self.ranks) > 1 else 'rank'} {causes.listed(self.ranks)}" if self.ranks else ""
        return f"{when}: {self.what}{f' of {name}' if name else ''} differs{where}{ratio}{detail}{more}: {self.cause}"


def compare_runs(several: Records, one: Records, limits: Limits) -> list[ParityFinding]:
    """The differences of the first step that has any, causes before consequences; empty if all steps are equal.

    Args:
        several: the records of all processes.
        one: the records of one process.
        limits: what counts as rounding.
    """
    comparison = _Comparison(several, one, limits)
    start = list(comparison.start())
    if start:
        return start
    for call in range(1, min(several.calls, one.calls) + 1):
        findings = comparison.step(call)
        if findings:
            return findings
    return list(comparison.dropout())


class _Comparison:
    """The records of one process and of several, with the start, the ranks and the limits that all checks share."""

    def __init__(self, several: Records, one: Records, limits: Limits) -> None:
        self._several, self._one, self._limits = several, one, limits
        self._ranks = several.ranks
        self._own_start = one.start()[0]
        self._starts = several.start()
        self._start: dict[str, Tensor] = {}
        for name in self._own_start.parameters:
            values = values_of([start.parameters.get(name) for start in self._starts])
            value = next((value for value in values if value is not None), None)
            if value is not None:
                self._start[name] = value
        self._noise: dict[str, Tensor] = {}
        first = one.step(0, 1) if one.calls else StepRecord()
        self._order = {name: number for number, name in enumerate(first.outputs)}

    # ------------------------------------------------------------------ the state before the first step

    def start(self) -> Iterator[ParityFinding]:
        """Compare the initial parameters between the ranks, and their order with that in one process."""
        starts = self._starts
        wrong, ranks = [], set()
        for name in starts[0].parameters:
            values = [value for value in values_of([one.parameters.get(name) for one in starts]) if value is not None]
            if all(value.shape == values[0].shape for value in values):
                apart = [rank for rank, value in enumerate(values) if not _same(value, values[0])]
                if apart:
                    wrong.append(name)
                    ranks |= set(apart)
        if wrong:
            cause = "processes begin with different initial weights: broadcast those of one process to all"
            yield self._finding(0, "parameter", cause, wrong[0], others=wrong[1:], ranks=tuple(sorted(ranks)))
            return
        # A script that is not seeded begins with other values, which one process takes over.
        own = {name: piece.local for name, piece in self._own_start.parameters.items()}
        moved = [
            name
            for name, value in self._start.items()
            if own[name].shape == value.shape and not _same(value, own[name]) and causes.is_permuted(value, own[name])
        ]
        if moved:
            cause = "its elements are in another order: a process has the shard of another one"
            yield self._finding(0, "parameter", cause, moved[0], others=moved[1:])

    # ------------------------------------------------------------------ one step

    def step(self, call: int) -> list[ParityFinding]:
        """Compare the results of one call of `step`."""
        expected, records = self._one.step(0, call), self._several.steps(call)
        number = expected.number
        samples = list(self._samples(number, records))
        frozen = list(self._parameters(number, expected, records, frozen=True))
        outputs = list(self._outputs(number, expected, records))
        buffers = list(self._buffers(number, expected, records))
        losses = list(self._losses(number, expected, records))
        before = self._gradients(number, expected, records, "before_clip")
        # An engine has stepped before a script reads its norm.
        norms = [] if self._clips_in_step else list(self._norms(number, expected, records))
        gradients = before or self._gradients(number, expected, records, "gradients")
        alike = not self._apart_between_ranks(records, "gradients")
        if before and alike and self._apart_between_ranks(records, "before_clip"):
            cause = "each process clips its own gradient, and gradients are averaged only then"
            gradients = [replace(before[0], cause=cause, ranks=())]
        if gradients and not before and not outputs:
            gradients = [self._with_scaling(gradients[0], expected, records)]
        rates = list(self._rates(number, expected, records))
        parameters = [] if gradients or norms else list(self._parameters(number, expected, records, frozen=False))
        decisive = [*samples, *frozen, *buffers, *gradients, *norms, *rates, *parameters]
        if not decisive:
            return []
        if outputs and alike and not frozen and (wrong := self._apart_between_ranks(records, "parameters")):
            # Equal gradients keep replicas apart that something else has moved apart.
            cause = "processes have different weights although their gradients are equal: one changed its own"
            frozen = [self._finding(number, "parameter", cause, wrong[0], others=wrong[1:])]
        forward = sorted([*buffers, *outputs], key=lambda one: self._order.get(one.module, len(self._order)))
        if gradients and (outputs or losses) and not buffers:
            gradients = [replace(gradients[0], cause=self._cause_with_forward(gradients[0], outputs, losses))]
        # A norm of gradients that differ tells nothing more.
        return [*samples, *frozen, *forward, *losses, *gradients, *([] if before else norms), *rates, *parameters]

    @property
    def _clips_in_step(self) -> bool:
        """Whether an engine clips gradients and steps within backward."""
        return bool(self._ranks[0].more.get("clips_in_step"))

    def _apart_between_ranks(self, records: Sequence[StepRecord], kind: str) -> list[str]:
        """Names of tensors of which processes have different values."""
        parts: list[dict[str, TensorPart]] = [getattr(record, kind) for record in records]
        wrong = []
        for name in parts[0]:
            values = [value for value in values_of([part.get(name) for part in parts]) if value is not None]
            size = self._limits.gradient * float(values[0].double().norm())
            if any(_apart(value, values[0]) > size for value in values):
                wrong.append(name)
        return wrong

    @staticmethod
    def _cause_with_forward(
        gradient: ParityFinding, outputs: Sequence[ParityFinding], losses: Sequence[ParityFinding]
    ) -> str:
        explained = any(text in gradient.cause for text in ("averaged", "added", "no_sync", "zero"))
        return gradient.cause if explained else "it follows from the difference above"

    def _samples(self, step: int, records: Sequence[StepRecord]) -> Iterator[ParityFinding]:
        first: dict[tuple[int, ...], tuple[int, list[list[str]]]] = {}
        for facts, record in zip(self._ranks, records, strict=True):
            rank, theirs = first.setdefault(facts.alike, (facts.rank, record.samples))
            if theirs != record.samples:
                cause = "processes that must read the same samples (tp, cp, sp) read different ones"
                yield ParityFinding(step, "samples", cause, ranks=(rank, facts.rank))
                return
        if self._repeats:
            return
        seen: dict[str, int] = {}
        for rank, batches in first.values():
            ids = [sample for batch in batches for sample in batch]
            if len(set(ids)) < len(ids):
                return
            shared = len({*seen} & {*ids})
            # The padding of a sampler repeats less than one sample of each process.
            if shared > len(first) - 1 or (shared and shared == len(ids)):
                cause = "processes train on the same samples, so they learn no more than one process"
                other = seen[next(one for one in ids if one in seen)]
                yield ParityFinding(
                    step, "samples", cause, detail=f"{shared} of {len(ids)} samples", ranks=(other, rank)
                )
                return
            seen |= dict.fromkeys(ids, rank)

    @property
    def _repeats(self) -> bool:
        """Whether the data set itself has equal samples, unless all processes read the same ones in every step."""
        read = []
        for facts in self._ranks:
            records = [self._several.step(facts.rank, call) for call in range(1, self._several.calls + 1)]
            read.append(
                [(feed, one) for record in records for feed, one in zip(record.feeds, record.samples, strict=True)]
            )
        if all(one == read[0] for one in read):
            return False
        for one in read:
            counts = Counter((feed, sample) for feed, batch in one for sample in batch)
            if any(count > len(one) // max(len({f for f, _ in one}), 1) for count in counts.values()):
                return True
            if any(len(set(batch)) < len(batch) for _, batch in one):
                return True
        return False

    def _outputs(self, step: int, expected: StepRecord, records: Sequence[StepRecord]) -> Iterator[ParityFinding]:
        """Modules whose outputs differ in their sums over all processes."""
        wrong = []
        for name, sums in expected.outputs.items():
            parts = [record.outputs[name] for record in records if name in record.outputs]
            elements = sum(part.elements for part in parts)
            if len(parts) < len(records) or any(part.calls != sums.calls for part in parts):
                continue
            if not sums.elements or not elements or elements % sums.elements:
                continue
            copies = elements // sums.elements
            total, squares = sum(part.total for part in parts) / copies, sum(part.squares for part in parts) / copies
            size = max((sums.elements * sums.squares) ** 0.5, 1e-30)
            limit = self._limits.gradient
            if not (
                abs(total - sums.total) <= limit * size
                and abs(squares - sums.squares) <= limit * max(sums.squares, 1e-30)
            ):
                wrong.append((name, (squares / sums.squares) ** 0.5 if sums.squares else None))
        if wrong:
            # A module that contains others ends after them.
            name, ratio = wrong[0]
            others = tuple(other for other, _ in wrong[1:])
            detail = "" if ratio is None else f"its size is {ratio:.4g} of that in one process"
            bias, cause = self._bias_added_often(name, expected, records)
            if bias:
                yield self._finding(step, "output", cause, bias, others=others)
            else:
                yield ParityFinding(step, "output", cause, name, others=others, detail=detail)

    def _bias_added_often(self, name: str, expected: StepRecord, records: Sequence[StepRecord]) -> tuple[str, str]:
        """The bias of whose multiple the outputs of a module differ, and the cause."""
        unknown = "", "forward computes something else in this module, or in code that computes its inputs"
        gradients = expected.outputs[name]
        features = [record.outputs[name].features for record in records]
        if gradients.features is None or any(one is None for one in features):
            return unknown
        parts = [one for one in features if one is not None]
        copies = sum(record.outputs[name].elements for record in records) / gradients.elements
        apart = torch.stack(parts).sum(0) / copies - gradients.features
        rows = gradients.elements / max(len(gradients.features), 1)
        for parameter, value in self._start.items():
            if parameter.endswith("bias"):
                bias = value.double()
                # The difference passes through the layer that was seen first.
                for matrix in (None, *self._matrices(name)):
                    moved = bias if matrix is None else (matrix @ bias if matrix.shape[-1] == len(bias) else None)
                    if moved is None or moved.shape != apart.shape:
                        continue
                    like = causes.likeness(apart, moved * rows)
                    if like.is_multiple and like.ratio is not None and abs(like.ratio - round(like.ratio)) < 0.01:
                        times = round(like.ratio) + 1
                        often = "twice" if times == 2 else f"{times} times"
                        cause = (
                            f"{parameter} is added {often}: each process adds the bias before the sum over processes"
                        )
                        return parameter, cause
        return unknown

    def _matrices(self, module: str) -> Iterator[Tensor]:
        weight = self._start.get(f"{module}.weight" if module else "weight")
        if weight is not None and weight.ndim == 2:
            yield weight.double()

    def _losses(self, step: int, expected: StepRecord, records: Sequence[StepRecord]) -> Iterator[ParityFinding]:
        readers = [facts.rank for facts in self._several.representatives()]
        for index, value in enumerate(expected.losses):
            losses = [records[rank].losses[index] for rank in readers if index < len(records[rank].losses)]
            if len(losses) < len(readers):
                yield ParityFinding(step, "loss", "processes run backward less often than one process")
                return
            mean = sum(losses) / len(losses)
            allowed = self._limits.gradient * max(abs(value), 1e-3, *(abs(one) for one in losses))
            if abs(mean - value) > allowed or mean != mean:
                ratio = mean / value if value else None
                detail = f"mean over the processes {mean:.6g}, one process {value:.6g}"
                yield ParityFinding(step, "loss", causes.cause_of_loss(ratio, len(readers)), ratio=ratio, detail=detail)
                return

    def _gradients(
        self, step: int, expected: StepRecord, records: Sequence[StepRecord], kind: str
    ) -> list[ParityFinding]:
        theirs: dict[str, TensorPart] = getattr(expected, kind)
        parts: list[dict[str, TensorPart]] = [getattr(record, kind) for record in records]
        if kind == "before_clip" and not all(parts):
            return []
        if kind == "gradients" and self._clips_in_step:
            # Those of an engine were read before it clipped them.
            theirs = expected.before_clip or theirs
        largest = max((float(piece.local.double().norm()) for piece in theirs.values()), default=0.0)
        wrong: dict[str, list[Tensor | None]] = {}
        for name, piece in theirs.items():
            value = piece.local
            values = values_of([part.get(name) for part in parts])
            if all(one is None for one in values) and not value.any():
                continue
            allowed = self._limits.gradient * max(float(value.double().norm()), _SMALL_NORM_SHARE * largest, 1e-30)
            if kind == "gradients":
                self._note_noise(name, value, allowed)
            if any(one is None or _apart(one, value) > allowed for one in values):
                wrong[name] = values
        if not wrong:
            return []
        readers = len(self._several.representatives())
        alike = [name for name in wrong if self._is_scaled_alike(wrong[name], theirs[name].local, wrong, theirs)]
        name = self._first(list(wrong), len(alike) == len(theirs))
        value = theirs[name].local
        allowed = self._limits.gradient * max(float(value.double().norm()), _SMALL_NORM_SHARE * largest)
        facts = causes.Facts(
            tuple(facts.alike for facts in self._ranks), len(self._ranks), readers, len(expected.losses)
        )
        if any(record.unsynchronised and record.unsynchronised[-1] for record in records):
            cause = "the last micro-batch of the step runs inside no_sync(), so its gradient is not averaged"
        else:
            cause = causes.cause_of_gradient(wrong[name], value, allowed, facts)
        one = next((one for one in wrong[name] if one is not None and _apart(one, value) > allowed), None)
        like = causes.likeness(one, value) if one is not None else causes.Likeness(0.0, 1.0)
        finding = self._finding(step, "gradient", cause, name, like, [other for other in wrong if other != name])
        ranks = [rank for rank, one in enumerate(wrong[name]) if one is None or _apart(one, value) > allowed]
        if 0 < len(ranks) < len(self._ranks) == len(wrong[name]):
            finding = replace(finding, ranks=tuple(ranks))
        return [finding]

    def _note_noise(self, name: str, value: Tensor, allowed: float) -> None:
        """Note elements whose gradient is rounding: an optimizer such as Adam may move them in any direction."""
        limit = 8 * allowed / max(value.numel(), 1) ** 0.5
        noise = value.double().abs() <= limit
        self._noise[name] = noise | self._noise.get(name, torch.zeros_like(noise))

    @staticmethod
    def _is_scaled_alike(
        values: Sequence[Tensor | None],
        value: Tensor,
        wrong: dict[str, list[Tensor | None]],
        theirs: dict[str, TensorPart],
    ) -> bool:
        first = next(iter(wrong))
        one, other = values[0], wrong[first][0]
        if one is None or other is None:
            return False
        like, base = causes.likeness(one, value), causes.likeness(other, theirs[first].local)
        return like.is_multiple and base.is_multiple and causes.is_near(like.ratio, base.ratio or 0.0)

    def _first(self, wrong: list[str], all_alike: bool) -> str:
        """The parameter to name: the first in forward order if all are scaled alike, otherwise in backward order."""
        ordered = sorted(wrong, key=self._place)
        return ordered[0] if all_alike else ordered[-1]

    def _place(self, name: str) -> int:
        return self._order.get(name.rpartition(".")[0], len(self._order))

    def _with_scaling(
        self, finding: ParityFinding, expected: StepRecord, records: Sequence[StepRecord]
    ) -> ParityFinding:
        """Name clipping by the norm of one shard: gradients were right after backward, and each rank scaled its own."""
        factors = []
        for record in records:
            before, after = record.after_backward, record.gradients
            names = [name for name in after if name in before and before[name].local.numel()]
            if not names or len(names) < len([name for name in after if after[name].local.numel()]):
                return finding
            one = torch.cat([after[name].local.double().flatten() for name in names])
            other = torch.cat([before[name].local.double().flatten() for name in names])
            like = causes.likeness(one, other)
            if not like.is_multiple or like.ratio is None:
                return finding
            factors.append(like.ratio)
        if len({round(factor, 6) for factor in factors}) < 2:
            return finding
        if self._gradients(finding.step, expected, records, "after_backward"):
            return finding
        detail = ", ".join(f"{factor:.4g}" for factor in factors)
        cause = "each process clips by the norm of its own shard: add the squares over the processes"
        return replace(finding, what="norm", cause=cause, ratio=None, detail=f"gradients are scaled by {detail}")

    def _norms(self, step: int, expected: StepRecord, records: Sequence[StepRecord]) -> Iterator[ParityFinding]:
        for index, value in enumerate(expected.norms):
            norms = [record.norms[index] for record in records if index < len(record.norms)]
            allowed = self._limits.gradient * max(abs(value), 1e-30)
            if norms and not all(abs(norm - value) <= allowed for norm in norms):
                ratio = next(norm for norm in norms if not abs(norm - value) <= allowed) / value if value else None
                detail = f"{', '.join(f'{norm:.6g}' for norm in norms)} by process, one process {value:.6g}"
                yield ParityFinding(step, "norm", causes.cause_of_norm(norms, value), ratio=ratio, detail=detail)
                return

    def _rates(self, step: int, expected: StepRecord, records: Sequence[StepRecord]) -> Iterator[ParityFinding]:
        for facts, record in zip(self._ranks, records, strict=True):
            for one, other in zip(record.rates, expected.rates, strict=False):
                if abs(one - other) > 1e-6 * max(abs(other), 1e-12):
                    detail = f"{one:.6g} on rank {facts.rank}, one process {other:.6g}"
                    cause = (
                        "the learning rate depends on the number of processes or on the rank, or its schedule steps "
                        "more or less often"
                    )
                    ratio = one / other if other else None
                    yield ParityFinding(step, "learning rate", cause, ratio=ratio, detail=detail)
                    return

    def _parameters(
        self, step: int, expected: StepRecord, records: Sequence[StepRecord], frozen: bool
    ) -> Iterator[ParityFinding]:
        """Compare the parameters with a gradient after the step, or those without."""
        wrong: dict[str, tuple[list[Tensor | None], Tensor]] = {}
        for name, piece in expected.parameters.items():
            value, start = piece.local, self._start.get(name)
            values = values_of([record.parameters.get(name) for record in records])
            if start is None or start.shape != value.shape or frozen is (name in expected.gradients):
                continue
            kept = ~self._noise.get(name, torch.zeros(value.shape, dtype=torch.bool))
            update = (value.double() - start.double())[kept].norm()
            rounding = (
                16 * torch.finfo(value.dtype).eps * float(value.double().norm()) if value.is_floating_point() else 0
            )
            allowed = self._limits.update * float(update) + rounding
            if any(one is not None and _apart(one, value, kept) > allowed for one in values):
                wrong[name] = values, kept
        if wrong:
            name = min(wrong, key=self._place)
            values, kept = wrong[name]
            before = self._start[name]
            cause, like = causes.cause_of_parameter(
                values, before, expected.parameters[name].local, self._limits.update
            )
            yield self._finding(step, "parameter", cause, name, like, [other for other in wrong if other != name])

    def _buffers(self, step: int, expected: StepRecord, records: Sequence[StepRecord]) -> Iterator[ParityFinding]:
        wrong = []
        for name, piece in expected.buffers.items():
            values = values_of([record.buffers.get(name) for record in records])
            size = float(piece.local.double().norm())
            allowed = self._limits.gradient * size if piece.local.is_floating_point() else 0.0
            if any(one is None or _apart(one, piece.local) > allowed for one in values):
                wrong.append(name)
        if wrong:
            name = min(wrong, key=self._place)
            others = [other for other in wrong if other != name]
            yield self._finding(step, "buffer", causes.cause_of_buffer(name), name, others=others)

    # ------------------------------------------------------------------ dropout

    def dropout(self) -> Iterator[ParityFinding]:
        """Compare the generators at the first active dropout of each step."""
        if self._ranks[0].shards_known:
            yield from dropout_seeds(self._several)

    def _finding(
        self,
        step: int,
        what: str,
        cause: str,
        name: str,
        like: causes.Likeness | None = None,
        others: Sequence[str] = (),
        ranks: tuple[int, ...] = (),
    ) -> ParityFinding:
        ratio = like.ratio if like is not None and like.is_multiple else None
        detail = like.text if like is not None and ratio is None else ""
        return ParityFinding(step, what, cause, name.rpartition(".")[0], name, ratio, detail, tuple(others), ranks)


def dropout_seeds(several: Records) -> Iterator[ParityFinding]:
    """Equal generators of ranks with different samples, or different ones of ranks that share samples."""
    advice = (
        "seed by the data shard (equal on the ranks of one shard, another on each shard), after the model is "
        "constructed"
    )
    for call in range(1, several.calls + 1):
        seen: dict[tuple[int, ...], tuple[int, str]] = {}
        for facts, record in zip(several.ranks, several.steps(call), strict=True):
            if record.dropout is None:
                continue
            module, state = record.dropout
            rank, theirs = seen.setdefault(facts.alike, (facts.rank, state))
            if theirs != state:
                cause = f"processes that share samples draw different masks of dropout: {advice}"
                yield ParityFinding(record.number, "dropout", cause, module, ranks=(rank, facts.rank))
                return
            same = next(
                (one for group, (one, digest) in seen.items() if group != facts.alike and digest == state), None
            )
            if same is not None:
                cause = f"processes with different samples draw the same masks of dropout: {advice}"
                yield ParityFinding(record.number, "dropout", cause, module, ranks=(same, facts.rank))
                return


def remarks(several: Records, one: Records) -> list[str]:
    """Further observations, which apply to one process as well or cannot be decided."""
    observations = [remark for facts in several.ranks for remark in facts.remarks]
    records = [one.step(0, call) for call in range(1, one.calls + 1)]
    used = {name for record in records for name, piece in record.gradients.items() if piece.local.any()}
    trained = {name for record in records for name in record.gradients}
    missing = sorted(trained - used)
    if missing:
        more = f" and {len(missing) - 3} more" if len(missing) > 3 else ""
        observations.append(f"parameters without a gradient, or with a zero gradient: {', '.join(missing[:3])}{more}")
    for record in records:
        count = len(record.losses)
        if count > 1 and all(causes.is_near(divisor, count * count) for divisor in record.divisors):
            observations.append(
                f"the loss is divided by {count * count} with {count} micro-batches for each step: it is divided twice"
            )
    if not several.ranks[0].shards_known:
        observations += [f"dropout: {seed.cause}" for seed in dropout_seeds(several)]
    losses = [record.losses for record in records if record.losses]
    if len(losses) > 1 and all(one == losses[0] for one in losses):
        observations.append(f"the loss does not change: it is {losses[0]} in every step")
    return list(dict.fromkeys(observations))


def limits_of(several: Records, one: Records) -> Limits:
    """The limits for two runs, by the numbers of their gradients."""
    dtypes = {
        piece.local.dtype for record in [*several.steps(1), one.step(0, 1)] for piece in record.gradients.values()
    }
    return Limits.of(dtypes, any(facts.low_precision for facts in several.ranks))


def _same(one: Tensor, other: Tensor) -> bool:
    return (
        _apart(one, other) <= 8 * torch.finfo(one.dtype).eps * float(one.double().norm())
        if one.is_floating_point()
        else torch.equal(one, other)
    )


def _apart(one: Tensor, other: Tensor, kept: Tensor | None = None) -> float:
    """The norm of the difference of two tensors; infinite if either is not finite or their shapes differ."""
    if one.shape != other.shape:
        return float("inf")
    apart = one.double() - other.double()
    # Infinities of masks are equal on both sides.
    apart = torch.where(one == other, 0.0, apart)
    distance = float((apart if kept is None else apart[kept]).norm())
    return distance if distance == distance else float("inf")
