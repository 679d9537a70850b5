"""The SFTTrainer of TRL fine-tunes on texts."""

from __future__ import annotations

from typing import Any

import pytest

from accel_state.settings.installed import importable

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


SHARDED: dict[str, dict[str, Any]] = {
    "by class": {"version": 1, "options": {"auto_wrap_policy": "TRANSFORMER_BASED_WRAP"}},
    "by size": {"version": 1, "options": {"auto_wrap_policy": "SIZE_BASED_WRAP", "min_num_params": 12000}},
    "by number, in bf16": {"version": 1, "options": {"sharding_strategy": "1", "mixed_precision_policy": "bf16"}},
    "version 2": {"version": 2, "options": {}},
    "version 2 in bf16": {"version": 2, "options": {"mixed_precision_policy": "bf16"}},
}


@pytest.mark.parametrize("case", SHARDED)
def test_a_reference_model_is_sharded_from_the_settings(case: str, compare: Any) -> None:
    told = SHARDED[case]
    ours, original = compare("fsdp_policies.py", "torchrun", adapters=False, prepared=False, **told)
    assert ours["logits"] == pytest.approx(original["logits"], rel=1e-5)
    assert (ours["blocks"], ours["dtype"]) == (original["blocks"], original["dtype"])


def test_adapters_are_blocks_of_their_own_as_peft_says(compare: Any, run: Any) -> None:
    told = {"version": 1, "adapters": True, "options": {}}
    ours, original = compare("fsdp_policies.py", "torchrun", prepared=False, **told)
    assert ours["logits"] == pytest.approx(original["logits"], rel=1e-5)
    assert ours["blocks"] == original["blocks"]
    assert any("lora_A" in name for name in ours["blocks"])
    # The same blocks, where the Accelerator shards, with either version.
    for version in (1, 2):
        prepared = run("fsdp_policies.py", "torchrun", **{**told, "version": version}, prepared=True)
        assert prepared["blocks"] == original["blocks"]
        assert prepared["logits"] == pytest.approx(original["logits"], rel=1e-4)
