"""Trackio: a local database with a dashboard, optionally mirrored to a Hub Space."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from accel_state.settings.installed import Requirement
from accel_tracking.base import LibraryTracker, on_main_process
from accel_tracking.values import plain, scalars_as_numbers

__all__ = ("TrackioTracker",)


class TrackioTracker(LibraryTracker):
    """Stores a run in a project of trackio.

    Args:
        run_name: name of the project.
        kwargs: arguments for `trackio.init`, such as `name` or `space_id`.
    """

    name = "trackio"
    main_process_only = False
    requirement = Requirement("trackio")

    run = LibraryTracker.tracker

    def open(self) -> Any:
        """Open a trackio run."""
        import trackio

        return trackio.init(project=self.run_name, **self.init_kwargs)

    @on_main_process
    def store_init_configuration(self, values: Mapping[str, Any]) -> None:
        """Store the hyperparameters as the run's config."""
        self.run.config.update(plain(values))

    @on_main_process
    def log(self, values: Mapping[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Log to the run."""
        self.run.log(scalars_as_numbers(values), step=step, **kwargs)

    @on_main_process
    def finish(self) -> None:
        """Finish the run."""
        self.run.finish()
