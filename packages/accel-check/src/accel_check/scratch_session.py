"""Keeps the sessions of our Accelerator out of the user's folders and trackers during a check."""

from __future__ import annotations

import dataclasses
import os
from typing import TYPE_CHECKING, Any

from accel_torch.hooks import Hook

if TYPE_CHECKING:
    from accel_torch.options import Options
    from accel_torch.session import Session

__all__ = ("ScratchHook",)


class ScratchHook(Hook):
    """Gives every folder of a session a counterpart in a scratch folder.

    Args:
        scratch: the folder.
        own: folders of the check, whose paths stay as they are.
    """

    def __init__(self, scratch: str, own: tuple[str, ...] = ()) -> None:
        self.scratch, self._own = scratch, (scratch, *own)

    def configure(self, options: Options) -> Options:
        """Move the project's folders, and start no tracker."""
        folders: dict[str, Any] = {
            name: self.inside(value)
            for name in ("project_dir", "logging_dir")
            if (value := getattr(options.project, name)) is not None
        }
        return options._replace(project=dataclasses.replace(options.project, **folders), log_with=())

    def folder_to_save(self, session: Session, output_dir: Any) -> Any:
        """Save into the counterpart of a folder inside the scratch folder, so that the script's own stays unchanged."""
        return None if output_dir is None else self.inside(output_dir)

    def folder_to_load(self, session: Session, input_dir: Any, missing_ok: bool) -> Any:
        """The counterpart of a folder; the folder itself if it has none and must exist."""
        if input_dir is None:
            return None
        inside = self.inside(input_dir)
        return inside if missing_ok or os.path.exists(inside) else input_dir

    def inside(self, folder: Any) -> str:
        """The counterpart of a path."""
        text = os.path.abspath(os.fspath(folder))
        return text if text.startswith(self._own) else os.path.join(self.scratch, text.lstrip(os.sep))
