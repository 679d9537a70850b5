"""MLflow, with a server, a database, or a folder."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from accel_state.settings.environ import from_environment
from accel_state.settings.installed import Requirement
from accel_state.settings.schema import BOOLEAN, JSON, TEXT, setting
from accel_tracking.base import LibraryTracker, on_main_process
from accel_tracking.values import as_number, flatten_keys, plain, scalars_as_numbers

__all__ = ("MLflowSettings", "MLflowTracker")

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class MLflowSettings:
    """Settings of the run from environment variables; they override the arguments of the tracker."""

    experiment_name: str | None = setting(None, type=TEXT, variable="MLFLOW_EXPERIMENT_NAME", help="Experiment.")
    run_id: str | None = setting(None, type=TEXT, variable="MLFLOW_RUN_ID", help="Run to continue.")
    tags: dict[str, str] | None = setting(  # noqa: RUF009 - makes a field
        None, type=JSON, variable="MLFLOW_TAGS", help="Tags of the run, as a JSON object."
    )
    nested_run: bool | None = setting(
        None, type=BOOLEAN, variable="MLFLOW_NESTED_RUN", help="Nest the run inside the open run."
    )


class MLflowTracker(LibraryTracker):
    """Stores a run in an experiment of MLflow.

    Args:
        experiment_name: name of the experiment, created if MLflow does not have it.
        logging_dir: folder for the artifacts of a new experiment.
        run_id: run to continue.
        tags: tags of the run.
        nested_run: whether to nest the run inside the open run.
        run_name: name of the run.
        description: description of the run.
    """

    name = "mlflow"
    requirement = Requirement("mlflow")

    active_run = LibraryTracker.tracker

    def __init__(
        self,
        experiment_name: str | None = None,
        logging_dir: str | os.PathLike[str] | None = None,
        run_id: str | None = None,
        tags: Mapping[str, Any] | None = None,
        nested_run: bool = False,
        run_name: str | None = None,
        description: str | None = None,
    ) -> None:
        super().__init__(run_name or "")
        settings = from_environment(MLflowSettings)
        self.experiment_name = settings.experiment_name or experiment_name
        self.logging_dir = logging_dir
        self.run_id = settings.run_id or run_id
        self.tags = dict(settings.tags or tags or {})
        self.nested_run = nested_run if settings.nested_run is None else settings.nested_run
        self.description = description

    def open(self) -> Any:
        """Find or create the experiment, and start the run."""
        import mlflow

        return mlflow.start_run(
            run_id=self.run_id,
            experiment_id=self._experiment_id(),
            run_name=self.run_name or None,
            nested=self.nested_run,
            tags=self.tags or None,
            description=self.description,
        )

    def _experiment_id(self) -> str | None:
        import mlflow

        if self.experiment_name is None:
            return None
        existing = mlflow.get_experiment_by_name(self.experiment_name)
        if existing is not None:
            return str(existing.experiment_id)
        location = None if self.logging_dir is None else os.path.abspath(self.logging_dir)
        return str(mlflow.create_experiment(self.experiment_name, artifact_location=location))

    @on_main_process
    def store_init_configuration(self, values: Mapping[str, Any]) -> None:
        """Store the hyperparameters as the run's parameters; log a warning for each that is too long for MLflow."""
        import mlflow
        from mlflow.utils.validation import MAX_PARAM_VAL_LENGTH, MAX_PARAMS_TAGS_PER_BATCH

        texts = {name: str(value) for name, value in flatten_keys(plain(values), ".").items()}
        for name in [name for name, text in texts.items() if len(text) > MAX_PARAM_VAL_LENGTH]:
            _log.warning(
                "Cannot store the parameter %r in MLflow: it has %d characters, and MLflow accepts %d.",
                name,
                len(texts.pop(name)),
                MAX_PARAM_VAL_LENGTH,
            )
        parameters = list(texts.items())
        for start in range(0, len(parameters), MAX_PARAMS_TAGS_PER_BATCH):
            mlflow.log_params(dict(parameters[start : start + MAX_PARAMS_TAGS_PER_BATCH]), run_id=self._id)

    @on_main_process
    def log(self, values: Mapping[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Log numbers as metrics in one call, and text as tags, because MLflow's metrics are numbers."""
        import mlflow

        flat = flatten_keys(scalars_as_numbers(values))
        numbers = {name: number for name, value in flat.items() if (number := as_number(value)) is not None}
        others = {name: str(plain(value)) for name, value in flat.items() if name not in numbers}
        mlflow.log_metrics(numbers, step=step, run_id=self._id, **kwargs)
        if others:
            mlflow.MlflowClient().log_batch(self._id, tags=[mlflow.entities.RunTag(*item) for item in others.items()])

    @on_main_process
    def log_figure(self, figure: Any, artifact_file: str, **save_kwargs: Any) -> None:
        """Store a matplotlib or plotly figure as an artifact of the run."""
        import mlflow

        mlflow.log_figure(figure, artifact_file, save_kwargs=save_kwargs or None)

    @on_main_process
    def log_artifact(self, local_path: str, artifact_path: str | None = None) -> None:
        """Store a file as an artifact of the run."""
        import mlflow

        mlflow.log_artifact(local_path, artifact_path, run_id=self._id)

    @on_main_process
    def log_artifacts(self, local_dir: str, artifact_path: str | None = None) -> None:
        """Store a folder as artifacts of the run."""
        import mlflow

        mlflow.log_artifacts(local_dir, artifact_path, run_id=self._id)

    @on_main_process
    def finish(self) -> None:
        """Finish the run."""
        import mlflow

        mlflow.end_run()

    @property
    def _id(self) -> str:
        return str(self.active_run.info.run_id)
