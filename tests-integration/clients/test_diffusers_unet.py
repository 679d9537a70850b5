"""A UNet of diffusers learns to remove noise, and its pipeline makes images from the CPU and from the disk."""

from __future__ import annotations

from typing import Any

import pytest

from accel_state.settings.installed import importable

pytestmark = [
    pytest.mark.skipif(not importable("diffusers"), reason="needs diffusers: nox -s clients-diffusers"),
    pytest.mark.timeout(900),
]


@pytest.mark.parametrize(
    ("launcher", "told"),
    [("python", {}), ("python", {"precision": "bf16"}), ("torchrun", {"accumulation": 4})],
    ids=["plain", "bf16", "accumulation on two processes"],
)
def test_training_and_making_images(launcher: str, told: dict[str, Any], compare: Any) -> None:
    ours, original = compare("diffusers_unet.py", launcher, **told)
    assert ours["losses"] == pytest.approx(original["losses"], rel=1e-3 if "precision" in told else 1e-5)
    assert ours["images"]["whole"] == pytest.approx(original["images"]["whole"], rel=1e-3)
    assert set(original["files"]) <= set(ours["files"])
    # Offloaded layer by layer on a CPU, a pipeline makes the same images here, and raises in the original.
    for name, sum_of_images in ours["images"].items():
        assert sum_of_images == pytest.approx(ours["images"]["whole"]), name
