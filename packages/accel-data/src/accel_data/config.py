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
"""How a stream is sharded; a function receives (data set, number of processes, index) and returns a data set."""

OrderOf = Literal["sampler", "seeded", "global"]
"""What determines the order of samples; see `DataLoaderConfiguration`."""

ORDERS: Final = ("sampler", "seeded", "global")

SHARDINGS: Final = ("auto", "already", "dispatch")

TORCHDATA: Final = Requirement("torchdata", versions=">=0.11")


@dataclass
class DataLoaderConfiguration:
    """How an Accelerator prepares DataLoaders.

    Args:
        split_batches: split each batch of the script's DataLoader into one shard per process, so that its batch size is
            the global batch size. Otherwise it is the batch size of one process.
        dispatch_batches: read every batch on the main process and send the other processes their shards. None does so
            for streams that cannot be sharded at their source.
        even_batches: pad the last global batch with samples from the beginning, so that all processes have batches of
            equal size.
        use_seedable_sampler: the same as order="seeded".
        data_seed: seed of the orders "seeded" and "global". None uses torch's initial seed.
        non_blocking: copy batches to the device asynchronously.
        use_stateful_dataloader: read through torchdata's `StatefulDataLoader` and restore the position after a load.
        use_configured_sampler: use the script's own sampler in any case: the same as order="sampler" instead of
            "seeded".
        gradient_accumulation_kwargs: fields of the `GradientAccumulationPlugin` that the Accelerator creates if it
            receives none.
        sharding: how the samples of a stream are sharded between processes. "auto" shards at the source if the source
            supports it, "already" means that the stream is sharded already, "dispatch" reads on the main process. A
            function receives (data set, number of processes, index) and returns the data set of one process.
        restore_position: continue in the middle of the epoch after a load, without `skip_first_batches`.
        seed_samples: seed the random-number generators for each sample from seed, epoch and index, so that random draws
            in `__getitem__` are the same after a resume.
        order: what determines the order of samples. "sampler": the script's sampler. "seeded": torch's `RandomSampler`
            shuffles by seed and epoch, not by other random draws. "global": the same, and a DataLoader whose order
            depends on anything else, such as the number of processes or DataLoader workers, is an error.

    Raises:
        Conflict: two fields contradict each other.
        Missing: torchdata is needed and not installed.
        SettingError: `sharding` or `order` has an unknown value.
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

    @property
    def shuffles_by_seed(self) -> bool:
        """Whether torch's `RandomSampler` is replaced by one whose order depends only on seed and epoch."""
        return (self.order != "sampler" or self.use_seedable_sampler) and not self.use_configured_sampler

    def __post_init__(self) -> None:
        _check_sharding(self.sharding, self.dispatch_batches)
        _check_choice("order", self.order, ORDERS)
        if self.use_stateful_dataloader:
            TORCHDATA.demand("Cannot use use_stateful_dataloader=True.")


def _check_choice(name: str, value: str, choices: tuple[str, ...], also: str = "") -> None:
    """Check a value that is one of a few; the first one is the default.

    Raises:
        SettingError: it is another one.
    """
    if value not in choices:
        near = closest(str(value), choices)
        raise SettingError(
            f"Cannot use {name}={value!r}.",
            f"The value must be one of {', '.join(choices)}{also}.",
            f"Did you mean {near!r}?" if near else f"Use {choices[0]!r}, the default.",
        )


def _check_sharding(sharding: Sharding, dispatch_batches: bool | None) -> None:
    """Check a way of sharding, alone and with `dispatch_batches`.

    Raises:
        Conflict: one of the two means dispatch, the other does not.
        SettingError: the way of sharding is unknown.
    """
    if not callable(sharding):
        _check_choice("sharding", sharding, SHARDINGS, ", or a function")
    if dispatch_batches is not None and sharding != "auto" and dispatch_batches != (sharding == "dispatch"):
        raise Conflict(
            f"Cannot combine sharding={sharding!r} with dispatch_batches={dispatch_batches}.",
            "One makes the main process read all batches, the other makes every process read its own.",
            "Remove dispatch_batches, so that sharding decides.",
        )
