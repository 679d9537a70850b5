"""Saving a checkpoint: at once, or a copy of the state in a thread while training continues."""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from accel_ops.agreement import StoreBarrier
from accel_plugins.checkpoint.background import BackgroundSaver, copy_state
from accel_plugins.checkpoint.commit import staging
from accel_plugins.checkpoint.finalize import CheckpointFinalizer
from accel_plugins.checkpoint.models import identity_of
from accel_plugins.checkpoint.retention import remove_oldest
from accel_plugins.checkpoint.state import CheckpointState, capture
from accel_plugins.layers import strategy_model
from accel_state.errors import CheckpointError, NotOffered, NotReady, SettingError
from accel_state.watch.record import STATUS_RECORD
from accel_torch.folders import next_folder

if TYPE_CHECKING:
    from accel_torch.session import Session

__all__ = ("save_state", "wait")


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
        output_dir = session.place_to_save(output_dir)
        named = next_folder(session, output_dir)
        if session.uploader is not None and named:
            from accel_torch.remote import refuse_local_folder

            refuse_local_folder(session.uploader.remote, Path(named))
    target = Path(barrier.wait("ready", named))
    finalizer = CheckpointFinalizer(project.fsync)
    if async_save:
        _save_copy(session, target, finalizer, barrier, safe_serialization)
    else:
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
    )


def _facts(session: Session) -> dict[str, Any]:
    """The facts about the run that the manifest records besides its files."""
    mesh = session.strategy.context.mesh
    models = [session.strategy.unwrap(strategy_model(model)) for model in session.prepared.all_models]
    shapes = not session.strategy.capabilities.collective_save
    positions = [loader.progress for loader in session.prepared.loaders if hasattr(loader, "progress")]
    return {
        "backend": session.backend.name,
        "step": session.accumulation.step,
        "gradient_accumulation_steps": session.gradient.num_steps,
        "run_step": STATUS_RECORD.run_step,
        "mesh": None if mesh is None else dict(zip(mesh.mesh_dim_names or (), mesh.shape, strict=False)),
        # A hook may write other models.
        "models": None if session.prepared.save_hooks else [identity_of(model, shapes=shapes) for model in models],
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


def _save_copy(
    session: Session, target: Path, finalizer: CheckpointFinalizer, barrier: StoreBarrier, safe_serialization: bool
) -> None:
    """Copy the state, and start a thread that writes the copy."""
    if session.saver is None:
        session.saver = BackgroundSaver(pinned=session.process.family.spec.pins_memory)

    def work() -> None:
        with staged:
            copied.write(folder, session.strategy, safe_serialization=safe_serialization, written=finalizer.begin)
        _after_commit(session, target, finalizer)

    with ExitStack() as stack:
        folder = stack.enter_context(_staging(session, target, finalizer, barrier))
        with barrier.reporting():
            copied = copy_state(_take(session, folder), session.saver.buffers)
        staged = stack.pop_all()
    try:
        session.saver.start(work)
    except CheckpointError as error:
        # The thread would have closed the folder.
        with staged:
            raise error


def _after_commit(session: Session, target: Path, finalizer: CheckpointFinalizer) -> None:
    """Upload a new checkpoint to the store, and delete the oldest ones beyond the project's limit."""
    project = session.options.project
    if session.uploader is not None:
        from accel_torch.remote import upload

        upload(session, target, finalizer.committed)
    limit, period = project.retention
    if limit is not None and session.state.process_index == 0:
        remove_oldest(target.parent, limit, period)


def wait(session: Session) -> None:
    """Wait for the checkpoint in the background, and raise its error if it failed."""
    if session.saver is not None:
        session.saver.wait()
