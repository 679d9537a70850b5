"""PEFT trains adapters in a loop of its own, saves them and reads them back over a base in pieces."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from accel_state.settings.installed import importable

pytestmark = [
    pytest.mark.skipif(not importable("peft"), reason="needs peft: nox -s clients-peft"),
    pytest.mark.timeout(900),
]

OWN_FILES = {"checkpoint_manifest.json", "dl_state_dict.bin", "dl_state_dict_rank1.bin"}


@pytest.mark.parametrize(
    ("launcher", "told"),
    [("python", {}), ("python", {"precision": "bf16"}), ("torchrun", {"accumulation": 3})],
    ids=["plain", "bf16", "accumulation on two processes"],
)
def test_adapters_are_trained_saved_and_read_back(launcher: str, told: dict[str, Any], compare: Any) -> None:
    ours, original = compare("peft_lora.py", launcher, **told)
    assert ours["losses"] == pytest.approx(original["losses"], rel=1e-4)
    assert ours["logits"] == pytest.approx(original["logits"], rel=1e-3, abs=1e-3)
    assert ours["logits"] == pytest.approx([ours["logits"][0]] * 4)
    assert set(original["files"]) <= set(ours["files"]) <= set(original["files"]) | OWN_FILES


@pytest.mark.parametrize(
    ("kind", "version"), [("SHARDED_STATE_DICT", 2), ("FULL_STATE_DICT", 2), ("FULL_STATE_DICT", 1)]
)
def test_an_adapter_of_a_sharded_model_is_saved_alone(run: Any, tmp_path: Path, kind: str, version: int) -> None:
    told = run("peft_sharded.py", "torchrun", folder=str(tmp_path), kind=kind, version=version)
    assert told["changed"] == told["adapters"]
    assert told["as_wanted"]
    assert len(told["adapters"]) == 4
    if kind == "FULL_STATE_DICT":
        assert told["saved"] == told["named_by_peft"]
