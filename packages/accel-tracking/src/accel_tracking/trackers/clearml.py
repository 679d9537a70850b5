"""ClearML, with a server or offline."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from accel_state.settings.environ import from_environment
from accel_state.settings.installed import Requirement
from accel_state.settings.schema import TEXT, setting
from accel_tracking.base import LibraryTracker, on_main_process
from accel_tracking.values import as_number, flatten_keys, plain, scalars_as_numbers

__all__ = ("ClearMLSettings", "ClearMLTracker")

_SPLIT_NAMES = ("eval", "test", "train")


@dataclass(frozen=True)
class ClearMLSettings:
    """Settings of the task, from environment variables."""

    project: str | None = setting(None, type=TEXT, variable="CLEARML_PROJECT", help="Project of the ClearML task.")
    task: str | None = setting(None, type=TEXT, variable="CLEARML_TASK", help="Name of the ClearML task.")


class ClearMLTracker(LibraryTracker):
    """Stores a run as a task of ClearML; a task that is already open is used, and stays open.

    Args:
        run_name: name of the task, and of its project unless `kwargs` or $CLEARML_PROJECT name one.
        kwargs: arguments for `clearml.Task.init`.
    """

    name = "clearml"
    requirement = Requirement("clearml")

    task = LibraryTracker.tracker

    def __init__(self, run_name: str | None = None, **kwargs: Any) -> None:
        super().__init__(run_name or "", **kwargs)
        self.user_provided_run_name = run_name
        self._owns_task = False

    def open(self) -> Any:
        """Open a task, or join the one that is open."""
        from clearml import Task

        task = Task.current_task()
        self._owns_task = task is None
        if task is not None:
            return task
        settings = from_environment(ClearMLSettings)
        names = {
            "project_name": settings.project or self.user_provided_run_name,
            "task_name": settings.task or self.user_provided_run_name,
        }
        return Task.init(**{**names, **self.init_kwargs})

    @on_main_process
    def store_init_configuration(self, values: Mapping[str, Any]) -> None:
        """Store the hyperparameters as the task's configuration."""
        self.task.connect_configuration(plain(values))

    @on_main_process
    def log(self, values: Mapping[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Report numbers as scalars (as single values if there is no step), and everything else as text."""
        logger = self.task.get_logger()
        for name, value in flatten_keys(scalars_as_numbers(values)).items():
            number = as_number(value)
            if number is None:
                logger.report_text(f"{name}: {plain(value)}", **kwargs)
            elif step is None:
                logger.report_single_value(name=name, value=number, **kwargs)
            else:
                title, series = _title_and_series(name)
                logger.report_scalar(title=title, series=series, value=number, iteration=step, **kwargs)

    @on_main_process
    def log_images(self, values: Mapping[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Report images: arrays of shape (H, W, C), or image objects."""
        logger = self.task.get_logger()
        for name, image in values.items():
            title, series = _title_and_series(name)
            logger.report_image(title=title, series=series, iteration=step, image=image, **kwargs)

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
        """Report a table."""
        rows = dataframe if dataframe is not None else [*([list(columns)] if columns else []), *(data or [])]
        title, series = _title_and_series(table_name)
        self.task.get_logger().report_table(title=title, series=series, table_plot=rows, iteration=step, **kwargs)

    @on_main_process
    def finish(self) -> None:
        """Close the task if this tracker opened it."""
        if self._owns_task and self.task is not None:
            self.task.close()


def _title_and_series(name: str) -> tuple[str, str]:
    """Chart and line of a metric: "eval_loss" and "train_loss" are lines of one chart "loss".

    Example:
        >>> _title_and_series("eval_loss"), _title_and_series("loss")
        (('loss', 'eval'), ('loss', 'train'))
    """
    for split in _SPLIT_NAMES:
        for separator in ("_", "/"):
            if name.startswith(split + separator):
                return name[len(split) + 1 :], split
    return name, "train"
