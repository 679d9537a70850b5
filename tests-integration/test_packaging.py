"""What the packages say about themselves agrees with what they are."""

from __future__ import annotations

import ast
import re
from importlib import import_module
from importlib.metadata import EntryPoint, version
from pathlib import Path
from typing import Any

import pytest
import tomli
from packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = sorted(path.name for path in (ROOT / "packages").iterdir() if path.is_dir())


def project(package: str) -> dict[str, Any]:
    """The [project] table of a package."""
    return tomli.loads((ROOT / "packages" / package / "pyproject.toml").read_text(encoding="utf-8"))["project"]


def entry_points() -> list[EntryPoint]:
    """All entry points and scripts that the packages declare."""
    found = []
    for package in PACKAGES:
        declared = project(package)
        groups = {"console_scripts": declared.get("scripts", {}), **declared.get("entry-points", {})}
        found += [EntryPoint(name, value, group) for group, points in groups.items() for name, value in points.items()]
    return found


def test_every_backend_is_under_its_contract() -> None:
    lint = tomli.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["importlinter"]
    (contract,) = [one for one in lint["contracts"] if one["name"] == "A backend knows no other backend"]
    targets = project("accel-plugins")["entry-points"]["accel.backends"].values()
    assert {".".join(target.split(".")[:2]) for target in targets} == set(contract["modules"])


BESIDE_THE_METAPACKAGE = {"accel-check", "accel-megatron", "accel-ray", "accel-testing", "accel-torchft"}


def test_the_metapackage_brings_all_but_those_that_need_an_engine() -> None:
    required, left = set(), ["accelerate"]
    while left:
        name = left.pop()
        required.add(name)
        needed = {Requirement(line).name for line in project(name)["dependencies"]} & set(PACKAGES)
        left += needed - required
    assert set(PACKAGES) - required == BESIDE_THE_METAPACKAGE


@pytest.mark.parametrize("package", PACKAGES)
def test_a_package_is_complete(package: str) -> None:
    folder = ROOT / "packages" / package
    source = folder / "src" / package.replace("-", "_")
    for path in (folder / "README.md", folder / "CHANGELOG.md", source / "__init__.py", source / "py.typed"):
        assert path.is_file()
    assert list((folder / "tests").glob("test_*.py"))


@pytest.mark.parametrize("package", PACKAGES)
def test_the_version_is_the_same_everywhere(package: str) -> None:
    declared = project(package)["version"]
    assert version(package) == declared
    assert getattr(import_module(package.replace("-", "_")), "__version__", declared) == declared


@pytest.mark.parametrize("package", PACKAGES)
def test_siblings_are_required_by_ranges(package: str) -> None:
    declared = project(package)
    lists = [declared["dependencies"], *declared.get("optional-dependencies", {}).values()]
    for requirement in (Requirement(line) for lines in lists for line in lines):
        if requirement.name in PACKAGES and requirement.name != package:
            assert sorted(part.operator for part in requirement.specifier) == ["<", ">="], requirement
            assert requirement.specifier.contains(project(requirement.name)["version"])


@pytest.mark.parametrize("point", entry_points(), ids=lambda point: f"{point.group}:{point.name}")
def test_an_entry_point_leads_to_something(point: EntryPoint) -> None:
    assert point.load() is not None


@pytest.mark.parametrize("package", PACKAGES)
def test_metadata_name_authors_keywords_and_the_address_of_the_repository(package: str) -> None:
    declared = project(package)
    assert declared["authors"] == [{"name": "The accel contributors"}]
    assert declared["keywords"] == sorted(declared["keywords"])
    address = tomli.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["accel"]["repository"]
    assert set(declared["urls"]) == {"Changelog", "Documentation", "Issues", "Source"}
    assert all(url.startswith(address) for url in declared["urls"].values())
    files = (url.partition("/blob/main/")[2] for url in declared["urls"].values())
    assert all((ROOT / file).is_file() for file in files if file)


def test_the_metapackage_offers_every_extra_of_the_packages_that_it_brings() -> None:
    offered = project("accel-torch")["optional-dependencies"]
    brought = sorted(set(PACKAGES) - BESIDE_THE_METAPACKAGE - {"accelerate", "accel-torch"})
    for package in brought:
        # torch itself is required.
        for name in set(project(package).get("optional-dependencies", ())) - {"torch"}:
            (requirement,) = map(Requirement, offered[name])
            assert requirement.extras == {name}
            assert name in project(requirement.name)["optional-dependencies"]
    beside = {Requirement(line).name for lines in offered.values() for line in lines} & BESIDE_THE_METAPACKAGE
    assert beside == BESIDE_THE_METAPACKAGE


def test_trackers_and_settings_install_without_torch() -> None:
    def required(package: str) -> set[str]:
        lines = [Requirement(line) for line in project(package)["dependencies"]]
        return {line.name for line in lines} | {
            name for line in lines if line.name in PACKAGES for name in required(line.name)
        }

    assert "torch" not in required("accel-tracking")
    for package in ("accel-ops", "accel-data", "accel-bigmodel", "accel-plugins"):
        assert "torch>=2.9" in project(package)["dependencies"]


UNPUBLISHED = re.compile(rf"pip install [^\n]*?\b({'|'.join(PACKAGES)})\b(?!-)")


def test_no_message_says_to_install_what_is_on_no_package_index() -> None:
    assert UNPUBLISHED.search('Run: pip install "accel-plugins[xla]"')
    assert not UNPUBLISHED.search("pip install accel-backend-fancy")
    messages = [
        (path.relative_to(ROOT), node.value)
        for path in ROOT.glob("packages/*/src/**/*.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    ]
    assert [path for path, text in messages if UNPUBLISHED.search(text)] == []


def test_no_two_test_files_share_a_name() -> None:
    paths = [*ROOT.glob("packages/*/tests/**/test_*.py"), *ROOT.glob("tests-integration/**/test_*.py")]
    names = [path.name for path in paths]
    assert sorted(name for name in set(names) if names.count(name) > 1) == []
