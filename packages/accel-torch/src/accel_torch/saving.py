"""Saving a checkpoint: at once, or a copy of the state in a thread while training continues."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

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
from accel_state.transport.base import LocalTransport
from accel_state.watch.calls import format_ranks
from accel_state.watch.record import STATUS_RECORD
from accel_torch.folders import next_folder

if TYPE_CHECKING:
    from accel_state.current import Process
    from accel_torch.session import Session

__all__ = ("save_state", "wait")

logger = logging.getLogger(__name__)


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
    if not session.saves:
        return str(named)
    saving = _Save(session, session.process, barrier, CheckpointFinalizer(project.fsync))
    try:
        target = Path(barrier.wait("ready", named, looks=True))
    except CheckpointError as error:
        saving, target = _alone(saving, error), Path(named)
    if async_save:
        _save_copy(saving, target, safe_serialization)
    else:
        with _staging(saving, target) as folder:
            _take(saving, folder).write(
                folder,
                session.strategy,
                safe_serialization=safe_serialization,
                written=saving.finalizer.begin,
                model_options=options,
            )
        _after_commit(saving, target)
    if project.automatic_checkpoint_naming:
        project.iteration += 1
    return str(target)


class _Save(NamedTuple):
    """One save: of which session, on which process, and who flushes and agrees."""

    session: Session
    process: Process
    barrier: StoreBarrier
    finalizer: CheckpointFinalizer


def _alone(saving: _Save, error: CheckpointError) -> _Save:
    """The save of the main process without the others, where scripts call `save_state` only there.

    Raises:
        CheckpointError: `error`, unless all others have gone on without calling it and this process has all weights.
    """
    session, process, others = saving.session, saving.process, saving.barrier.gone_on
    whole = not session.strategy.capabilities.collective_save and session.uploader is None
    if process.rank or len(others) < process.world_size - 1 or not whole:
        raise error
    logger.warning(
        "Only the main process calls save_state(): %s. This checkpoint has the random states of this process alone. "
        "Call save_state() on every process, without a condition.",
        f"{format_ranks(others)} {'is' if len(others) == 1 else 'are'} in a later call, or ended",
    )
    transport = LocalTransport(process.device)
    topology = process.topology._replace(world_size=1, local_world_size=1)
    alone = process._replace(transport=transport, topology=topology)
    failed, project = "Cannot save a checkpoint.", session.options.project
    barrier = StoreBarrier(alone, "save", failed, project.deadline, CheckpointError)
    return saving._replace(process=alone, barrier=barrier)


def _staging(saving: _Save, target: Path) -> AbstractContextManager[Path]:
    session, project = saving.session, saving.session.options.project
    facts = _facts(session)
    if saving.process is not session.process:
        facts["alone"] = True
    return staging(
        target,
        saving.process,
        facts=facts,
        fsync=project.fsync,
        deadline=project.deadline,
        finalizer=saving.finalizer,
        barrier=saving.barrier,
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
        names = ", ".join(sorted(strategy.save_options))
        raise SettingError(
            f"Cannot call save_state() with {', '.join(unknown)}.",
            f"The backend {session.backend.name!r} does not have these options for saving models.",
            f"Use only its options: {names}." if names else "Remove them.",
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


def _take(saving: _Save, folder: Path) -> CheckpointState:
    session = saving.session
    return capture(
        session.prepared,
        session.strategy,
        saving.process,
        folder=folder,
        step=session.accumulation.step,
        save_on_each_node=session.options.project.save_on_each_node,
        hooks=list(session.prepared.save_hooks.values()),
        in_window=not session.gradient.sync_gradients,
    )


def _save_copy(saving: _Save, target: Path, safe_serialization: bool) -> None:
    """Copy the state, and start a thread that writes the copy."""
    session, finalizer = saving.session, saving.finalizer
    if session.saver is None:
        session.saver = BackgroundSaver(pinned=session.process.family.spec.pins_memory)

    def work() -> None:
        with staged:
            copied.write(folder, session.strategy, safe_serialization=safe_serialization, written=finalizer.begin)
        _after_commit(saving, target)

    with ExitStack() as stack:
        folder = stack.enter_context(_staging(saving, target))
        with saving.barrier.reporting():
            copied = copy_state(_take(saving, folder), session.saver.buffers)
        staged = stack.pop_all()
    try:
        session.saver.start(work)
    except CheckpointError as error:
        # The thread would have closed the folder.
        with staged:
            raise error


def _after_commit(saving: _Save, target: Path) -> None:
    """Upload a new checkpoint to the store, and delete the oldest ones beyond the project's limit."""
    session = saving.session
    project = session.options.project
    if session.uploader is not None:
        from accel_torch.remote import upload

        upload(session, target, saving.finalizer.committed)
    limit, period = project.retention
    if limit is not None and session.state.process_index == 0:
        remove_oldest(target.parent, limit, period)


def wait(session: Session) -> None:
    """Wait for the checkpoint in the background, and raise its error if it failed."""
    if session.saver is not None:
        session.saver.wait()
