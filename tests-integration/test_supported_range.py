"""What is supported stands once, in the pyproject.toml of the repository; all else that names it agrees."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import tomli
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

import bootstrap
import lowest_versions

ROOT = Path(__file__).resolve().parents[1]
PROJECT: dict[str, Any] = tomli.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
PYTHONS: list[str] = PROJECT["tool"]["accel"]["supported"]["python"]
TORCHES: dict[str, list[str]] = PROJECT["tool"]["accel"]["supported"]["torch"]
MAJORS: dict[str, list[str]] = PROJECT["tool"]["accel"]["supported"]["majors"]
CONSTRAINTS = (ROOT / "tools/constraints.txt").read_text(encoding="utf-8")
PACKAGES = lowest_versions.projects(ROOT / "packages")

OLDEST_TORCH, NEWEST_TORCH = min(TORCHES, key=Version), max(TORCHES, key=Version)


def row(name: str) -> str:
    """The entry of a name in the list of supported versions, the first of the page."""
    text = (ROOT / "docs/reference/support.md").read_text(encoding="utf-8")
    found = re.search(rf"^- \*\*{name}\*\*: (.*)$", text, re.MULTILINE)
    assert found
    return found[1]


@pytest.mark.parametrize("package", PACKAGES)
def test_a_package_names_the_supported_pythons(package: str) -> None:
    project = PACKAGES[package]
    assert project["requires-python"] == PROJECT["project"]["requires-python"] == f">={PYTHONS[0]}"
    named = [line.rpartition(" ")[2] for line in project["classifiers"] if "Python :: 3." in line]
    assert named == PYTHONS


@pytest.mark.parametrize("package", PACKAGES)
def test_a_package_that_requires_torch_takes_every_supported_one(package: str) -> None:
    extras = PACKAGES[package].get("optional-dependencies", {}).values()
    lines = [line for group in (PACKAGES[package]["dependencies"], *extras) for line in group]
    for requirement in map(Requirement, lines):
        if requirement.name == "torch":
            assert str(requirement.specifier) == f">={Version(OLDEST_TORCH).major}.{Version(OLDEST_TORCH).minor}"
        if requirement.name == "torch-xla":
            assert not requirement.specifier.contains("2.8"), "torch_xla of a torch that is not supported"


def test_every_torch_is_tried_with_supported_pythons_only() -> None:
    assert all(set(pythons) <= set(PYTHONS) for pythons in TORCHES.values())
    assert {python for pythons in TORCHES.values() for python in pythons} == set(PYTHONS)


def test_each_earlier_major_version_of_a_dependency_is_tried() -> None:
    declared = [
        requirement
        for package in PACKAGES
        for requirement in lowest_versions.requirements(
            PACKAGES, package, PACKAGES[package].get("optional-dependencies", ())
        )
    ]
    pinned = dict(re.findall(r"^([\w.-]+)==([\w.]+)", CONSTRAINTS, re.MULTILINE))
    for name, lowest in lowest_versions.lowest(declared).items():
        if name in pinned:
            tried = [Version(version) for version in MAJORS.get(name, [])]
            assert tried == sorted(tried), name
            assert all(lowest <= version < Version(pinned[name]) for version in tried), name
            earlier = set(range(lowest.major, Version(pinned[name]).major))
            assert earlier <= {version.major for version in tried}, f"{name} from {lowest} to {pinned[name]}"
    assert set(MAJORS) <= {canonicalize_name(requirement.name) for requirement in declared}


def test_the_tools_read_the_code_for_the_oldest_python() -> None:
    oldest = PYTHONS[0]
    assert tuple(map(int, oldest.split("."))) == bootstrap.OLDEST_PYTHON
    assert PROJECT["tool"]["mypy"]["python_version"] == oldest
    assert PROJECT["tool"]["ruff"]["target-version"] == f"py{oldest.replace('.', '')}"


def test_support_table_equals_pyproject() -> None:
    assert row("Python").startswith(f"{PYTHONS[0]} to {PYTHONS[-1]}")
    numbers = [".".join(text.split(".")[:2]) for text in (OLDEST_TORCH, NEWEST_TORCH)]
    assert row("torch").startswith(f"{numbers[0]} and newer")
    assert numbers[1] in row("torch")


def test_the_constraints_hold_a_supported_torch() -> None:
    pinned = re.search(r"^torch==(\S+)$", CONSTRAINTS, re.MULTILINE)
    assert pinned
    assert Version(OLDEST_TORCH) <= Version(pinned[1]) <= Version(NEWEST_TORCH)


def test_the_lowest_versions_of_a_package_count_those_of_its_siblings(capsys: pytest.CaptureFixture[str]) -> None:
    assert lowest_versions.main(["accel-ops"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert {line.partition("==")[0] for line in lines} == {"numpy", "packaging", "pytest", "torch"}
    assert "torch==2.9" in lines


def test_the_highest_of_several_lower_bounds_counts() -> None:
    found = lowest_versions.lowest(map(Requirement, ["b>=1.2", "a>=3,<4", "b>=1.10", "B>=1.9"]))
    assert {name: str(version) for name, version in found.items()} == {"a": "3", "b": "1.10"}


def test_a_requirement_without_a_lower_bound_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "a").mkdir()
    text = '[project]\nname = "a"\ndependencies = ["numpy<3"]\n'
    (tmp_path / "a/pyproject.toml").write_text(text, encoding="utf-8")
    assert lowest_versions.main(["a"], tmp_path) == 1
    assert "numpy<3 has no lower bound" in capsys.readouterr().err


@pytest.mark.parametrize("arguments", [[], ["accel-nothing"], ["accel-ops", "nothing"]])
def test_an_unknown_package_or_a_second_word_is_refused(arguments: list[str]) -> None:
    assert lowest_versions.main(arguments) == 2
