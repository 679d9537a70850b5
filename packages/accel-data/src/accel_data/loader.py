"""The loader that a script iterates: this process's batches on its device, prefetched by one to detect the end."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, closing, nullcontext
from functools import partial
from operator import attrgetter
from types import TracebackType
from typing import Any, Final, NoReturn, TypeVar

import torch
from torch.utils.data import IterableDataset

from accel_data.adapter import DataLoaderAdapter
from accel_data.batches import samples_in
from accel_data.hooks import BatchPauses, DeviceTransfer, LoaderHook, accompanied, with_hook
from accel_data.kept_batches import KeptBatches
from accel_data.loader_state import load_loader_state, loader_state
from accel_data.order import RNGState
from accel_data.padding import PaddedBatch
from accel_data.progress import Iteration, Position, Progress
from accel_data.sharding import StepCounts, batching_of, innermost_sampler
from accel_data.source import Source
from accel_data.stream_source import source_of
from accel_data.workers import explain
from accel_ops.conversion import send_to_device
from accel_ops.rng import restore, snapshot, synchronize_rng_states
from accel_state import current
from accel_state.errors import CollectiveError, DataError
from accel_state.gradient import GradientState
from accel_state.labels import RNGType
from accel_state.library import stack_level

__all__ = (
    "NO_BATCH",
    "DataLoaderShard",
    "DataLoaderStateMixin",
    "PreparedLoader",
    "SkipDataLoader",
)

P = TypeVar("P", bound="PreparedLoader")

_logger: Final = logging.getLogger(__name__)

NO_BATCH: Final = object()
"""Marks the end of an epoch, instead of a batch."""

_TOO_FEW_SAMPLES_REMEDY: Final = (
    "Check how samples are selected or filtered, use fewer processes, or use even_batches=True and drop_last=False."
)
_FLAT_TYPES: Final = frozenset({torch.Tensor, dict, list, tuple})
"""Types of batches with a fast check of their device."""
_OWN_MODULE_PREFIX: Final = "accel_data."
"""Modules whose data sets wrap a data set of the script."""
_ATTACHED_ATTRIBUTES: Final = frozenset(
    {"between_batches", "device_transfer", "epoch_reader", "hook", "keeps_batches", "pauses", "stand_in"}
)
"""Attributes that belong to the run of this process, so that they are neither copied nor pickled."""


class DataLoaderStateMixin:
    """The state of a loader that gradient accumulation and metrics read; the base of loaders of other libraries too.

    A subclass has a `gradient_state`, calls `begin` and `end` around an iteration, and sets `end_of_dataloader` before
    it yields its last batch.

    Attributes:
        gradient_state: notified when the loader enters and leaves iteration.
        end_of_dataloader: whether the last yielded batch is the last one of the epoch.
        remainder: real samples of an incomplete last step of all processes; 0 if it is complete, -1 if unknown.

    Example:
        >>> class Batches(DataLoaderStateMixin):
        ...     def __init__(self, batches):
        ...         self.batches, self.gradient_state = batches, GradientState()
        ...     def __iter__(self):
        ...         self.begin()
        ...         for number, batch in enumerate(self.batches, 1):
        ...             self.end_of_dataloader = number == len(self.batches)
        ...             yield batch
        ...         self.end()
        >>> [batch for batch in Batches([1, 2])]
        [1, 2]
    """

    gradient_state: GradientState
    end_of_dataloader: bool = False
    remainder: int = -1

    def reset(self) -> None:
        """Reset the state of the last iteration."""
        self.end_of_dataloader = False
        self.remainder = -1

    def begin(self) -> None:
        """Enter iteration; the remainder follows from `total_dataset_length` and `total_batch_size`, if there are."""
        self.reset()
        length, size = getattr(self, "total_dataset_length", None), getattr(self, "total_batch_size", None)
        if length is not None and size and not getattr(self, "_drop_last", False):
            self.remainder = length % size
        self.gradient_state.begin(self)

    def end(self) -> None:
        """Leave iteration."""
        self.gradient_state.finish(self)


class PreparedLoader(DataLoaderAdapter, DataLoaderStateMixin):
    """A loader over a source of this process's shard.

    Attributes:
        source: yields this process's batches.
        device: the device for batches; None does not move them.
        rng_types: generators to synchronise at the start of an epoch; see `synchronize_rng_states`.
        synchronized_generator: the generator that "generator" selects.
        skip_batches: batches to skip at the beginning of every epoch.
        skips: whether the script set a position itself, so that none is restored.
        restores: whether `load_state_dict` restores the position.
        torch_device_mesh: the mesh on which the data is sharded, or None.
        exact_epochs: whether each sample counts once in the gradient of its step.
        progress: the position: that of the iterator which yielded last.
        between_batches: called before each batch of the loop, after the loop has finished with the previous one; with
            True before the first batch of an epoch.
        pauses: whether `between_batches` has work to do; None calls it always.
        device_transfer: copies batches to the device, if more than a plain copy is needed; None for a plain copy.
        hook: called at the beginning and end of epochs, and with batches.
        epoch_reader: reads epochs whose next batch depends on what the loop did with the last one; None if no batch
            does. Called with the loader at the beginning of an epoch. It returns an iterator over the epoch's batches
            in host memory, which sets `progress.iteration` before it yields a batch, or None to let the loader read
            this epoch itself. The loader moves the batches to its device and reads none ahead.
        keeps_batches: whether batches are kept until `Iteration.kept` is marked, so that the loop can be taken back.
        stand_in: returns a context manager around a step in which some processes have stand-ins; None if nothing is to
            be put back after it. Called with the samples of each process, and the index of this one.
    """

    source: Source
    progress: Progress
    device: torch.device | None = None
    rng_types: Sequence[str | RNGType] = ()
    synchronized_generator: torch.Generator | None = None
    skip_batches: int = 0
    skips: bool = False
    restores: bool = False
    torch_device_mesh: Any = None
    exact_epochs: bool = False
    stand_in: Callable[[StepCounts, int], AbstractContextManager[object]] | None = None
    between_batches: Callable[[bool], None] | None = None
    device_transfer: DeviceTransfer | None = None
    hook: LoaderHook | None = None
    pauses: BatchPauses | None = None
    keeps_batches: bool = False
    epoch_reader: Callable[[PreparedLoader], Iterator[Any] | None] | None = None
    _non_blocking: bool = False
    _drop_last: bool = False

    @classmethod
    def around(
        cls: type[P],
        source: Source,
        use_stateful_dataloader: bool = False,
        gradient_state: GradientState | None = None,
        progress: Progress | None = None,
        **attributes: Any,
    ) -> P:
        """A loader over a source that is already sharded.

        Args:
            source: yields this process's batches.
            use_stateful_dataloader: whether the source reads through torchdata.
            gradient_state: gradient state of the loader's Accelerator. None uses the current one.
            progress: the loader's position; None for the beginning.
            attributes: further attributes of the loader; `skip_batches` leaves out the first batches of every epoch.
        """
        loader = cls.__new__(cls)
        loader._read_from(source, use_stateful_dataloader, gradient_state, progress, **attributes)
        return loader

    def _read_from(
        self,
        source: Source,
        use_stateful_dataloader: bool = False,
        gradient_state: GradientState | None = None,
        progress: Progress | None = None,
        skip_batches: int = 0,
        **attributes: Any,
    ) -> None:
        vars(self).update(
            attributes,
            base_dataloader=source.local.base,
            source=source.skipping(skip_batches) if skip_batches else source,
            use_stateful_dataloader=use_stateful_dataloader,
            gradient_state=gradient_state or GradientState(),
            progress=progress or Progress(),
            skip_batches=skip_batches,
            skips=skip_batches > 0,
        )

    def _like_this(self: P, source: Source, **attributes: Any) -> P:
        """A loader with the same attributes, except for some, over another source."""
        other = type(self).__new__(type(self))
        vars(other).update(vars(self), source=source, base_dataloader=source.local.base, **attributes)
        return other

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name not in _ATTACHED_ATTRIBUTES}

    # Gradient accumulation reads it at each micro-batch, and a C function is faster.
    end_of_dataloader = property(  # pyright: ignore[reportAssignmentType]
        attrgetter("progress.iteration.end_of_dataloader"),
        doc="Whether the last yielded batch is the last one of the epoch.",
    )

    @property
    def remainder(self) -> int:  # type: ignore[override]
        """Real samples of an incomplete last step; 0 if it is complete, -1 if unknown."""
        return self.progress.remainder

    @property
    def is_stand_in(self) -> bool:
        """Whether the newest batch counts nothing, because this process has no data in this step.

        Forward and backward must run nevertheless, since other processes wait for them.
        """
        counts = self.progress.padding
        return isinstance(counts, StepCounts) and counts.of(self.source.index) == 0

    @property
    def step_weights(self) -> tuple[float, float]:
        """The weight of this process's newest batch, and that of the whole step: their samples, if nothing is else."""
        counts = self.progress.padding
        if isinstance(counts, StepCounts):
            return counts.weights[self.source.index], sum(counts.weights)
        size = self.source.step_size or self.source.processes
        return size / self.source.processes, size

    @property
    def iteration(self) -> int:
        """Number of the current or the next epoch."""
        return self.progress.epoch

    def reset(self) -> None:
        """Reset the state of the last iteration."""
        iteration = self.progress.iteration
        iteration.end_of_dataloader, iteration.remainder = False, -1

    def begin(self) -> None:
        """Enter iteration."""
        self.gradient_state.begin(self)

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        batches = self._batches() if self.epoch_reader is None else self._batches_of(self.epoch_reader)
        batches = self._with_stand_ins(batches) if self.exact_epochs else batches
        return batches if self.hook is None else with_hook(batches, self.hook)

    def _with_stand_ins(self, batches: Generator[Any, None, None]) -> Generator[Any, None, None]:
        """Yield batches, and enter `stand_in` for the step of a batch that counts nothing."""
        with closing(batches):
            for batch in batches:
                counts = self.progress.padding
                stand_in: AbstractContextManager[object] = nullcontext()
                if self.stand_in is not None and isinstance(counts, StepCounts) and 0 in (counts.counts or ()):
                    stand_in = self.stand_in(counts, self.source.index)
                with stand_in:
                    yield batch
                    del batch

    def _batches_of(self, epoch_reader: Callable[[PreparedLoader], Iterator[Any] | None]) -> Generator[Any, None, None]:
        batches = epoch_reader(self)
        if batches is None:
            yield from self._batches()
            return
        self.progress.take_start()
        if self.device is not None:
            batches = map(partial(send_to_device, device=self.device, non_blocking=self._non_blocking), batches)
        if self.between_batches is not None:
            batches = accompanied(batches, self.between_batches, self.pauses)
        with _OpenEpoch(self) as epoch:
            while True:
                # The reader sets the position before it yields.
                self._follow(epoch.iteration)
                batch = next(batches, NO_BATCH)
                if batch is NO_BATCH:
                    return
                yield batch
                # Its memory must be free before the next batch is read.
                del batch

    def _batches(self) -> Generator[Any, None, None]:
        """Yield the batches of an epoch, each read while the loop works on the one before, and keep the position."""
        with _OpenEpoch(self) as epoch:
            iteration, progress, loaders = epoch.iteration, self.progress, self.gradient_state.loaders
            batches, current = epoch.read()
            padded, number = self.source.padded, 0
            # An error of reading, until the loop has got the batch before it. A raised one keeps its frames alive.
            failure: list[Exception] = []
            between, pauses = self.between_batches, self.pauses
            device, non_blocking, tensor = self.device, self._non_blocking, torch.Tensor
            is_there = None if device is None else _on(device)
            while current is not NO_BATCH:
                padding, base = padded.pop(number, None) if padded else None, None
                kind = type(current)
                if kind is PaddedBatch:
                    # A map-style source has the padding elsewhere; that of a complete step is false, but not None.
                    padding = padding if current.padding is None else current.padding
                    current, base = current.batch, current.base
                    kind = type(current)
                batch = current
                # Start the copy to the device before reading the next batch, so that both overlap.
                if is_there is not None:
                    # Most batches are there already, and the check is faster than moving.
                    try:
                        leaves = batch.values() if kind is dict else (batch,) if kind is tensor else batch
                        stays = kind in _FLAT_TYPES and all(map(is_there, leaves))
                    except AttributeError:
                        stays = False
                    batch = batch if stays else send_to_device(batch, device, non_blocking)
                try:
                    current = next(batches, NO_BATCH)
                except Exception as error:
                    current, failure = NO_BATCH, [error]
                number += 1
                iteration.steps += 1
                iteration.base, iteration.padding = base, padding
                if current is NO_BATCH and not failure:
                    self._note_end(iteration, batch)
                if progress.iteration is not iteration or loaders[-1] is not self:
                    self._follow(iteration)
                yield batch
                del batch
                if between is not None and (pauses is None or pauses.used):
                    between(False)
                    current, failure = self._going_on(iteration, current, failure)
            if failure:
                self._raise_explained(failure.pop())

    def _going_on(self, iteration: Iteration, current: Any, failure: list[Exception]) -> tuple[Any, list[Exception]]:
        """The next batch and the error of reading it; other ones if the loop was taken back."""
        if iteration.kept is None or not iteration.is_taken_back:
            return current, failure
        iteration.is_taken_back = False
        try:
            return next(iteration.kept, NO_BATCH), []
        except Exception as error:
            return NO_BATCH, [error]

    def _follow(self, iteration: Iteration) -> None:
        """Make an iterator the current one of this loader, and this loader that of the gradient state."""
        self.progress.follow(iteration)
        self.gradient_state.follow(self)

    def _open(self, iteration: Iteration, at: Position | None, replay: RNGState | None) -> Iterator[Any]:
        """Begin an epoch of the source, with its batches on the device if that takes more than a copy."""
        source = self.source
        source.local.set_epoch(iteration.epoch)
        steps, samples = source.skipped() if at is None else (at.steps, at.samples)
        try:
            remainder, shortage = source.agree(samples)
            if shortage is not None:
                raise DataError("cannot begin an epoch.", shortage, _TOO_FEW_SAMPLES_REMEDY)
        except DataError as error:
            self._raise_explained(error)
        iteration.begin(steps, samples, source.step_size, remainder)
        batches, transfer = source.open(at, replay), self.device_transfer
        if transfer is not None:
            # Prefetching in another thread must not draw from this process's generators, nor call collectives.
            ahead = source.local is source and self.base_dataloader.num_workers > 0
            batches = _transferred(batches, transfer, ahead)
        if self.keeps_batches:
            stays = _everything if self.device is None else _on(self.device)
            batches = iteration.kept = KeptBatches(batches, source.padded, stays, iteration.expect)
        return batches

    def _first(self, batches: Iterator[Any], resumed: bool) -> Any:
        try:
            first = self.next_batch(batches)
        except Exception:
            # The other processes may have read theirs.
            self._check_draws()
            raise
        self._check_draws()
        if first is NO_BATCH and not (resumed or self.skips):
            if not self.source.may_be_empty:
                raise self.error("cannot begin an epoch.", "It has no samples.", _TOO_FEW_SAMPLES_REMEDY)
            if self.progress.epoch == 0:
                _logger.warning("%s: it has no batches. %s", self.identify(), _TOO_FEW_SAMPLES_REMEDY)
        return first

    def _check_draws(self) -> None:
        if self.source.local is self.source:
            try:
                self.source.local.check_draws()
            except DataError as error:
                self._raise_explained(error)

    def _note_end(self, iteration: Iteration, last: Any) -> None:
        """Update the position when the last batch of the epoch is known; what was read decides, not the length."""
        source, padding = self.source, iteration.padding
        iteration.end_of_dataloader = True
        # With a dispatched loader, only the main process has a state.
        iteration.final_base = None if iteration.base is None else source.base_state()
        size = source.step_size
        if padding is not None and padding.total >= 0:
            iteration.remainder = padding.total % size if size else padding.total * bool(padding)
        elif size and not source.has_exact_length:
            if source.pads:
                iteration.remainder = 0
            elif source.processes == 1:
                count = samples_in(last)
                iteration.remainder = -1 if count is None or count > size else count % size
        if iteration.kept is not None and iteration.kept.ends_early:
            # What was read last, and may be incomplete, was left out.
            iteration.remainder = 0

    def _warn_of_wrong_length(self, epoch: int, received: int) -> None:
        base = self.base_dataloader
        divided_by_workers = isinstance(base.dataset, IterableDataset) and base.num_workers > 0
        # Own shards of other processes may be longer.
        if divided_by_workers or self.exact_epochs or not self.source.reads_here:
            return
        try:
            reported = len(self)
        except (TypeError, NotImplementedError):
            return
        if reported != received:
            warnings.warn(
                f"{self.identify(epoch)}: it yielded {received} batches on this process; len() reports {reported}. "
                "Correct __len__ of the data set, the sampler or the batch sampler, or remove it: a learning rate "
                "schedule may be computed from it.",
                UserWarning,
                stacklevel=stack_level(),
            )

    def next_batch(self, batches: Iterator[Any]) -> Any:
        """The next batch, or `NO_BATCH`; the message of an error names the process and the loader."""
        try:
            return next(batches, NO_BATCH)
        except Exception as error:
            self._raise_explained(error)

    def _raise_explained(self, error: Exception) -> NoReturn:
        explained = self._explained(error)
        try:
            if explained is None:
                raise error
            raise explained from error
        finally:
            # An error would keep this frame alive, and the frame the error.
            del error, explained

    def _explained(self, error: Exception) -> Exception | None:
        """An error of reading with process and loader in its message; None to raise it unchanged."""
        if isinstance(error, (CollectiveError, DataError)):
            return type(error)(f"{self.identify()}: {error.failure}", error.obstacle, error.remedy)
        explanation = explain(error, self.base_dataloader)
        return None if explanation is None else self.error(*explanation)

    def error(self, failure: str, obstacle: str, remedy: str) -> DataError:
        """An error whose message names the process and the loader before what failed."""
        return DataError(f"{self.identify()}: {failure}", obstacle, remedy)

    def identify(self, epoch: int | None = None) -> str:
        """Process, data set and epoch, for messages."""
        process = current.process_or_none()
        where = "" if process is None else f"Process {process.rank} of {process.world_size}, "
        dataset: Any = self.dataset
        while type(dataset).__module__.startswith(_OWN_MODULE_PREFIX) and hasattr(dataset, "dataset"):
            dataset = dataset.dataset
        return f"{where}loader over {type(dataset).__name__} in epoch {self.progress.epoch if epoch is None else epoch}"

    def __len__(self) -> int:
        return self.source.steps()

    @property
    def total_batch_size(self) -> int:
        """Samples of all processes in one step."""
        size = self.source.step_size or getattr(self.batch_sampler, "step_size", None)
        if size is None:
            raise DataError(
                f"{self.identify()}: cannot compute its total batch size.",
                "Its batch sampler has no batch size.",
                "Give the batch sampler a batch_size attribute.",
            )
        return int(size)

    @property
    def total_dataset_length(self) -> int:
        """Samples of an epoch on all processes together, without padding."""
        length = self.source.length()
        return len(self.dataset) if length is None else length  # type: ignore[arg-type]

    def get_sampler(self) -> Any:
        """The sampler of single indices, or None."""
        batching = batching_of(self.base_dataloader)
        if batching is not None:
            return innermost_sampler(batching)
        # A loader without batches reads through a sampler that takes single indices from batches of one.
        shard = getattr(self.sampler, "shard", None)
        return self.sampler if shard is None else innermost_sampler(shard)

    def set_sampler(self, sampler: Any) -> None:
        """Replace the sampler of single indices.

        Raises:
            DataError: the loader reads a stream, so it has no sampler.
        """
        below: Any = batching_of(self.base_dataloader)
        if below is None:
            below = getattr(self.base_dataloader.sampler, "shard", None)
        while hasattr(below, "batch_sampler"):
            below = below.batch_sampler
        if below is None or isinstance(self.base_dataloader.dataset, IterableDataset):
            raise self.error(
                "cannot replace its sampler.",
                "It has no sampler of indices.",
                "Prepare a DataLoader over a map-style data set, or use another stream.",
            )
        below.sampler = sampler

    def set_epoch(self, epoch: int) -> None:
        """Set the number of the next epoch.

        A position to restore is kept if it is in that epoch.
        """
        if epoch != self.progress.epoch:
            following = self.progress.next_rng_state if epoch == self.progress.epoch + 1 else None
            self.progress.replay = self.progress.next_rng_state = None
            self.progress.move_to(epoch)
            if following is not None:
                self.source.local.upcoming_rng(following)
        self.source.local.set_epoch(epoch)

    def skipping(self: P, steps: int) -> P:
        """A loader without the first `steps` batches of its epochs; both share their position."""
        return self._like_this(self.source.skipping(steps), skip_batches=self.skip_batches + steps, skips=True)

    def auditing(self: P, progress: Progress, gradient: GradientState) -> P:
        """A loader over sample ids, with a separate progress and gradient state; see `audit`."""
        attributes = dict.fromkeys(_ATTACHED_ATTRIBUTES) | {"device": None, "use_stateful_dataloader": False}
        return self._like_this(self.source.with_sample_ids(), progress=progress, gradient_state=gradient, **attributes)

    def _state(self) -> dict[str, Any]:
        return loader_state(self.source, self.progress, self.restores, self.identify())

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Continue the epoch of `state_dict`.

        The next iteration has that epoch's order. It begins at the position if the loader restores positions. Otherwise
        it begins at the start, and `skip_first_batches` skips to the position. A state of the original library does not
        contain the number of the epoch: it is the one given to `set_epoch`, or the next one.

        Raises:
            CheckpointError: the loader restores positions, and cannot restore this one exactly.
        """
        load_loader_state(state_dict, self.source, self.progress, self.restores, self.identify())


class _OpenEpoch:
    """Context manager of one iterator of a loader.

    Args:
        loader: the loader.

    Attributes:
        iteration: the position of the iterator.
    """

    __slots__ = ("_from_the_start", "_loader", "iteration")

    def __init__(self, loader: PreparedLoader) -> None:
        self._loader = loader
        self._from_the_start = False

    def __enter__(self) -> _OpenEpoch:
        self.iteration = self._loader.progress.enter()
        self._loader.begin()
        return self

    def read(self) -> tuple[Iterator[Any], Any]:
        """Begin to read the epoch; its batches after the first, and the first."""
        loader = self._loader
        at, replay = loader.progress.take_start()
        # A position set by the script counts from the beginning of the epoch.
        at = None if loader.skips else at
        self._from_the_start = at is None
        resumed = at is not None or replay is not None
        before = snapshot() if resumed else None
        if loader.rng_types and not resumed:
            synchronize_rng_states(list(loader.rng_types), loader.synchronized_generator)
        batches = loader._open(self.iteration, at, replay)
        first = loader._first(batches, resumed)
        self.iteration.rng_state = loader.source.local.last_rng.state
        if before is not None:
            # The saved run had drawn its random numbers for this epoch before it was saved.
            restore(before)
        if loader.between_batches is not None and (loader.pauses is None or loader.pauses.used):
            loader.between_batches(True)
        return batches, first

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        loader, iteration = self._loader, self.iteration
        epoch, received = iteration.epoch, iteration.received if iteration.kept is None else iteration.kept.read
        if kind is GeneratorExit and iteration.end_of_dataloader:
            loader.gradient_state.left = loader
        loader.progress.leave(iteration, finished=kind is None)
        loader.end()
        if kind is None and self._from_the_start:
            # The work of the epoch is done.
            loader._warn_of_wrong_length(epoch, received)


class DataLoaderShard(PreparedLoader):
    """Yields this process's batches and tracks its position.

    `prepare_data_loader` creates it. A script that creates it directly passes this process's own data set and samplers.

    Args:
        dataset: the data set.
        device: the device for batches; None does not move them.
        rng_types: generators to synchronise at the start of an epoch; see `synchronize_rng_states`.
        synchronized_generator: the generator that "generator" selects.
        skip_batches: batches to skip at the beginning of every epoch.
        use_stateful_dataloader: read through torchdata's `StatefulDataLoader`.
        torch_device_mesh: stored as an attribute; the loader is already sharded.
        iteration: number of the first epoch.
        gradient: gradient state of the loader's Accelerator. None uses the current one.
        restore_position: continue in the middle of the epoch after `load_state_dict`.
        kwargs: arguments of `torch.utils.data.DataLoader`.
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
        self._read_from(
            source_of(self.base_dataloader),
            use_stateful_dataloader,
            gradient,
            Progress(iteration),
            skip_batches,
            device=device,
            rng_types=rng_types or (),
            synchronized_generator=synchronized_generator,
            restores=restore_position or use_stateful_dataloader,
            torch_device_mesh=torch_device_mesh,
            _drop_last=_drop_last,
            _non_blocking=_non_blocking,
        )


class SkipDataLoader(DataLoaderShard):
    """A loader without the first batches of its epochs.

    Args:
        dataset: the data set.
        skip_batches: the number of batches to skip.
        use_stateful_dataloader: read through torchdata's `StatefulDataLoader`.
        kwargs: of `torch.utils.data.DataLoader`.
    """

    def __init__(
        self, dataset: Any, skip_batches: int = 0, use_stateful_dataloader: bool = False, **kwargs: Any
    ) -> None:
        super().__init__(dataset, skip_batches=skip_batches, use_stateful_dataloader=use_stateful_dataloader, **kwargs)


def _everything(tensor: Any) -> bool:
    return True


def _on(device: torch.device) -> Callable[[Any], bool]:
    """Returns a check whether a tensor is on a device; tensors have a faster one for the CPU."""
    return attrgetter("is_cpu") if device.type == "cpu" else lambda tensor: tensor.device == device


def _transferred(items: Iterator[Any], transfer: DeviceTransfer, ahead: bool) -> Iterator[Any]:
    """Items with their batches copied to the device.

    Args:
        items: batches, or `PaddedBatch` where there is more than the batch.
        transfer: copies batches to the device.
        ahead: whether another thread may read the items.
    """
    pairs = ((item.batch, item) if type(item) is PaddedBatch else (item, None) for item in items)
    for batch, item in transfer(pairs, ahead):
        yield batch if item is None else PaddedBatch(batch, item.padding, item.base)
