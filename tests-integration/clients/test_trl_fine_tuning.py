"""The SFTTrainer of TRL fine-tunes on texts."""

from __future__ import annotations

from typing import Any

import pytest

from accel_state.settings.probe import importable

pytestmark = [
    pytest.mark.skipif(not importable("trl"), reason="needs trl: nox -s clients-trl"),
    pytest.mark.timeout(900),
]

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "plain": ("python", {"arguments": {}}),
    "bf16": ("python", {"arguments": {"bf16": True}}),
    "adapters": ("python", {"arguments": {"max_steps": 3}, "lora": True}),
    "accumulation on two processes": ("torchrun", {"arguments": {"gradient_accumulation_steps": 2, "max_steps": 3}}),
}


@pytest.mark.parametrize("case", CASES)
def test_losses_and_what_is_counted_on_the_way(case: str, compare: Any) -> None:
    launcher, told = CASES[case]
    ours, original = compare("trl_sft.py", launcher, **told)
    assert ours["processes"] == original["processes"] == (2 if launcher == "torchrun" else 1)
    for name in ("losses", "accuracy", "tokens", "evaluated"):
        assert ours[name] == pytest.approx(original[name], rel=1e-4), name
