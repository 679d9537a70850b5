from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from accel_testing.trackers import Curves, TrackerSuite, leveldb_records
from accel_tracking.trackers.swanlab import SwanLabTracker

pytestmark = pytest.mark.filterwarnings("ignore")  # swanlab's own


def records(folder: Path) -> list[Any]:
    from swanlab.proto.swanlab.record.v1 import record_pb2

    (path,) = folder.rglob("*.swanlab")
    return [record_pb2.Record.FromString(message) for message in leveldb_records(path)]


class TestSwanLab(TrackerSuite):
    tracker_class = SwanLabTracker

    def make(self, folder: Path) -> SwanLabTracker:
        return SwanLabTracker("project", mode="offline", log_dir=str(folder))

    @pytest.fixture(autouse=True)
    def _folder(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("SWANLAB_SAVE_DIR", str(tmp_path / "swanlab-own"))

    def read(self, folder: Path, tracker: Any) -> Curves:
        curves: dict[str, list[tuple[float, float]]] = {}
        for record in records(folder):
            if record.HasField("scalar"):
                curves.setdefault(record.scalar.key, []).append((record.scalar.step, record.scalar.value.number))
        return curves

    def read_config(self, folder: Path, tracker: Any) -> Mapping[str, Any]:
        yaml = pytest.importorskip("yaml")
        (path,) = folder.rglob("config.yaml")
        return {name: entry["value"] for name, entry in yaml.safe_load(path.read_text()).items()}

    def test_text_and_images_are_stored(self, tmp_path: Path) -> None:
        np, _ = pytest.importorskip("numpy"), pytest.importorskip("PIL")
        tracker = self.make(tmp_path)
        tracker.start()
        tracker.log({"note": "first"}, step=1)
        tracker.log_images({"pictures": np.zeros((2, 4, 4, 3), np.uint8)}, step=3)
        tracker.finish()
        kept = {record.media.key: record.media for record in records(tmp_path) if record.HasField("media")}
        assert (kept["note"].step, kept["pictures"].step) == (1, 3)
        assert len(kept["pictures"].value.items) == 2
