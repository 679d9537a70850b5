"""`accel estimate-memory --training` of configs of transformers, against real runs of the models they describe."""

from __future__ import annotations

from typing import Any

import pytest

from accel_state.settings.installed import importable

pytestmark = [
    pytest.mark.skipif(not importable("transformers"), reason="needs transformers: nox -s clients-transformers"),
    pytest.mark.timeout(600),
]


@pytest.mark.parametrize("kind", ["bert", "gpt2", "llama", "t5", "vit"])
def test_the_estimate_of_a_config_is_within_5_percent_of_the_allocator(run: Any, kind: str) -> None:
    told = run("estimated_memory.py", kind=kind)
    assert told["one"]["Total"] == pytest.approx(told["allocated"], rel=0.05)
    assert told["many"]["Optstate"] < told["one"]["Optstate"] / 20
