"""Models that transformers distributes itself train like whole ones, and their checkpoints change their layout."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from accel_state.settings.installed import importable

pytestmark = [
    pytest.mark.skipif(not importable("transformers.distributed"), reason="needs nox -s clients-transformers"),
    pytest.mark.timeout(900),
]

TENSORS, SHARDS, EXPERTS = {"tp_size": 2}, {"fsdp_size": 2}, {"ep_size": 2, "fsdp_size": 2}
SQUARE = {"tp_size": 2, "fsdp_size": 2}
SCRIPT = "distributed_models.py"


@pytest.fixture(params=["llama", "qwen3", "mixtral"])
def kind(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


def train(run: Any, folder: Path, sizes: dict[str, int], **told: Any) -> dict[str, Any]:
    """Train on as many processes as the layout has."""
    processes = {"": "python", "tp_size": "accel", "fsdp_size": "accel", "ep_size,fsdp_size": "accel"}
    launcher = processes.get(",".join(sorted(sizes)), "accel of four")
    answer: dict[str, Any] = run(SCRIPT, launcher, do="train", folder=str(folder), sizes=sizes, **told)
    return answer


def is_equal(answer: dict[str, Any], expected: dict[str, Any]) -> None:
    assert answer["losses"] == pytest.approx(expected["losses"], rel=1e-5)
    assert answer["norms"] == pytest.approx(expected["norms"], rel=1e-6)
    assert answer["sums"].keys() == expected["sums"].keys()
    assert answer["sums"] == pytest.approx(expected["sums"], rel=1e-5)


def test_each_layout_trains_as_one_process(run: Any, kind: str, tmp_path: Path) -> None:
    run(SCRIPT, do="write", kind=kind, folder=str(tmp_path))
    expected = train(run, tmp_path, {})
    layouts = [(TENSORS, 4), (SHARDS, 2), (SQUARE, 2)]
    if kind == "mixtral":
        # Only this one has a plan for its experts.
        layouts.append((EXPERTS, 2))
    for sizes, samples in layouts:
        answer = train(run, tmp_path, sizes)
        is_equal(answer, expected)
        assert answer["samples"] == samples, sizes


def test_a_checkpoint_of_four_processes_continues_on_two_and_on_one(run: Any, tmp_path: Path) -> None:
    model, saved = tmp_path / "model", str(tmp_path / "checkpoint")
    run(SCRIPT, do="write", kind="mixtral", folder=str(model))
    train(run, model, SQUARE, checkpoint=saved)
    whole = train(run, model, {}, source=saved)
    is_equal(train(run, model, EXPERTS, source=saved), whole)
    is_equal(train(run, model, TENSORS, source=saved), whole)
