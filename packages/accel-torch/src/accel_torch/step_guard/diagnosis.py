"""The likely cause of a bad step: what each process knows about it, and what follows from that of all.

Called only after a bad verdict, on every process.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import torch

from accel_ops.rng import restore, snapshot
from accel_ops.tree import leaves_with_paths
from accel_torch.replicas import digests_by_place, local_part

if TYPE_CHECKING:
    from torch import Tensor

    from accel_plugins.strategy import Strategy
    from accel_torch.step_guard.events import LikelyCause
    from accel_torch.step_guard.window import Window

__all__ = ("Evidence", "collect", "conclude")

_ALONE: Final = 1000.0
"""A single element that is this many times larger than all others is a flipped bit rather than a result."""

_APART: Final = 1e-3
"""Relative difference of norms that should be equal."""

_MOST_READ: Final = 1024
"""Largest number of samples of a process that are read again."""


class Evidence(NamedTuple):
    """What one process knows about a bad step.

    Args:
        losses: the losses of its micro-batches.
        norm: its total gradient norm; None if the backend does not compute it.
        digests: digests of its weights by their place: processes with an equal place are replicas.
        weights, gradients: the two largest absolute values of their elements; infinite for NaN.
        samples: ids of the samples.
        bad_samples: ids of those that are not finite; None if they could not be read again.
        batches: where they are in the loaders.
        module: the first module whose output was not finite, if it was searched.
    """

    losses: list[float]
    norm: float | None
    digests: dict[bytes, bytes]
    weights: tuple[float, float]
    gradients: tuple[float, float]
    samples: list[str]
    bad_samples: list[str] | None
    batches: str
    module: str | None = None


def collect(
    strategy: Strategy, parameters: Sequence[Tensor], window: Window, norm: Tensor | None, module: str | None
) -> Evidence:
    """What this process knows.

    Args:
        strategy: the strategy, for the shards that this process has.
        parameters: those of the optimizer.
        window: the losses and batches of the step.
        norm: the norm that this process has computed.
        module: see `Evidence`.
    """
    samples, bad_samples = _samples(window)
    return Evidence(
        losses=[float(loss) for loss in window.losses],
        norm=None if norm is None else float(norm),
        digests=digests_by_place(strategy, parameters),
        weights=_two_largest(parameters),
        gradients=_two_largest(parameter.grad for parameter in parameters if parameter.grad is not None),
        samples=samples,
        bad_samples=bad_samples,
        batches=window.positions(),
        module=module,
    )


def conclude(
    everyones: Sequence[Evidence], is_bad: Callable[[float], bool], changed: bool, replicated: bool
) -> tuple[LikelyCause, list[int]]:
    """The likely cause, and the processes on which the step was bad, from what all processes know.

    Args:
        everyones: the evidence by rank.
        is_bad: whether a loss is not finite, or above the limit of a spike.
        changed: whether the run was about to leave its course: the loss or the norm rose before, or the learning rate
            is far above its median.
        replicated: whether all processes should have the same gradients and weights.
    """

    def ranks_where(holds: Callable[[Evidence], object]) -> list[int]:
        return [rank for rank, one in enumerate(everyones) if holds(one)]

    broken = _minority(everyones) if replicated else []
    broken = broken or ranks_where(lambda one: _stands_out(one.weights))
    broken = broken or (_apart([one.norm for one in everyones]) if replicated else [])
    bad = ranks_where(lambda one: any(map(is_bad, one.losses)))
    if broken or (not bad and (broken := ranks_where(lambda one: _stands_out(one.gradients)))):
        return "hardware", broken
    if samples := ranks_where(lambda one: one.bad_samples):
        return "data", samples
    if not bad or any(not math.isfinite(second) for _, second in (one.weights for one in everyones)):
        return "numerics", bad or ranks_where(lambda one: True)
    some_are_good = any(not is_bad(loss) for one in everyones for loss in one.losses)
    unread = any(everyones[rank].bad_samples is None for rank in bad)
    alone = len(everyones) == 1 and (unread or all(map(math.isfinite, everyones[0].losses)))
    return ("data" if not changed and (some_are_good or alone) else "numerics"), bad


def _minority(everyones: Sequence[Evidence]) -> list[int]:
    """The processes whose weights differ from those of most of their replicas."""
    minority: set[int] = set()
    for place in {place for one in everyones for place in one.digests}:
        digests = {rank: one.digests[place] for rank, one in enumerate(everyones) if place in one.digests}
        ((most, count),) = Counter(digests.values()).most_common(1)
        other = {rank for rank, theirs in digests.items() if theirs != most}
        suspects = {rank for rank in digests if _stands_out(everyones[rank].weights)}
        # Of two values that are equally frequent, the suspect's is the wrong one.
        minority |= suspects if other and suspects and count * 2 <= len(digests) else other
    return sorted(minority)


def _apart(norms: Sequence[float | None]) -> list[int]:
    """The processes whose norm differs from the smallest one."""
    finite = [norm for norm in norms if norm is not None and math.isfinite(norm)]
    if not finite or len(norms) < 2:
        return []
    least = min(finite)
    return [rank for rank, norm in enumerate(norms) if norm is not None and not abs(norm - least) <= _APART * least]


def _stands_out(largest: tuple[float, float]) -> bool:
    """Whether a single element is far larger than all others."""
    first, second = largest
    return second > 0 and first > _ALONE * second


@torch.no_grad()
def _two_largest(tensors: Iterable[Tensor]) -> tuple[float, float]:
    """The two largest absolute values among the elements of this process; NaN counts as infinite."""
    largest = [0.0, 0.0]
    for tensor in tensors:
        local = local_part(tensor)
        values = (local.coalesce().values() if local.is_sparse else local).flatten().double().abs()
        largest += values.nan_to_num(nan=math.inf, posinf=math.inf).topk(min(2, values.numel())).values.tolist()
    first, second, *_ = sorted(largest, reverse=True)
    return first, second


def _samples(window: Window) -> tuple[list[str], list[str] | None]:
    """Ids of the samples of a window, and of those that are not finite, if they can be read again."""
    ids: list[str] = []
    bad: list[str] = []
    readable = bool(window.batches)
    generators = snapshot()
    for batch in dict.fromkeys(window.batches):
        indices = batch.indices
        dataset = _dataset_of(batch.loader())
        readable = readable and bool(indices) and dataset is not None and len(ids) + len(indices) <= _MOST_READ
        ids += map(str, indices)
        if readable and dataset is not None:
            try:
                bad += [str(index) for index in indices if not _is_finite(dataset[index])]
            except Exception:
                # The code of the script; the step does not fail because a sample cannot be read again.
                readable = False
    restore(generators)
    return ids, bad if readable else None


def _dataset_of(loader: Any) -> Any:
    """The map-style data set of the script below a loader, or None."""
    dataset: Any = getattr(loader, "dataset", None)
    while type(dataset).__module__.startswith("accel_data.") and hasattr(dataset, "dataset"):
        dataset = dataset.dataset
    return dataset if hasattr(dataset, "__getitem__") else None


def _is_finite(sample: Any) -> bool:
    for _, leaf in leaves_with_paths(sample):
        if isinstance(leaf, float) and not math.isfinite(leaf):
            return False
        values = torch.as_tensor(leaf) if hasattr(leaf, "__array__") else leaf
        if isinstance(values, torch.Tensor) and not bool(torch.isfinite(values).all()):
            return False
    return True
