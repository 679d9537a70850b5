"""The dispatching loader: the main process reads for all, and each process receives its shard of every step."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, Final

import torch
from torch.utils.data import IterableDataset

from accel_data.batches import cut, join, samples_in
from accel_data.loader import PreparedLoader
from accel_data.mesh import coordinates
from accel_data.order import RNGState
from accel_data.padding import PaddedBatch
from accel_data.progress import Position, Progress
from accel_data.sharding import Padding, shortage
from accel_data.source import LocalSource, Source, first_batches
from accel_data.stream_source import source_of
from accel_ops.objects import gather_object, scatter_object
from accel_ops.tree import recursively_apply
from accel_state import current
from accel_state.errors import DataError
from accel_state.gradient import GradientState
from accel_state.library import stack_level

__all__ = ("DataLoaderDispatcher", "DispatchedSource", "GlobalStep", "global_steps")

_MAIN_RANK: Final = 0

_BATCH_MESSAGE: Final = "batch"
_END_MESSAGE: Final = "end"
_FAILURE_MESSAGE: Final = "failure"
"""Kinds of messages from the main process; the first element of each message."""

_PLAIN_TYPES: Final = (bool, int, float, str, list, tuple, range)
_MAX_ATTRIBUTE_CHARACTERS: Final = 200
"""Characters of an attribute of a stream that the processes compare."""

SliceFunction = Callable[..., Any]
"""`f(batch, slice, process_index=, num_processes=)` gives the samples of a slice."""


class DataLoaderDispatcher(PreparedLoader):
    """Yields this process's shard of the batches that the main process reads.

    Args:
        dataset: the data set; only the main process reads it.
        split_batches: split each batch of the loader; otherwise a step takes one batch for each process.
        skip_batches: batches to skip at the beginning of every epoch, counted on one process.
        use_stateful_dataloader: read through torchdata's `StatefulDataLoader`.
        slice_fn: `f(batch, slice, process_index=, num_processes=)` that returns the samples of one process.
        torch_device_mesh: mesh whose data axes determine which processes receive different shards.
        iteration: number of the first epoch.
        gradient: gradient state of the loader's Accelerator. None uses the current one.
        restore_position: continue in the middle of the epoch after `load_state_dict`.
        kwargs: arguments of `torch.utils.data.DataLoader`.
    """

    source: DispatchedSource

    def __init__(
        self,
        dataset: Any,
        split_batches: bool = False,
        skip_batches: int = 0,
        use_stateful_dataloader: bool = False,
        _drop_last: bool = False,
        _non_blocking: bool = False,
        slice_fn: SliceFunction | None = None,
        torch_device_mesh: Any = None,
        iteration: int = 0,
        *,
        gradient: GradientState | None = None,
        restore_position: bool = False,
        **kwargs: Any,
    ) -> None:
        super().__init__(dataset, use_stateful_dataloader=use_stateful_dataloader, **kwargs)
        process = current.process_or_start()
        shards = max(coordinates(torch_device_mesh, process.world_size)) + 1
        local = source_of(self.base_dataloader)
        self._read_from(
            DispatchedSource(local, shards, split_batches, _drop_last, slice_fn, torch_device_mesh),
            use_stateful_dataloader,
            gradient,
            Progress(iteration),
            skip_batches,
            device=process.device,
            restores=restore_position or use_stateful_dataloader,
            torch_device_mesh=torch_device_mesh,
            _drop_last=_drop_last,
            _non_blocking=_non_blocking,
        )

    @property
    def split_batches(self) -> bool:
        """Whether each batch of the loader is split."""
        return self.source.split

    @property
    def slice_fn(self) -> SliceFunction | None:
        """The function that returns the samples of one process, if one was given."""
        return self.source.slice_fn


class DispatchedSource(Source):
    """Shards of global steps, which the main process reads from the batches of the script's loader.

    Args:
        local: yields the batches of the script's loader.
        processes: number of shards of a step.
        split: split each batch; otherwise a step takes one batch for each process.
        drop_last: drop an incomplete last step.
        slice_fn: `f(batch, slice, process_index=, num_processes=)` that returns the samples of one process.
        mesh: mesh whose data axes determine which processes receive different shards.
    """

    def __init__(
        self,
        local: LocalSource,
        processes: int,
        split: bool = False,
        drop_last: bool = False,
        slice_fn: SliceFunction | None = None,
        mesh: Any = None,
    ) -> None:
        self.local = local
        self.split = split
        self.drop_last = drop_last
        self.slice_fn = slice_fn
        self.mesh = mesh
        self.processes = processes
        self.step_size = None if local.step_size is None else local.step_size * self.batches_per_step
        self.counts_steps = local.counts_steps
        self.self_contained = local.self_contained and processes == 1
        self._described = False

    @property
    def batches_per_step(self) -> int:
        """Batches of the loader in one step."""
        return 1 if self.split else self.processes

    @property
    def reads_here(self) -> bool:
        return current.process_or_start().rank == _MAIN_RANK

    @property
    def drops_last(self) -> bool:
        return self.drop_last

    @property
    def may_be_empty(self) -> bool:
        return self.drop_last or self.local.may_be_empty

    def length(self) -> int | None:
        return self.local.length()

    def steps(self) -> int:
        batches = self.local.steps()
        return batches // self.batches_per_step if self.drop_last else -(-batches // self.batches_per_step)

    def remainder(self, start: int | None) -> int:
        # An unbatched sample may contain any number of samples.
        return -1 if self.local.base.batch_sampler is None else super().remainder(start)

    def shortage(self) -> str | None:
        length = self.length() if self.local.has_exact_length else None
        return shortage(length, self.processes, not self.drop_last)

    def agree(self, start: int | None) -> tuple[int, str | None]:
        """Those of the main process; the other processes do not read their data set.

        Raises:
            DataError: the loaders of the processes differ.
        """
        own = super().agree(start)
        if current.process_or_start().world_size == 1:
            return own
        settings = {
            "batch_size": self.local.base.batch_size,
            "split_batches": self.split,
            "drop_last": self.drop_last,
            "skip_batches": self.skipped()[0],
        }
        described = None if self._described else _description(self.local.base.dataset)
        self._described = True
        everyone = gather_object([(settings, own, described)])
        for rank, (others, _, _) in enumerate(everyone):
            _check_equal(rank, everyone[_MAIN_RANK][0], others)
        _warn_of_divided_stream([description for *_, description in everyone])
        agreed: tuple[int, str | None] = everyone[_MAIN_RANK][1]
        return agreed

    def open(self, at: Position | None = None, replay: RNGState | None = None) -> Iterator[PaddedBatch]:
        # Errors are raised when the first step is read, because the other processes receive them there.
        process = current.process_or_start()
        if process.world_size == 1:
            return (PaddedBatch(step.batches[0], step.padding, step.base) for step in self.global_steps(at, replay))
        steps = self.global_steps(at, replay) if process.rank == _MAIN_RANK else None
        return _scattered(steps, coordinates(self.mesh, process.world_size))

    def global_steps(self, at: Position | None = None, replay: RNGState | None = None) -> Iterator[GlobalStep]:
        """The steps of all processes, for the main process only; arguments like those of `open`."""
        steps, first = self.local.skipped()[0] if at is None else at.steps, None
        if steps and not self.drop_last:
            first, replay = first_batches(self.local, self.batches_per_step, replay)
        start = None if at is None else dataclasses.replace(at, steps=at.steps * self.batches_per_step)
        batched = self.local.base.batch_sampler is not None
        batches = self.local.open(start, replay)
        yield from global_steps(batches, self.processes, self.split, self.drop_last, self.slice_fn, first, batched)

    def skipping(self, steps: int) -> DispatchedSource:
        return self.over(self.local.skipping(steps * self.batches_per_step))

    def skipped(self) -> tuple[int, int | None]:
        batches, samples = self.local.skipped()
        return batches // self.batches_per_step, samples

    def with_sample_ids(self) -> DispatchedSource:
        other = self.over(self.local.with_sample_ids())
        # A function that slices batches cannot slice lists of ids.
        other.slice_fn = None
        return other

    def obstacle_to_counting(self) -> str | None:
        if self.processes > 1:
            return "The state includes batches that the main process had prefetched, so the position is unknown."
        return self.local.obstacle_to_counting()


def _check_equal(rank: int, main: dict[str, Any], others: dict[str, Any]) -> None:
    name = next((name for name, value in others.items() if value != main[name]), None)
    if name is not None:
        raise DataError(
            "cannot begin an epoch that the main process reads for all processes.",
            f"Process 0 has {name}={main[name]}, process {rank} has {name}={others[name]}.",
            "Create the loader with the same arguments on every process.",
        )


def _description(dataset: Any) -> dict[str, str] | None:
    """The type and the plain attributes of a stream, as text; None for a map-style data set."""
    if not isinstance(dataset, IterableDataset):
        return None
    plain = {name: value for name, value in vars(dataset).items() if type(value) in _PLAIN_TYPES}
    return {"": str(type(dataset))} | {name: repr(value)[:_MAX_ATTRIBUTE_CHARACTERS] for name, value in plain.items()}


def _warn_of_divided_stream(descriptions: Sequence[dict[str, str] | None]) -> None:
    """Warn on the main process if its stream seems to be one of several, by an attribute that differs."""
    main = descriptions[_MAIN_RANK]
    if main is None or current.process_or_start().rank != _MAIN_RANK:
        return
    for rank, other in enumerate(descriptions):
        # Other processes may have a stand-in.
        if other is None or other.keys() != main.keys() or other[""] != main[""]:
            continue
        name = next((name for name, value in other.items() if value != main[name]), None)
        if name is not None:
            warnings.warn(
                f"The main process reads the stream for all processes, but it has {name}={main[name]} there and "
                f"{name}={other[name]} on process {rank}. If the stream is divided by rank, the samples of the other "
                "processes are lost: use sharding='already' then.",
                UserWarning,
                stacklevel=stack_level(),
            )
            return


# ------------------------------------------------------------------ the steps of all processes, read by the main one


@dataclass
class GlobalStep:
    """One step of all processes.

    Args:
        batches: one batch for each process.
        padding: the real samples of the last step of the epoch, and of a step that was padded; else None.
        base: torchdata's state after the step; None if a position is enough.
    """

    batches: list[Any]
    padding: Padding | None = None
    base: dict[str, Any] | None = None


def global_steps(
    batches: Iterator[Any],
    processes: int,
    split: bool,
    drop_last: bool,
    slice_fn: SliceFunction | None = None,
    first: list[Any] | None = None,
    batched: bool = True,
) -> Iterator[GlobalStep]:
    """Build the steps of all processes from the batches of a loader.

    A step takes one batch for each process, or one batch to split. Batches of equal size are unchanged. Otherwise the
    samples of the step are dealt evenly: they are concatenated, padded with samples from the beginning of the epoch,
    and split.

    Args:
        batches: the batches of the loader.
        processes: number of shards of a step.
        split: split each batch, instead of taking one for each process.
        drop_last: drop an incomplete last step.
        slice_fn: slices a batch, instead of `accel_data.batches.cut`.
        first: the batches of the epoch's first step; None for the first ones of `batches`.
        batched: whether these are batches; if not, each may be one sample, which is sliced in the last step only.
    """
    per_step = 1 if split else processes
    head: Any = _first_samples(first, processes) if first else None
    upcoming, base, failure = _take(batches, per_step)
    while upcoming and failure is None:
        taken, state = upcoming, base
        upcoming, base, failure = _take(batches, per_step)
        if head is None:
            head = _first_samples(taken, processes)
        incomplete = len(taken) < per_step
        if incomplete and drop_last:
            return
        ends = not upcoming and failure is None
        sizes = {samples_in(batch) for batch in taken} if ends or batched else {None}
        if split or slice_fn is not None or incomplete or len(sizes) > 1:
            step = _cut_step(taken, head, processes, slice_fn, ends)
        else:
            (size,) = sizes
            step = GlobalStep(taken, Padding(size * processes, size, processes) if ends and size is not None else None)
        step.base = state
        del taken
        yield step
        del step
    if failure is not None:
        try:
            raise failure
        finally:
            # The error would keep this frame alive, and the frame the error.
            del failure


def _take(batches: Iterator[Any], count: int) -> tuple[list[Any], dict[str, Any] | None, Exception | None]:
    """The next batches and the state after them; an error is raised only after the previous step was yielded."""
    taken: list[Any] = []
    state = None
    try:
        for item in islice(batches, count):
            batch, state = (item.batch, item.base) if type(item) is PaddedBatch else (item, None)
            taken.append(batch)
    except Exception as error:
        return taken, state, error
    return taken, state, None


def _first_samples(taken: list[Any], processes: int) -> Any:
    first = taken[0]
    size = samples_in(first)
    if size is None:
        return first
    joined = _joined_or_none(taken) if size < processes - 1 else None
    if joined is None:
        joined = first
    # Copies, so that the first step's memory is not kept for the whole epoch.
    return recursively_apply(torch.clone, cut(joined, 0, max(processes - 1, 1)))


def _joined_or_none(batches: list[Any]) -> Any:
    """Concatenated batches; None if their samples have different shapes."""
    try:
        return join(batches)
    except DataError:
        return None


def _cut_step(taken: list[Any], head: Any, processes: int, slice_fn: SliceFunction | None, ends: bool) -> GlobalStep:
    if samples_in(taken[0]) is None:
        return _unbatched_step(taken, head, processes)
    joined = _joined_or_none(taken)
    if joined is None:
        return _uneven_step(taken, processes, slice_fn)
    total = samples_in(joined) or 0
    missing = -total % processes
    filled = _filled(joined, head, missing)
    width = (total + missing) // processes
    shards = [_shard_of(filled, index, width, processes, slice_fn) for index in range(processes)]
    return GlobalStep(shards, Padding(total, width, processes) if missing or ends else None)


def _filled(batch: Any, head: Any, missing: int) -> Any:
    """A batch with `missing` further samples: of `head`, or of the batch itself if those have other shapes."""
    if not missing:
        return batch
    filled = _joined_or_none([batch, _repeated(head, missing)])
    return join([batch, _repeated(batch, missing)]) if filled is None else filled


def _repeated(batch: Any, count: int) -> Any:
    """`count` samples of a batch, repeated as often as necessary."""
    return cut(join([batch] * (count // max(samples_in(batch) or 1, 1) + 1)), 0, count)


def _uneven_step(taken: list[Any], processes: int, slice_fn: SliceFunction | None) -> GlobalStep:
    """One batch for each process, completed from itself, because the samples of different batches differ in shape.

    Raises:
        DataError: a function slices the concatenated batches.
    """
    if slice_fn is not None:
        # The error says which shapes differ.
        join(taken)
    sizes = [samples_in(batch) or 0 for batch in taken]
    width = max(sizes)
    shards = [_filled(batch, batch, width - size) for batch, size in zip(taken, sizes, strict=True)]
    shards += [shards[-1]] * (processes - len(shards))
    return GlobalStep(shards, Padding.by_process(sizes + [0] * (processes - len(sizes)), width))


def _shard_of(batch: Any, index: int, width: int, processes: int, slice_fn: SliceFunction | None) -> Any:
    start, stop = index * width, (index + 1) * width
    if slice_fn is None:
        return cut(batch, start, stop)
    return slice_fn(batch, slice(start, stop), process_index=index, num_processes=processes)


def _unbatched_step(taken: list[Any], head: Any, processes: int) -> GlobalStep:
    """Unbatched samples: one for each process, repeating the first one if there are too few."""
    padding = Padding(len(taken), 1, processes).of_single() if len(taken) < processes else None
    return GlobalStep([*taken, *[head] * (processes - len(taken))], padding)


# ------------------------------------------------------------------ one message for each process


def _scattered(steps: Iterator[GlobalStep] | None, shard_of_rank: Sequence[int]) -> Iterator[PaddedBatch]:
    """This process's batches, with one collective for each step.

    Args:
        steps: the steps of all processes, on the main process; None on the others.
        shard_of_rank: the index of each rank's shard.

    Raises:
        CollectiveError: a process has ended.
        DataError: the main process could not read.
    """
    while True:
        step, failure = _next_step(steps)
        message = scatter_object(
            _messages(steps, step, failure, shard_of_rank), _MAIN_RANK, operation="DataLoader.__next__"
        )
        state = None if step is None else step.base
        del step
        if failure is not None:
            try:
                raise failure
            finally:
                # The error would keep this frame alive, and the frame the error.
                del failure
        if message[0] == _END_MESSAGE:
            return
        if message[0] == _FAILURE_MESSAGE:
            raise DataError(
                "Cannot get the next batch.",
                f"The main process, which reads for all processes, could not read it: {message[1]}",
                "See the error of process 0.",
            )
        yield PaddedBatch(message[1], message[2], state)


def _next_step(steps: Iterator[GlobalStep] | None) -> tuple[GlobalStep | None, Exception | None]:
    try:
        return (None, None) if steps is None else (next(steps, None), None)
    except Exception as error:
        return None, error


def _messages(
    steps: Iterator[GlobalStep] | None, step: GlobalStep | None, failure: Exception | None, shard_of_rank: Sequence[int]
) -> list[tuple[Any, ...]] | None:
    """What the main process sends to each process; None on the others."""
    if steps is None:
        return None
    if failure is not None:
        return [(_FAILURE_MESSAGE, f"{type(failure).__name__}: {failure}")] * len(shard_of_rank)
    if step is None:
        return [(_END_MESSAGE,)] * len(shard_of_rank)
    return [(_BATCH_MESSAGE, step.batches[shard], step.padding) for shard in shard_of_rank]
