"""SwanLab, in the cloud, on this machine, or offline."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from accel_state.settings.installed import Requirement
from accel_tracking.base import GeneralTracker, on_main_process
from accel_tracking.values import flat, plain, scalars_as_numbers

__all__ = ("SwanLabTracker",)


class SwanLabTracker(GeneralTracker):
    """Keeps a run in a project of SwanLab.

    Args:
        run_name: name of the project.
        kwargs: for `swanlab.init`, such as `mode` or `name`.
    """

    name = "swanlab"
    requires_logging_directory = False
    main_process_only = False
    requirement = Requirement("swanlab", extra="accel-tracking[swanlab]")

    def __init__(self, run_name: str, **kwargs: Any) -> None:
        super().__init__()
        self.run_name = run_name
        self.init_kwargs = kwargs
        self.run: Any = None

    @property
    def tracker(self) -> Any:
        """The run of SwanLab."""
        return self.run

    @on_main_process
    def start(self) -> None:
        """Begin a run of SwanLab."""
        self.requirement.demand("The tracker 'swanlab' was started.")
        import swanlab

        self.run = swanlab.init(project=self.run_name, **self.init_kwargs)

    @on_main_process
    def store_init_configuration(self, values: Mapping[str, Any]) -> None:
        """Keep the hyperparameters as the run's config."""
        self.run.config.update(plain(values))

    @on_main_process
    def log(self, values: Mapping[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Log to the run; text as `swanlab.Text`, objects of SwanLab as they are."""
        import swanlab

        known = flat(scalars_as_numbers(values))
        self.run.log(
            {name: swanlab.Text(value) if isinstance(value, str) else value for name, value in known.items()},
            step=step,
            **kwargs,
        )

    @on_main_process
    def log_images(self, values: Mapping[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Log batches of images as `swanlab.Image`, whose arguments `kwargs` are."""
        import swanlab

        self.run.log(
            {name: [swanlab.Image(one, **kwargs) for one in images] for name, images in values.items()}, step=step
        )

    @on_main_process
    def finish(self) -> None:
        """End the run."""
        self.run.finish()
