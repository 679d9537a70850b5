"""Comet, online or offline."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from accel_state.settings.installed import Requirement
from accel_tracking.base import LibraryTracker, on_main_process
from accel_tracking.values import as_number, flatten_keys, plain, scalars_as_numbers

__all__ = ("CometMLTracker",)


class CometMLTracker(LibraryTracker):
    """Stores a run as an experiment of Comet.

    Args:
        run_name: name of the project.
        kwargs: arguments for `comet_ml.start`, such as `online=False`.
    """

    name = "comet_ml"
    requirement = Requirement("comet_ml", distribution="comet-ml")

    writer = LibraryTracker.tracker

    def open(self) -> Any:
        """Open an experiment."""
        import comet_ml

        return comet_ml.start(project_name=self.run_name, **self.init_kwargs)

    @on_main_process
    def store_init_configuration(self, values: Mapping[str, Any]) -> None:
        """Store the hyperparameters as the experiment's parameters."""
        self.writer.log_parameters(flatten_keys(plain(values)))

    @on_main_process
    def log(self, values: Mapping[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Log numbers and mappings of numbers as metrics, everything else under "Other"."""
        if step is not None:
            self.writer.set_step(step)
        for name, value in flatten_keys(scalars_as_numbers(values)).items():
            if (number := as_number(value)) is not None:
                self.writer.log_metric(name, number, step=step, **kwargs)
            else:
                self.writer.log_other(name, plain(value), **kwargs)

    @on_main_process
    def finish(self) -> None:
        """Finish the experiment, and send or write what is pending."""
        self.writer.end()
