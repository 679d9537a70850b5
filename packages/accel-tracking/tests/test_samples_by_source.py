"""`accel runs samples`: what each source of a mixture gave, from the JSON lines of a run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from accel_state.errors import SettingError
from accel_tracking import JSONLinesTracker
from accel_tracking.sample_counts import COLUMNS, TABLE, describe_samples


def call(*arguments: object) -> int:
    print(describe_samples(str(arguments[0]), "--json" in arguments))
    return 0


def run_with(folder: Path, tables: list[tuple[str, Any, Any]]) -> Path:
    tracker = JSONLinesTracker("digits", folder)
    tracker.start()
    for step, (name, columns, rows) in enumerate(tables):
        tracker.log({"loss": 1.0}, step=step)
        tracker.log_table(name, columns, rows, step=step)
    tracker.finish()
    return folder


ROWS = [[0, "code", 700, 23.3, 0.7, 0.7], [0, "text", 300, 25.0, 0.3, 0.3]]


def test_the_newest_counts_are_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = [[0, "code", 7, 0.2, 0.7, 0.7], [0, "text", 3, 0.2, 0.3, 0.3]]
    run_with(tmp_path, [(TABLE, COLUMNS, before), (TABLE, COLUMNS, ROWS), ("worst", ["image"], [[3]])])
    assert call(tmp_path) == 0
    assert capsys.readouterr().out.splitlines() == [
        "digits, step 1",
        "loader  source  samples   epochs   asked   given",
        "     0  code        700  23.3000  0.7000  0.7000",
        "     0  text        300  25.0000  0.3000  0.3000",
    ]


def test_counts_are_printed_as_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run_with(tmp_path, [(TABLE, COLUMNS, ROWS)])
    assert call(tmp_path, "--json") == 0
    (line,) = capsys.readouterr().out.splitlines()
    assert json.loads(line) == {
        "run": "digits",
        "step": 0,
        "sources": [dict(zip(COLUMNS, row, strict=True)) for row in ROWS],
    }


@pytest.mark.parametrize(
    "table",
    [("worst", COLUMNS, ROWS), (TABLE, ["source"], ROWS), (TABLE, COLUMNS, "many"), (TABLE, COLUMNS, [[1, 2]])],
)
def test_a_run_without_counts_is_refused(tmp_path: Path, table: tuple[str, Any, Any]) -> None:
    run_with(tmp_path, [table])
    with pytest.raises(SettingError, match=r"(?s)'digits'.*contains no table.*MixtureDataset"):
        call(tmp_path)
