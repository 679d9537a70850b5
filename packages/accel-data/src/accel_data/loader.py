"""The loader that a script iterates: this process's batches, on its device, read one ahead so that the end is known."""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence
from typing import Any

import torch
from torch.utils.data import BatchSampler, DataLoader, IterableDataset

from accel_data.feed import fed
from accel_data.indexed import MapSource
from accel_data.padding import Marked
from accel_data.prepared import END, PreparedLoader
from accel_data.progress import Position, Progress
from accel_data.samplers import BatchSamplerShard, batching_of
from accel_data.self_contained import SelfContained
from accel_data.sources import Source
from accel_data.stateful import is_stateful, knows_its_order
from accel_data.streamed import StreamSource
from accel_ops.conversion import send_to_device
from accel_state.gradient import GradientState
from accel_state.labels import RNGType

__all__ = ("DataLoaderShard", "source_of")


class DataLoaderShard(PreparedLoader):
    """Gives this process's batches and keeps account of where it stands.

    Made by `prepare_data_loader`; made directly, its data set and samplers are taken as this process's own.

    Args:
        dataset: the data set.
        device: where batches are moved to; None leaves them where they are.
        rng_types: generators made equal on all processes when an iteration begins; see `synchronize_rng_states`.
        synchronized_generator: the one meant by "generator".
        skip_batches: batches left out at the beginning of every epoch.
        use_stateful_dataloader: read through torchdata's `StatefulDataLoader`.
        torch_device_mesh: kept for readers; the sharding was decided before.
        iteration: number of the first epoch.
        gradient: state of the Accelerator that the loader belongs to; the current one when None.
        restore_position: continue in the middle of the epoch after `load_state_dict`.
        kwargs: of `torch.utils.data.DataLoader`.
    """

    def __init__(
        self,
        dataset: Any,
        device: torch.device | None = None,
        rng_types: Sequence[str | RNGType] | None = None,
        synchronized_generator: torch.Generator | None = None,
        skip_batches: int = 0,
        use_stateful_dataloader: bool = False,
        _drop_last: bool = False,
        _non_blocking: bool = False,
        torch_device_mesh: Any = None,
        iteration: int = 0,
        *,
        gradient: GradientState | None = None,
        restore_position: bool = False,
        **kwargs: Any,
    ) -> None:
        super().__init__(dataset, use_stateful_dataloader=use_stateful_dataloader, **kwargs)
        source = source_of(self.base_dataloader)
        source = source.skipping(skip_batches) if skip_batches else source
        self.hold(source.base, use_stateful_dataloader)
        self._set(
            source,
            device=device,
            rng_types=rng_types,
            synchronized_generator=synchronized_generator,
            skip_batches=skip_batches,
            skips=skip_batches > 0,
            restores=restore_position or use_stateful_dataloader,
            gradient_state=gradient,
            progress=Progress(iteration),
            torch_device_mesh=torch_device_mesh,
            _drop_last=_drop_last,
            _non_blocking=_non_blocking,
        )

    def _open(self, at: Position | None) -> Iterator[Any]:
        batches, feed = super()._open(at), self.feed
        if is_stateful(self.base_dataloader):
            batches = _with_states(batches, self.source)
        if feed is None:
            return batches
        # What another thread reads ahead must not draw from this process's generators.
        return fed(batches, feed, self.base_dataloader.num_workers > 0, _batch_of, _replaced)

    def _give_out(self, batches: Iterator[Any], first: Any) -> Generator[Any, None, int]:
        progress, source = self.progress, self.source
        padded = source.padded
        device, non_blocking, fetch = self.device, self._non_blocking, self._next
        current, number = first, 0
        while current is not END:
            padding, base = source.padding(number) if padded else None, None
            if type(current) is Marked:
                padding, base = current.padding or padding, current.base
                current = current.batch
            # Moved before the next one is read, so that a copy to the device overlaps with reading.
            stays = device is None or lies_on(current, device)
            batch = current if stays else send_to_device(current, device, non_blocking)
            current = fetch(batches)
            number += 1
            progress.steps += 1
            progress.base = base
            progress.padding = padding
            if current is END:
                progress.end_of_dataloader = True
                progress.final_base = source.base_state()
                if padding is not None and padding.total >= 0:
                    progress.remainder = padding.total
                elif progress.remainder < 0:
                    self._count_last(batch)
            yield batch
        return number


def _with_states(batches: Iterator[Any], source: Source) -> Iterator[Marked]:
    """The batches, each with torchdata's state after it, which the next one changes."""
    for batch in batches:
        marked = batch if type(batch) is Marked else Marked(batch, None)
        marked.base = source.base_state()
        yield marked


def _batch_of(item: Any) -> Any:
    return item.batch if type(item) is Marked else item


def _replaced(item: Any, batch: Any) -> Any:
    return Marked(batch, item.padding, item.base) if type(item) is Marked else batch


def lies_on(batch: Any, device: torch.device) -> bool:
    """Whether a tensor, or a flat dict or sequence of tensors, is on a device: quicker to see than to move it there."""
    kind = type(batch)
    if kind is torch.Tensor:
        return bool(batch.device == device)
    if kind is not dict and kind is not list and kind is not tuple:
        return False
    for value in batch.values() if kind is dict else batch:
        if type(value) is not torch.Tensor or value.device != device:
            return False
    return True


def source_of(loader: DataLoader[Any]) -> Source:
    """The source of a loader whose samplers are this process's own already."""
    contained = knows_its_order(loader)
    if isinstance(loader.dataset, IterableDataset):
        return StreamSource(loader, 1, loader.batch_size, self_contained=contained)
    if contained:
        return SelfContained(loader)
    batching = batching_of(loader)
    if isinstance(batching, BatchSamplerShard):
        return MapSource(loader, batching)
    return MapSource.over(loader, BatchSamplerShard(batching or BatchSampler(loader.sampler, 1, False)))
