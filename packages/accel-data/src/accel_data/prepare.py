"""From a plain `DataLoader` to the loader of one process."""

from __future__ import annotations

import types
from collections.abc import Callable, Sequence, Sized
from typing import Any, Final, cast

import torch
from torch.utils.data import BatchSampler, DataLoader, IterableDataset
from torch.utils.data.distributed import DistributedSampler

from accel_data.adapter import rebuilt
from accel_data.agreement import AgreedSource
from accel_data.config import Sharding, check_sharding
from accel_data.dispatched import DispatchedSource
from accel_data.dispatcher import DataLoaderDispatcher
from accel_data.divide import Part, Shuffling, divide_indexed, divide_stream
from accel_data.loader import DataLoaderShard
from accel_data.mesh import data_coordinates, first_of_each
from accel_data.prepared import PreparedLoader
from accel_data.samplers import batching_of, check_split, innermost_sampler
from accel_data.sources import Source
from accel_data.stateful import stateful_twin
from accel_data.streams import own_part
from accel_state import current
from accel_state.errors import Conflict, UnknownKind
from accel_state.gradient import GradientState
from accel_state.labels import RNGType

__all__ = ("get_sampler", "prepare_data_loader")

_READ_ONCE: Final = frozenset({types.GeneratorType, map, filter, zip})


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
) -> DataLoader[Any]:
    """A loader that gives this process its part of every epoch, on its device.

    Args:
        dataloader: as the script made it; it stays as it is. A prepared one is returned unchanged.
        device: where batches are moved to with `put_on_device`; the process's device when None.
        num_processes: how many processes share the data; all of the run (or of the mesh's data axes) when None.
        process_index: which of them this is.
        put_on_device: move batches to the device.
        rng_types: generators made equal on all processes when an iteration begins: "torch", "generator" (that of the
            sampler) or the name of a device.
        slice_fn_for_dispatch: `f(batch, slice, process_index=, num_processes=)` that cuts a batch for one process.
        torch_device_mesh: mesh whose data axes say which processes get different data.
        gradient: state of the Accelerator that the loader is for; the current one when None.

    The other arguments are the fields of `DataLoaderConfiguration`.

    Raises:
        Conflict: two arguments contradict each other, or the position was to be restored of a stream that has none.
        Missing: torchdata is needed and not installed.
        SettingError: a batch cannot be cut into equal parts, or a number is out of range.
        UnknownKind: it is no `DataLoader`.

    Example:
        >>> loader = prepare_data_loader(DataLoader(range(10), batch_size=2), num_processes=2, process_index=1)
        >>> [batch.tolist() for batch in loader]
        [[2, 3], [6, 7], [0, 1]]
    """
    if isinstance(dataloader, PreparedLoader):
        return dataloader
    if not isinstance(dataloader, DataLoader):
        raise UnknownKind(
            f"prepare_data_loader was called with a {type(dataloader).__name__}.",
            "Only a DataLoader can be prepared.",
            "Wrap the data in torch.utils.data.DataLoader first.",
        )
    check_sharding(sharding, dispatch_batches)
    processes, index = _place(num_processes, process_index, torch_device_mesh)
    world_size = current.process_or_start().world_size
    everyone = torch_device_mesh is not None or processes == world_size
    part = Part(processes, index, split_batches, even_batches, world_size if everyone else 1)
    base = stateful_twin(dataloader) if use_stateful_dataloader else dataloader
    own = _own_part(base, part, sharding, dispatch_batches)
    dispatches = own is None and _dispatches(base, dispatch_batches, sharding, put_on_device, processes, everyone)
    seedable = use_seedable_sampler and not use_configured_sampler
    rereads = use_stateful_dataloader and not restore_position
    shuffling = Shuffling(seedable, data_seed, restore_position, seed_samples, rereads)
    # A part that is this process's own already is read as it is; so is what the main process reads for all.
    source, generator = _divided(
        base if own is None else own, part if own is None and not dispatches else Part(1, 0), shuffling
    )
    if own is not None:
        together = first_of_each(torch_device_mesh, world_size) if everyone else ()
        source = AgreedSource(source, processes, even_batches, _drops_last(base), together, _real_samples(base, part))
    if (restore_position or use_stateful_dataloader) and isinstance(dataloader.dataset, IterableDataset):
        wish = "restore_position=True" if restore_position else "use_stateful_dataloader=True"
        _check_resumable(dataloader.dataset, source, wish)
    shared = generator if part.shared and own is None and not dispatches else None
    options: dict[str, Any] = {
        "device": _device(device) if put_on_device else None,
        "rng_types": _rng_types(rng_types, shared),
        "synchronized_generator": shared,
        "restores": restore_position or use_stateful_dataloader,
        "use_stateful_dataloader": use_stateful_dataloader,
        "gradient_state": gradient,
        "torch_device_mesh": torch_device_mesh,
        "_drop_last": dataloader.drop_last,
        "_non_blocking": non_blocking,
    }
    if not dispatches:
        return DataLoaderShard.around(source, **options)
    if split_batches:
        check_split(getattr(batching_of(dataloader), "batch_size", None), processes)
    steps = DispatchedSource(source, processes, split_batches, _drops_last(dataloader), slice_fn_for_dispatch)
    return DataLoaderDispatcher.around(steps, **options)


def _check_resumable(dataset: Any, source: Source, wish: str) -> None:
    """Refuse a stream that could not be continued after a load, before a run depends on it."""
    obstacle = source.obstacle()
    held = next((name for name, value in getattr(dataset, "__dict__", {}).items() if type(value) in _READ_ONCE), None)
    if held is not None and not source.continues_from_base:
        obstacle = f"The stream holds {held!r}, which can be read once, so that no epoch can be begun again."
    if obstacle is not None:
        raise Conflict(
            f"A loader over {source.identity()} was prepared with {wish}.",
            obstacle,
            "Give the stream a method set_epoch(epoch), which says that an epoch gives the same samples again; or "
            "state_dict() and load_state_dict(), with use_stateful_dataloader=True; or leave restoring off and call "
            "skip_first_batches.",
        )


def _own_part(
    loader: DataLoader[Any], part: Part, sharding: Sharding, dispatch_batches: bool | None
) -> DataLoader[Any] | None:
    """A loader over what is this process's own already, or can be made so at the source; None when it cannot."""
    if dispatch_batches or (part.processes == 1 and not callable(sharding)):
        return None
    if not isinstance(loader.dataset, IterableDataset):
        if callable(sharding):
            raise Conflict(
                "A function as sharding was given for a data set with indices.",
                "It divides streams; indices are divided through the sampler.",
                "Leave sharding at 'auto' for this loader.",
            )
        return loader if sharding == "already" or _divided_sampler(loader, part.processes) is not None else None
    dataset = own_part(loader.dataset, part.processes, part.index, sharding)
    if dataset is None:
        return None
    if not part.split:
        return rebuilt(loader, dataset=dataset)
    check_split(loader.batch_size, part.processes)
    width = (loader.batch_size or 1) // part.processes
    batch_sampler = BatchSampler(loader.sampler, width, loader.drop_last)
    return rebuilt(loader, dataset=dataset, batch_size=width, batch_sampler=batch_sampler)


def _divided_sampler(loader: DataLoader[Any], processes: int) -> DistributedSampler[Any] | None:
    """Torch's sampler for it, where the script divides the indices itself."""
    sampler = get_sampler(loader)
    divides = isinstance(sampler, DistributedSampler) and sampler.num_replicas == processes > 1
    return cast("DistributedSampler[Any]", sampler) if divides else None


def _real_samples(loader: DataLoader[Any], part: Part) -> int | None:
    """Samples that torch's sampler gives this process before it repeats some; None when it is not that sampler."""
    sampler = None if isinstance(loader.dataset, IterableDataset) else _divided_sampler(loader, part.processes)
    if sampler is None:
        return None
    return min(sampler.num_samples, len(range(sampler.rank, len(cast("Sized", sampler.dataset)), part.processes)))


def _divided(loader: DataLoader[Any], part: Part, shuffling: Shuffling) -> tuple[Source, torch.Generator | None]:
    if isinstance(loader.dataset, IterableDataset):
        return divide_stream(loader, part, shuffling)
    return divide_indexed(loader, part, shuffling)


def _dispatches(
    loader: DataLoader[Any],
    asked: bool | None,
    sharding: Sharding,
    put_on_device: bool,
    processes: int,
    everyone: bool,
) -> bool:
    """Whether the main process reads for all."""
    if asked or sharding == "dispatch":
        if not everyone:
            raise Conflict(
                f"Dispatching to {processes} processes was asked for.",
                f"The run has {current.process_or_start().world_size}, and the main process sends to all of them.",
                "Leave num_processes and process_index out, or let every process read for itself.",
            )
        return True
    undecided = asked is None and sharding == "auto" and put_on_device
    return undecided and everyone and processes > 1 and isinstance(loader.dataset, IterableDataset)


def _drops_last(loader: DataLoader[Any]) -> bool:
    return loader.drop_last or bool(getattr(batching_of(loader), "drop_last", False))


def _place(num_processes: int | None, process_index: int | None, mesh: Any) -> tuple[int, int]:
    process = current.process_or_start()
    processes, index = (process.world_size, process.rank) if mesh is None else data_coordinates(mesh)
    return processes if num_processes is None else num_processes, index if process_index is None else process_index


def _device(device: torch.device | None) -> torch.device:
    return current.process_or_start().device if device is None else torch.device(device)


def _rng_types(asked: Sequence[str | RNGType] | None, generator: torch.Generator | None) -> list[str | RNGType]:
    return [kind for kind in asked or () if generator is not None or str(kind) != "generator"]


def get_sampler(dataloader: DataLoader[Any]) -> Any:
    """The sampler of a loader that gives single indices, below whatever divides them; None when there is none."""
    batching = batching_of(dataloader)
    return dataloader.sampler if batching is None else innermost_sampler(batching)
