"""A built wheel and sdist are read, and everything that does not belong there or is missing is named."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import check_distributions

ROOT = Path(__file__).resolve().parents[1]

WORKSPACE = '[project]\nname = "workspace"\nversion = "0"\nrequires-python = ">=3.10"\n'

PROJECT = """\
[build-system]
requires = ["hatchling"]
build-backend = "hatchling.build"

[project]
name = "some-package"
version = "1.0"
license = "Apache-2.0"
requires-python = ">=3.10"
dependencies = ["numpy>=1"]

[tool.hatch.build.targets.wheel]
packages = ["src/some_package"]

[tool.hatch.build.targets.sdist]
include = ["src", "tests"]
"""

FILES = {
    "pyproject.toml": WORKSPACE,
    "packages/some-package/pyproject.toml": PROJECT,
    "packages/some-package/LICENSE": "As you like.\n",
    "packages/some-package/src/some_package/__init__.py": "",
    "packages/some-package/src/some_package/py.typed": "",
    "packages/some-package/tests/test_nothing.py": "",
}


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A repository with one package."""
    for name, text in FILES.items():
        path = tmp_path / "repository" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    root = tmp_path / "repository"
    for command in (("init", "-q"), ("add", "--all")):
        subprocess.run(["git", *command], cwd=root, check=True)
    return root


def built(root: Path) -> Path:
    """Builds the package, and returns the folder of what came of it."""
    folder = root.parent / "dist"
    command = [sys.executable, "-m", "hatchling", "build", "-d", str(folder)]
    environment = {key: value for key, value in os.environ.items() if key != "SOURCE_DATE_EPOCH"}
    subprocess.run(command, cwd=root / "packages/some-package", env=environment, capture_output=True, check=True)
    return folder


def replace(root: Path, old: str, new: str) -> None:
    path = root / "packages/some-package/pyproject.toml"
    text = path.read_text(encoding="utf-8")
    assert old in text
    path.write_text(text.replace(old, new), encoding="utf-8")


def test_what_git_holds_is_complete(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert check_distributions.main([str(built(root)), str(root)]) == 0
    assert "every wheel and every sdist is complete" in capsys.readouterr().out


def test_a_stray_file_is_named_in_both(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (root / "packages/some-package/src/some_package/notes.txt").write_text("Mine.", encoding="utf-8")
    assert check_distributions.main([str(built(root)), str(root)]) == 1
    told = capsys.readouterr().err.splitlines()
    assert len(told) == 2
    assert all("src/some_package/notes.txt does not belong there" in line for line in told)


def test_check_distributions_refuses_tests_in_a_wheel(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = built(root)
    with zipfile.ZipFile(folder / "some_package-1.0-py3-none-any.whl", "a") as archive:
        archive.writestr("tests/test_nothing.py", "")
    assert check_distributions.main([str(folder), str(root)]) == 1
    assert "src/tests/test_nothing.py does not belong there" in capsys.readouterr().err


def test_check_distributions_names_missing_files(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    replace(
        root,
        "[tool.hatch.build.targets.sdist]",
        '[tool.hatch.build]\nexclude = ["py.typed"]\n\n[tool.hatch.build.targets.sdist]',
    )
    (root / "packages/some-package/LICENSE").unlink()
    assert check_distributions.main([str(built(root)), str(root)]) == 1
    told = capsys.readouterr().err
    assert "whl: src/some_package/py.typed is missing" in told
    assert "tar.gz: src/some_package/py.typed is missing" in told
    assert "it has no py.typed" in told
    assert "it has no licence" in told


@pytest.mark.parametrize(
    ("old", "new", "told"),
    [
        ("numpy>=1", "numpy==1.26", "it requires one exact version: numpy==1.26"),
        ("numpy>=1", "numpy", "it requires any version: numpy"),
        ('">=3.10"', '">=3.11"', "it requires Python >=3.11, not >=3.10"),
        ('"Apache-2.0"', '"MIT"', "its licence is MIT"),
    ],
)
def test_metadata_that_are_not_right_are_named(
    root: Path, capsys: pytest.CaptureFixture[str], old: str, new: str, told: str
) -> None:
    replace(root, old, new)
    assert check_distributions.main([str(built(root)), str(root)]) == 1
    assert capsys.readouterr().err.count(told) == 2


def test_a_sibling_is_required_by_a_range(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    other = root / "packages/other-package"
    other.mkdir()
    (other / "pyproject.toml").write_text(PROJECT.replace("some-package", "other-package"), encoding="utf-8")
    replace(root, "numpy>=1", "other-package>=1")
    assert check_distributions.main([str(built(root)), str(root)]) == 1
    told = capsys.readouterr().err
    assert "it requires a sibling without a range: other-package>=1" in told
    assert "other-package: 0 files are called other_package-*.whl, there must be one" in told


def test_a_file_of_no_package_is_named(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = built(root)
    (folder / "stranger-1.0.tar.gz").write_bytes(b"")
    assert check_distributions.main([str(folder), str(root)]) == 1
    assert "stranger-1.0.tar.gz is of no package" in capsys.readouterr().err


def test_without_a_folder_nothing_is_checked(tmp_path: Path) -> None:
    assert check_distributions.main([]) == 2
    assert check_distributions.main([str(tmp_path / "missing")]) == 2


@pytest.mark.parametrize("folder", sorted(ROOT.glob("packages/*")), ids=lambda folder: folder.name)
def test_every_package_carries_the_licence(folder: Path) -> None:
    assert (folder / "LICENSE").read_bytes() == (ROOT / "LICENSE").read_bytes()
