"""Trainers of libraries that are built on the interface train to the same numbers as with the original."""

from __future__ import annotations

from typing import Any

import pytest

from accel_state.settings.installed import importable

pytestmark = [
    pytest.mark.skipif(not importable("pytorch_accelerated"), reason="needs nox -s clients-trainers"),
    pytest.mark.timeout(900),
]


@pytest.mark.parametrize("launcher", ["python", "torchrun"])
def test_pytorch_accelerated_trains_and_evaluates_each_sample_once(launcher: str, compare: Any) -> None:
    ours, original = compare("pytorch_accelerated_trainer.py", launcher)
    assert ours["sizes"] == original["sizes"]
    assert ours["weights"] == pytest.approx(original["weights"], rel=1e-5)
    assert set(ours["history"]) == set(original["history"])
    for name, values in original["history"].items():
        assert ours["history"][name] == pytest.approx(values, rel=1e-5), name


@pytest.mark.parametrize("accumulation", [1, 2])
def test_accmt_trains_to_the_same_weights(accumulation: int, compare: Any) -> None:
    """On one process: on several it pins memory, which needs a GPU."""
    ours, original = compare("accmt_trainer.py", accumulation=accumulation)
    assert ours["weights"] == pytest.approx(original["weights"], rel=1e-5)
