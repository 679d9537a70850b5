from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from accel_testing.trackers import Curves, TrackerSuite, leveldb_records
from accel_tracking.trackers.wandb import WandBTracker

pytestmark = pytest.mark.filterwarnings("ignore")  # wandb's own


def records(folder: Path) -> list[Any]:
    """The records of the offline run in a folder, once wandb's own process, which outlives `finish`, wrote the last."""
    from wandb.proto import wandb_internal_pb2

    (path,) = folder.rglob("*.wandb")
    deadline = time.monotonic() + 250
    while time.monotonic() < deadline:
        found = [wandb_internal_pb2.Record.FromString(message) for message in leveldb_records(path)]
        if any(record.WhichOneof("record_type") == "exit" for record in found):
            return found
        time.sleep(0.05)
    raise AssertionError(f"{path} was not finished")


def rows(folder: Path) -> Iterator[dict[str, Any]]:
    for record in records(folder):
        if record.WhichOneof("record_type") == "history":
            yield {"/".join(i.nested_key) or i.key: json.loads(i.value_json) for i in record.history.item}


class TestWandB(TrackerSuite):
    tracker_class = WandBTracker

    def make(self, folder: Path) -> WandBTracker:
        return WandBTracker("project", mode="offline", dir=str(folder), settings={"console": "off", "silent": True})

    @pytest.fixture(autouse=True)
    def _folders(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        for name in ("WANDB_CACHE_DIR", "WANDB_CONFIG_DIR", "WANDB_DATA_DIR"):
            monkeypatch.setenv(name, str(tmp_path / "wandb-own"))

    def read(self, folder: Path, tracker: Any) -> Curves:
        curves: dict[str, list[tuple[float, float]]] = {}
        for row in rows(folder):
            for name, value in row.items():
                for inner, number in value.items() if isinstance(value, dict) else [("", value)]:
                    curves.setdefault(f"{name}/{inner}" if inner else name, []).append((row["_step"], number))
        return curves

    def read_config(self, folder: Path, tracker: Any) -> Mapping[str, Any]:
        config: dict[str, Any] = {}
        for record in records(folder):
            kind = record.WhichOneof("record_type")
            if kind in ("config", "run"):
                update = record.config.update if kind == "config" else record.run.config.update
                config.update({i.key: json.loads(i.value_json) for i in update if i.key})
        return config

    def test_images_and_tables_are_written(self, tmp_path: Path) -> None:
        np, _ = pytest.importorskip("numpy"), pytest.importorskip("PIL")
        tracker = self.make(tmp_path)
        tracker.start()
        tracker.log_images({"pictures": np.zeros((2, 4, 4, 3), np.uint8)}, step=1, caption="black")
        tracker.log_table("worst", columns=["image"], data=[[3]], step=2)
        tracker.finish()
        logged = {name: row for row in rows(tmp_path) for name in row}
        assert "pictures/count" in logged or logged["pictures"]["pictures"]["count"] == 2
        assert any("worst" in name for name in logged)
