from __future__ import annotations

import json
import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from accel_testing.trackers import Curves, TrackerSuite
from accel_tracking.trackers.comet_ml import CometMLTracker

pytestmark = pytest.mark.filterwarnings("ignore")  # Comet's own

QUIET = {
    "log_code": False,
    "log_graph": False,
    "log_git_metadata": False,
    "log_env_details": False,
    "parse_args": False,
    "auto_param_logging": False,
    "auto_metric_logging": False,
    "auto_output_logging": False,
    "display_summary_level": 0,
}


def messages(folder: Path, kind: str) -> Iterator[dict[str, Any]]:
    (path,) = folder.rglob("*.zip")
    with zipfile.ZipFile(path) as archive:
        for line in archive.read("messages.json").decode().splitlines():
            message = json.loads(line)
            if message["type"] == kind:
                yield message["payload"]


class TestCometML(TrackerSuite):
    tracker_class = CometMLTracker

    def make(self, folder: Path) -> CometMLTracker:
        comet_ml = pytest.importorskip("comet_ml", exc_type=ImportError)
        config = comet_ml.ExperimentConfig(offline_directory=str(folder), **QUIET)
        return CometMLTracker("project", online=False, experiment_config=config)

    def read(self, folder: Path, tracker: Any) -> Curves:
        curves: dict[str, list[tuple[float, float]]] = {}
        for payload in messages(folder, "metric_msg"):
            metric = payload["metric"]
            curves.setdefault(metric["metricName"], []).append((metric["step"], metric["metricValue"]))
        return curves

    def read_config(self, folder: Path, tracker: Any) -> Mapping[str, Any]:
        # Comet writes a single value as `param` and a list as `params`.
        parameters = [payload.get("param") or payload["params"] for payload in messages(folder, "parameter_msg")]
        return {parameter["paramName"]: parameter["paramValue"] for parameter in parameters}

    def test_text_is_logged_as_other(self, tmp_path: Path) -> None:
        tracker = self.make(tmp_path)
        tracker.start()
        tracker.log({"note": "first"}, step=1)
        tracker.finish()
        assert {"key": "note", "value": "first"}.items() <= {
            item for payload in messages(tmp_path, "log_other") for item in payload.items() if payload["key"] == "note"
        }
