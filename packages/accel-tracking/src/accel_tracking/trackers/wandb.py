"""Weights & Biases, online or offline as its own settings and variables say."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from accel_state.settings.installed import Requirement
from accel_tracking.base import GeneralTracker, on_main_process
from accel_tracking.values import plain, scalars_as_numbers

__all__ = ("WandBTracker",)


class WandBTracker(GeneralTracker):
    """Keeps a run in a project of Weights & Biases.

    Args:
        run_name: name of the project.
        kwargs: for `wandb.init`, such as `name`, `mode` or `dir`.
    """

    name = "wandb"
    requires_logging_directory = False
    main_process_only = False
    requirement = Requirement("wandb", extra="accel-tracking[wandb]")

    def __init__(self, run_name: str, **kwargs: Any) -> None:
        super().__init__()
        self.run_name = run_name
        self.init_kwargs = kwargs
        self.run: Any = None

    @property
    def tracker(self) -> Any:
        """The run of wandb."""
        return self.run

    @on_main_process
    def start(self) -> None:
        """Begin a run of wandb."""
        self.requirement.demand("The tracker 'wandb' was started.")
        import wandb

        self.run = wandb.init(project=self.run_name, **self.init_kwargs)

    @on_main_process
    def store_init_configuration(self, values: Mapping[str, Any]) -> None:
        """Keep the hyperparameters as the run's config."""
        self.run.config.update(plain(values), allow_val_change=True)

    @on_main_process
    def log(self, values: Mapping[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Log to the run; objects of wandb go through as they are."""
        self.run.log(scalars_as_numbers(values), step=step, **kwargs)

    @on_main_process
    def log_images(self, values: Mapping[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Log batches of images as `wandb.Image`, whose arguments `kwargs` are."""
        import wandb

        self.run.log(
            {name: [wandb.Image(one, **kwargs) for one in images] for name, images in values.items()}, step=step
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
        """End the run and send or write what is left."""
        self.run.finish()
