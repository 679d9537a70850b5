"""Weights & Biases, online or offline according to its own settings and variables."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from accel_state.settings.installed import Requirement
from accel_tracking.base import LibraryTracker, on_main_process
from accel_tracking.values import plain, scalars_as_numbers

__all__ = ("WandBTracker",)


class WandBTracker(LibraryTracker):
    """Stores a run in a project of Weights & Biases.

    Args:
        run_name: name of the project.
        kwargs: arguments for `wandb.init`, such as `name`, `mode` or `dir`.
    """

    name = "wandb"
    main_process_only = False
    requirement = Requirement("wandb")

    run = LibraryTracker.tracker

    def open(self) -> Any:
        """Open a `wandb` run."""
        import wandb

        return wandb.init(project=self.run_name, **self.init_kwargs)

    @on_main_process
    def store_init_configuration(self, values: Mapping[str, Any]) -> None:
        """Store the hyperparameters as the run's config."""
        self.run.config.update(plain(values), allow_val_change=True)

    @on_main_process
    def log(self, values: Mapping[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Log to the run, objects of wandb unchanged."""
        self.run.log(scalars_as_numbers(values), step=step, **kwargs)

    @on_main_process
    def log_images(self, values: Mapping[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Log batches of images as `wandb.Image(image, **kwargs)`."""
        import wandb

        self.run.log(
            {name: [wandb.Image(image, **kwargs) for image in images] for name, images in values.items()}, step=step
        )

    @on_main_process
    def log_table(
        self,
        table_name: str,
        columns: Sequence[str] | None = None,
        data: Sequence[Sequence[Any]] | None = None,
        dataframe: Any = None,
        step: int | None = None,
        **kwargs: Any,
    ) -> None:
        """Log a `wandb.Table`."""
        import wandb

        self.run.log({table_name: wandb.Table(columns=columns, data=data, dataframe=dataframe)}, step=step, **kwargs)

    @on_main_process
    def finish(self) -> None:
        """Finish the run, and send or write what is pending."""
        self.run.finish()
