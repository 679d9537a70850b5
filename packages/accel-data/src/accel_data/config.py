"""`DataLoaderConfiguration`: how an Accelerator prepares its loaders."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final, Literal

from accel_state.errors import Conflict, SettingError
from accel_state.settings.installed import Requirement
from accel_state.settings.schema import closest

__all__ = ("ORDERS", "SHARDINGS", "TORCHDATA", "DataLoaderConfiguration", "OrderOf", "Sharding")

Sharding = Literal["auto", "already", "dispatch"] | Callable[[Any, int, int], Any]
"""How a stream is divided; a function gets (data set, number of processes, index) and returns a data set."""

OrderOf = Literal["sampler", "global"]
"""What decides the order of samples; see `DataLoaderConfiguration`."""

ORDERS: Final = ("sampler", "global")

SHARDINGS: Final = ("auto", "already", "dispatch")

TORCHDATA: Final = Requirement("torchdata", versions=">=0.11")


@dataclass
class DataLoaderConfiguration:
    """How loaders are prepared.

    Args:
        split_batches: cut each batch of the script's loader into one shard per process, so that its batch size is the
            global one; otherwise it is that of one process.
        dispatch_batches: let the main process read every batch and send the others their shard; None does so for
            streams that cannot be divided at their source.
        even_batches: complete the last step with samples from the beginning, so that all processes have equal batches.
        use_seedable_sampler: shuffle by seed and epoch alone, whatever else draws random numbers.
        data_seed: seed of that sampler; torch's initial seed when None.
        non_blocking: let copies to the device overlap with what follows.
        use_stateful_dataloader: read through torchdata's `StatefulDataLoader` and restore the position after a load.
        use_configured_sampler: keep the sampler that the script gave to its loader, with `use_seedable_sampler` too.
        gradient_accumulation_kwargs: fields of the `GradientAccumulationPlugin` that the Accelerator makes when none is
            given to it.
        sharding: how the samples of a stream are divided between the processes. "auto" divides at the source where the
            source can, "already" leaves a stream that is divided already as it is, "dispatch" reads in the main
            process; a function gets (data set, number of processes, index) and returns the data set of one process.
        restore_position: continue in the middle of the epoch after a load, without `skip_first_batches`.
        seed_samples: seed the generators for each sample from seed, epoch and index, so that random draws in
            `__getitem__` are the same after a resume.
        order: "sampler" keeps the order that the script's sampler draws. "global" shuffles by seed and epoch alone, as
            `use_seedable_sampler` does, and refuses a loader whose order depends on anything else, such as the number
            of processes or DataLoader workers.

    Raises:
        Conflict: two of the choices contradict each other.
        Missing: torchdata is not installed.
        SettingError: there is no such way of sharding, or no such order.
    """

    split_batches: bool = False
    dispatch_batches: bool | None = None
    even_batches: bool = True
    use_seedable_sampler: bool = False
    data_seed: int | None = None
    non_blocking: bool = False
    use_stateful_dataloader: bool = False
    use_configured_sampler: bool = field(default=False, kw_only=True)
    gradient_accumulation_kwargs: dict[str, Any] | None = field(default=None, kw_only=True)
    sharding: Sharding = field(default="auto", kw_only=True)
    restore_position: bool = field(default=False, kw_only=True)
    seed_samples: bool = field(default=False, kw_only=True)
    order: OrderOf = field(default="sampler", kw_only=True)

    def __post_init__(self) -> None:
        check_sharding(self.sharding, self.dispatch_batches)
        check_order(self.order)
        if self.use_stateful_dataloader:
            TORCHDATA.demand("Cannot use use_stateful_dataloader=True.")


def check_order(order: str) -> None:
    """Refuse an order that does not exist.

    Raises:
        SettingError: there is no such order.
    """
    if order not in ORDERS:
        near = closest(str(order), ORDERS)
        raise SettingError(
            f"Cannot use order={order!r}.",
            f"The value must be one of {', '.join(ORDERS)}.",
            f"Did you mean {near!r}?" if near else "Leave it at 'sampler'.",
        )


def check_sharding(sharding: Sharding, dispatch_batches: bool | None) -> None:
    """Refuse a way of sharding that does not exist, or that `dispatch_batches` contradicts.

    Raises:
        Conflict: one of the two means dispatching, the other does not.
        SettingError: there is no such way of sharding.
    """
    if not callable(sharding) and sharding not in SHARDINGS:
        near = closest(str(sharding), SHARDINGS)
        raise SettingError(
            f"Cannot use sharding={sharding!r}.",
            f"The value must be one of {', '.join(SHARDINGS)}, or a function.",
            f"Did you mean {near!r}?" if near else "Leave it at 'auto' unless the stream is special.",
        )
    if dispatch_batches is not None and sharding != "auto" and dispatch_batches != (sharding == "dispatch"):
        raise Conflict(
            f"Cannot combine sharding={sharding!r} with dispatch_batches={dispatch_batches}.",
            "One lets the main process read all batches, the other lets every process read its own.",
            "Leave dispatch_batches at None and let sharding decide.",
        )
