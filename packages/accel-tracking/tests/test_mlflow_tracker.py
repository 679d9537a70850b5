from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from accel_state.errors import SettingError
from accel_testing.trackers import Curves, TrackerSuite
from accel_tracking.trackers.mlflow import MLflowTracker

pytestmark = pytest.mark.filterwarnings("ignore")  # MLflow's own


class TestMLflow(TrackerSuite):
    tracker_class = MLflowTracker

    def make(self, folder: Path) -> MLflowTracker:
        return MLflowTracker("experiment", logging_dir=folder / "artifacts", run_name="run", tags={"a": "b"})

    @pytest.fixture(autouse=True)
    def _database(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
        mlflow = pytest.importorskip("mlflow", exc_type=ImportError)
        for name in ("EXPERIMENT_NAME", "RUN_ID", "TAGS", "NESTED_RUN"):
            monkeypatch.delenv(f"MLFLOW_{name}", raising=False)
        mlflow.set_tracking_uri(f"sqlite:///{tmp_path / 'mlflow.db'}")
        yield
        mlflow.end_run()
        mlflow.set_tracking_uri(None)

    def run(self) -> Any:
        """The only run in the database."""
        import mlflow

        client = mlflow.MlflowClient()
        (run,) = client.search_runs([e.experiment_id for e in client.search_experiments()])
        return run

    def read(self, folder: Path, tracker: Any) -> Curves:
        import mlflow

        run = self.run()
        client = mlflow.MlflowClient()
        history = {name: client.get_metric_history(run.info.run_id, name) for name in run.data.metrics}
        return {name: [(metric.step, metric.value) for metric in metrics] for name, metrics in history.items()}

    def read_config(self, folder: Path, tracker: Any) -> Mapping[str, Any]:
        parameters: Mapping[str, Any] = self.run().data.params
        return parameters

    def test_names_tags_text_and_artifacts_are_stored(self, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
        import mlflow

        (tmp_path / "note.txt").write_text("kept")
        tracker = self.make(tmp_path)
        tracker.start()
        config = {"long": "x" * 10_000, "optimizer": {"name": "sgd"}}
        tracker.store_init_configuration(config)
        assert "long" in config
        assert "'long'" in caplog.text
        tracker.log({"note": "first"}, step=1)
        tracker.log_artifact(str(tmp_path / "note.txt"), "texts")
        (tmp_path / "folder").mkdir()
        (tmp_path / "folder" / "a.txt").write_text("a")
        tracker.log_artifacts(str(tmp_path / "folder"))
        tracker.finish()
        run = self.run()
        assert run.info.run_name == "run"
        assert {"a": "b", "note": "first"}.items() <= run.data.tags.items()
        assert run.data.params == {"optimizer.name": "sgd"}
        files = mlflow.MlflowClient().list_artifacts(run.info.run_id)
        assert {file.path for file in files} == {"texts", "a.txt"}

    def test_figures_are_artifacts(self, tmp_path: Path) -> None:
        figure = pytest.importorskip("matplotlib.figure")
        import mlflow

        tracker = self.make(tmp_path)
        tracker.start()
        tracker.log_figure(figure.Figure(), "empty.png")
        tracker.finish()
        assert [file.path for file in mlflow.MlflowClient().list_artifacts(self.run().info.run_id)] == ["empty.png"]

    def test_many_hyperparameters_go_in_batches(self, tmp_path: Path) -> None:
        tracker = self.make(tmp_path)
        tracker.start()
        tracker.store_init_configuration({f"p{i}": i for i in range(250)})
        tracker.finish()
        assert len(self.run().data.params) == 250

    def test_an_existing_experiment_and_run_are_continued(self, tmp_path: Path) -> None:
        first = self.make(tmp_path)
        first.start()
        first.log({"loss": 1.0}, step=1)
        identity = first.tracker.info.run_id
        first.finish()
        second = MLflowTracker("experiment", run_id=identity)
        second.start()
        second.log({"loss": 2.0}, step=2)
        second.finish()
        assert self.read(tmp_path, second) == {"loss": [(1, 1.0), (2, 2.0)]}

    def test_variables_override_arguments(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("MLFLOW_EXPERIMENT_NAME", "variable")
        monkeypatch.setenv("MLFLOW_TAGS", '{"from": "variable"}')
        monkeypatch.setenv("MLFLOW_NESTED_RUN", "1")
        tracker = MLflowTracker("argument", tags={"a": "b"})
        assert (tracker.experiment_name, tracker.tags, tracker.nested_run) == ("variable", {"from": "variable"}, True)
        monkeypatch.setenv("MLFLOW_TAGS", "not json")
        with pytest.raises(SettingError, match="MLFLOW_TAGS"):
            MLflowTracker()
