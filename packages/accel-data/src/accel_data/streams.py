"""A process's shard of a stream: sharded at its source, or selected from a stream that every process reads."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import Any

import torch
from torch.utils.data import IterableDataset, get_worker_info

from accel_data.config import Sharding
from accel_data.padding import PaddingMarker
from accel_data.sharding import ShardPlan, check_process, check_split, shard_samples

__all__ = (
    "IterableDatasetShard",
    "ResumableShard",
    "ResumableSkip",
    "SkippedStream",
    "is_sharded",
    "own_shard",
    "seed_stream",
    "shards_itself",
)


def shards_itself(dataset: Any, processes: int, sharding: Sharding) -> bool:
    """Whether a stream is, or can give, the shard of one process.

    Args:
        dataset: the whole stream, or one that is sharded already.
        processes: number of processes, more than one.
        sharding: see `DataLoaderConfiguration`.
    """
    if callable(sharding) or sharding == "already":
        return True
    if sharding != "auto":
        return False
    return is_sharded(dataset) or callable(getattr(dataset, "split_by_node", None)) or _has_shards(dataset, processes)


def own_shard(dataset: Any, processes: int, index: int, sharding: Sharding) -> Any:
    """The stream of one process; None if the stream cannot give it.

    Args:
        dataset: the whole stream, or one that is sharded already.
        processes: number of processes.
        index: index of this process.
        sharding: see `DataLoaderConfiguration`.
    """
    if callable(sharding):
        return sharding(dataset, processes, index)
    if sharding == "already" or is_sharded(dataset):
        return dataset
    if callable(getattr(dataset, "split_by_node", None)):
        return dataset.split_by_node(index, processes)
    if _has_shards(dataset, processes):
        return dataset.shard(num_shards=processes, index=index)
    return None


def _has_shards(dataset: Any, processes: int) -> bool:
    # With fewer shards, or an uneven number, some processes would have no samples or more than others.
    count = getattr(dataset, "num_shards", None)
    return callable(getattr(dataset, "shard", None)) and isinstance(count, int) and count > 0 and count % processes == 0


def is_sharded(dataset: Any) -> bool:
    """Whether a stream is marked as one process's shard, as streams of Hugging Face datasets and WebDataset are."""
    stages = getattr(dataset, "pipeline", ())
    functions = [getattr(stage, "func", stage) for stage in stages] if isinstance(stages, (list, tuple)) else []
    splits = any(getattr(function, "__name__", "") == "split_by_node" for function in functions)
    return splits or getattr(dataset, "_distributed", None) is not None


class IterableDatasetShard(IterableDataset[Any]):
    """The samples of one process from a stream.

    Every process reads the whole stream, so the stream must yield the same samples in the same order on all processes.

    Args:
        dataset: the stream.
        batch_size: samples of one process in a step; of all processes together with `split_batches`.
        drop_last: drop samples that do not fill a step.
        num_processes: number of processes.
        process_index: index of this process.
        split_batches: see `batch_size`.
        even_batches: pad the last step with samples from the beginning; a single process never pads.
        marking: yield the last sample of a padded step as `accel_data.padding.PaddingMarker`, for a loader that
            collates with `PaddingCollate`; and raise an error if some process would have no sample.

    Raises:
        SettingError: a number is out of range, or a batch cannot be split into equal shards.
    """

    def __init__(
        self,
        dataset: IterableDataset[Any],
        batch_size: int = 1,
        drop_last: bool = False,
        num_processes: int = 1,
        process_index: int = 0,
        split_batches: bool = False,
        *,
        even_batches: bool = True,
        marking: bool = False,
    ) -> None:
        check_process(num_processes, process_index)
        if split_batches:
            check_split(batch_size, num_processes)
        self.dataset = dataset
        self.batch_size = batch_size
        self.drop_last = drop_last
        self.num_processes = num_processes
        self.process_index = process_index
        self.split_batches = split_batches
        self.even_batches = even_batches
        self.marking = marking
        self.epoch = 0
        self.skipped_samples = 0

    @property
    def pads(self) -> bool:
        """Whether a short last step is padded; a single process never pads."""
        return self.even_batches and self.num_processes > 1

    def plan(self, length: int = 0) -> ShardPlan:
        """This process's shard of a stream of `length` samples."""
        width = self.batch_size // self.num_processes if self.split_batches else self.batch_size
        start, even, drop_last = self.skipped_samples, self.pads, self.drop_last
        return ShardPlan(length, width, self.num_processes, self.process_index, even, drop_last, start)

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the next iteration, and pass it on if the stream has `set_epoch`."""
        self.epoch = epoch
        if hasattr(self.dataset, "set_epoch"):
            self.dataset.set_epoch(epoch)

    def __iter__(self) -> Iterator[Any]:
        seed_stream(self.dataset, self.epoch)
        return self._samples(None)

    def _samples(self, first: list[Any] | None) -> Iterator[Any]:
        # A DataLoader worker may read only a part of the stream, so it cannot know whether there are too few samples.
        for_all = self.marking and get_worker_info() is None
        for batch, padding in shard_samples(self.dataset, self.plan(), first, for_all):
            if padding is None or not self.marking:
                yield from batch
                continue
            yield from batch[:-1]
            yield PaddingMarker(batch[-1], padding)

    def __len__(self) -> int:
        plan = self.plan(len(self.dataset))  # type: ignore[arg-type]
        last = len(plan.tail_positions()) if plan.has_tail else 0
        return plan.full_steps * plan.batch_size + last


class ResumableShard(IterableDatasetShard):
    """The shard of a stream that can save and restore its position, as `StatefulDataLoader` requires."""

    _position: Any = None

    def state_dict(self) -> dict[str, Any]:
        """The position of the stream; after each batch it is between two steps."""
        state: dict[str, Any] = self.dataset.state_dict()  # type: ignore[attr-defined]
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Let the next iteration begin at a position."""
        self._position = state_dict

    def __iter__(self) -> Iterator[Any]:
        position, self._position = self._position, None
        if position is None:
            return super().__iter__()
        # Samples from the beginning of the epoch are needed to pad the last step.
        first = list(islice(iter(self.dataset), self.plan().step_size))
        self.dataset.load_state_dict(position)  # type: ignore[attr-defined]
        return self._samples(first)


def seed_stream(dataset: Any, epoch: int) -> None:
    """Seed the `generator` attribute of a stream with the epoch, so that all processes read the same order.

    A stream with `set_epoch` is not changed, because it seeds itself.
    """
    generator = getattr(dataset, "generator", None)
    if isinstance(generator, torch.Generator) and not hasattr(dataset, "set_epoch"):
        generator.manual_seed(epoch)


class SkippedStream(IterableDataset[Any]):
    """A stream without its first samples.

    Args:
        dataset: the stream.
        samples: number of samples to skip.
    """

    def __init__(self, dataset: IterableDataset[Any], samples: int) -> None:
        self.dataset = dataset
        self.samples = samples

    def __iter__(self) -> Iterator[Any]:
        return islice(iter(self.dataset), self.samples, None)

    def __len__(self) -> int:
        return max(len(self.dataset) - self.samples, 0)  # type: ignore[arg-type]


class ResumableSkip(SkippedStream):
    """A `SkippedStream` that can restore a position; a restored position is after the skipped samples."""

    _resumes = False

    def state_dict(self) -> dict[str, Any]:
        """The position of the stream."""
        state: dict[str, Any] = self.dataset.state_dict()  # type: ignore[attr-defined]
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Let the next iteration begin at a position."""
        self.dataset.load_state_dict(state_dict)  # type: ignore[attr-defined]
        self._resumes = True

    def __iter__(self) -> Iterator[Any]:
        resumes, self._resumes = self._resumes, False
        return iter(self.dataset) if resumes else super().__iter__()
