from __future__ import annotations

import json
import sqlite3
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from accel_testing.trackers import Curves, TrackerSuite
from accel_tracking.trackers.trackio import TrackioTracker

pytestmark = pytest.mark.filterwarnings("ignore")  # trackio's own


class TestTrackio(TrackerSuite):
    tracker_class = TrackioTracker

    def make(self, folder: Path) -> TrackioTracker:
        return TrackioTracker("project", embed=False, auto_log_cpu=False, auto_log_gpu=False)

    @pytest.fixture(autouse=True)
    def _offline(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        trackio = pytest.importorskip("trackio", exc_type=ImportError)
        # The folder is read from the environment once, when trackio is imported.
        monkeypatch.setattr("trackio.sqlite_storage.TRACKIO_DIR", tmp_path)
        monkeypatch.setattr("trackio.utils.TRACKIO_DIR", tmp_path)
        monkeypatch.setattr(trackio, "TRACKIO_DIR", tmp_path)
        monkeypatch.setenv("HF_HUB_OFFLINE", "1")

    def read(self, folder: Path, tracker: Any) -> Curves:
        curves: dict[str, list[tuple[float, float]]] = {}
        with sqlite3.connect(folder / "project.db") as database:
            for step, text in database.execute("SELECT step, metrics FROM metrics ORDER BY id"):
                for name, value in json.loads(text).items():
                    for inner, number in value.items() if isinstance(value, dict) else [("", value)]:
                        curves.setdefault(f"{name}/{inner}" if inner else name, []).append((step, number))
        database.close()
        return curves

    def read_config(self, folder: Path, tracker: Any) -> Mapping[str, Any]:
        with sqlite3.connect(folder / "project.db") as database:
            ((text,),) = database.execute("SELECT config FROM configs")
        database.close()
        config: Mapping[str, Any] = json.loads(text)
        return config
