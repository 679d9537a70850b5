"""Batches of a stream."""

from __future__ import annotations

import copy
from collections.abc import Collection, Iterable, Iterator
from itertools import islice
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset

from accel_data.adapter import opened, rebuilt
from accel_data.iterable import IterableDatasetShard
from accel_data.names import ByContents, ByPosition, as_list
from accel_data.order import Draw, Draws, restore_generator
from accel_data.padding import MarkingCollate, Padding
from accel_data.plan import ShardPlan, shortage
from accel_data.progress import Position
from accel_data.seeding import SampleSeed, SeededStream
from accel_data.sources import READS_NAMES, length_of
from accel_data.stateful import has_state, is_stateful

__all__ = ("SkippedStream", "StreamSource")


class SkippedStream(IterableDataset[Any]):
    """A stream without its first samples.

    Args:
        dataset: the stream.
        samples: how many to leave out.
    """

    def __init__(self, dataset: IterableDataset[Any], samples: int) -> None:
        self.dataset = dataset
        self.samples = samples

    def __iter__(self) -> Iterator[Any]:
        return islice(iter(self.dataset), self.samples, None)

    def __len__(self) -> int:
        return max(len(self.dataset) - self.samples, 0)  # type: ignore[arg-type]


class ResumableSkip(SkippedStream):
    """The same of a stream that can tell its position and go back to it, from where nothing is left out."""

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


class StreamSource:
    """Batches of a stream.

    Args:
        base: reads them.
        processes: number of processes that share the stream.
        step_size: samples of all processes in one step; None when unknown.
        self_contained: whether torchdata's state says all there is to say of a position.

    Attributes:
        rereads: whether a stream that says nothing of itself is taken to give the same samples again.
    """

    rereads = False

    def __init__(
        self, base: DataLoader[Any], processes: int, step_size: int | None, *, self_contained: bool = False
    ) -> None:
        self.base = base
        self.processes = processes
        self.step_size = step_size
        self.skipped_steps = 0
        self.self_contained = self_contained
        self.draws = Draws()
        self._reading = base
        self._continues = has_state(base)
        self._epoch = 0

    @property
    def stream(self) -> Any:
        """The stream itself, below what divides it."""
        dataset: Any = self.base.dataset
        while isinstance(dataset, (IterableDatasetShard, SeededStream)):
            dataset = dataset.dataset
        return dataset

    @property
    def sample_seed(self) -> SampleSeed | None:
        """See `Source`."""
        dataset: Any = self.base.dataset
        dataset = dataset.dataset if isinstance(dataset, IterableDatasetShard) else dataset
        return dataset.sample_seed if isinstance(dataset, SeededStream) else None

    @property
    def counts_steps(self) -> bool:
        """See `Source`."""
        return self.base.num_workers > 0 or not self.step_size

    @property
    def index(self) -> int:
        """See `Source`."""
        dataset = self.base.dataset
        return dataset.process_index if isinstance(dataset, IterableDatasetShard) else 0

    def missing_from_len(self) -> int:
        """See `Source`."""
        return self.skipped_steps

    def names(self) -> Iterable[Any] | None:
        """None: a stream is known when it was read."""
        return None

    def named(self, own: bool = False) -> StreamSource:
        """See `Source`."""
        naming, dataset = (ByContents if own else ByPosition), self.base.dataset
        other = copy.copy(self)
        other._continues = False
        if isinstance(dataset, IterableDatasetShard):
            named = copy.copy(dataset)
            named.dataset = naming(dataset.dataset)
            other.base = rebuilt(self.base, dataset=named, **READS_NAMES | {"collate_fn": MarkingCollate(as_list)})
        else:
            other.base = rebuilt(self.base, dataset=naming(dataset), **READS_NAMES)
        return other

    def length(self) -> int | None:
        """See `Source`."""
        return length_of(self.stream)

    def remainder(self, start: int | None) -> int:
        """See `Source`."""
        length = self.length()
        if length is None or not self.step_size or self.base.drop_last:
            return -1
        return max(length - (start or 0), 0) % self.step_size

    def shortage(self) -> str | None:
        """See `Source`."""
        return shortage(self.length(), self.processes, self.pads and not self.base.drop_last)

    def steps(self, at: Position | None) -> int | None:
        """See `Source`."""
        length = self.length()
        if length is None or self.counts_steps or not self.step_size:
            return None
        start = self.skipped_steps * self.step_size if at is None else at.samples or 0
        width = self.step_size // self.processes
        return len(ShardPlan(length, width, self.processes, self.index, self.pads, self.base.drop_last, start))

    @property
    def pads(self) -> bool:
        """See `Source`."""
        dataset = self.base.dataset
        return isinstance(dataset, IterableDatasetShard) and dataset.pads

    @property
    def may_be_empty(self) -> bool:
        """See `Source`."""
        return self.base.drop_last or (self.processes > 1 and not self.pads)

    def open(self, at: Position | None) -> Iterator[Any]:
        """See `Source`."""
        self._note_draw()
        self._reading = self.base
        if at is not None and at.base is not None:
            self.base.load_state_dict(at.base)  # type: ignore[attr-defined]
            return opened(self.base, self._epoch)
        steps = self.skipped_steps if at is None else at.steps
        samples = steps * (self.step_size or 0) if at is None else at.samples
        if not steps:
            return opened(self.base, self._epoch)
        if self.counts_steps or samples is None:
            return islice(opened(self.base, self._epoch), steps, None)
        self._reading = self._without(samples)
        return iter(self._reading)

    def _without(self, samples: int) -> DataLoader[Any]:
        dataset = self.base.dataset
        if isinstance(dataset, IterableDatasetShard):
            rest = copy.copy(dataset)
            rest.skipped_samples = samples
            return rebuilt(self.base, dataset=rest)
        kind = ResumableSkip if self._continues else SkippedStream
        return rebuilt(self.base, dataset=kind(dataset, samples))  # type: ignore[arg-type]

    def _note_draw(self) -> None:
        again, self.draws.again = self.draws.again, None
        generator = getattr(self.stream, "generator", None)
        if not isinstance(generator, torch.Generator):
            self.draws.last = Draw("fixed")
            return
        self.draws.last = restore_generator(generator, again)

    @property
    def padded(self) -> Collection[int]:
        """None of them: see `padding`."""
        return ()

    def padding(self, number: int) -> Padding | None:
        """None: the batches of a stream carry their own marks."""
        return None

    def upcoming(self, restored: Draw | None = None) -> Draw | None:
        """See `Source`."""
        generator = getattr(self.stream, "generator", None)
        return restore_generator(generator, restored) if isinstance(generator, torch.Generator) else None

    def set_epoch(self, epoch: int) -> None:
        """See `Source`."""
        self._epoch = epoch
        if hasattr(self.base.dataset, "set_epoch"):
            self.base.dataset.set_epoch(epoch)

    def skipping(self, steps: int) -> StreamSource:
        """See `Source`."""
        other = copy.copy(self)
        other.skipped_steps += steps
        return other

    def skipped(self) -> tuple[int, int | None]:
        """See `Source`."""
        return self.skipped_steps, None if self.step_size is None else self.skipped_steps * self.step_size

    @property
    def continues_from_base(self) -> bool:
        """See `Source`."""
        return self._continues

    def base_state(self) -> dict[str, Any] | None:
        """See `Source`."""
        return self._reading.state_dict() if is_stateful(self._reading) else None  # type: ignore[attr-defined]

    def identity(self) -> str:
        """See `Source`."""
        return f"{type(self.stream).__module__}.{type(self.stream).__qualname__}"

    def obstacle(self) -> str | None:
        """See `Source`."""
        if self.continues_from_base or isinstance(getattr(self.stream, "generator", None), torch.Generator):
            return None
        return self.foreign_obstacle()

    def foreign_obstacle(self) -> str | None:
        """See `Source`."""
        stream = self.stream
        if hasattr(stream, "set_epoch") or (self.continues_from_base and self.processes == 1):
            return None
        # What divides a stream seeds its generator from the epoch.
        if isinstance(getattr(stream, "generator", None), torch.Generator) and self.stream is not self.base.dataset:
            return None
        if self.rereads:
            return None
        hint = " Its own state is used with use_stateful_dataloader=True." if hasattr(stream, "state_dict") else ""
        return (
            f"The stream {self.identity()} has no position: neither set_epoch nor a generator says that it gives the "
            f"same samples again.{hint}"
        )
