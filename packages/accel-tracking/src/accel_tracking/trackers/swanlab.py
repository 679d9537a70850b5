"""SwanLab, in the cloud, on this machine, or offline."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from accel_state.settings.installed import Requirement
from accel_tracking.base import LibraryTracker, on_main_process
from accel_tracking.values import flatten_keys, plain, scalars_as_numbers

__all__ = ("SwanLabTracker",)


class SwanLabTracker(LibraryTracker):
    """Stores a run in a project of SwanLab.

    Args:
        run_name: name of the project.
        kwargs: arguments for `swanlab.init`, such as `mode` or `name`.
    """

    name = "swanlab"
    main_process_only = False
    requirement = Requirement("swanlab")

    run = LibraryTracker.tracker

    def open(self) -> Any:
        """Open a SwanLab run."""
        import swanlab

        return swanlab.init(project=self.run_name, **self.init_kwargs)

    @on_main_process
    def store_init_configuration(self, values: Mapping[str, Any]) -> None:
        """Store the hyperparameters as the run's config."""
        self.run.config.update(plain(values))

    @on_main_process
    def log(self, values: Mapping[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Log to the run: text as `swanlab.Text`, objects of SwanLab unchanged."""
        import swanlab

        flat = flatten_keys(scalars_as_numbers(values))
        self.run.log(
            {name: swanlab.Text(value) if isinstance(value, str) else value for name, value in flat.items()},
            step=step,
            **kwargs,
        )

    @on_main_process
    def log_images(self, values: Mapping[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Log batches of images as `swanlab.Image(image, **kwargs)`."""
        import swanlab

        self.run.log(
            {name: [swanlab.Image(image, **kwargs) for image in images] for name, images in values.items()}, step=step
        )

    @on_main_process
    def finish(self) -> None:
        """Finish the run."""
        self.run.finish()
