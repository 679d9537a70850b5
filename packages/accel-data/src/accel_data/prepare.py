"""`prepare_data_loader`: converts a plain `DataLoader` to the loader of one process."""

from __future__ import annotations

import copy
import types
import warnings
from collections.abc import Callable, Sequence, Sized
from dataclasses import dataclass
from typing import Any, Final, cast

import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    IterableDataset,
    RandomSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)
from torch.utils.data.distributed import DistributedSampler

from accel_data.agreement import AgreedSource
from accel_data.config import OrderOf, Sharding, check_order, check_sharding
from accel_data.dispatch import DataLoaderDispatcher, DispatchedSource
from accel_data.global_order import check_global_order
from accel_data.loader import DataLoaderShard, LoaderOptions, PreparedLoader
from accel_data.mesh import data_coordinates, first_of_each
from accel_data.order import SeedableRandomSampler
from accel_data.padding import PaddingCollate
from accel_data.seeding import SampleSeed, SeededStream
from accel_data.sharding import BatchSamplerShard, batching_of, check_process, check_split, innermost_sampler
from accel_data.source import MapSource, Source, rebuilt
from accel_data.stateful import has_state, stateful_twin
from accel_data.stream_source import StreamSource
from accel_data.streams import IterableDatasetShard, ResumableShard, own_shard
from accel_ops.objects import broadcast_object_list
from accel_state import current
from accel_state.errors import Conflict, UnknownKind
from accel_state.gradient import GradientState
from accel_state.labels import RNGType
from accel_state.library import stack_level

__all__ = ("get_sampler", "prepare_data_loader")

_READ_ONCE: Final = frozenset({types.GeneratorType, map, filter, zip})

_DRAWING: Final = frozenset({RandomSampler, SubsetRandomSampler, WeightedRandomSampler})
"""Torch's samplers that draw from the process's generator if they have no generator."""


@dataclass(frozen=True)
class Shard:
    """This process's shard of the data.

    Args:
        processes: the number of processes that share the data.
        index: the index of this process among them.
        split: batches are global batches.
        even: pad the last step.
        readers: the number of processes that draw a common order, including those with the same shard; 1 if each draws
            its own.
    """

    processes: int
    index: int
    split: bool = False
    even: bool = True
    readers: int = 1

    def __post_init__(self) -> None:
        check_process(self.processes, self.index)

    @property
    def shared(self) -> bool:
        """Whether another process reads in the same order."""
        return self.processes > 1 or self.readers > 1


@dataclass(frozen=True)
class Shuffling:
    """How a map-style data set is shuffled.

    Args:
        seedable: replace torch's `RandomSampler` by one that depends only on seed and epoch.
        seed: seed of that sampler. None uses torch's initial seed.
        seed_samples: seed the generators for each sample.
        repeatable: give torch's samplers a generator even in a run of one process, so that an epoch can be replayed.
        rereads: assume that a stream without a position yields the same samples each time, as torchdata does.
    """

    seedable: bool = False
    seed: int | None = None
    repeatable: bool = False
    seed_samples: bool = False
    rereads: bool = False


def prepare_data_loader(
    dataloader: DataLoader[Any],
    device: torch.device | None = None,
    num_processes: int | None = None,
    process_index: int | None = None,
    split_batches: bool = False,
    put_on_device: bool = False,
    rng_types: Sequence[str | RNGType] | None = None,
    dispatch_batches: bool | None = None,
    even_batches: bool = True,
    slice_fn_for_dispatch: Callable[..., Any] | None = None,
    use_seedable_sampler: bool = False,
    data_seed: int | None = None,
    non_blocking: bool = False,
    use_stateful_dataloader: bool = False,
    torch_device_mesh: Any = None,
    *,
    gradient: GradientState | None = None,
    use_configured_sampler: bool = False,
    sharding: Sharding = "auto",
    restore_position: bool = False,
    seed_samples: bool = False,
    order: OrderOf = "sampler",
) -> DataLoader[Any]:
    """Create a loader that yields this process's shard of every epoch, on its device.

    Args:
        dataloader: a DataLoader, which is not changed. A prepared loader is returned unchanged.
        device: the device for batches with `put_on_device`. None uses the process's device.
        num_processes: the number of processes that share the data. None uses all of the run, or of the mesh's data
            axes.
        process_index: the index of this process among them.
        put_on_device: move batches to the device.
        rng_types: generators to synchronise at the start of each epoch: "torch", "generator" (the sampler's generator)
            or the name of a device.
        slice_fn_for_dispatch: `f(batch, slice, process_index=, num_processes=)` that returns the samples of one process
            from a global batch.
        torch_device_mesh: mesh whose data axes determine which processes read different data.
        gradient: gradient state of the loader's Accelerator. None uses the current one.

    The other arguments are the fields of `DataLoaderConfiguration`.

    Raises:
        Conflict: two arguments contradict each other, `restore_position` is given for a stream without a position, or
            order="global" for a loader whose order depends on more than seed and epoch.
        Missing: torchdata is needed and not installed.
        SettingError: a batch cannot be split into equal shards, or a number is out of range.
        UnknownKind: `dataloader` is not a `DataLoader`.

    Example:
        >>> loader = prepare_data_loader(DataLoader(range(10), batch_size=2), num_processes=2, process_index=1)
        >>> [batch.tolist() for batch in loader]
        [[2, 3], [6, 7], [0, 1]]
    """
    if isinstance(dataloader, PreparedLoader):
        return dataloader
    if not isinstance(dataloader, DataLoader):
        raise UnknownKind(
            f"Cannot prepare a {type(dataloader).__name__} as a loader.",
            "Only a DataLoader can be prepared.",
            "Wrap the data in torch.utils.data.DataLoader first.",
        )
    check_sharding(sharding, dispatch_batches)
    check_order(order)
    processes, index = _place(num_processes, process_index, torch_device_mesh)
    world_size = current.process_or_start().world_size
    everyone = torch_device_mesh is not None or processes == world_size
    shard = Shard(processes, index, split_batches, even_batches, world_size if everyone else 1)
    base = stateful_twin(dataloader) if use_stateful_dataloader else dataloader
    own = _own_shard(base, shard, sharding, dispatch_batches)
    dispatches = own is None and _dispatches(base, dispatch_batches, sharding, put_on_device, processes, everyone)
    seedable = (use_seedable_sampler or order == "global") and not use_configured_sampler
    rereads = use_stateful_dataloader and not restore_position
    shuffling = Shuffling(seedable, data_seed, restore_position, seed_samples, rereads)
    # A loader over this process's shard needs no sharding, nor does one that the main process reads for all.
    source, generator = _sharded(
        base if own is None else own, shard if own is None and not dispatches else Shard(1, 0), shuffling
    )
    if order == "global":
        check_global_order(dataloader, source, own is not None, dispatches, everyone and world_size > 1)
    if own is not None:
        together = first_of_each(torch_device_mesh, world_size) if everyone else ()
        source = AgreedSource(source, processes, even_batches, _drops_last(base), together, _real_samples(base, shard))
    if restore_position or use_stateful_dataloader:
        option = "restore_position=True" if restore_position else "use_stateful_dataloader=True"
        _check_resumable(dataloader.dataset, source, option)
    shared = generator if shard.shared and own is None and not dispatches else None
    options = LoaderOptions(
        device=_device(device) if put_on_device else None,
        rng_types=_rng_types(rng_types, shared),
        synchronized_generator=shared,
        restores=restore_position or use_stateful_dataloader,
        torch_device_mesh=torch_device_mesh,
        _drop_last=dataloader.drop_last,
        _non_blocking=non_blocking,
    )
    if not dispatches:
        return DataLoaderShard.around(source, options, use_stateful_dataloader, gradient)
    if split_batches:
        check_split(getattr(batching_of(dataloader), "batch_size", None), processes)
    steps = DispatchedSource(source, processes, split_batches, _drops_last(dataloader), slice_fn_for_dispatch)
    return DataLoaderDispatcher.around(steps, options, use_stateful_dataloader, gradient)


def _check_resumable(dataset: Any, source: Source, option: str) -> None:
    """Raise an error for a stream that cannot continue after a load, before a run depends on it.

    A map-style data set whose order cannot be replayed is only a warning: it may be for evaluation.
    """
    obstacle = source.obstacle()
    if not isinstance(dataset, IterableDataset):
        if obstacle is not None:
            warnings.warn(
                f"The position inside an epoch of this loader cannot be saved ({option}): {obstacle} Give the sampler "
                "a generator, or state_dict() and load_state_dict().",
                UserWarning,
                stacklevel=stack_level(),
            )
        return
    held = next((name for name, value in getattr(dataset, "__dict__", {}).items() if type(value) in _READ_ONCE), None)
    if held is not None and not source.continues_from_base:
        obstacle = f"The stream contains {held!r}, which can be read only once, so it cannot be read again."
    if obstacle is not None:
        raise Conflict(
            f"Cannot prepare a loader over {source.identity()} with {option}.",
            obstacle,
            "Add a method set_epoch(epoch) to the stream, which means that an epoch is repeatable; or add "
            "state_dict() and load_state_dict() and set use_stateful_dataloader=True; or disable restoring and call "
            "skip_first_batches.",
        )


def _own_shard(
    loader: DataLoader[Any], shard: Shard, sharding: Sharding, dispatch_batches: bool | None
) -> DataLoader[Any] | None:
    """A loader over this process's shard, if the data are sharded already or at their source; else None."""
    if dispatch_batches or (shard.processes == 1 and not callable(sharding)):
        return None
    if not isinstance(loader.dataset, IterableDataset):
        if callable(sharding):
            raise Conflict(
                "Cannot use a function as sharding for a map-style data set.",
                "Functions shard streams; a map-style data set is sharded through the sampler.",
                "Use sharding='auto' for this loader.",
            )
        return loader if sharding == "already" or _distributed_sampler(loader, shard.processes) is not None else None
    dataset = own_shard(loader.dataset, shard.processes, shard.index, sharding)
    if dataset is None:
        return None
    if not shard.split:
        return rebuilt(loader, dataset=dataset)
    check_split(loader.batch_size, shard.processes)
    width = (loader.batch_size or 1) // shard.processes
    batch_sampler = BatchSampler(loader.sampler, width, loader.drop_last)
    return rebuilt(loader, dataset=dataset, batch_size=width, batch_sampler=batch_sampler)


def _distributed_sampler(loader: DataLoader[Any], processes: int) -> DistributedSampler[Any] | None:
    """Torch's `DistributedSampler`, if the script shards the indices itself."""
    sampler = get_sampler(loader)
    shards = isinstance(sampler, DistributedSampler) and sampler.num_replicas == processes > 1
    return cast("DistributedSampler[Any]", sampler) if shards else None


def _real_samples(loader: DataLoader[Any], shard: Shard) -> int | None:
    """This process's samples of torch's `DistributedSampler` without repeated ones; None for another sampler."""
    sampler = None if isinstance(loader.dataset, IterableDataset) else _distributed_sampler(loader, shard.processes)
    if sampler is None:
        return None
    return min(sampler.num_samples, len(range(sampler.rank, len(cast("Sized", sampler.dataset)), shard.processes)))


def _sharded(loader: DataLoader[Any], shard: Shard, shuffling: Shuffling) -> tuple[Source, torch.Generator | None]:
    if isinstance(loader.dataset, IterableDataset):
        return _shard_stream(loader, shard, shuffling)
    return _shard_map_dataset(loader, shard, shuffling)


def _dispatches(
    loader: DataLoader[Any],
    dispatch_batches: bool | None,
    sharding: Sharding,
    put_on_device: bool,
    processes: int,
    everyone: bool,
) -> bool:
    """Whether the main process reads for all processes."""
    if dispatch_batches or sharding == "dispatch":
        if not everyone:
            raise Conflict(
                f"Cannot dispatch to {processes} processes.",
                f"The run has {current.process_or_start().world_size}, and the main process sends to each of them.",
                "Remove num_processes and process_index, or let every process read its own batches.",
            )
        return True
    undecided = dispatch_batches is None and sharding == "auto" and put_on_device
    return undecided and everyone and processes > 1 and isinstance(loader.dataset, IterableDataset)


def _drops_last(loader: DataLoader[Any]) -> bool:
    return loader.drop_last or bool(getattr(batching_of(loader), "drop_last", False))


def _place(num_processes: int | None, process_index: int | None, mesh: Any) -> tuple[int, int]:
    process = current.process_or_start()
    processes, index = (process.world_size, process.rank) if mesh is None else data_coordinates(mesh)
    return processes if num_processes is None else num_processes, index if process_index is None else process_index


def _device(device: torch.device | None) -> torch.device:
    return current.process_or_start().device if device is None else torch.device(device)


def _rng_types(given: Sequence[str | RNGType] | None, generator: torch.Generator | None) -> list[str | RNGType]:
    return [kind for kind in given or () if generator is not None or str(kind) != "generator"]


def get_sampler(dataloader: DataLoader[Any]) -> Any:
    """The sampler of a loader that gives single indices, below whatever shards them; None when there is none."""
    batching = batching_of(dataloader)
    return dataloader.sampler if batching is None else innermost_sampler(batching)


def _shard_map_dataset(
    loader: DataLoader[Any], shard: Shard, shuffling: Shuffling
) -> tuple[MapSource, torch.Generator | None]:
    """One process's shard of a loader over a data set with indices, and the generator that shuffles it."""
    below: Any = batching_of(loader)
    single = below is None
    if single:
        below = BatchSampler(loader.sampler, 1, False)
    if shard.split:
        check_split(None if single else getattr(below, "batch_size", None), shard.processes)
    sampler = innermost_sampler(below)
    if sampler is not None and getattr(below, "sampler", None) is sampler:
        replacement = _shuffled(sampler, shard, shuffling)
        if replacement is not sampler:
            below = copy.copy(below)
            below.sampler = sampler = replacement
    batches = BatchSamplerShard(below, shard.processes, shard.index, shard.split, shard.even)
    changes = {} if loader.batch_sampler is None or sampler is None else {"sampler": sampler}
    source = MapSource.reading(loader, batches, _sample_seed(shard, shuffling), **changes)
    return source, _generator_of(sampler, below)


def _sample_seed(shard: Shard, shuffling: Shuffling) -> SampleSeed | None:
    if not shuffling.seed_samples:
        return None
    return SampleSeed(_seed(shard, shuffling))


def _seed(shard: Shard, shuffling: Shuffling) -> int:
    return _agreed(torch.initial_seed(), shard) if shuffling.seed is None else shuffling.seed


def _shuffled(sampler: Any, shard: Shard, shuffling: Shuffling) -> Any:
    # A subclass that draws its indices in its own way keeps doing so.
    if shuffling.seedable and isinstance(sampler, RandomSampler) and type(sampler).__iter__ is RandomSampler.__iter__:
        count = None if sampler.num_samples == len(sampler.data_source) else sampler.num_samples
        seed = _seed(shard, shuffling)
        seeded = SeedableRandomSampler(sampler.data_source, sampler.replacement, count, data_seed=seed)
        seeded.generator = sampler.generator
        return seeded
    draws_globally = type(sampler) in _DRAWING and sampler.generator is None
    if not draws_globally or not (shard.shared or shuffling.repeatable):
        return sampler
    own = copy.copy(sampler)
    seed = _agreed(int(torch.empty((), dtype=torch.int64).random_().item()), shard)
    own.generator = torch.Generator().manual_seed(seed)
    return own


def _agreed(seed: int, shard: Shard) -> int:
    """The main process's seed, if the processes of the run read a common order."""
    if shard.readers == 1:
        return seed
    agreed: int = broadcast_object_list([seed])[0]
    return agreed


def _generator_of(sampler: Any, batch_sampler: Any) -> torch.Generator | None:
    for holder in (sampler, batch_sampler):
        generator = getattr(holder, "generator", None)
        # The generator of a sampler that is seeded for each epoch is already equal on all processes.
        if isinstance(generator, torch.Generator) and not isinstance(holder, SeedableRandomSampler):
            return generator
    return None


def _shard_stream(
    loader: DataLoader[Any], shard: Shard, shuffling: Shuffling
) -> tuple[StreamSource, torch.Generator | None]:
    """One process's shard of a loader over a stream that every process reads, and the generator that shuffles it."""
    source, generator = _sharded_stream(loader, shard, shuffling)
    if shuffling.rereads and source.obstacle() is not None:
        source.rereads = True
        warnings.warn(
            f"The stream {source.identity()} has no position: after a load it is read again from its beginning, "
            "without the batches that are done. Give it state_dict() and load_state_dict(), or set_epoch(epoch), if "
            "it does not yield the same samples each time.",
            UserWarning,
            stacklevel=stack_level(),
        )
    return source, generator


def _sharded_stream(
    loader: DataLoader[Any], shard: Shard, shuffling: Shuffling
) -> tuple[StreamSource, torch.Generator | None]:
    batch_size = loader.batch_size
    if shard.split:
        check_split(batch_size, shard.processes)
    generator = getattr(loader.dataset, "generator", None)
    generator = generator if isinstance(generator, torch.Generator) else None
    sample_seed = _sample_seed(shard, shuffling)
    if sample_seed is not None:
        loader = rebuilt(loader, dataset=SeededStream.of(loader.dataset, sample_seed))
    if shard.processes == 1:
        return StreamSource(loader, 1, batch_size or 1), generator
    kind = ResumableShard if has_state(loader) else IterableDatasetShard
    own = kind(
        loader.dataset,  # type: ignore[arg-type]
        batch_size or 1,
        loader.drop_last,
        shard.processes,
        shard.index,
        shard.split,
        even_batches=shard.even,
        marking=True,
    )
    width = own.plan().batch_size
    changes: dict[str, Any] = {"dataset": own, "collate_fn": PaddingCollate(loader.collate_fn)}
    if batch_size is not None:
        changes |= {"batch_size": width, "batch_sampler": BatchSampler(loader.sampler, width, loader.drop_last)}
    return StreamSource(rebuilt(loader, **changes), shard.processes, width * shard.processes), generator
