from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from accel_testing.trackers import Curves, TrackerSuite
from accel_tracking.trackers.tensorboard import TensorBoardTracker

pytestmark = pytest.mark.filterwarnings("ignore")  # tensorboard's own


def events(folder: Path) -> Any:
    reader = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator", exc_type=ImportError)
    accumulator = reader.EventAccumulator(str(folder))
    accumulator.Reload()
    return accumulator


class TestTensorBoard(TrackerSuite):
    tracker_class = TensorBoardTracker

    def make(self, folder: Path) -> TensorBoardTracker:
        return TensorBoardTracker("run", folder)

    def read(self, folder: Path, tracker: Any) -> Curves:
        main = events(folder / "run")
        curves = {tag: [(e.step, e.value) for e in main.Scalars(tag)] for tag in main.Tags()["scalars"]}
        # `add_scalars` writes each line of a chart as a run of its own.
        for path in (folder / "run").glob("eval_*"):
            line = events(path)
            curves[f"eval/{path.name.removeprefix('eval_')}"] = [(e.step, e.value) for e in line.Scalars("eval")]
        return curves

    def read_config(self, folder: Path, tracker: Any) -> Mapping[str, Any]:
        (path,) = (folder / "run").glob("*/hparams.yml")
        config: Mapping[str, Any] = json.loads(path.read_text())
        return config

    def test_hyperparameters_are_in_the_event_files(self, tmp_path: Path) -> None:
        tracker = self.make(tmp_path)
        tracker.start()
        tracker.store_init_configuration({"lr": 0.1, "optimizer": {"name": "sgd"}, "none": None})
        tracker.finish()
        (folder,) = {path.parent for path in (tmp_path / "run").glob("*/events*")}
        assert any("hparams" in tag for tag in events(folder).summary_metadata)

    def test_text_and_images_are_kept(self, tmp_path: Path) -> None:
        torch = pytest.importorskip("torch")
        tracker = self.make(tmp_path)
        tracker.start()
        tracker.log({"note": "first", "list": [1, 2]}, step=1)
        tracker.log_images({"pictures": torch.zeros(2, 3, 4, 4)}, step=3)
        tracker.finish()
        kept = events(tmp_path / "run")
        assert [e.step for e in kept.Images("pictures")] == [3]
        assert {"note/text_summary", "list/text_summary"} <= set(kept.Tags()["tensors"])
