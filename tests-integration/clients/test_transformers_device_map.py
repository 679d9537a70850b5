"""transformers loads models in pieces, on the CPU and on the disk, as it does with the original library."""

from __future__ import annotations

from typing import Any

import pytest

from accel_state.settings.installed import importable

pytestmark = [
    pytest.mark.skipif(not importable("transformers"), reason="needs transformers: nox -s clients-transformers"),
    pytest.mark.timeout(900),
]


def test_models_in_pieces_compute_and_generate_the_same(compare: Any) -> None:
    ours, original = compare("device_map.py")
    assert set(ours) == set(original)
    for name, told in ours.items():
        assert told["logits"] == pytest.approx(original[name]["logits"], rel=1e-5), name
        assert told["made"] == original[name]["made"], name
        assert told["places"] == original[name]["places"], name
    assert "disk" in ours["with little memory"]["places"].values()
    assert ours["by hand"]["logits"] == pytest.approx(ours["whole"]["logits"])
