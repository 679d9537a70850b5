"""lm-eval evaluates a small language model, also with the documents divided over two processes."""

from __future__ import annotations

from typing import Any

import pytest

from accel_state.settings.installed import importable

pytestmark = [
    pytest.mark.skipif(not importable("lm_eval"), reason="needs lm-eval: nox -s clients-lm-eval"),
    pytest.mark.timeout(900),
]

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "on one process": ("python", {}),
    "in bf16": ("python", {"dtype": "bfloat16"}),
    "each process all documents": ("torchrun", {}),
    "documents divided": ("torchrun", {"divided": True}),
    "documents divided, in batches of a found size": ("torchrun", {"divided": True, "batch": "auto"}),
}


@pytest.mark.parametrize("case", CASES)
def test_scores_and_answers_to_every_document(case: str, compare: Any) -> None:
    launcher, told = CASES[case]
    ours, original = compare("lm_eval_harness.py", launcher, **told)
    assert ours == original
    assert ours["processes"] == (2 if told.get("divided") else 1)
    assert set(ours["sizes"].values()) == {23}
    assert {name: len(answers) for name, answers in ours["answers"].items()} == ours["sizes"]
