"""Comet, online or offline."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from accel_state.settings.installed import Requirement
from accel_tracking.base import GeneralTracker, on_main_process
from accel_tracking.values import flat, is_number, plain, scalars_as_numbers

__all__ = ("CometMLTracker",)


class CometMLTracker(GeneralTracker):
    """Keeps a run as an experiment of Comet.

    Args:
        run_name: name of the project.
        kwargs: for `comet_ml.start`, such as `online=False`.
    """

    name = "comet_ml"
    requires_logging_directory = False
    requirement = Requirement("comet_ml", distribution="comet-ml", extra="accel-tracking[comet_ml]")

    def __init__(self, run_name: str, **kwargs: Any) -> None:
        super().__init__()
        self.run_name = run_name
        self.init_kwargs = kwargs
        self.writer: Any = None

    @property
    def tracker(self) -> Any:
        """The experiment of Comet."""
        return self.writer

    @on_main_process
    def start(self) -> None:
        """Begin an experiment."""
        self.requirement.demand("The tracker 'comet_ml' was started.")
        import comet_ml

        self.writer = comet_ml.start(project_name=self.run_name, **self.init_kwargs)

    @on_main_process
    def store_init_configuration(self, values: Mapping[str, Any]) -> None:
        """Keep the hyperparameters as the experiment's parameters."""
        self.writer.log_parameters(flat(plain(values)))

    @on_main_process
    def log(self, values: Mapping[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Log numbers and mappings of numbers as metrics, everything else under "Other"."""
        if step is not None:
            self.writer.set_step(step)
        for name, value in flat(scalars_as_numbers(values)).items():
            if is_number(value):
                self.writer.log_metric(name, value, step=step, **kwargs)
            else:
                self.writer.log_other(name, plain(value), **kwargs)

    @on_main_process
    def finish(self) -> None:
        """End the experiment and send or write what is left."""
        self.writer.end()
