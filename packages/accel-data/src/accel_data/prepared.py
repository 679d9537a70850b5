"""What prepared loaders have in common: where they stand, how they are continued, what they show of themselves."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final, TypeVar

import torch
from torch.utils.data import IterableDataset

from accel_data.adapter import DataLoaderAdapter
from accel_data.feed import Feed
from accel_data.foreign import is_foreign, position_in
from accel_data.order import Draw
from accel_data.progress import Outlook, Position, Progress
from accel_data.samplers import batching_of, innermost_sampler
from accel_data.slicing import samples_in
from accel_data.sources import Source
from accel_ops.rng import restore, snapshot, synchronize_rng_states
from accel_state import current
from accel_state.errors import CheckpointError, CollectiveError, DataError
from accel_state.gradient import GradientState
from accel_state.labels import RNGType

__all__ = ("END", "DataLoaderStateMixin", "PreparedLoader")

P = TypeVar("P", bound="PreparedLoader")

END: Final = object()
"""What stands for the batch after the last one."""

_VERSION: Final = 1
_ENOUGH: Final = "Check what was selected or filtered, use fewer processes, or leave even_batches on and drop_last off."
_OURS: Final = "accel_data."
"""Modules whose data sets are around one of the script."""
_LOADING: Final = ("DataLoader worker", "DataLoader timed out")
"""How torch begins to tell that a loading process is gone."""


class DataLoaderStateMixin:
    """What every prepared loader knows: where it stands, and whose gradient accumulation follows it.

    Attributes:
        progress: where it stands.
        gradient_state: told when it enters and leaves iteration.
    """

    progress: Progress
    gradient_state: GradientState

    @property
    def end_of_dataloader(self) -> bool:
        """Whether the batch given out last is the last one of the epoch."""
        return self.progress.end_of_dataloader

    @property
    def remainder(self) -> int:
        """Real samples of an incomplete last step; 0 when it is complete, -1 when unknown."""
        return self.progress.remainder

    @property
    def iteration(self) -> int:
        """Number of the epoch that runs or comes next."""
        return self.progress.epoch

    def reset(self) -> None:
        """Forget how the last iteration ended."""
        self.progress.end_of_dataloader = False
        self.progress.remainder = -1

    def begin(self) -> None:
        """Enter iteration."""
        self.gradient_state.begin(self)

    def end(self) -> None:
        """Leave iteration."""
        self.gradient_state.finish(self)


class PreparedLoader(DataLoaderAdapter, DataLoaderStateMixin):
    """A loader over a source that is divided between the processes.

    Attributes:
        source: gives this process's batches.
        device: where they are moved to; None leaves them where they are.
        rng_types: generators made equal on all processes when an iteration begins.
        synchronized_generator: the one meant by "generator".
        skip_batches: batches left out at the beginning of every epoch.
        skips: whether a position was given by hand, so that none is restored.
        restores: whether `load_state_dict` restores the position.
        torch_device_mesh: kept for readers.
        between_batches: called before each batch is read for the loop, so that the loop is done with the one before;
            with True before the first of an epoch.
        feed: brings batches to the device in its own way; None copies each when its turn comes.
    """

    source: Source
    device: torch.device | None
    rng_types: Sequence[str | RNGType] | None
    synchronized_generator: torch.Generator | None
    skip_batches: int
    skips: bool
    restores: bool
    torch_device_mesh: Any
    between_batches: Callable[[bool], None] | None = None
    feed: Feed | None = None
    _non_blocking: bool

    @classmethod
    def around(cls: type[P], source: Source, *, use_stateful_dataloader: bool = False, **options: Any) -> P:
        """A loader over a source that is divided already.

        Args:
            source: gives this process's batches.
            use_stateful_dataloader: whether the source reads through torchdata.
            options: attributes of the loader; those left out have the default of the class's argument.
        """
        loader = cls.__new__(cls)
        loader.hold(source.base, use_stateful_dataloader)
        loader._set(source, **options)
        return loader

    def _set(
        self,
        source: Source,
        *,
        device: torch.device | None = None,
        rng_types: Sequence[str | RNGType] | None = None,
        synchronized_generator: torch.Generator | None = None,
        skip_batches: int = 0,
        skips: bool = False,
        restores: bool = False,
        gradient_state: GradientState | None = None,
        progress: Progress | None = None,
        torch_device_mesh: Any = None,
        _drop_last: bool = False,
        _non_blocking: bool = False,
        between_batches: Callable[[bool], None] | None = None,
        feed: Feed | None = None,
    ) -> None:
        vars(self).update(
            source=source,
            device=device,
            rng_types=rng_types,
            synchronized_generator=synchronized_generator,
            skip_batches=skip_batches,
            skips=skips,
            restores=restores,
            gradient_state=gradient_state or GradientState(),
            progress=progress or Progress(),
            torch_device_mesh=torch_device_mesh,
            _drop_last=_drop_last,
            _non_blocking=_non_blocking,
            between_batches=between_batches,
            feed=feed,
        )

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        at = self.progress.take_resume()
        if self.skips:
            # A position that was given by hand counts from the beginning of the epoch.
            at = None
        resumed = at is not None or self.source.draws.again is not None
        before = snapshot() if resumed else None
        if self.rng_types and not resumed:
            synchronize_rng_states(list(self.rng_types), self.synchronized_generator)
        self.begin()
        try:
            outlook = self._begin_epoch(at)
            batches = self._open(at)
            first = self._next(batches)
            if before is not None:
                # What the run draws at the beginning of an epoch it had drawn before it was saved.
                restore(before)
            if first is END and not (resumed or self.skips or self.source.may_be_empty):
                raise self._error("an epoch was begun.", "It gave no sample.", _ENOUGH)
            steps = self._give_out(batches, first)
            between = self.between_batches
            given = yield from (steps if between is None else _with_pauses(steps, between))
            broken = self._broken_promise(outlook, given)
            self.progress.finish()
            if broken is not None:
                raise broken
        except GeneratorExit:
            if self.progress.end_of_dataloader:
                self.gradient_state.left = self
            raise
        finally:
            self.end()

    def _give_out(self, batches: Iterator[Any], first: Any) -> Generator[Any, None, int]:
        """The batches for the loop, keeping `progress` up to date; returns how many they were."""
        raise NotImplementedError

    def _begin_epoch(self, at: Position | None) -> Outlook:
        source, progress = self.source, self.progress
        source.set_epoch(progress.epoch)
        steps, samples = source.skipped() if at is None else (at.steps, at.samples)
        outlook = self._outlook(at, samples)
        if outlook.shortage is not None:
            raise self._error("an epoch was begun.", outlook.shortage, _ENOUGH)
        progress.begin(steps, samples, source.step_size, outlook.length, outlook.remainder)
        return outlook

    def _outlook(self, at: Position | None, samples: int | None) -> Outlook:
        source = self.source
        return Outlook(source.length(), source.remainder(samples), source.steps(at), source.shortage())

    def _open(self, at: Position | None) -> Iterator[Any]:
        return self.source.open(at)

    def _count_last(self, batch: Any) -> None:
        """Learn the remainder from the last batch, where one process reads all samples and no length told it before."""
        size = self.source.step_size
        if self.source.processes > 1 or not size or self.progress.remainder >= 0:
            return
        count = samples_in(batch)
        if count is not None and count <= size:
            self.progress.remainder = count % size

    def _broken_promise(self, outlook: Outlook, given: int) -> DataError | None:
        """What is wrong with the length that was reported, now that every batch was given out."""
        promised, remainder = outlook.batches, outlook.remainder
        if promised is None:
            return None
        padding, obstacle = self.progress.padding, ""
        real = padding.total if padding else 0 if self.source.pads else -1
        if given != promised:
            obstacle = f"It gave this process {given} batches; by its length they should have been {promised}."
        elif real >= 0 <= remainder != real:
            obstacle = f"Its last step had {real or 'all'} samples; by its length they should have been {remainder}."
        remedy = "Let len() of the data set, the sampler or the batch sampler say how many come, or leave it out."
        return self._error("the epoch was read to its end.", obstacle, remedy) if obstacle else None

    def _next(self, batches: Iterator[Any]) -> Any:
        try:
            return next(batches, END)
        except IndexError as error:
            raise self._error(
                "the next batch was asked for.",
                f"An index that the sampler gave is not in the data set: {error}",
                "Check that the data set's __len__ and the sampler agree with what __getitem__ can give.",
            ) from error
        except (CollectiveError, DataError) as error:
            raise type(error)(f"{self._name()}: {error.failure}", error.obstacle, error.remedy) from error
        except RuntimeError as error:
            if not str(error).startswith(_LOADING):
                raise
            raise self._error(
                "the next batch was asked for.",
                f"A loading process died or did not answer: {error}",
                "Look for what ended it (memory, a crash in __getitem__), or try num_workers=0.",
            ) from error

    def _error(self, asked: str, obstacle: str, remedy: str) -> DataError:
        return DataError(f"{self._name()}: {asked}", obstacle, remedy)

    def _name(self) -> str:
        process = current.process_or_none()
        where = "" if process is None else f"Process {process.rank} of {process.world_size}, "
        dataset: Any = self.dataset
        while type(dataset).__module__.startswith(_OURS) and hasattr(dataset, "dataset"):
            dataset = dataset.dataset
        return f"{where}loader over {type(dataset).__name__} in epoch {self.progress.epoch}"

    def __len__(self) -> int:
        return max(len(self.base_dataloader) - self.source.missing_from_len(), 0)

    @property
    def total_batch_size(self) -> int:
        """Samples of all processes in one step."""
        size = self.source.step_size or getattr(self.batch_sampler, "step_size", None)
        if size is None:
            raise DataError(
                f"{self._name()}: its total batch size was asked for.",
                "Its batch sampler has no batch size.",
                "Give the batch sampler a batch_size attribute.",
            )
        return int(size)

    @property
    def total_dataset_length(self) -> int:
        """Samples of an epoch of all processes together, without padding."""
        length = self.source.length()
        return len(self.dataset) if length is None else length  # type: ignore[arg-type]

    def get_sampler(self) -> Any:
        """The sampler that gives single indices, or None."""
        batching = batching_of(self.base_dataloader)
        if batching is not None:
            return innermost_sampler(batching)
        # A loader without batches reads through a sampler of ours that takes single indices out of batches of one.
        shard = getattr(self.sampler, "shard", None)
        return self.sampler if shard is None else innermost_sampler(shard)

    def set_sampler(self, sampler: Any) -> None:
        """Replace the sampler that gives single indices.

        Raises:
            DataError: the loader reads a stream, which has no sampler.
        """
        below: Any = batching_of(self.base_dataloader)
        if below is None:
            below = getattr(self.base_dataloader.sampler, "shard", None)
        while hasattr(below, "batch_sampler"):
            below = below.batch_sampler
        if below is None or isinstance(self.base_dataloader.dataset, IterableDataset):
            raise self._error(
                "its sampler cannot be replaced.",
                "It has no sampler that gives indices of a data set.",
                "Prepare a DataLoader over a data set with indices, or make another stream.",
            )
        below.sampler = sampler

    def set_epoch(self, epoch: int) -> None:
        """Let the next iteration be that of epoch number `epoch`.

        A position that waits to be restored is kept when it lies in that epoch.
        """
        if epoch != self.progress.epoch:
            following = self.progress.following if epoch == self.progress.epoch + 1 else None
            self.source.draws.again = self.progress.following = None
            self.progress.move_to(epoch)
            if following is not None:
                self.source.upcoming(following)
        self.source.set_epoch(epoch)

    def skipping(self: P, steps: int) -> P:
        """A loader without the first `steps` batches of its epochs; both count as one where the epoch stands."""
        options = {name: value for name, value in vars(self).items() if name in _OPTIONS}
        return type(self).around(
            self.source.skipping(steps),
            use_stateful_dataloader=self.use_stateful_dataloader,
            **options | {"skip_batches": self.skip_batches + steps, "skips": True},
        )

    def auditing(self: P, progress: Progress, gradient: GradientState) -> P:
        """A loader over names of samples, with a progress and a gradient state of its own; see `audit`."""
        options = {name: value for name, value in vars(self).items() if name in _OPTIONS}
        own = {"progress": progress, "gradient_state": gradient, "device": None, "between_batches": None, "feed": None}
        return type(self).around(self.source.named(), **options | own)

    def _kept(self) -> dict[str, Any]:
        # What ties a loader to its run stays there.
        return {name: value for name, value in vars(self).items() if name not in ("between_batches", "feed")}

    def _standing(self) -> dict[str, Any]:
        """Plain values and tensors, equal on all processes, except torchdata's.

        torchdata's own state is part of it, so that its loader and the original library can continue from there; where
        it says all, it is all there is.
        """
        source, progress = self.source, self.progress
        theirs = progress.final_base or progress.base if progress.resume is None else progress.resume.base
        if source.self_contained and (theirs or progress.resume is None):
            return dict(theirs or source.base_state() or {})
        begun = source.draws.last if progress.steps else source.upcoming()
        position = progress.resume or progress.position(source.draws.again or begun)
        if not source.continues_from_base:
            position = replace(position, base=None)
        obstacle = source.obstacle() if self.restores and position.steps else None
        if obstacle is not None:
            raise CheckpointError(
                f"{self._name()}: its position was to be saved, to be restored after a load.",
                obstacle,
                _REPEATABLE,
            )
        # After its last batch an epoch has drawn everything, so that the next one begins with what there is now.
        following = source.upcoming() if progress.steps and progress.end_of_dataloader else progress.following
        return {
            **(theirs or {}),
            "version": _VERSION,
            **position.state_dict(),
            "sampler": source.identity(),
            "processes": source.processes,
            "step_size": source.step_size,
            "length": source.length(),
            "following": following.state_dict() if following is not None else None,
            "sample_seed": None if source.sample_seed is None else source.sample_seed.seed,
        }

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Continue the epoch that `state_dict` tells of.

        The next iteration has that epoch's order. It begins at the position when restoring it was asked for; else at
        the beginning, and `skip_first_batches` leads to the position. A state of the original library does not say
        which epoch that is: it is the one that `set_epoch` told, or the one that comes next.

        Raises:
            CheckpointError: restoring the position was asked for and cannot be done exactly.
        """
        if is_foreign(state_dict):
            epoch = self.progress.epoch
            if self.restores:
                self.progress.move_to(epoch, position_in(state_dict, self.source, epoch, self._name()))
            return
        position = Position.from_state_dict(state_dict)
        same = state_dict["sampler"] == self.source.identity()
        if self.source.sample_seed is not None and state_dict["sample_seed"] is not None:
            self.source.sample_seed.seed = state_dict["sample_seed"]
        resumes = self.restores and position.steps > 0
        if resumes:
            self._check_restorable(state_dict)
        draw = position.draw if same else None
        following = state_dict.get("following") if same else None
        self.progress.following = None if following is None else Draw.from_state_dict(following)
        self.source.draws.again = draw if position.steps else None
        if draw is not None and not position.steps:
            self.source.upcoming(draw)
        self.progress.move_to(position.epoch, position if resumes else None)

    def _check_restorable(self, state: Mapping[str, Any]) -> None:
        source = self.source
        obstacle = source.obstacle()
        if state["sampler"] != source.identity():
            obstacle = f"It was saved with {state['sampler']}; this loader has {source.identity()}."
        elif state["length"] != source.length():
            obstacle = f"It was saved over {state['length']} samples; this loader has {source.length()}."
        elif source.counts_steps and (state["processes"], state["step_size"]) != (source.processes, source.step_size):
            obstacle = (
                f"Its position is in steps of {state['step_size']} samples on {state['processes']} processes; this "
                f"loader has steps of {source.step_size} on {source.processes}."
            )
        if obstacle is not None:
            raise CheckpointError(
                f"{self._name()}: its position in epoch {state['epoch']} was to be restored.",
                obstacle,
                _REPEATABLE,
            )


def _with_pauses(steps: Generator[Any, None, int], between: Callable[[bool], None]) -> Generator[Any, None, int]:
    """The same batches, with a call before each."""
    between(True)
    while True:
        try:
            batch = next(steps)
        except StopIteration as end:
            given: int = end.value
            return given
        yield batch
        between(False)


_REPEATABLE: Final = (
    "Shuffle by seed (use_seedable_sampler=True) or give the sampler a generator; or leave restoring off and call "
    "skip_first_batches."
)

_OPTIONS: Final = frozenset(
    {
        "_drop_last",
        "_non_blocking",
        "between_batches",
        "device",
        "feed",
        "gradient_state",
        "progress",
        "restores",
        "rng_types",
        "skip_batches",
        "synchronized_generator",
        "torch_device_mesh",
    }
)
