from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from accel_testing.trackers import Curves, TrackerSuite
from accel_tracking.trackers.clearml import ClearMLTracker, _title_and_series

pytestmark = pytest.mark.filterwarnings("ignore")  # ClearML's own

FRAMEWORKS = (
    *("matplotlib", "tensorflow", "tensorboard", "pytorch", "xgboost", "scikit", "fastai", "lightgbm", "hydra"),
    *("joblib", "megengine", "catboost", "gradio", "jsonargparse", "tfdefines"),
)
QUIET = {
    # The search for the repository and its requirements reads every source file below, which can take minutes.
    "auto_connect_frameworks": dict.fromkeys([*FRAMEWORKS, "detect_repository"], False),
    "auto_resource_monitoring": False,
    "auto_connect_streams": False,
    "auto_connect_arg_parser": False,
    "reuse_last_task_id": False,
}


def reports(folder: Path, file: str = "metrics.jsonl") -> Iterator[dict[str, Any]]:
    """What the newest offline task reported."""
    path = max(folder.rglob(file), key=lambda path: path.stat().st_mtime_ns)
    for line in path.read_text().splitlines():
        yield from json.loads(line)


class TestClearML(TrackerSuite):
    tracker_class = ClearMLTracker

    def make(self, folder: Path) -> ClearMLTracker:
        return ClearMLTracker("run", **QUIET)

    @pytest.fixture(autouse=True)
    def _offline(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
        clearml = pytest.importorskip("clearml", exc_type=ImportError)
        monkeypatch.setenv("CLEARML_CACHE_DIR", str(tmp_path))
        clearml.Task.set_offline(True)
        yield
        task = clearml.Task.current_task()
        if task is not None:
            task.close()

    def read(self, folder: Path, tracker: Any) -> Curves:
        curves: dict[str, list[tuple[float, float]]] = {}
        for report in reports(folder):
            if report["type"] == "training_stats_scalar":
                single, train = report["metric"] == "Summary", report["variant"] == "train"
                name = report["variant"] if single else report["metric"]
                name = name if single or train else f"{report['variant']}/{name}"
                curves.setdefault(name, []).append((report["iter"], report["value"]))
        return curves

    def read_config(self, folder: Path, tracker: Any) -> Mapping[str, Any]:
        (path,) = folder.rglob("task.json")
        text = json.loads(path.read_text())["configuration"]["General"]["value"]
        return dict(line.split(" = ", 1) for line in text.splitlines() if " = " in line)

    def test_text_is_reported(self, tmp_path: Path) -> None:
        tracker = self.make(tmp_path)
        tracker.start()
        tracker.log({"note": "first"}, step=1)
        tracker.finish()
        assert "note: first" in [report["msg"] for report in reports(tmp_path, "log.jsonl")]

    def test_an_open_task_is_joined_and_stays_open(self, tmp_path: Path) -> None:
        from clearml import Task

        task = Task.init(project_name="own", task_name="own", **QUIET)
        tracker = self.make(tmp_path)
        tracker.start()
        assert tracker.tracker is task
        tracker.finish()
        assert Task.current_task() is task

    def test_variables_name_project_and_task(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("CLEARML_PROJECT", "from variable")
        monkeypatch.setenv("CLEARML_TASK", "task from variable")
        tracker = self.make(tmp_path)
        tracker.start()
        tracker.finish()
        (path,) = tmp_path.rglob("task.json")
        task = json.loads(path.read_text())
        assert (task["project_name"], task["name"]) == ("from variable", "task from variable")


@pytest.mark.parametrize(
    ("name", "title", "series"),
    [
        ("loss", "loss", "train"),
        ("train_loss", "loss", "train"),
        ("eval_loss", "loss", "eval"),
        ("test/top1/a", "top1/a", "test"),
        ("evaluation", "evaluation", "train"),
    ],
)
def test_splits_share_a_chart(name: str, title: str, series: str) -> None:
    assert _title_and_series(name) == (title, series)
