"""What the sources of a mixture gave, in the JSON lines of a run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from torch.utils.data import DataLoader

from accel_data import MixtureDataset
from accel_testing.processes import Processes
from accel_torch import Accelerator
from accel_tracking.sample_counts import describe_samples

pytestmark = pytest.mark.usefixtures("fresh_state")


def train(folder: Path, batches: int, mixed: bool = True) -> None:
    accelerator = Accelerator(cpu=True, log_with="jsonl", project_dir=folder)
    accelerator.init_trackers("mixed")
    data: Any = list(range(40))
    if mixed:
        data = MixtureDataset({"code": range(30), "text": range(100, 110)}, {"code": 3, "text": 1})
    loader = accelerator.prepare(DataLoader(data, batch_size=4))
    for step, batch in enumerate(loader, 1):
        accelerator.log({"size": len(batch)}, step=step)
        if step == batches:
            break
    if batches > 2:
        accelerator.end_training()


def counts_in(folder: Path) -> dict[str, Any]:
    answer = json.loads(describe_samples(str(folder), as_json=True))
    return {row["source"]: (row["samples"], row["epochs"], row["asked"], row["given"]) for row in answer["sources"]}


def test_each_log_adds_what_the_sources_gave_so_far(tmp_path: Path) -> None:
    train(tmp_path, 2)
    assert counts_in(tmp_path) == {"code": (6, 0.2, 0.75, 0.75), "text": (2, 0.2, 0.25, 0.25)}


def test_the_end_of_training_adds_the_last_counts(tmp_path: Path) -> None:
    train(tmp_path, 100)
    counts = counts_in(tmp_path)
    assert (counts["code"][0], counts["text"][0]) == (30, 10)
    assert counts["text"][1] == 1


def test_samples_of_all_processes_are_counted(two: Processes, tmp_path: Path) -> None:
    two.run(train, tmp_path, 2)
    assert {name: count[0] for name, count in counts_in(tmp_path).items()} == {"code": 12, "text": 4}


def test_a_run_without_a_mixture_logs_no_counts(tmp_path: Path) -> None:
    train(tmp_path, 3, mixed=False)
    (path,) = tmp_path.rglob("*.jsonl")
    assert "samples by source" not in path.read_text()
