"""Classifies differences between tensors, and names the likely cause of each."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final, NamedTuple

import torch
from torch import Tensor

__all__ = (
    "Facts",
    "Likeness",
    "cause_of_buffer",
    "cause_of_gradient",
    "cause_of_loss",
    "cause_of_norm",
    "cause_of_parameter",
    "is_near",
    "is_permuted",
    "likeness",
    "listed",
)

_MIN_PARALLEL_COSINE: Final = 0.999
"""Cosine above which two tensors are taken to have the same direction."""

_NEAR_TOLERANCE: Final = 0.02
"""Relative difference below which ratios count as equal."""


class Facts(NamedTuple):
    """What causes depend on.

    Args:
        alike: for each rank, the ranks that read the same samples.
        world: the number of processes.
        shards: the number of shards of the data.
        micro_batches: the backward passes of a step.
    """

    alike: tuple[tuple[int, ...], ...]
    world: int
    shards: int
    micro_batches: int


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
        return self.ratio is not None and abs(self.cosine) >= _MIN_PARALLEL_COSINE

    @property
    def text(self) -> str:
        """The ratio as readable text."""
        if self.ratio is None:
            return ""
        return (
            f"ratio {self.ratio:.4g}" if self.is_multiple or abs(self.ratio) < _NEAR_TOLERANCE else "not proportional"
        )


def likeness(actual: Tensor, expected: Tensor) -> Likeness:
    """Compare a tensor with the expected one."""
    one, other = actual.double().flatten(), expected.double().flatten()
    if one.numel() != other.numel():
        return Likeness(None, 0.0)
    product, square, own = float(one @ other), float(other @ other), float(one @ one)
    if not square:
        return Likeness(None if not own else math.inf, 0.0)
    return Likeness(product / square, product / math.sqrt(square * own) if own else 1.0)


def is_near(value: float | None, expected: float) -> bool:
    """Whether a ratio equals the expected one."""
    return value is not None and abs(value - expected) <= _NEAR_TOLERANCE * abs(expected)


def cause_of_gradient(values: Sequence[Tensor | None], expected: Tensor, allowed: float, facts: Facts) -> str:
    """The likely cause of gradients of a parameter that differ from that of one process.

    Args:
        values: values by rank, or those that the parts of all ranks make; None for a process without one.
        expected: the gradient of one process.
        allowed: the largest norm of a difference that counts as rounding.
        facts: the processes.
    """
    present = [(rank, one.double()) for rank, one in enumerate(values) if one is not None]
    if not present:
        return "no process has a gradient: the parameter was not wrapped, or forward does not use it"
    if len({tuple(one.shape) for _, one in present} | {tuple(expected.shape)}) > 1:
        return "it has another shape: a shard is used as the full tensor"
    if not all(bool(one.isfinite().all()) for _, one in present):
        return "it is not finite"
    first = present[0][1]
    if any(_apart(one, first) > allowed for _, one in present):
        return _cause_between_ranks(present, expected.double(), allowed, facts)
    like = likeness(first, expected)
    if like.ratio is not None and abs(like.ratio) < _NEAR_TOLERANCE:
        return "the gradient is zero: forward does not use the parameter, or its gradient is cleared before the step"
    return _cause_of_ratio(like, facts)


def _cause_between_ranks(present: Sequence[tuple[int, Tensor]], expected: Tensor, allowed: float, facts: Facts) -> str:
    groups: dict[tuple[int, ...], list[Tensor]] = {}
    for rank, one in present:
        groups.setdefault(facts.alike[rank] if rank < len(facts.alike) else (), []).append(one)
    within = any(_apart(one, group[0]) > allowed for group in groups.values() for one in group)
    over = "the processes that share samples (tp, cp, sp)" if within else "the processes of data parallelism"
    tensors = [one for _, one in present]
    total = torch.stack(tensors).sum(0)
    slack = allowed * math.sqrt(len(tensors))
    if _apart(total / len(tensors), expected) <= slack:
        return f"it is not averaged over {over}: each keeps its own gradient"
    if _apart(total, expected) <= slack * len(tensors):
        return f"it is not added over {over}: each keeps its part of the sum"
    sums = [torch.stack(group).sum(0) for group in groups.values()]
    if within and _apart(torch.stack(sums).mean(0), expected) <= slack * len(tensors):
        return f"it is not added over {over}: each keeps its part of the sum"
    right = [rank for rank, one in present if _apart(one, expected) <= allowed]
    if right:
        wrong = sorted({rank for rank, _ in present} - set(right))
        return f"processes {listed(wrong)} change it or reduce it differently; {listed(right)} are right"
    likes = [likeness(one, expected) for one in tensors]
    if all(like.is_multiple for like in likes):
        factors = ", ".join(f"{like.ratio:.4g}" for like in likes)
        return f"each process scales it by another factor ({factors}), as clipping by the norm of one shard does"
    return f"{over} have different gradients: each keeps its own gradient"


def _cause_of_ratio(like: Likeness, facts: Facts) -> str:
    if not like.is_multiple or like.ratio is None:
        return "it is not a multiple of the expected one: other terms are added, some are missing, or they have weights"
    shards, world, steps = facts.shards, facts.world, facts.micro_batches
    shared = world // max(shards, 1)
    for factor, cause in (
        (-1, "its sign is wrong"),
        (shards, "it is added over the processes of data parallelism, and not averaged"),
        (1 / shards, "it is averaged twice over the processes, or the loss is a sum over the samples of each"),
        (steps, "the loss is not divided by the number of micro-batches"),
        (1 / max(steps, 1), "the loss is divided twice by the number of micro-batches, or only one micro-batch counts"),
        (shared, "it is added once for each of the processes that share samples (tp, cp, sp)"),
        (1 / shared, "it is divided by the number of processes that share samples (tp, cp, sp)"),
        (world, "it is added over all processes, and not averaged"),
        (1 / world, "it is averaged over all processes, including those that share samples"),
        (shards * shards, "it is added twice over the processes"),
    ):
        if factor != 1 and is_near(like.ratio, factor):
            return cause
    return "it is scaled by a factor that one process does not have"


def cause_of_loss(ratio: float | None, shards: int) -> str:
    """The likely cause of losses whose mean differs from the loss of one process."""
    if is_near(ratio, 1 / shards) and shards > 1:
        return "the loss is a sum over the samples of a process, and the processes average gradients"
    if is_near(ratio, shards) and shards > 1:
        return "the loss is multiplied by the number of processes"
    return (
        "each process divides by its own number of tokens or samples, so that those of small slices count more; "
        "or forward computes something else"
    )


def cause_of_norm(norms: Sequence[float], expected: float) -> str:
    """The likely cause of different gradient norms from clipping.

    Args:
        norms: norms by rank.
        expected: the norm of one process.
    """
    squares = math.sqrt(sum(norm * norm for norm in norms))
    if len(norms) > 1 and (is_near(squares, expected) or len({round(norm, 6) for norm in norms}) > 1):
        return "each process clips by the norm of its own shard: add the squares over the processes"
    return "the norm is that of other gradients, or shards are counted more than once"


def cause_of_parameter(
    values: Sequence[Tensor | None], before: Tensor, expected: Tensor, allowed: float
) -> tuple[str, Likeness]:
    """The likely cause of a parameter that differs after a step with equal gradients, and the similarity of its update.

    Args:
        values: values by rank; None for a process that does not have the full parameter.
        before, expected: the parameter of one process before and after the step.
        allowed: the largest difference, as a fraction of the norm of the update.
    """
    present = [tensor.double() for tensor in values if tensor is not None]
    base, wanted = before.double(), expected.double()
    if any(tensor.shape != wanted.shape for tensor in present):
        return "it has another shape: a shard is used as the full tensor", Likeness(None, 0.0)
    limit = allowed * float((wanted - base).norm()) + 1e-12
    wrong = [tensor for tensor in present if _apart(tensor, wanted) > limit] or present
    like = likeness(wrong[0] - base, wanted - base)
    if len(wrong) < len(present):
        return "some processes step differently from the others, so that replicas diverge", like
    if not float((wanted - base).norm()):
        whole = likeness(wrong[0], wanted)
        return "it is frozen in one process, and changed outside of the optimizer in several", whole
    if like.ratio is not None and abs(like.ratio) < _NEAR_TOLERANCE:
        return "it is not updated: the optimizer does not have it", like
    if is_near(like.ratio, 2.0) and like.is_multiple:
        return "it is updated twice in a step: two optimizers or two parameter groups have it", like
    if any(_apart(tensor, present[0]) > limit for tensor in present):
        return "processes step with different gradients or optimizer states", like
    if is_permuted(wrong[0], wanted):
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


def listed(ranks: Sequence[int]) -> str:
    """Ranks as text."""
    return ", ".join(map(str, ranks))


def is_permuted(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors have the same elements in another order."""
    first, second = one.double().flatten().sort().values, other.double().flatten().sort().values
    return one.numel() > 2 and bool(torch.allclose(first, second, rtol=1e-6, atol=1e-9))


def _apart(one: Tensor, other: Tensor) -> float:
    distance = float((one - other).norm())
    return distance if distance == distance else math.inf
