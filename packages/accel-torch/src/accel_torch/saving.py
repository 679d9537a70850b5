"""Saving and loading everything: which folder, with which contents, and how many checkpoints are kept."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from accel_ops import broadcast_object_list
from accel_plugins.checkpoint.commit import staging
from accel_plugins.checkpoint.folder import Contents, load_folder, save_folder
from accel_plugins.checkpoint.gradients import load_gradients, save_gradients
from accel_plugins.checkpoint.manifest import verify
from accel_plugins.checkpoint.retention import find_newest, remove_oldest
from accel_plugins.manifest import Duty
from accel_state.errors import AccelError, CheckpointError, SettingError

if TYPE_CHECKING:
    from torch.nn import Module

    from accel_plugins.checkpoint.config import ProjectConfiguration
    from accel_state.current import Process
    from accel_torch.parts import Parts

__all__ = ("load_state", "save_state")

T = TypeVar("T")


def save_state(parts: Parts, output_dir: str | os.PathLike[str] | None, safe_serialization: bool) -> str:
    """Write a checkpoint and return its folder; called on every process.

    Raises:
        SettingError: no folder was given and naming is not automatic.
        CheckpointError: it could not be written; what was there before is unchanged.
    """
    project, process = parts._options.project, parts.state._process
    if project.automatic_checkpoint_naming:
        target = decided_by_main(process, lambda: _next_automatic(project))
    else:
        target = Path(_named(output_dir, "save_state"))
    with staging(target, process, fsync=project.fsync, deadline=project.deadline) as folder:
        save_folder(
            folder,
            contents(parts),
            parts._engine.strategy,
            process,
            step=parts._accumulation.step,
            safe_serialization=safe_serialization,
            save_on_each_node=project.save_on_each_node,
            hooks=list(parts._registry.save_hooks.values()),
        )
        if not parts.gradient_state.sync_gradients:
            save_gradients(unwrapped(parts), folder, process.rank)
    if project.automatic_checkpoint_naming:
        project.iteration += 1
        if project.total_limit is not None and process.rank == 0:
            remove_oldest(target.parent, project.total_limit)
    return str(target)


def load_state(parts: Parts, input_dir: str | os.PathLike[str] | None, options: dict[str, Any]) -> None:
    """Read a checkpoint; called on every process.

    Raises:
        SettingError: no folder was given and naming is not automatic.
        CheckpointError: it cannot be trusted or does not fit.
    """
    project = parts._options.project
    hashes = project.verify == "hashes"
    if input_dir is None and project.automatic_checkpoint_naming:
        folder = decided_by_main(parts.state._process, lambda: find_newest(_automatic(project), hashes=hashes))
    else:
        folder = Path(_named(input_dir, "load_state"))
        _check(folder, hashes)
    map_location = options.pop("map_location", "cpu")
    parts._accumulation.step = load_folder(
        folder,
        contents(parts),
        parts._engine.strategy,
        parts.state._process,
        map_location=map_location,
        model_options=options,
        hooks=list(parts._registry.load_hooks.values()),
    )
    load_gradients(unwrapped(parts), folder, parts.state.process_index)


def unwrapped(parts: Parts) -> list[Module]:
    """The user's models, whose parameters have the names that the user gave them."""
    return [parts._engine.strategy.unwrap(model) for model in parts._registry.models]


def contents(parts: Parts) -> Contents:
    """What a checkpoint of this Accelerator holds."""
    registry, engine = parts._registry, parts._engine
    return Contents(
        models=registry.models,
        optimizers=registry.optimizers,
        schedulers=registry.schedulers,
        loaders=registry.loaders,
        scaler=None if engine.owns(Duty.PRECISION) else engine.precision,
        custom=registry.custom,
    )


def decided_by_main(process: Process, decide: Callable[[], T]) -> T:
    """What `decide` returns on the main process, on every process; its error comes to every process too."""
    answer: list[Any] = [None]
    if process.rank == 0:
        try:
            answer = [decide()]
        except AccelError as error:
            answer = [error]
    broadcast_object_list(answer)
    if isinstance(answer[0], AccelError):
        raise answer[0]
    decided: T = answer[0]
    return decided


def _automatic(project: ProjectConfiguration) -> Path:
    """Folder of automatically named checkpoints."""
    return Path(project.project_dir or ".") / "checkpoints"


def _next_automatic(project: ProjectConfiguration) -> Path:
    target = _automatic(project) / f"checkpoint_{project.iteration}"
    if target.exists():
        raise CheckpointError(
            f"save_state() was to write {target} by automatic naming.",
            "It is there already.",
            f"Set project_configuration.iteration to a number after {project.iteration}, or use another project_dir.",
        )
    return target


def _named(given: str | os.PathLike[str] | None, method: str) -> str:
    if given is None:
        raise SettingError(
            f"{method}() was called without a folder.",
            "Checkpoints are not named automatically.",
            "Name a folder, or give ProjectConfiguration(automatic_checkpoint_naming=True) to the Accelerator.",
        )
    return os.path.expanduser(os.fspath(given))


def _check(folder: Path, hashes: bool) -> None:
    """Refuse a folder that is not there or whose files are not those that its manifest names."""
    asked = f"The checkpoint {folder} was to be loaded."
    if not folder.is_dir():
        raise CheckpointError(asked, "There is no such folder.", "Name a folder that save_state() wrote.")
    verdict = verify(folder, hashes=hashes)
    if verdict.damage:
        raise CheckpointError(asked, " ".join(verdict.damage), "Load an older checkpoint.")
