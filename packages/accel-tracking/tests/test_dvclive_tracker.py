from __future__ import annotations

import csv
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from accel_testing.trackers import Curves, TrackerSuite
from accel_tracking.trackers.dvclive import DVCLiveTracker

pytestmark = pytest.mark.filterwarnings("ignore")  # DVC's own


class TestDVCLive(TrackerSuite):
    tracker_class = DVCLiveTracker

    def make(self, folder: Path) -> DVCLiveTracker:
        return DVCLiveTracker("run", dir=str(folder), save_dvc_exp=False, dvcyaml=None)

    def read(self, folder: Path, tracker: Any) -> Curves:
        curves = {}
        metrics = folder / "plots" / "metrics"
        for path in metrics.rglob("*.tsv"):
            with path.open(newline="") as file:
                header, *rows = csv.reader(file, delimiter="\t")
            if not header[-1].endswith("note"):  # the kit's text
                points = [(float(row[0]), float(row[-1])) for row in rows]
                curves[str(path.relative_to(metrics).with_suffix(""))] = points
        return curves

    def read_config(self, folder: Path, tracker: Any) -> Mapping[str, Any]:
        yaml = pytest.importorskip("ruamel.yaml", exc_type=ImportError)
        config: Mapping[str, Any] = yaml.YAML(typ="safe").load(folder / "params.yaml")
        return config

    def test_an_own_live_is_used(self, tmp_path: Path) -> None:
        from dvclive import Live

        live = Live(dir=str(tmp_path), save_dvc_exp=False, dvcyaml=None)
        tracker = DVCLiveTracker(live=live)
        tracker.start()
        assert tracker.tracker is live
        tracker.log({"loss": 1.0})
        tracker.log({"loss": 2.0})
        tracker.finish()
        assert self.read(tmp_path, tracker) == {"loss": [(0, 1.0), (1, 2.0)]}
