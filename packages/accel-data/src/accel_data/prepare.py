"""`prepare_data_loader`: converts a plain `DataLoader` to the loader of one process."""

from __future__ import annotations

import copy
import types
import warnings
from collections.abc import Callable, Sequence, Sized
from dataclasses import dataclass
from enum import Enum
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

from accel_data.config import DataLoaderConfiguration, OrderOf, Sharding
from accel_data.dispatch import DataLoaderDispatcher, DispatchedSource
from accel_data.exact_epochs import ExactShard
from accel_data.global_order import check_global_order
from accel_data.loader import DataLoaderShard, PreparedLoader
from accel_data.mesh import data_coordinates, first_of_each
from accel_data.order import SeedableRandomSampler, is_stock
from accel_data.own_shards import OwnShardSource
from accel_data.padding import CountingCollate, PaddingCollate
from accel_data.seeding import SampleSeed, SeededStream
from accel_data.sharding import BatchSamplerShard, batching_of, check_process, check_split, innermost_sampler
from accel_data.source import LocalSource, MapSource, Source, rebuilt
from accel_data.stateful import has_state, stateful_twin
from accel_data.stream_source import StreamSource
from accel_data.streams import IterableDatasetShard, ResumableShard, is_sharded, own_shard, shards_itself
from accel_data.token_batches import TokenBatches, TokenBatchSampler
from accel_ops.objects import broadcast_object_list
from accel_state import current
from accel_state.errors import Conflict, UnknownKind
from accel_state.gradient import GradientState
from accel_state.labels import RNGType
from accel_state.library import stack_level

__all__ = (
    "LoaderKind",
    "Shard",
    "classify",
    "distributed_sampler",
    "get_sampler",
    "prepare_data_loader",
)

_READ_ONCE_TYPES: Final = frozenset({types.GeneratorType, map, filter, zip})

_DRAWING_SAMPLERS: Final = frozenset({RandomSampler, SubsetRandomSampler, WeightedRandomSampler})
"""Torch's samplers that draw from the process's generator if they have no generator."""


@dataclass(frozen=True)
class Shard:
    """This process's shard of the data.

    Args:
        processes: the number of processes that share the data.
        index: the index of this process among them.
        readers: the number of processes that draw a common order, including those with the same shard; 1 if each draws
            its own.
        everyone: whether all processes of the run take part.
    """

    processes: int
    index: int
    readers: int = 1
    everyone: bool = True

    def __post_init__(self) -> None:
        check_process(self.processes, self.index)

    @property
    def shared(self) -> bool:
        """Whether another process reads in the same order."""
        return self.processes > 1 or self.readers > 1


class LoaderKind(Enum):
    """Who reads what.

    MAP: a map-style data set; each process draws the indices of all, and reads its own.
    STREAM: a stream; each process reads all of it, and keeps its own samples.
    OWN_SHARD: the loader already has this process's shard, or the stream gives it.
    DISPATCHED: the main process reads for all.
    """

    MAP = "map"
    STREAM = "stream"
    OWN_SHARD = "own shard"
    DISPATCHED = "dispatched"


def classify(
    loader: DataLoader[Any], shard: Shard, configuration: DataLoaderConfiguration, put_on_device: bool
) -> LoaderKind:
    """The kind of a loader.

    Args:
        loader: the script's loader.
        shard: this process's shard of the data.
        configuration: how loaders are prepared.
        put_on_device: whether batches are moved to the device. Only then streams are dispatched by themselves.

    Raises:
        Conflict: the configuration is not possible for this loader.
    """
    is_stream = isinstance(loader.dataset, IterableDataset)
    sharding, dispatches = configuration.sharding, configuration.dispatch_batches
    if dispatches or sharding == "dispatch":
        if not shard.everyone:
            raise Conflict(
                f"Cannot dispatch to {shard.processes} processes.",
                f"The run has {current.process_or_start().world_size}, and the main process sends to each of them.",
                "Remove num_processes and process_index, or let every process read its own batches.",
            )
        if is_stream and shard.processes > 1 and is_sharded(loader.dataset):
            raise Conflict(
                f"Cannot dispatch the stream {type(loader.dataset).__name__}.",
                "It is divided by rank already, so the samples of all processes but the main one would be lost.",
                "Remove dispatch_batches and sharding='dispatch', or give a stream that is not divided.",
            )
        return LoaderKind.DISPATCHED
    if not is_stream:
        if callable(sharding):
            raise Conflict(
                "Cannot use a function as sharding for a map-style data set.",
                "Functions shard streams; a map-style data set is sharded through the sampler.",
                "Use sharding='auto' for this loader.",
            )
        own = shard.processes > 1 and (
            sharding == "already" or distributed_sampler(loader, shard.processes) is not None
        )
        return LoaderKind.OWN_SHARD if own else LoaderKind.MAP
    own = configuration.exact_epochs or shards_itself(loader.dataset, shard.processes, sharding)
    if callable(sharding) or (shard.processes > 1 and own):
        return LoaderKind.OWN_SHARD
    undecided = dispatches is None and sharding == "auto" and put_on_device
    return LoaderKind.DISPATCHED if undecided and shard.everyone and shard.processes > 1 else LoaderKind.STREAM


def distributed_sampler(loader: DataLoader[Any], processes: int) -> DistributedSampler[Any] | None:
    """Torch's `DistributedSampler`, if the script shards the indices itself."""
    sampler = get_sampler(loader)
    return sampler if isinstance(sampler, DistributedSampler) and sampler.num_replicas == processes > 1 else None


def get_sampler(dataloader: DataLoader[Any]) -> Any:
    """The sampler of a loader that gives single indices, below whatever shards them; None when there is none."""
    batching = batching_of(dataloader)
    return dataloader.sampler if batching is None else innermost_sampler(batching)


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
    exact_epochs: bool = False,
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
    configuration = DataLoaderConfiguration(
        split_batches,
        dispatch_batches,
        even_batches,
        use_seedable_sampler,
        data_seed,
        non_blocking,
        use_stateful_dataloader,
        use_configured_sampler=use_configured_sampler,
        sharding=sharding,
        restore_position=restore_position,
        seed_samples=seed_samples,
        order=order,
        exact_epochs=exact_epochs,
    )
    shard = _shard(num_processes, process_index, torch_device_mesh)
    loader = stateful_twin(dataloader) if use_stateful_dataloader else dataloader
    kind = classify(loader, shard, configuration, put_on_device)
    if split_batches and (kind is not LoaderKind.OWN_SHARD or isinstance(dataloader.dataset, IterableDataset)):
        check_split(getattr(batching_of(loader), "batch_size", None), shard.processes)
    source, generator = _source(kind, loader, shard, configuration, slice_fn_for_dispatch, torch_device_mesh)
    if order == "global":
        check_global_order(dataloader, source)
    if restore_position or use_stateful_dataloader:
        option = "restore_position=True" if restore_position else "use_stateful_dataloader=True"
        _check_resumable(dataloader.dataset, source.local, option)
    synchronized = generator if shard.shared else None
    loader_class = DataLoaderDispatcher if kind is LoaderKind.DISPATCHED else DataLoaderShard
    return loader_class.around(
        source,
        use_stateful_dataloader,
        gradient,
        device=_device(device) if put_on_device else None,
        rng_types=_rng_types(rng_types, synchronized),
        synchronized_generator=synchronized,
        restores=restore_position or use_stateful_dataloader,
        torch_device_mesh=torch_device_mesh,
        _drop_last=dataloader.drop_last,
        exact_epochs=exact_epochs,
        _non_blocking=non_blocking,
    )


def _check_resumable(dataset: Any, source: LocalSource, option: str) -> None:
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
    held = next(
        (name for name, value in getattr(dataset, "__dict__", {}).items() if type(value) in _READ_ONCE_TYPES), None
    )
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


_WHOLE_SHARD: Final = Shard(1, 0)
"""The shard of a process that needs no sharding: of its own shard, or of data that it reads for all."""


def _source(
    kind: LoaderKind,
    loader: DataLoader[Any],
    shard: Shard,
    configuration: DataLoaderConfiguration,
    slice_fn: Callable[..., Any] | None,
    mesh: Any,
) -> tuple[Source, torch.Generator | None]:
    """The source of a kind of loader, and the generator that shuffles it for all processes, if one does."""
    if kind is LoaderKind.MAP:
        return _shard_map_dataset(loader, shard, configuration)
    if kind is LoaderKind.STREAM:
        return _shard_stream(loader, shard, configuration)
    drop_last = _drops_last(loader)
    if kind is LoaderKind.DISPATCHED:
        local = _unsharded(loader, configuration)
        return DispatchedSource(local, shard.processes, configuration.split_batches, drop_last, slice_fn, mesh), None
    local = _unsharded(_with_own_stream(loader, shard, configuration), configuration)
    ranks = first_of_each(mesh, current.process_or_start().world_size) if shard.everyone else ()
    real = _real_samples(loader, shard)
    keeps_sizes = _keeps_sizes(loader, configuration)
    even = configuration.even_batches or keeps_sizes
    return OwnShardSource(local, shard.processes, even, drop_last, ranks, real, keeps_sizes, shard.index), None


def _keeps_sizes(loader: DataLoader[Any], configuration: DataLoaderConfiguration) -> bool:
    """Whether no sample is repeated to make the batches of a step equally large."""
    return configuration.exact_epochs or isinstance(loader.dataset, TokenBatches)


def _unsharded(loader: DataLoader[Any], configuration: DataLoaderConfiguration) -> LocalSource:
    """A source of all that a loader yields."""
    if not isinstance(loader.dataset, IterableDataset):
        return _shard_map_dataset(loader, _WHOLE_SHARD, configuration)[0]
    return _shard_stream(loader, _WHOLE_SHARD, configuration)[0]


def _with_own_stream(loader: DataLoader[Any], shard: Shard, configuration: DataLoaderConfiguration) -> DataLoader[Any]:
    """A loader over this process's stream, with its share of a global batch; a map-style one is unchanged."""
    if not isinstance(loader.dataset, IterableDataset):
        return loader
    split = configuration.split_batches and shard.processes > 1
    width = (loader.batch_size or 1) // (shard.processes if split else 1)
    dataset = own_shard(loader.dataset, shard.processes, shard.index, configuration.sharding)
    if dataset is None:
        # For exact epochs of a stream that every process reads.
        dataset = IterableDatasetShard(
            loader.dataset, width, loader.drop_last, shard.processes, shard.index, even_batches=False
        )
    if not split:
        return rebuilt(loader, dataset=dataset)
    batch_sampler = BatchSampler(loader.sampler, width, loader.drop_last)
    return rebuilt(loader, dataset=dataset, batch_size=width, batch_sampler=batch_sampler)


def _real_samples(loader: DataLoader[Any], shard: Shard) -> int | None:
    """This process's samples of torch's `DistributedSampler` without repeated ones; None for another sampler."""
    sampler = None if isinstance(loader.dataset, IterableDataset) else distributed_sampler(loader, shard.processes)
    if sampler is None:
        return None
    return min(sampler.num_samples, len(range(sampler.rank, len(cast("Sized", sampler.dataset)), shard.processes)))


def _drops_last(loader: DataLoader[Any]) -> bool:
    return loader.drop_last or bool(getattr(batching_of(loader), "drop_last", False))


def _shard(num_processes: int | None, process_index: int | None, mesh: Any) -> Shard:
    process = current.process_or_start()
    count, index = (process.world_size, process.rank) if mesh is None else data_coordinates(mesh)
    count = count if num_processes is None else num_processes
    everyone = mesh is not None or count == process.world_size
    readers = process.world_size if everyone else 1
    return Shard(count, index if process_index is None else process_index, readers, everyone)


def _device(device: torch.device | None) -> torch.device:
    return current.process_or_start().device if device is None else torch.device(device)


def _rng_types(kinds: Sequence[str | RNGType] | None, generator: torch.Generator | None) -> list[str | RNGType]:
    return [kind for kind in kinds or () if generator is not None or str(kind) != "generator"]


def _shard_map_dataset(
    loader: DataLoader[Any], shard: Shard, configuration: DataLoaderConfiguration
) -> tuple[MapSource, torch.Generator | None]:
    """One process's shard of a loader over a data set with indices, and the generator that shuffles it."""
    below: Any = batching_of(loader)
    single = below is None
    if single:
        below = BatchSampler(loader.sampler, 1, False)
    sampler = innermost_sampler(below)
    if sampler is not None and getattr(below, "sampler", None) is sampler:
        replacement = _shuffled(sampler, shard, configuration)
        if replacement is not sampler:
            below = copy.copy(below)
            below.sampler = sampler = replacement
    split = configuration.split_batches and shard is not _WHOLE_SHARD
    if configuration.exact_epochs or isinstance(below, TokenBatchSampler):
        stand_ins = configuration.exact_epochs
        batches: BatchSamplerShard = ExactShard(
            below, shard.processes, shard.index, split, dataset=loader.dataset, stand_ins=stand_ins
        )
    else:
        batches = BatchSamplerShard(below, shard.processes, shard.index, split, configuration.even_batches)
    is_custom = batches.has_custom_batches or not is_stock(sampler)
    batches.compared = shard.everyone and shard.readers > 1 and is_custom
    changes = {} if loader.batch_sampler is None or sampler is None else {"sampler": sampler}
    source = MapSource.reading(loader, batches, _sample_seed(shard, configuration), **changes)
    return source, _generator_of(sampler, below)


def _sample_seed(shard: Shard, configuration: DataLoaderConfiguration) -> SampleSeed | None:
    if not configuration.seed_samples:
        return None
    return SampleSeed(_seed(shard, configuration))


def _seed(shard: Shard, configuration: DataLoaderConfiguration) -> int:
    return _agreed(torch.initial_seed(), shard) if configuration.data_seed is None else configuration.data_seed


def _shuffled(sampler: Any, shard: Shard, configuration: DataLoaderConfiguration) -> Any:
    # A subclass that draws its indices in its own way keeps doing so.
    draws_as_torch = isinstance(sampler, RandomSampler) and type(sampler).__iter__ is RandomSampler.__iter__
    if draws_as_torch and configuration.shuffles_by_seed:
        count = None if sampler.num_samples == len(sampler.data_source) else sampler.num_samples
        seed = _seed(shard, configuration)
        seeded = SeedableRandomSampler(sampler.data_source, sampler.replacement, count, data_seed=seed)
        seeded.generator = sampler.generator
        return seeded
    draws_globally = type(sampler) in _DRAWING_SAMPLERS and sampler.generator is None
    if not draws_globally or not (shard.shared or configuration.restore_position):
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
    loader: DataLoader[Any], shard: Shard, configuration: DataLoaderConfiguration
) -> tuple[StreamSource, torch.Generator | None]:
    """One process's shard of a loader over a stream that every process reads, and the generator that shuffles it."""
    if _keeps_sizes(loader, configuration):
        loader = rebuilt(loader, collate_fn=CountingCollate(loader.collate_fn))
    source, generator = _sharded_stream(loader, shard, configuration)
    # torchdata assumes that a stream without a position yields the same samples each time.
    rereads = configuration.use_stateful_dataloader and not configuration.restore_position
    if rereads and source.obstacle() is not None:
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
    loader: DataLoader[Any], shard: Shard, configuration: DataLoaderConfiguration
) -> tuple[StreamSource, torch.Generator | None]:
    batch_size = loader.batch_size
    generator = getattr(loader.dataset, "generator", None)
    generator = generator if isinstance(generator, torch.Generator) else None
    sample_seed = _sample_seed(shard, configuration)
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
        configuration.split_batches,
        even_batches=configuration.even_batches,
        marking=True,
    )
    width = own.plan().batch_size
    changes: dict[str, Any] = {"dataset": own, "collate_fn": PaddingCollate(loader.collate_fn)}
    if batch_size is not None:
        changes |= {"batch_size": width, "batch_sampler": BatchSampler(loader.sampler, width, loader.drop_last)}
    return StreamSource(rebuilt(loader, **changes), shard.processes, width * shard.processes), generator
