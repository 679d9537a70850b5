"""The document of what is supported says what packages declare: their ranges, and the tiers of backends and devices."""

from __future__ import annotations

import re
from importlib.metadata import entry_points
from pathlib import Path

import pytest
import tomli

from accel_plugins.resolve import BACKENDS

ROOT = Path(__file__).resolve().parents[1]
DOCUMENT = ROOT / "docs" / "reference" / "support.md"
PACKAGES = sorted(path.parent.name for path in ROOT.glob("packages/*/pyproject.toml"))


def range_of(name: str, pattern: str) -> tuple[str, ...]:
    """The versions in the document's entry of that name."""
    (found,) = re.findall(rf"^- \*\*{name}\*\*: {pattern}", DOCUMENT.read_text(encoding="utf-8"), re.MULTILINE)
    return found if isinstance(found, tuple) else (found,)


@pytest.mark.parametrize("package", PACKAGES)
def test_the_ranges_are_those_of_every_package(package: str) -> None:
    project = tomli.loads((ROOT / "packages" / package / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    lowest, highest = range_of("Python", r"([\d.]+) to ([\d.]+)")
    assert project["requires-python"] == f">={lowest}"
    named = [tuple(map(int, version)) for version in re.findall(r":: (3)\.(\d+)", "\n".join(project["classifiers"]))]
    assert (min(named), max(named)) == tuple(tuple(map(int, end.split("."))) for end in (lowest, highest))
    extras = [needed for group in project.get("optional-dependencies", {}).values() for needed in group]
    bounds = {needed for needed in (*project["dependencies"], *extras) if re.match(r"torch\b(?!-)", needed)}
    (oldest,) = range_of("torch", r"([\d.]+) and newer")
    assert bounds <= {f"torch>={oldest}"}


def tiers() -> dict[int, tuple[set[str], set[str]]]:
    """The backends and the device families of each tier, as the document's table has them."""
    rows = re.findall(r"^\| (\d) \|[^|]*\|([^|]*)\|([^|]*)\|$", DOCUMENT.read_text(encoding="utf-8"), re.MULTILINE)
    return {int(tier): (set(re.findall(r"[\w-]+", a)), set(re.findall(r"\w+", b))) for tier, a, b in rows}


def test_every_backend_stands_in_its_tier() -> None:
    declared = {manifest.name: manifest.tier for manifest in BACKENDS.values()}
    assert {name: tier for tier, (names, _) in tiers().items() for name in names} == declared


def test_every_device_family_stands_in_one_tier() -> None:
    written = [name for _, names in tiers().values() for name in names]
    assert sorted(written) == sorted(entry_points(group="accel.devices").names)
