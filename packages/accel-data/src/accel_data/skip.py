"""Skip the first batches of an epoch, to continue in its middle without restored positions."""

from __future__ import annotations

from typing import Any

from torch.utils.data import BatchSampler, DataLoader, IterableDataset

from accel_state.errors import SettingError, UnknownKind

__all__ = ("skip_first_batches",)


def skip_first_batches(dataloader: DataLoader[Any], num_batches: int = 0) -> DataLoader[Any]:
    """A loader without the first `num_batches` batches of the epoch.

    The skipped samples of a map-style data set are not read; a stream reads them without collating. After
    `load_state_dict`, batches are counted from the beginning of the epoch, even if the loader restores positions
    itself.

    Args:
        dataloader: a prepared loader or a plain one.
        num_batches: the number of batches to skip, counted on one process.

    Raises:
        SettingError: the number is negative.
        UnknownKind: `dataloader` is not a `DataLoader`.

    Example:
        >>> rest = skip_first_batches(loader, 100)
    """
    if num_batches < 0:
        raise SettingError(
            f"Cannot skip {num_batches} batches.",
            "The number cannot be negative.",
            "Give the number of completed batches of this epoch.",
        )
    # Scripts that import this function may prepare no loader.
    from accel_data.loader import DataLoaderShard, PreparedLoader
    from accel_data.progress import Progress
    from accel_data.sharding import SkipBatchSampler, UnbatchedSampler
    from accel_data.source import rebuilt
    from accel_data.stream_source import source_of

    if isinstance(dataloader, PreparedLoader):
        return dataloader.skipping(num_batches)
    if not isinstance(dataloader, DataLoader):
        raise UnknownKind(
            f"Cannot skip batches of a {type(dataloader).__name__}.",
            "Only a DataLoader has batches that can be skipped.",
            "Give the loader itself, not its iterator or data set.",
        )
    if num_batches == 0:
        return dataloader
    if isinstance(dataloader.dataset, IterableDataset):
        # Of a plain loader nobody counts the epochs; the script has set that of its stream.
        epoch = getattr(dataloader.dataset, "epoch", 0)
        return DataLoaderShard.around(
            source_of(dataloader),
            progress=Progress(epoch if isinstance(epoch, int) else 0),
            skip_batches=num_batches,
        )
    if dataloader.batch_sampler is None:
        single = BatchSampler(dataloader.sampler, 1, False)
        return rebuilt(dataloader, sampler=UnbatchedSampler(SkipBatchSampler(single, num_batches)))
    return rebuilt(dataloader, batch_sampler=SkipBatchSampler(dataloader.batch_sampler, num_batches))  # type: ignore[arg-type]
