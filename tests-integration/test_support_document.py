"""The document of what is supported names every backend and device family, in the tier that a backend declares."""

from __future__ import annotations

import re
from importlib.metadata import entry_points
from pathlib import Path

from accel_plugins.resolve import available

DOCUMENT = Path(__file__).resolve().parents[1] / "docs" / "reference" / "support.md"


def tiers() -> dict[int, tuple[set[str], set[str]]]:
    """The backends and the device families of each tier, as the document's table has them."""
    rows = re.findall(r"^\| (\d) \|[^|]*\|([^|]*)\|([^|]*)\|$", DOCUMENT.read_text(encoding="utf-8"), re.MULTILINE)
    return {int(tier): (set(re.findall(r"\w+", a)), set(re.findall(r"\w+", b))) for tier, a, b in rows}


def test_every_backend_stands_in_its_tier() -> None:
    declared = {found.name: found.manifest.tier for found in available() if found.manifest}
    assert {name: tier for tier, (names, _) in tiers().items() for name in names} == declared


def test_every_device_family_stands_in_one_tier() -> None:
    written = [name for _, names in tiers().values() for name in names]
    assert sorted(written) == sorted(entry_points(group="accel.devices").names)
