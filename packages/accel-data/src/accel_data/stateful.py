"""torchdata's `StatefulDataLoader`: create one, and read its state."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any, Final

from torch.utils.data import DataLoader, IterableDataset, SequentialSampler

from accel_data.config import TORCHDATA
from accel_data.order import has_own_state, is_stock_batching, torchdata_sampler

__all__ = (
    "has_state",
    "is_finished",
    "is_stateful",
    "knows_its_order",
    "stateful_loader_class",
    "stateful_twin",
    "steps_in",
)

_CARRIED_OPTIONS: Final = (
    "num_workers",
    "collate_fn",
    "pin_memory",
    "timeout",
    "worker_init_fn",
    "multiprocessing_context",
    "generator",
    "prefetch_factor",
    "persistent_workers",
    "in_order",
)


def stateful_loader_class() -> type[DataLoader[Any]]:
    """torchdata's `StatefulDataLoader`.

    Raises:
        Missing: torchdata is not installed.
    """
    TORCHDATA.demand("Cannot create a loader with use_stateful_dataloader=True.")
    from torchdata.stateful_dataloader import StatefulDataLoader

    loader_class: type[DataLoader[Any]] = StatefulDataLoader
    return loader_class


def is_stateful(loader: DataLoader[Any]) -> bool:
    """Whether a loader is torchdata's."""
    return hasattr(loader, "load_state_dict")


def knows_its_order(loader: DataLoader[Any]) -> bool:
    """Whether the state of torchdata's loader describes an epoch completely."""
    if not is_stateful(loader):
        return False
    if isinstance(loader.dataset, IterableDataset):
        return has_state(loader)
    above, sampler = loader.batch_sampler, loader.sampler
    if above is not None and not is_stock_batching(above):
        return has_own_state(above)
    stock = type(sampler) is SequentialSampler or type(sampler) is torchdata_sampler("RandomSampler")
    return stock or has_own_state(sampler)


def has_state(loader: DataLoader[Any]) -> bool:
    """Whether a loader reads through torchdata from a data set that restores its own state exactly."""
    dataset = loader.dataset
    if not is_stateful(loader):
        return False
    return has_own_state(dataset) and not _loses_samples(dataset)


def _loses_samples(dataset: Any) -> bool:
    """Whether a stream of Hugging Face `datasets` has a shuffle buffer; its state leaves out the samples in it."""
    buffered = getattr(sys.modules.get("datasets.iterable_dataset"), "BufferShuffledExamplesIterable", None)
    below = [] if buffered is None else [dataset]
    while below:
        stage = below.pop()
        if isinstance(stage, buffered):  # type: ignore[arg-type]
            return True
        held = getattr(stage, "__dict__", {})
        below += [held[name] for name in ("dataset", "_ex_iterable", "ex_iterable") if name in held]
        below += held.get("ex_iterables", [])
    return False


def steps_in(state: Mapping[str, Any]) -> int | None:
    """Batches of the running epoch that a state of torchdata's loader counts; None when it is not such a state."""
    if "_num_yielded" in state:
        steps = int(state["_num_yielded"])
    elif "_snapshot" in state:
        steps = int(state["_snapshot"]["_snapshot_step"]) + int(state["_steps_since_snapshot"])
    else:
        return None
    return 0 if is_finished(state) else steps


def is_finished(state: Mapping[str, Any]) -> bool:
    """Whether a state of torchdata's loader was taken after the last batch; loading it begins a new epoch."""
    return bool(state.get("_iterator_finished", False))


def stateful_twin(loader: DataLoader[Any]) -> DataLoader[Any]:
    """A `StatefulDataLoader` with all arguments of a plain loader; a stateful one is returned unchanged.

    Raises:
        Missing: torchdata is not installed.
    """
    loader_class = stateful_loader_class()
    if isinstance(loader, loader_class):
        return loader
    batching: dict[str, Any] = {"batch_size": loader.batch_size}
    if isinstance(loader.dataset, IterableDataset):
        batching["drop_last"] = loader.drop_last
    elif loader.batch_sampler is not None:
        batching = {"batch_sampler": loader.batch_sampler}
    else:
        batching["sampler"] = loader.sampler
    return loader_class(loader.dataset, **batching, **{name: getattr(loader, name) for name in _CARRIED_OPTIONS})
