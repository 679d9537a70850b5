"""Aim: a repository of runs in a folder."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from accel_state.settings.installed import Requirement
from accel_tracking.base import LibraryTracker, on_main_process
from accel_tracking.values import flatten_keys, plain, scalars_as_numbers

__all__ = ("AimTracker",)


class AimTracker(LibraryTracker):
    """Stores a run in the Aim repository of a folder.

    Args:
        run_name: name of the run.
        logging_dir: folder of the repository.
        kwargs: arguments for `aim.Run`.
    """

    name = "aim"
    requires_logging_directory = True
    requirement = Requirement("aim")

    writer = LibraryTracker.tracker

    def __init__(self, run_name: str, logging_dir: str | os.PathLike[str] = ".", **kwargs: Any) -> None:
        super().__init__(run_name, **kwargs)
        self.aim_repo_path = logging_dir

    def open(self) -> Any:
        """Open an Aim run."""
        from aim import Run

        run = Run(repo=os.fspath(self.aim_repo_path), **self.init_kwargs)
        run.name = self.run_name
        return run

    @on_main_process
    def store_init_configuration(self, values: Mapping[str, Any]) -> None:
        """Store the hyperparameters under `hparams`."""
        self.writer["hparams"] = plain(values)

    @on_main_process
    def log(self, values: Mapping[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Track each value, text as `aim.Text`; `kwargs` are those of `Run.track`, such as `context`."""
        import aim

        for name, value in flatten_keys(scalars_as_numbers(values)).items():
            tracked = aim.Text(value) if isinstance(value, str) else value
            self.writer.track(tracked, name=name, step=step, **kwargs)

    @on_main_process
    def log_images(
        self,
        values: Mapping[str, Any],
        step: int | None = None,
        kwargs: Mapping[str, Mapping[str, Any]] | None = None,
        **image_options: Any,
    ) -> None:
        """Track images, each an image or a pair (image, caption).

        Args:
            values: name to image or pair.
            step: step of the images.
            kwargs: `aim_image` for `aim.Image`, `track` for `Run.track`.
            image_options: further arguments for `aim.Image`.
        """
        import aim

        options = kwargs or {}
        for name, value in values.items():
            image, caption = value if isinstance(value, tuple) else (value, "")
            picture = aim.Image(image, caption=caption, **{**image_options, **options.get("aim_image", {})})
            self.writer.track(picture, name=name, step=step, **options.get("track", {}))

    @on_main_process
    def finish(self) -> None:
        """Close the run."""
        self.writer.close()
