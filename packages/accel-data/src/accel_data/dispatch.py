"""The dispatching loader: the main process reads for all, and each process receives its shard of every step.

Every step is one message to each process. It announces the size of the next one, which is sent while the loop works on
this one.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Generator, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, Final

import torch

from accel_data.batch_codec import (
    BATCH,
    END,
    FAILURE,
    Announcement,
    BatchSpec,
    Message,
    PackedBatch,
    cut,
    join,
    pack,
    samples_in,
)
from accel_data.hooks import transferred
from accel_data.loader import NO_BATCH, LoaderEpoch, LoaderOptions, PreparedLoader
from accel_data.mesh import coordinates
from accel_data.order import RNGState
from accel_data.progress import EpochInfo, Position, Progress
from accel_data.sharding import Padding, shortage
from accel_data.source import Source, WrappedSource, first_batches
from accel_data.source_choice import source_of
from accel_ops.conversion import send_to_device
from accel_ops.objects import broadcast_object_list, gather_object
from accel_ops.pending import ScatterStream, open_scatter_stream
from accel_ops.tree import recursively_apply
from accel_state import current
from accel_state.errors import DataError
from accel_state.gradient import GradientState

__all__ = ("DataLoaderDispatcher", "DispatchedSource", "GlobalStep", "ReceivedBatch", "global_steps")

_MAIN: Final = 0
_CALLS: Final = ("DataLoader.__iter__", "DataLoader.__next__")

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
        inner = source_of(self.base_dataloader)
        options = LoaderOptions(
            device=process.device,
            skip_batches=skip_batches,
            skips=skip_batches > 0,
            restores=restore_position or use_stateful_dataloader,
            torch_device_mesh=torch_device_mesh,
            _drop_last=_drop_last,
            _non_blocking=_non_blocking,
        )
        source = DispatchedSource(inner, shards, split_batches, _drop_last, slice_fn).skipping(skip_batches)
        self._read_from(source, options, use_stateful_dataloader, gradient, Progress(iteration))

    @property
    def split_batches(self) -> bool:
        """Whether each batch of the loader is split."""
        return self.source.split

    @property
    def slice_fn(self) -> SliceFunction | None:
        """The function that returns the samples of one process, if one was given."""
        return self.source.slice_fn

    def _epoch_info(self, at: Position | None, samples: int | None) -> EpochInfo:
        """The data set of the main process; the other processes do not read theirs."""
        own = super()._epoch_info(at, samples)
        if current.process_or_start().world_size == 1:
            return own
        base = self.base_dataloader
        mine = {
            "batch_size": base.batch_size,
            "split_batches": self.source.split,
            "drop_last": self.source.drop_last,
            "skip_batches": self.source.skipped()[0],
        }
        everyone = gather_object([(mine, own)])
        for rank, (theirs, _) in enumerate(everyone):
            self._check_alike(rank, everyone[0][0], theirs)
        info: EpochInfo = everyone[0][1]
        return info

    def _check_alike(self, rank: int, main: dict[str, Any], theirs: dict[str, Any]) -> None:
        name = next((name for name, value in theirs.items() if value != main[name]), None)
        if name is not None:
            raise self.error(
                "cannot begin an epoch that the main process reads for all processes.",
                f"Process 0 has {name}={main[name]}, process {rank} has {name}={theirs[name]}.",
                "Create the loader with the same arguments on every process.",
            )

    def _open(self, at: Position | None, replay: RNGState | None) -> Iterator[Any]:
        received, transfer = self._received(at, replay), self.device_transfer
        if transfer is None:
            return received
        return transferred(
            received, transfer, False, lambda one: one.batch, lambda one, batch: dataclasses.replace(one, batch=batch)
        )

    def _received(self, at: Position | None, replay: RNGState | None) -> Iterator[ReceivedBatch]:
        process, source = current.process_or_start(), self.source
        if process.world_size == 1:
            return _alone(source.open(at, replay))
        if process.rank == _MAIN:
            return _send(source.open(at, replay), coordinates(self.torch_device_mesh, process.world_size))
        return _receive(process.rank, source.processes)

    def _batches(self) -> Generator[Any, None, None]:
        with LoaderEpoch(self) as epoch:
            progress, device, number = self.progress, self.device, 0
            between, pauses = self.between_batches, self.pauses
            received, epoch.first = epoch.first, None
            while isinstance(received, ReceivedBatch):
                number += 1
                progress.steps += 1
                progress.base = received.base
                progress.padding = padding = received.padding
                progress.end_of_dataloader = received.last
                batch = received.batch
                if received.last and padding is not None and padding.total >= 0:
                    progress.remainder = padding.total % (self.source.step_size or padding.total + 1)
                elif received.last:
                    self._count_last(batch)
                if received.last and received.base is not None:
                    progress.final_base = self.source.base_state()
                if device is not None:
                    batch = send_to_device(batch, device, self._non_blocking)
                yield batch
                if between is not None and (pauses is None or pauses.used):
                    between(False)
                received = NO_BATCH if received.last else self.next_batch(epoch.batches)
            epoch.given = number

    def __len__(self) -> int:
        batches = super().__len__()
        per_step, drops = self.source.per_step, self.source.drop_last
        return batches // per_step if drops else -(-batches // per_step)


class DispatchedSource(WrappedSource):
    """Global steps, read on the main process from the batches of the script's loader.

    Args:
        inner: yields the batches of the script's loader.
        processes: number of shards of a step.
        split: split each batch; otherwise a step takes one batch for each process.
        drop_last: drop an incomplete last step.
        slice_fn: `f(batch, slice, process_index=, num_processes=)` that returns the samples of one process.
    """

    def __init__(
        self,
        inner: Source,
        processes: int,
        split: bool = False,
        drop_last: bool = False,
        slice_fn: SliceFunction | None = None,
    ) -> None:
        super().__init__(inner)
        self.split = split
        self.drop_last = drop_last
        self.slice_fn = slice_fn
        self._processes = processes

    @property
    def per_step(self) -> int:
        """Batches of the loader in one step."""
        return 1 if self.split else self.processes

    @property
    def processes(self) -> int:
        """See `Source`."""
        return self._processes

    @property
    def index(self) -> int:
        """0: the main process reads for all processes."""
        return 0

    @property
    def step_size(self) -> int | None:
        """See `Source`."""
        size = self.inner.step_size
        return None if size is None else size * self.per_step

    @property
    def pads(self) -> bool:
        """False: the last samples are split into equal shards, and padded only if they do not divide evenly."""
        return False

    @property
    def may_be_empty(self) -> bool:
        """See `Source`."""
        return self.drop_last or self.inner.may_be_empty

    def remainder(self, start: int | None) -> int:
        """See `Source`."""
        length, size = self.length(), self.step_size
        # An unbatched sample may contain any number of samples.
        if length is None or not size or self.drop_last or self.base.batch_sampler is None:
            return -1
        return max(length - (start or 0), 0) % size

    def shortage(self) -> str | None:
        """See `Source`."""
        return shortage(self.length(), self.processes, not self.drop_last)

    def steps(self, at: Position | None) -> int | None:
        """See `Source`."""
        batches = self.inner.steps(self._inner_position(at))
        if batches is None:
            return None
        return batches // self.per_step if self.drop_last else -(-batches // self.per_step)

    def _inner_position(self, at: Position | None) -> Position | None:
        return None if at is None else dataclasses.replace(at, steps=at.steps * self.per_step)

    def open(self, at: Position | None = None, replay: RNGState | None = None) -> Iterator[GlobalStep]:
        """See `Source`; the steps of all processes, for the main process only.

        Errors are raised when the first step is read, because the other processes receive them there.
        """
        steps, first = self.inner.skipped()[0] if at is None else at.steps, None
        if steps and not self.drop_last:
            first, replay = first_batches(self.inner, self.per_step, replay)
        batches, base_state = self.inner.open(self._inner_position(at), replay), self.inner.base_state
        yield from global_steps(batches, self.processes, self.split, self.drop_last, self.slice_fn, first, base_state)

    @property
    def padded(self) -> Collection[int]:
        """Empty: the steps contain their padding."""
        return ()

    def padding(self, number: int) -> Padding | None:
        """None: the steps contain their padding."""
        return None

    def skipping(self, steps: int) -> DispatchedSource:
        """See `Source`."""
        return self.over(self.inner.skipping(steps * self.per_step))

    def skipped(self) -> tuple[int, int | None]:
        """See `Source`."""
        batches, samples = self.inner.skipped()
        return batches // self.per_step, samples

    def with_sample_ids(self, own: bool = False) -> DispatchedSource:
        """See `Source`."""
        return DispatchedSource(self.inner.with_sample_ids(own), self.processes, self.split, self.drop_last)

    @property
    def self_contained(self) -> bool:
        """See `Source`."""
        return self.inner.self_contained and self.processes == 1

    def obstacle_to_counting(self) -> str | None:
        """See `Source`."""
        if self.processes > 1:
            return "The state includes batches that the main process had prefetched, so the position is unknown."
        return self.inner.obstacle_to_counting()


# ------------------------------------------------------------------ the steps of all processes, read by the main one


@dataclass
class GlobalStep:
    """One step of all processes.

    Args:
        batches: one batch for each process.
        padding: the padding of a step at the end of the epoch, else None.
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
    base_state: Callable[[], dict[str, Any] | None] = lambda: None,
) -> Iterator[GlobalStep]:
    """Build the steps of all processes from the batches of a loader.

    A step takes one batch for each process, or one batch to split. Batches that need no split are unchanged. The last
    step is concatenated, padded with samples from the beginning of the epoch until all processes have equal shards, and
    split.

    Args:
        batches: the batches of the loader.
        processes: number of shards of a step.
        split: split each batch, instead of taking one for each process.
        drop_last: drop an incomplete last step.
        slice_fn: slices a batch, instead of `accel_data.batch_codec.cut`.
        first: the batches of the epoch's first step; None for the first ones of `batches`.
        base_state: returns torchdata's state after the batch read last.
    """
    per_step = 1 if split else processes
    head: Any = _first_samples(first, processes) if first else None
    upcoming, failure = _take(batches, per_step)
    while upcoming and failure is None:
        base = base_state()
        taken, (upcoming, failure) = upcoming, _take(batches, per_step)
        if head is None:
            head = _first_samples(taken, processes)
        incomplete = len(taken) < per_step
        if incomplete and drop_last:
            return
        ends = not upcoming and failure is None
        sizes = {samples_in(batch) for batch in taken} if ends else {None}
        cuts = split or slice_fn is not None or incomplete or len(sizes) > 1
        step = _cut_step(taken, head, processes, slice_fn, ends) if cuts else GlobalStep(taken)
        step.base = base
        yield step
    if failure is not None:
        raise failure


def _take(batches: Iterator[Any], count: int) -> tuple[list[Any], Exception | None]:
    """The next batches; an error is raised only after the previous step was yielded."""
    taken: list[Any] = []
    try:
        for batch in islice(batches, count):
            taken.append(batch)  # noqa: PERF402 - batches before the failure count
    except Exception as error:
        return taken, error
    return taken, None


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
        DataError: padding would not be at the end of the step, or a function slices the concatenated batches.
    """
    sizes = [samples_in(batch) or 0 for batch in taken]
    width = sizes[0]
    if slice_fn is not None or any(size != width for size in sizes[:-1]) or sizes[-1] > width:
        # The error says which shapes differ.
        join(taken)
    shards = [_filled(batch, batch, width - size) for batch, size in zip(taken, sizes, strict=True)]
    shards += [shards[-1]] * (processes - len(shards))
    return GlobalStep(shards, Padding(sum(sizes), width, processes))


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


@dataclass
class ReceivedBatch:
    """One step as a process receives it.

    Args:
        batch: the batch of this process.
        padding: see `GlobalStep`.
        last: whether this is the last step of the epoch.
        base: torchdata's state after the step, on the main process.
    """

    batch: Any
    padding: Padding | None
    last: bool
    base: dict[str, Any] | None = None


def _alone(steps: Iterator[GlobalStep]) -> Iterator[ReceivedBatch]:
    """The steps of a run of one process."""
    upcoming = next(steps, None)
    while upcoming is not None:
        step, upcoming = upcoming, next(steps, None)
        yield ReceivedBatch(step.batches[0], step.padding, upcoming is None, step.base)


def _send(steps: Iterator[GlobalStep], shard_of_rank: Sequence[int]) -> Iterator[ReceivedBatch]:
    """The batches of the main process, which sends the others theirs."""
    sender = _Sender(steps, shard_of_rank)
    outgoing, following = sender.read(), None
    _, stream = open_scatter_stream(_announced(outgoing).to_bytes(), *_CALLS, Message, _MAIN)
    try:
        if isinstance(outgoing, _OutgoingStep):
            following = sender.read()
            sender.send(outgoing, following, stream)
        while isinstance(outgoing, _OutgoingStep):
            stream.wait()
            step, outgoing = outgoing.step, following
            if isinstance(outgoing, _OutgoingStep):
                following = sender.read()
                sender.send(outgoing, following, stream)
            yield ReceivedBatch(step.batches[shard_of_rank[_MAIN]], step.padding, outgoing is None, step.base)
        if outgoing is not None:
            broadcast_object_list([f"{type(outgoing).__name__}: {outgoing}"], _MAIN)
            raise outgoing
    finally:
        stream.close()


class _OutgoingStep:
    """A step, ready to be sent.

    Args:
        step: its batches.
        shard_of_rank: the index of each rank's shard.
        known: the structures that were already sent.
    """

    def __init__(self, step: GlobalStep, shard_of_rank: Sequence[int], known: list[BatchSpec] | None) -> None:
        self.step = step
        self.packed = [pack(step.batches[shard]) for rank, shard in enumerate(shard_of_rank) if rank != _MAIN]
        self.specs = _shared_specs(self.packed, known or [])
        self.new_spec = self.specs is not known
        self.nbytes = max(batch.nbytes for batch in self.packed)


def _shared_specs(packed: list[PackedBatch], known: list[BatchSpec]) -> list[BatchSpec]:
    """The structures of the batches, or one if they are equal. Known ones are reused with their layout."""
    specs = [batch.spec for batch in packed]
    if all(spec == specs[0] for spec in specs[1:]):
        specs = specs[:1]
    specs = known if specs == known else specs
    for number, batch in enumerate(packed):
        batch.spec = specs[number if len(specs) > 1 else 0]
    return specs


_Upcoming = _OutgoingStep | Exception | None
"""The successor of a step: another step, an error of reading, or the end."""


class _Sender:
    def __init__(self, steps: Iterator[GlobalStep], shard_of_rank: Sequence[int]) -> None:
        self.steps = steps
        self.shard_of_rank = shard_of_rank
        self.specs: list[BatchSpec] | None = None

    def read(self) -> _Upcoming:
        """The next step; an error is returned after the step before it."""
        try:
            step = next(self.steps, None)
            if step is None:
                return None
            outgoing = _OutgoingStep(step, self.shard_of_rank, self.specs)
        except Exception as error:
            return error
        self.specs = outgoing.specs
        return outgoing

    def send(self, outgoing: _OutgoingStep, following: _Upcoming, stream: ScatterStream) -> None:
        """Start to send a step."""
        if outgoing.new_spec:
            broadcast_object_list([outgoing.specs], _MAIN)
        announced = _with_padding(_announced(following), outgoing.step.padding)
        header, objects = announced.to_bytes(), announced.objects
        for message, batch in zip(stream.buffers(outgoing.nbytes), outgoing.packed, strict=True):
            if len(batch.objects) != objects:
                objects = len(batch.objects)
                header = dataclasses.replace(announced, objects=objects).to_bytes()
            message.write(header, batch)
        stream.send()


def _receive(rank: int, processes: int) -> Iterator[ReceivedBatch]:
    """The batches of a process that receives them from the main process.

    Args:
        rank: the rank of this process.
        processes: number of different shards of a step.

    Raises:
        CollectiveError: the main process has ended.
        DataError: the main process could not read.
    """
    said, stream = open_scatter_stream(b"", *_CALLS, Message, _MAIN)
    announced, spec = Announcement.of(said), BatchSpec(None, ())
    upcoming = _expected(announced, spec, rank, stream)
    try:
        while announced.kind == BATCH:
            message, spec = stream.wait(), upcoming
            announced = message.announcement()
            upcoming = _expected(announced, spec, rank, stream)
            batch = message.unpack(spec, announced.objects)
            stream.release()
            yield ReceivedBatch(batch, _announced_padding(announced, processes), announced.kind == END)
    finally:
        stream.close()
    if announced.kind == FAILURE:
        reason = [""]
        broadcast_object_list(reason, _MAIN)
        raise DataError(
            "Cannot get the next batch.",
            f"The main process, which reads for all processes, could not read it: {reason[0]}",
            "See the error of process 0.",
        )


def _expected(announced: Announcement, spec: BatchSpec, rank: int, stream: ScatterStream) -> BatchSpec:
    """Start to receive the announced message, if any, and return the structure of its batch."""
    if announced.kind != BATCH:
        return spec
    if announced.new_spec:
        specs: list[Any] = [None]
        broadcast_object_list(specs, _MAIN)
        spec = specs[0][0 if len(specs[0]) == 1 else rank - 1]
    stream.expect(announced.nbytes)
    return spec


def _announced(following: _Upcoming) -> Announcement:
    if following is None:
        return Announcement(END)
    if isinstance(following, Exception):
        return Announcement(FAILURE)
    return Announcement(BATCH, following.nbytes, following.new_spec)


def _with_padding(announced: Announcement, padding: Padding | None) -> Announcement:
    if padding is None:
        return announced
    if padding.counts is None:
        return dataclasses.replace(announced, total=padding.total, batch_size=padding.batch_size)
    real = sum(count is None for count in padding.counts)
    return dataclasses.replace(announced, total=real, batch_size=1, single=True)


def _announced_padding(announced: Announcement, processes: int) -> Padding | None:
    if announced.total < 0:
        return None
    padding = Padding(announced.total, announced.batch_size, processes)
    return padding.of_single() if announced.single else padding
