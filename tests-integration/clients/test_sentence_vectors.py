"""sentence-transformers trains a small encoder on pairs of sentences."""

from __future__ import annotations

from typing import Any

import pytest

from accel_state.settings.installed import importable

pytestmark = [
    pytest.mark.skipif(
        not importable("sentence_transformers"),
        reason="needs sentence-transformers: nox -s clients-sentence-transformers",
    ),
    pytest.mark.timeout(900),
]

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "plain": ("python", {"arguments": {}}),
    "bf16": ("python", {"arguments": {"bf16": True}}),
    "accumulation on two processes": ("torchrun", {"arguments": {"gradient_accumulation_steps": 2, "max_steps": 3}}),
    "compared with the sentences of both processes": ("torchrun", {"arguments": {}, "gathered": True}),
    "evaluated": ("python", {"arguments": {}, "evaluated": True}),
    "evaluated on two processes": ("torchrun", {"arguments": {}, "evaluated": True}),
}
TIMES = ("runtime", "per_second")


@pytest.mark.parametrize("case", CASES)
def test_losses_and_vectors(case: str, compare: Any) -> None:
    launcher, told = CASES[case]
    ours, original = compare("sentences.py", launcher, **told)
    tolerance = 1e-2 if case == "bf16" else 1e-4
    assert ours["processes"] == original["processes"] == (2 if launcher == "torchrun" else 1)
    for name in ("losses", "norms", "vectors"):
        assert ours[name] == pytest.approx(original[name], rel=tolerance), name
    if case == "evaluated on two processes":
        # The short batch is dropped, and of the other two the original keeps that of the first process alone.
        assert ours["metrics"].pop("eval_loss") == pytest.approx(original["metrics"].pop("eval_loss"), rel=1e-2)
    assert scores(ours) == pytest.approx(scores(original), rel=tolerance)
    assert ("eval_spearman_cosine" in ours["metrics"]) is told.get("evaluated", False)


def scores(told: dict[str, Any]) -> dict[str, float]:
    return {name: value for name, value in told["metrics"].items() if not name.endswith(TIMES)}
