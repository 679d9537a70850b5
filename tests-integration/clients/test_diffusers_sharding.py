"""The FSDP helpers of diffusers shard a model by the FSDP plugin of the run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from accel_state.settings.installed import importable

pytestmark = [
    pytest.mark.skipif(not importable("diffusers"), reason="needs diffusers: nox -s clients-diffusers"),
    pytest.mark.timeout(900),
]


def test_helpers_refuse_a_run_without_fsdp(compare: Any) -> None:
    ours, original = compare("diffusers_fsdp.py", sharded=False)
    assert ours == original == {"arguments": {"error": "ValueError"}}


@pytest.mark.parametrize("strategy", ["FULL_SHARD", "SHARD_GRAD_OP"])
def test_a_model_wrapped_by_diffusers_trains_as_a_whole_one(run: Any, tmp_path: Path, strategy: str) -> None:
    """The original shards nothing on a CPU, so plain PyTorch says what is right."""
    told = run("diffusers_fsdp.py", "torchrun", folder=str(tmp_path), strategy=strategy)
    assert told["arguments"] == {"sharding_strategy": f"ShardingStrategy.{strategy}"}
    assert told["strategies"] == [f"ShardingStrategy.{strategy}"]
    assert told["units"] == ["", "transformer.h.0", "transformer.h.1"]
    assert told["losses"] == pytest.approx(told["plain"], rel=1e-5)
    assert told["losses"] == sorted(told["losses"], reverse=True)
