"""The ratios that the README quotes are those of the last run of the benchmarks."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from bench.cases import cases
from bench.results import document, read_rows

ROOT = Path(__file__).resolve().parents[1]

CASES = {
    "gather 64 small tensors from two processes": "gather 64 x (8, 16)",
    "gather 4 tensors of 1 MiB": "gather 4 x 1 MiB",
    "broadcast 4 tensors of 1 MiB": "broadcast 4 x 1 MiB",
    "overhead of a training step over a plain step": "full precision, accumulation 1: added alone",
    "iterate over an epoch as one of 8 processes": "one epoch, sequential, 8 processes",
    "a step with batches that the main process dispatches, two processes": "dispatched step, 2 processes",
    "launch two processes, to their first line": "launch, two processes, to the first line",
    "import and create an Accelerator": "import and Accelerator()",
    "infer a device map of 200 blocks": "infer_auto_device_map, 200 blocks",
    "load 2 GB of weights, copied into a model": "load 2 GB and copy each weight",
    "load a training state with 300 MB of weights": "load_state",
}


def quoted() -> dict[str, float]:
    """The table of the README."""
    table = (ROOT / "README.md").read_text(encoding="utf-8").partition("| | accel / original |")[2].partition("\n\n")[0]
    return {name: float(ratio) for name, ratio in re.findall(r"^\| (.+?) \| (\d+\.\d+) \|$", table, re.MULTILINE)}


def measured() -> dict[str, float]:
    """Every ratio to the original, the first where one case has several units."""
    found: dict[str, float] = {}
    for row in read_rows(ROOT / "docs" / "reports" / "benchmarks.json"):
        if row.figure.endswith(("/peer", "/(peer - raw)")):
            found.setdefault(row.case, row.value)
    return found


def test_the_tables_are_made_from_the_rows_that_are_checked_in() -> None:
    tables = document(cases(), read_rows(ROOT / "docs" / "reports" / "benchmarks.json"))
    assert (ROOT / "docs" / "reports" / "benchmarks.md").read_text(encoding="utf-8") == tables


def test_every_quoted_figure_has_its_case() -> None:
    assert quoted().keys() == CASES.keys()


@pytest.mark.parametrize("told", CASES)
def test_a_quoted_figure_was_measured(told: str) -> None:
    assert quoted()[told] == pytest.approx(measured()[CASES[told]], abs=0.00501)
