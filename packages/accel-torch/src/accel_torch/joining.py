"""Training loops in which processes run out of batches at different times."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from accel_plugins.layers import strategy_model
from accel_plugins.manifest import Ability

if TYPE_CHECKING:
    from accel_torch.parts import Parts

__all__ = ("join_uneven_inputs",)


@contextmanager
def join_uneven_inputs(parts: Parts, joinables: Sequence[Any], even_batches: bool | None = None) -> Iterator[None]:
    """A block in which a process without batches answers the collectives of those that still have some.

    Args:
        parts: the Accelerator.
        joinables: prepared models.
        even_batches: what prepared loaders fill up inside of the block; as before when None.

    Raises:
        NotOffered: every step of the backend needs all processes.
    """
    if parts.state.use_distributed:
        parts._engine.manifest.demand(Ability.JOIN)
    samplers = [] if even_batches is None else _adjustable(parts)
    before = [sampler.even_batches for sampler in samplers]
    for sampler in samplers:
        sampler.even_batches = even_batches
    try:
        with parts._engine.strategy.join([strategy_model(model) for model in joinables], even_batches):
            yield
    finally:
        for sampler, even in zip(samplers, before, strict=True):
            sampler.even_batches = even


def _adjustable(parts: Parts) -> list[Any]:
    """The samplers of prepared loaders that decide about even batches."""
    samplers = [getattr(loader, "batch_sampler", None) for loader in parts._registry.loaders]
    found = [sampler for sampler in samplers if hasattr(sampler, "even_batches")]
    if len(found) < len(samplers):
        warnings.warn(
            "join_uneven_inputs(even_batches=...) is only supported for map-style datasets: it does not reach loaders "
            "over streams, nor those that the main process reads for the others.",
            UserWarning,
            stacklevel=4,
        )
    return found
