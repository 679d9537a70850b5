"""The names of an Accelerator's checkpoints: given by the script, or numbered in the project's folder."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from accel_plugins.checkpoint.retention import checkpoints, number_of
from accel_plugins.checkpoint.store import is_url
from accel_state.errors import CheckpointNameError, SettingError

if TYPE_CHECKING:
    from accel_plugins.checkpoint.config import ProjectConfiguration
    from accel_torch.session import Session

__all__ = ("automatic_folder", "follow_number", "given_folder", "next_folder")


def automatic_folder(project: ProjectConfiguration) -> Path:
    """The folder of automatically named checkpoints."""
    return Path(project.project_dir or ".") / "checkpoints"


def next_folder(session: Session, output_dir: str | os.PathLike[str] | None) -> str:
    """The path of the next checkpoint; the main process decides.

    Raises:
        SettingError: no folder was given and naming is not automatic.
        CheckpointNameError: the name is taken.
    """
    project = session.options.project
    if not project.automatic_checkpoint_naming:
        return given_folder(output_dir, "save_state")
    return str(_next_automatic(project)) if session.process.rank == 0 else ""


def follow_number(project: ProjectConfiguration, loaded: str) -> None:
    """Number the next automatic checkpoint after one that was loaded by its name.

    Args:
        project: the Accelerator's project configuration.
        loaded: the folder or URL.
    """
    if is_url(loaded):
        store, _, name = loaded.rstrip("/").rpartition("/")
        own = store == str(project.remote).rstrip("/")
    else:
        folder = Path(loaded).resolve()
        own, name = folder.parent == automatic_folder(project).resolve(), folder.name
    if own and project.automatic_checkpoint_naming and (number := number_of(name)) is not None:
        project.iteration = max(project.iteration, number + 1)


def _next_automatic(project: ProjectConfiguration) -> Path:
    folder = automatic_folder(project)
    target = folder / f"checkpoint_{project.iteration}"
    later = [one.path.name for one in checkpoints(folder) if one.number >= project.iteration]
    if later or target.exists():
        raise CheckpointNameError(
            f"Cannot save {target} by automatic naming.",
            f"{(later or [target.name])[-1]} exists already, and load_state() would load it as the newest.",
            "Call load_state() first to continue after it, set project_configuration.iteration to a later number, or "
            "use another project_dir.",
        )
    return target


def given_folder(folder: str | os.PathLike[str] | None, method: str) -> str:
    """The folder that a script gave to `method`.

    Raises:
        SettingError: it gave none.
    """
    if folder is None:
        raise SettingError(
            f"Cannot call {method}() without a folder.",
            "Automatic naming of checkpoints is off.",
            "Give a folder, or give ProjectConfiguration(automatic_checkpoint_naming=True) to the Accelerator.",
        )
    return os.path.expanduser(os.fspath(folder))
