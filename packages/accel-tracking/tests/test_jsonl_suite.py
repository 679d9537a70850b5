from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from accel_testing.trackers import Curves, TrackerSuite
from accel_tracking import JSONLinesTracker, read_run


class TestJSONLines(TrackerSuite):
    tracker_class = JSONLinesTracker

    def make(self, folder: Path) -> JSONLinesTracker:
        return JSONLinesTracker("run", folder)

    def read(self, folder: Path, tracker: Any) -> Curves:
        return read_run(folder).curves()

    def read_config(self, folder: Path, tracker: Any) -> Mapping[str, Any]:
        return read_run(folder).config
