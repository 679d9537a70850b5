from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from accel_tracking import JSONLinesTracker, read_run
from accel_tracking.testing import Curves, TrackerSuite


class TestJSONLines(TrackerSuite):
    tracker_class = JSONLinesTracker

    def make(self, folder: Path) -> JSONLinesTracker:
        return JSONLinesTracker("run", folder)

    def read(self, folder: Path, tracker: Any) -> Curves:
        return read_run(folder).curves()

    def read_config(self, folder: Path, tracker: Any) -> Mapping[str, Any]:
        return read_run(folder).config
