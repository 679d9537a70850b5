"""Saving a checkpoint, either at once or in the background while training continues."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import torch

from accel_ops.agreement import StoreBarrier
from accel_plugins.checkpoint.background import BackgroundSaver, CopyGuard, Snapshot, TornError, guarded_tensors
from accel_plugins.checkpoint.boundaries import StepBoundaries
from accel_plugins.checkpoint.commit import Adopt, AllWrote, CheckpointFinalizer, staging
from accel_plugins.checkpoint.retention import remove_oldest
from accel_plugins.checkpoint.state import CheckpointState, capture
from accel_plugins.wrapped.optimizer import inner_optimizer
from accel_state.errors import CheckpointError, NotOffered, NotReady, SettingError
from accel_state.hang_report.progress import PROGRESS
from accel_torch.folders import next_folder

if TYPE_CHECKING:
    from accel_torch.members import AcceleratorMembers

__all__ = ("save_state", "wait")

logger = logging.getLogger(__name__)

_COPIES_BEHIND: Final = 3
"""Attempts to copy a checkpoint while training continues; after these, training pauses for a copy."""


def save_state(
    accelerator: AcceleratorMembers,
    output_dir: str | os.PathLike[str] | None,
    safe_serialization: bool,
    async_save: bool = False,
    options: Mapping[str, Any] | None = None,
) -> str:
    """Write a checkpoint and return its folder, which the main process chooses; called on every process.

    Raises:
        SettingError: no folder was given and naming is not automatic, or an option is unknown.
        NotReady: the current state cannot be saved, inside an accumulation window.
        NotOffered: the backend cannot save while training continues.
        CheckpointError: this checkpoint or the previous one could not be written; earlier checkpoints are unchanged.
    """
    project = accelerator._options.project
    barrier = StoreBarrier(
        accelerator.state._process, "save", "Cannot save a checkpoint.", project.deadline, CheckpointError
    )
    with barrier.reporting():
        wait(accelerator)
        _check(accelerator, async_save, options or {})
        named = next_folder(accelerator, output_dir)
        if accelerator._uploader is not None and named:
            from accel_torch.remote import refuse_local_folder

            refuse_local_folder(accelerator._uploader.remote, Path(named))
    target = Path(barrier.wait("ready", named))
    if async_save:
        _save_behind(accelerator, _Request(target, safe_serialization), barrier)
    else:
        finalizer = CheckpointFinalizer(project.fsync)
        with _staging(accelerator, target, finalizer, barrier) as folder:
            _take(accelerator, folder).write(
                folder,
                accelerator._backend.strategy,
                safe_serialization=safe_serialization,
                written=finalizer.begin,
                model_options=options,
            )
        _after_commit(accelerator, target, finalizer)
    if project.automatic_checkpoint_naming:
        project.iteration += 1
    return str(target)


def _staging(
    accelerator: AcceleratorMembers,
    target: Path,
    finalizer: CheckpointFinalizer,
    barrier: StoreBarrier,
    all_wrote: AllWrote | None = None,
) -> AbstractContextManager[Path]:
    project = accelerator._options.project
    return staging(
        target,
        accelerator.state._process,
        facts=_facts(accelerator),
        fsync=project.fsync,
        deadline=project.deadline,
        finalizer=finalizer,
        barrier=barrier,
        all_wrote=all_wrote,
    )


def _facts(accelerator: AcceleratorMembers) -> dict[str, Any]:
    """The facts about the run that the manifest records besides its files."""
    mesh = accelerator._backend.strategy.context.mesh
    positions = [loader.progress for loader in accelerator._prepared.loaders if hasattr(loader, "progress")]
    return {
        "backend": accelerator._backend.manifest.name,
        "step": accelerator._accumulation.step,
        "gradient_accumulation_steps": accelerator.gradient_state.num_steps,
        "run_step": PROGRESS.run_step,
        "mesh": None if mesh is None else dict(zip(mesh.mesh_dim_names or (), mesh.shape, strict=False)),
        "positions": [{"epoch": at.epoch, "batch": at.steps, "sample": at.samples} for at in positions],
        "seed": torch.initial_seed(),
    }


def _check(accelerator: AcceleratorMembers, async_save: bool, options: Mapping[str, Any]) -> None:
    strategy = accelerator._backend.strategy
    unknown = sorted(options.keys() - strategy.save_options)
    if unknown:
        known = ", ".join(sorted(strategy.save_options))
        raise SettingError(
            f"Cannot call save_state() with {', '.join(unknown)}.",
            f"The backend {accelerator._backend.manifest.name!r} does not have these options for saving models.",
            f"Use only its options: {known}." if known else "Remove them.",
        )
    if async_save and strategy.capabilities.collective_save and not strategy.capabilities.async_save:
        raise NotOffered(
            "Cannot save a checkpoint with async_save=True.",
            f"The backend {accelerator._backend.manifest.name!r} saves with collectives, which would interfere with "
            "those of training.",
            "Remove async_save.",
        )
    _check_window(accelerator)


def _check_window(accelerator: AcceleratorMembers) -> None:
    strategy = accelerator._backend.strategy
    weighting = accelerator._accumulation.weighting
    if weighting is not None and weighting.unfinished:
        raise NotReady(
            "Cannot save a checkpoint in the middle of an accumulation window.",
            "Its micro-batches have weights, and a checkpoint does not contain their sum.",
            "Call save_state() when accelerator.sync_gradients is true.",
        )
    if not accelerator.gradient_state.sync_gradients and not strategy.capabilities.partial_gradients:
        raise NotReady(
            "Cannot save a checkpoint in the middle of an accumulation window.",
            f"The backend {accelerator._backend.manifest.name!r} does not expose the gradients accumulated so far.",
            "Call save_state() when accelerator.sync_gradients is true.",
        )


def _take(accelerator: AcceleratorMembers, folder: Path) -> CheckpointState:
    return capture(
        accelerator._prepared,
        accelerator._backend.strategy,
        accelerator.state._process,
        folder=folder,
        step=accelerator._accumulation.step,
        save_on_each_node=accelerator._options.project.save_on_each_node,
        hooks=list(accelerator._prepared.save_hooks.values()),
        in_window=not accelerator.gradient_state.sync_gradients,
    )


@dataclass
class _Request:
    """A checkpoint that is saved while training continues."""

    target: Path
    safe_serialization: bool
    attempts: int = 0

    @property
    def asked(self) -> str:
        """The first part of error messages."""
        return f"Cannot save the checkpoint {self.target} in the background."


def _save_behind(
    accelerator: AcceleratorMembers, request: _Request, barrier: StoreBarrier, guard: CopyGuard | None = None
) -> None:
    """Collect the state, then copy it and write the copy in a thread.

    Args:
        barrier: the barrier of the save, which ends with the commit.
        guard: the guard of the previous attempt, if its copy was inconsistent.
    """
    strategy = accelerator._backend.strategy
    optimizers = [inner_optimizer(wrapped) for wrapped in accelerator._prepared.optimizers]
    saver = _saver(accelerator)
    request.attempts += 1
    boundaries = StepBoundaries()

    def again(at_once: bool) -> None:
        if at_once:
            _save_again(accelerator, request)
        else:
            _save_behind(accelerator, request, _barrier(accelerator, request), guard)

    def copied() -> list[str]:
        try:
            return snapshot.copy()
        except BaseException as error:
            barrier.fail(error)
            raise
        finally:
            released.release()

    torn: list[str] = []

    def all_wrote(barrier: StoreBarrier, records: str, adopt: Adopt) -> None:
        try:
            _refuse_torn(request, barrier, torn, records, adopt)
        except TornError:
            boundaries.agree(barrier)
            raise

    def work() -> None:
        with staged:
            torn.extend(copied() if early is None else early)
            snapshot.captured.write(
                folder, strategy, safe_serialization=request.safe_serialization, written=finalizer.begin
            )
        _after_commit(accelerator, request.target, finalizer)

    with ExitStack() as stack:
        # An error here deletes the folder; later the thread is responsible for it.
        finalizer = CheckpointFinalizer(accelerator._options.project.fsync)
        folder = stack.enter_context(_staging(accelerator, request.target, finalizer, barrier, all_wrote))
        with barrier.reporting():
            snapshot = Snapshot(_take(accelerator, folder), saver.buffers, guarded_tensors(optimizers))
            if guard is None:
                guard = CopyGuard(
                    optimizers,
                    accelerator._prepared.unwrapped_models(accelerator._backend.strategy.unwrap),
                    lambda: _before_step(accelerator),
                    lambda: _after_step(accelerator),
                )
            else:
                guard.hold()
            released = guard
            early = copied() if request.attempts > _COPIES_BEHIND else None
        staged = stack.pop_all()
    saver.start(work, guard, boundaries, again)


def _save_again(accelerator: AcceleratorMembers, request: _Request) -> None:
    """Save while training pauses, after copies in the background were inconsistent."""
    _check_window(accelerator)
    request.attempts += 1
    finalizer, barrier = CheckpointFinalizer(accelerator._options.project.fsync), _barrier(accelerator, request)

    def all_wrote(barrier: StoreBarrier, records: str, adopt: Adopt) -> None:
        # Other processes may have reached a boundary and copied once more.
        try:
            _refuse_torn(request, barrier, [], records, adopt)
        except TornError:
            # They wait for the count of this process to choose the next boundary.
            StepBoundaries().agree(barrier)
            raise

    with _staging(accelerator, request.target, finalizer, barrier, all_wrote) as folder:
        with barrier.reporting():
            taken = _take(accelerator, folder)
        taken.write(folder, accelerator._backend.strategy, safe_serialization=request.safe_serialization)
    _after_commit(accelerator, request.target, finalizer)


def _barrier(accelerator: AcceleratorMembers, request: _Request) -> StoreBarrier:
    topic = f"copy/{request.target.name}"
    deadline = accelerator._options.project.deadline
    return StoreBarrier(accelerator.state._process, topic, request.asked, deadline, CheckpointError)


def _refuse_torn(request: _Request, barrier: StoreBarrier, torn: list[str], records: str, adopt: Adopt) -> None:
    """Exchange with the other processes which copies are inconsistent; the main process reports them.

    Args:
        records: the facts about this process's files.
        adopt: called with the facts of all processes, on the main process.

    Raises:
        TornError: a copy is inconsistent.
        CheckpointError: the copy was made while training paused, or another process failed.
    """

    def combine(answers: Sequence[str]) -> str:
        told = [json.loads(answer) for answer in answers]
        adopt([records for _, records in told])
        return json.dumps([f"{name} (process {rank})" for rank, (names, _) in enumerate(told) for name in names])

    places: list[str] = json.loads(barrier.wait("copied", json.dumps([torn, records]), combine))
    if not places:
        return
    named = ", ".join(places[:3]) + (f" and {len(places) - 3} more" if len(places) > 3 else "")
    remedy = "Call wait_for_checkpoint() before you change parameters outside of optimizer.step()."
    if request.attempts > _COPIES_BEHIND:
        barrier.leave()
        obstacle = f"Another thread changes parameters between two steps: {named}."
        raise CheckpointError(request.asked, obstacle, "Stop that thread, or call wait_for_checkpoint() before it.")
    if barrier.rank == 0:
        logger.warning(
            "%s It is not committed: %s changed before they were copied. The save is repeated between the next two "
            "steps. %s",
            request.asked,
            named,
            remedy,
        )
    raise TornError(named)


def _before_step(accelerator: AcceleratorMembers) -> None:
    """The step boundary of loops without a prepared loader, which would call at its batches."""
    if accelerator._saver is not None and not accelerator._prepared.loaders:
        accelerator._saver.between_steps()


def _after_step(accelerator: AcceleratorMembers) -> None:
    if accelerator._saver is not None and accelerator._saver.boundaries is not None:
        accelerator._saver.boundaries.steps += 1


def _saver(accelerator: AcceleratorMembers) -> BackgroundSaver:
    if accelerator._saver is None:
        accelerator._saver = BackgroundSaver(pinned=accelerator.state._process.family.pins_memory)
        accelerator._pauses.used = True
    return accelerator._saver


def _after_commit(accelerator: AcceleratorMembers, target: Path, finalizer: CheckpointFinalizer) -> None:
    """Upload a new checkpoint to the store, and delete the oldest ones beyond the project's limit."""
    project = accelerator._options.project
    if accelerator._uploader is not None:
        from accel_torch.remote import upload

        upload(accelerator, target, finalizer.committed)
    limit, period = project.retention
    if limit is not None and accelerator.state.process_index == 0:
        remove_oldest(target.parent, limit, _in_use(accelerator) | {target}, period)


def _in_use(accelerator: AcceleratorMembers) -> frozenset[Path]:
    return frozenset() if accelerator._uploader is None else accelerator._uploader.in_use


def wait(accelerator: AcceleratorMembers) -> None:
    """Wait for the checkpoint in the background, and raise its error if it failed."""
    if accelerator._saver is not None:
        accelerator._saver.wait()
