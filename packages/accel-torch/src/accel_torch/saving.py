"""Saving everything, in one go or while training goes on."""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from accel_plugins.checkpoint.background import BackgroundSaver
from accel_plugins.checkpoint.capture import Captured, capture
from accel_plugins.checkpoint.commit import staging
from accel_plugins.checkpoint.retention import remove_oldest
from accel_plugins.checkpoint.sealing import Sealer
from accel_plugins.checkpoint.snapshot import Gate, Snapshot, steady_tensors
from accel_state.errors import NotOffered, NotReady, SettingError
from accel_torch.checkpoints import contents, next_folder, unwrapped

if TYPE_CHECKING:
    from accel_torch.parts import Parts

__all__ = ("save_state", "wait")


def save_state(
    parts: Parts,
    output_dir: str | os.PathLike[str] | None,
    safe_serialization: bool,
    async_save: bool = False,
    options: Mapping[str, Any] | None = None,
) -> str:
    """Write a checkpoint and return its folder; called on every process.

    Raises:
        SettingError: no folder was given and naming is not automatic, or an option is unknown.
        NotReady: it cannot be saved at this moment.
        NotOffered: the backend cannot save while training goes on.
        CheckpointError: it, or the one before it, could not be written; what was there before is unchanged.
    """
    wait(parts)
    _check(parts, async_save, options or {})
    project, process = parts._options.project, parts.state._process
    target = next_folder(parts, output_dir)
    sealer = Sealer(project.fsync)
    with ExitStack() as stack:
        staged = staging(
            target,
            process,
            facts=_facts(parts),
            fsync=project.fsync,
            deadline=project.deadline,
            sealer=sealer,
        )
        folder = stack.enter_context(staged)
        taken = _take(parts, folder)
        if async_save:
            _write_behind(parts, taken, folder, target, stack.pop_all(), safe_serialization)
        else:
            strategy = parts._engine.strategy
            taken.write(
                folder,
                strategy,
                safe_serialization=safe_serialization,
                written=sealer.begin,
                model_options=options,
            )
    if not async_save:
        _retain(parts, target)
    if project.automatic_checkpoint_naming:
        project.iteration += 1
    return str(target)


def _facts(parts: Parts) -> dict[str, Any]:
    """What the manifest tells of the run beside its files."""
    mesh = parts._engine.strategy.context.mesh
    positions = [loader.progress for loader in parts._registry.loaders if hasattr(loader, "progress")]
    return {
        "backend": parts._engine.manifest.name,
        "step": parts._accumulation.step,
        "mesh": None if mesh is None else dict(zip(mesh.mesh_dim_names or (), mesh.shape, strict=False)),
        "positions": [{"epoch": at.epoch, "batch": at.steps, "sample": at.samples} for at in positions],
        "seed": torch.initial_seed(),
    }


def _check(parts: Parts, async_save: bool, options: Mapping[str, Any]) -> None:
    strategy = parts._engine.strategy
    unknown = sorted(options.keys() - strategy.save_options)
    if unknown:
        known = ", ".join(sorted(strategy.save_options))
        raise SettingError(
            f"save_state() was given {', '.join(unknown)}.",
            f"The backend {parts._engine.manifest.name!r} has no such options for saving models.",
            f"Leave them out; it knows {known}." if known else "Leave them out.",
        )
    if async_save and strategy.saves_together and not strategy.saves_behind:
        raise NotOffered(
            "A checkpoint was to be saved while training goes on (async_save=True).",
            f"The backend {parts._engine.manifest.name!r} saves with collectives that would meet those of training.",
            "Leave async_save out.",
        )
    weighting = parts._accumulation.weighting
    if weighting is not None and weighting.unfinished:
        raise NotReady(
            "A checkpoint was to be saved in the middle of an accumulation window.",
            "Its micro-batches have weights, whose sum so far no checkpoint holds.",
            "Call save_state() when accelerator.sync_gradients is true.",
        )
    if not parts.gradient_state.sync_gradients and not strategy.gives_partial_gradients:
        raise NotReady(
            "A checkpoint was to be saved in the middle of an accumulation window.",
            f"The backend {parts._engine.manifest.name!r} does not give out the gradients gathered so far.",
            "Call save_state() when accelerator.sync_gradients is true.",
        )


def _take(parts: Parts, folder: Path) -> Captured:
    return capture(
        contents(parts),
        parts._engine.strategy,
        parts.state._process,
        folder=folder,
        step=parts._accumulation.step,
        save_on_each_node=parts._options.project.save_on_each_node,
        hooks=list(parts._registry.save_hooks.values()),
        in_window=not parts.gradient_state.sync_gradients,
    )


def _write_behind(
    parts: Parts, taken: Captured, folder: Path, target: Path, staged: ExitStack, safe_serialization: bool
) -> None:
    """Copy what was taken and write the copy, both in a thread; `staged` completes the folder."""
    strategy = parts._engine.strategy
    optimizers = [getattr(wrapped, "optimizer", wrapped) for wrapped in parts._registry.optimizers]

    def work() -> None:
        with staged:
            try:
                snapshot.copy()
            finally:
                gate.open()
            snapshot.captured.write(folder, strategy, safe_serialization=safe_serialization)
        _retain(parts, target)

    with staged:
        # Whatever fails here takes the folder away; afterwards the thread is responsible for it.
        saver = _saver(parts)
        snapshot = Snapshot(taken, saver.buffers, steady_tensors(optimizers))
        gate = Gate(optimizers, unwrapped(parts))
        staged = staged.pop_all()
    saver.start(work, gate)


def _saver(parts: Parts) -> BackgroundSaver:
    if parts._saver is None:
        parts._saver = BackgroundSaver(pinned=parts.state._process.family.pins_memory)
    return parts._saver


def _retain(parts: Parts, target: Path) -> None:
    """Remove the oldest checkpoints beyond what the project keeps."""
    project = parts._options.project
    limited = project.automatic_checkpoint_naming and project.total_limit is not None
    if limited and parts.state.process_index == 0:
        remove_oldest(target.parent, project.total_limit or 1)


def wait(parts: Parts) -> None:
    """Return when no checkpoint is being saved any more; what went wrong with it is raised here."""
    if parts._saver is not None:
        parts._saver.wait()
