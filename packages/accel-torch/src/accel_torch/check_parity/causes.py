"""Classifies differences between tensors, and names the likely cause of each."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final, NamedTuple

import torch
from torch import Tensor

from accel_torch.check_parity.notes import RunFacts

__all__ = (
    "Likeness",
    "cause_of_buffer",
    "cause_of_gradient",
    "cause_of_norm",
    "cause_of_parameter",
    "cause_of_start",
    "is_near",
    "likeness",
)

_PARALLEL: Final = 0.999
"""Cosine above which two tensors are taken to have the same direction."""

_NEAR: Final = 0.02
"""Relative difference below which ratios count as equal."""


class Likeness(NamedTuple):
    """Similarity of a tensor to the expected one.

    Args:
        ratio: the factor that scales the expected tensor closest to the tensor found; None if both are zero.
        cosine: the cosine of the angle between them.
    """

    ratio: float | None
    cosine: float

    @property
    def is_multiple(self) -> bool:
        """Whether one tensor is a multiple of the other."""
        return self.ratio is not None and abs(self.cosine) >= _PARALLEL

    @property
    def text(self) -> str:
        """The ratio as readable text."""
        if self.ratio is None:
            return ""
        return f"ratio {self.ratio:.4g}" if self.is_multiple or abs(self.ratio) < _NEAR else "not proportional"


def likeness(found: Tensor, expected: Tensor) -> Likeness:
    """Compare a tensor with the expected one."""
    one, other = found.double().flatten(), expected.double().flatten()
    if one.numel() != other.numel():
        return Likeness(None, 0.0)
    product, square, own = float(one @ other), float(other @ other), float(one @ one)
    if not square:
        return Likeness(None if not own else math.inf, 0.0)
    return Likeness(product / square, product / math.sqrt(square * own) if own else 1.0)


def is_near(value: float | None, expected: float) -> bool:
    """Whether a ratio equals the expected one."""
    return value is not None and abs(value - expected) <= _NEAR * abs(expected)


def cause_of_gradient(
    found: Sequence[Tensor | None], expected: Tensor, tolerance: float, ranks: Sequence[RunFacts]
) -> str:
    """The likely cause of gradients of a parameter that differ from that of one process.

    Args:
        found: gradients by rank; None for a process without one.
        expected: the gradient of one process.
        tolerance: largest difference that counts as rounding.
        ranks: the processes.
    """
    present = [(facts, gradient) for facts, gradient in zip(ranks, found, strict=True) if gradient is not None]
    if not present:
        return "no process has a gradient: the parameter was not wrapped, or forward does not use it"
    if len({tuple(gradient.shape) for _, gradient in present} | {tuple(expected.shape)}) > 1:
        return "it has another shape: a shard is used as the full tensor"
    tensors = [gradient.double() for _, gradient in present]
    facts = ranks[0]
    if any(_apart(tensor, tensors[0]) > tolerance for tensor in tensors):
        return _cause_between_ranks(present, expected, tolerance)
    like = likeness(tensors[0], expected)
    if like.ratio is not None and abs(like.ratio) < _NEAR and float(tensors[0].abs().max()) <= tolerance:
        return "the gradient is zero: forward does not use the parameter, or its gradient is cleared before the step"
    return _cause_of_ratio(like, facts)


def _cause_between_ranks(present: Sequence[tuple[RunFacts, Tensor]], expected: Tensor, tolerance: float) -> str:
    tensors = [gradient.double() for _, gradient in present]
    by_place: dict[int, list[Tensor]] = {}
    for facts, gradient in present:
        by_place.setdefault(facts.data, []).append(gradient.double())
    within = any(_apart(one, group[0]) > tolerance for group in by_place.values() for one in group)
    over = "the processes that share samples (tp, cp, sp)" if within else "the processes of data parallelism"
    total = torch.stack(tensors).sum(0)
    slack = tolerance * math.sqrt(len(tensors))
    if _apart(total / len(tensors), expected) <= slack:
        return f"it is not averaged over {over}: each keeps its own gradient"
    if _apart(total, expected) <= slack * len(tensors):
        return f"it is not added over {over}: each keeps its part of the sum"
    groups = [torch.stack(group).sum(0) for group in by_place.values()]
    if within and _apart(torch.stack(groups).mean(0), expected) <= slack * len(tensors):
        return f"it is not added over {over}: each keeps its part of the sum"
    right = [facts.rank for facts, gradient in present if _apart(gradient.double(), expected) <= tolerance]
    if right:
        wrong = sorted({facts.rank for facts, _ in present} - set(right))
        return f"processes {_listed(wrong)} change it or reduce it differently; {_listed(right)} are right"
    return f"{over} have different gradients"


def _cause_of_ratio(like: Likeness, facts: RunFacts) -> str:
    if not like.is_multiple or like.ratio is None:
        return "it is not a multiple of the expected one: other terms are added, some are missing, or they have weights"
    data, world, steps = facts.data_count, facts.world, facts.accumulation
    shared = world // max(data, 1)
    for factor, cause in (
        (-1, "its sign is wrong"),
        (data, "it is added over the processes of data parallelism, and not averaged"),
        (1 / data, "it is averaged twice over the processes, or the loss is a sum over the samples of each"),
        (steps, "the loss is not divided by the number of micro-batches"),
        (1 / steps, "the loss is divided twice by the number of micro-batches, or only one micro-batch counts"),
        (shared, "it is added once for each of the processes that share samples (tp, cp, sp)"),
        (1 / shared, "it is divided by the number of processes that share samples (tp, cp, sp)"),
        (world, "it is added over all processes, and not averaged"),
        (1 / world, "it is averaged over all processes, including those that share samples"),
        (data * data, "it is added twice over the processes"),
    ):
        if factor != 1 and is_near(like.ratio, factor):
            return cause
    return "it is scaled by a factor that one process does not have"


def cause_of_norm(found: Sequence[float], expected: float) -> str:
    """The likely cause of different gradient norms from clipping.

    Args:
        found: norms by rank.
        expected: the norm of one process.
    """
    squares = math.sqrt(sum(norm * norm for norm in found))
    if len(found) > 1 and is_near(squares, expected):
        return "each process clips by the norm of its own shard: add the squares over the processes"
    if len({round(norm, 6) for norm in found}) > 1:
        return "processes clip by different norms: they are not reduced over the processes"
    return "the norm is that of other gradients, or shards are counted more than once"


def cause_of_parameter(
    found: Sequence[Tensor | None], before: Tensor, expected: Tensor, tolerance: Tensor
) -> tuple[str, Likeness]:
    """The likely cause of a parameter that differs after a step with equal gradients, and the similarity of its update.

    Args:
        found: values by rank; None for a process that does not have the full parameter.
        before, expected: the parameter of one process before and after the step.
        tolerance: largest difference of each element.
    """
    present = [tensor.double() for tensor in found if tensor is not None]
    base, wanted = before.double(), expected.double()
    if any(tensor.shape != wanted.shape for tensor in present):
        return "it has another shape: a shard is used as the full tensor", Likeness(None, 0.0)
    wrong = [tensor for tensor in present if bool(((tensor - wanted).abs() > tolerance).any())]
    like = likeness(wrong[0] - base, wanted - base)
    if len(wrong) < len(present):
        return "some processes step differently from the others, so that replicas diverge", like
    if like.ratio is not None and abs(like.ratio) < _NEAR:
        return "it is not updated: the optimizer does not have it", like
    if is_near(like.ratio, 2.0) and like.is_multiple:
        return "it is updated twice in a step: two optimizers or two parameter groups have it", like
    if any(_apart(tensor, present[0]) > float(tolerance.max()) for tensor in present):
        return "processes step with different gradients or optimizer states", like
    if _permuted(wrong[0], wanted, float(tolerance.max())):
        return "its elements are in another order: shards are concatenated wrongly", like
    if like.is_multiple:
        return "its update is scaled: learning rate, clipping or an optimizer state differs", like
    return "the optimizer steps with another state, or the parameter is changed after the step", like


def cause_of_buffer(name: str) -> str:
    """The likely cause of a buffer that differs after forward; `name` is its name in the model."""
    if name.rpartition(".")[2] in ("running_mean", "running_var"):
        return (
            "the layer normalises over the samples of each process separately, so that its outputs differ too: use "
            "torch.nn.SyncBatchNorm, or a layer that normalises each sample by itself, such as GroupNorm"
        )
    return "each process computes it from its own samples, it is not sent to the others, or it is reset"


def cause_of_start(found: Sequence[Tensor | None], expected: Tensor) -> str:
    """The likely cause of a parameter or buffer that differs before the first step."""
    present = [tensor.double() for tensor in found if tensor is not None]
    wanted = expected.double()
    if any(tensor.shape != wanted.shape for tensor in present):
        return "it has another shape: a shard is used as the full tensor"
    if any(not torch.equal(tensor, present[0]) for tensor in present):
        return "processes begin with different values: broadcast those of one process to all"
    if _permuted(present[0], wanted, 0.0):
        return "its elements are in another order: a process has the shard of another one"
    return "all processes begin with other values than one process: shards are concatenated or initialised differently"


def _permuted(one: Tensor, other: Tensor, slack: float) -> bool:
    return one.numel() > 1 and bool(
        ((one.flatten().sort().values - other.flatten().sort().values).abs() <= slack).all()
    )


def _apart(one: Tensor, other: Tensor) -> float:
    return float((one.double() - other.double()).abs().max()) if one.numel() else 0.0


def _listed(ranks: Sequence[int]) -> str:
    return ", ".join(map(str, ranks))
