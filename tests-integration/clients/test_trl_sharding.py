"""TRL, PEFT and transformers shard models by the FSDP plugin of the run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from accel_state.settings.installed import importable

pytestmark = [
    pytest.mark.skipif(not importable("trl"), reason="needs trl and peft: nox -s clients-trl"),
    pytest.mark.timeout(900),
]


def test_the_policy_of_peft_chooses_the_same_modules(compare: Any) -> None:
    ours, original = compare("fsdp_helpers.py", sharded=False)
    assert ours == original
    assert ours["unknown layer"] == "TypeError"
    assert len(ours["policy"]) == 6


@pytest.mark.parametrize("version", [1, 2])
def test_adapters_train_beside_a_sharded_reference(run: Any, tmp_path: Path, version: int) -> None:
    """The original shards nothing on a CPU."""
    told = run("fsdp_helpers.py", "torchrun", folder=str(tmp_path), version=version)
    assert told["units"] == ["", *told["policy"]]
    assert told["reference units"][0] == ""
    found, wanted = told["reference"]
    assert found == pytest.approx(wanted, rel=1e-5)
    assert not told["training"]
    assert told["losses"] == sorted(told["losses"], reverse=True)
