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
from accel_state.watch.record import STATUS_RECORD
from accel_torch.folders import next_folder

if TYPE_CHECKING:
    from accel_torch.session import Session

__all__ = ("save_state", "wait")

logger = logging.getLogger(__name__)

_COPIES_BEHIND: Final = 3
"""Attempts to copy a checkpoint while training continues; after these, training pauses for a copy."""


def save_state(
    session: Session,
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
    project = session.options.project
    barrier = StoreBarrier(session.process, "save", "Cannot save a checkpoint.", project.deadline, CheckpointError)
    with barrier.reporting():
        wait(session)
        _check(session, async_save, options or {})
        for folder_to_save in session.hooks.folder_to_save:
            output_dir = folder_to_save(session, output_dir)
        named = next_folder(session, output_dir)
        if session.uploader is not None and named:
            from accel_torch.remote import refuse_local_folder

            refuse_local_folder(session.uploader.remote, Path(named))
    target = Path(barrier.wait("ready", named))
    if async_save:
        _save_behind(session, _Request(target, safe_serialization), barrier)
    else:
        finalizer = CheckpointFinalizer(project.fsync)
        with _staging(session, target, finalizer, barrier) as folder:
            _take(session, folder).write(
                folder,
                session.strategy,
                safe_serialization=safe_serialization,
                written=finalizer.begin,
                model_options=options,
            )
        _after_commit(session, target, finalizer)
    if project.automatic_checkpoint_naming:
        project.iteration += 1
    return str(target)


def _staging(
    session: Session,
    target: Path,
    finalizer: CheckpointFinalizer,
    barrier: StoreBarrier,
    all_wrote: AllWrote | None = None,
) -> AbstractContextManager[Path]:
    project = session.options.project
    return staging(
        target,
        session.process,
        facts=_facts(session),
        fsync=project.fsync,
        deadline=project.deadline,
        finalizer=finalizer,
        barrier=barrier,
        all_wrote=all_wrote,
    )


def _facts(session: Session) -> dict[str, Any]:
    """The facts about the run that the manifest records besides its files."""
    mesh = session.strategy.context.mesh
    positions = [loader.progress for loader in session.prepared.loaders if hasattr(loader, "progress")]
    return {
        "backend": session.backend.name,
        "step": session.accumulation.step,
        "gradient_accumulation_steps": session.gradient.num_steps,
        "run_step": STATUS_RECORD.run_step,
        "mesh": None if mesh is None else dict(zip(mesh.mesh_dim_names or (), mesh.shape, strict=False)),
        "positions": [{"epoch": at.epoch, "batch": at.steps, "sample": at.samples} for at in positions],
        "seed": torch.initial_seed(),
    }


def _check(session: Session, async_save: bool, options: Mapping[str, Any]) -> None:
    strategy = session.strategy
    unknown = sorted(options.keys() - strategy.save_options)
    if unknown:
        known = ", ".join(sorted(strategy.save_options))
        raise SettingError(
            f"Cannot call save_state() with {', '.join(unknown)}.",
            f"The backend {session.backend.name!r} does not have these options for saving models.",
            f"Use only its options: {known}." if known else "Remove them.",
        )
    if async_save and strategy.capabilities.collective_save and not strategy.capabilities.async_save:
        raise NotOffered(
            "Cannot save a checkpoint with async_save=True.",
            f"The backend {session.backend.name!r} saves with collectives, which would interfere with "
            "those of training.",
            "Remove async_save.",
        )
    _check_window(session)


def _check_window(session: Session) -> None:
    strategy = session.strategy
    weighting = session.accumulation.weighting
    if weighting is not None and weighting.unfinished:
        raise NotReady(
            "Cannot save a checkpoint in the middle of an accumulation window.",
            "Its micro-batches have weights, and a checkpoint does not contain their sum.",
            "Call save_state() when accelerator.sync_gradients is true.",
        )
    if not session.gradient.sync_gradients and not strategy.capabilities.partial_gradients:
        raise NotReady(
            "Cannot save a checkpoint in the middle of an accumulation window.",
            f"The backend {session.backend.name!r} does not expose the gradients accumulated so far.",
            "Call save_state() when accelerator.sync_gradients is true.",
        )


def _take(session: Session, folder: Path) -> CheckpointState:
    return capture(
        session.prepared,
        session.strategy,
        session.process,
        folder=folder,
        step=session.accumulation.step,
        save_on_each_node=session.options.project.save_on_each_node,
        hooks=list(session.prepared.save_hooks.values()),
        in_window=not session.gradient.sync_gradients,
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


def _save_behind(session: Session, request: _Request, barrier: StoreBarrier, guard: CopyGuard | None = None) -> None:
    """Collect the state, then copy it and write the copy in a thread.

    Args:
        barrier: the barrier of the save, which ends with the commit.
        guard: the guard of the previous attempt, if its copy was inconsistent.
    """
    strategy = session.strategy
    optimizers = [inner_optimizer(wrapped) for wrapped in session.prepared.optimizers]
    saver = _saver(session)
    request.attempts += 1
    boundaries = StepBoundaries()

    def again(at_once: bool) -> None:
        if at_once:
            _save_again(session, request)
        else:
            _save_behind(session, request, _barrier(session, request), guard)

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
        _after_commit(session, request.target, finalizer)

    with ExitStack() as stack:
        # An error here deletes the folder; later the thread is responsible for it.
        finalizer = CheckpointFinalizer(session.options.project.fsync)
        folder = stack.enter_context(_staging(session, request.target, finalizer, barrier, all_wrote))
        with barrier.reporting():
            snapshot = Snapshot(_take(session, folder), saver.buffers, guarded_tensors(optimizers))
            if guard is None:
                guard = CopyGuard(
                    optimizers,
                    session.prepared.unwrapped_models(session.strategy.unwrap),
                    lambda: _before_step(session),
                    lambda: _after_step(session),
                )
            else:
                guard.hold()
            released = guard
            early = copied() if request.attempts > _COPIES_BEHIND else None
        staged = stack.pop_all()
    saver.start(work, guard, boundaries, again)


def _save_again(session: Session, request: _Request) -> None:
    """Save while training pauses, after copies in the background were inconsistent."""
    _check_window(session)
    request.attempts += 1
    finalizer, barrier = CheckpointFinalizer(session.options.project.fsync), _barrier(session, request)

    def all_wrote(barrier: StoreBarrier, records: str, adopt: Adopt) -> None:
        # Other processes may have reached a boundary and copied once more.
        try:
            _refuse_torn(request, barrier, [], records, adopt)
        except TornError:
            # They wait for the count of this process to choose the next boundary.
            StepBoundaries().agree(barrier)
            raise

    with _staging(session, request.target, finalizer, barrier, all_wrote) as folder:
        with barrier.reporting():
            taken = _take(session, folder)
        taken.write(folder, session.strategy, safe_serialization=request.safe_serialization)
    _after_commit(session, request.target, finalizer)


def _barrier(session: Session, request: _Request) -> StoreBarrier:
    topic = f"copy/{request.target.name}"
    deadline = session.options.project.deadline
    return StoreBarrier(session.process, topic, request.asked, deadline, CheckpointError)


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


def _before_step(session: Session) -> None:
    """The step boundary of loops without a prepared loader, which would call at its batches."""
    if session.saver is not None and not session.prepared.loaders:
        session.saver.between_steps()


def _after_step(session: Session) -> None:
    if session.saver is not None and session.saver.boundaries is not None:
        session.saver.boundaries.steps += 1


def _saver(session: Session) -> BackgroundSaver:
    if session.saver is None:
        session.saver = BackgroundSaver(pinned=session.process.family.spec.pins_memory)
        session.pauses.used = True
    return session.saver


def _after_commit(session: Session, target: Path, finalizer: CheckpointFinalizer) -> None:
    """Upload a new checkpoint to the store, and delete the oldest ones beyond the project's limit."""
    project = session.options.project
    if session.uploader is not None:
        from accel_torch.remote import upload

        upload(session, target, finalizer.committed)
    limit, period = project.retention
    if limit is not None and session.state.process_index == 0:
        remove_oldest(target.parent, limit, _in_use(session) | {target}, period)


def _in_use(session: Session) -> frozenset[Path]:
    return frozenset() if session.uploader is None else session.uploader.in_use


def wait(session: Session) -> None:
    """Wait for the checkpoint in the background, and raise its error if it failed."""
    if session.saver is not None:
        session.saver.wait()
