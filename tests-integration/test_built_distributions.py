"""A built wheel and sdist are read, and everything that does not belong there or is missing is named."""

from __future__ import annotations

import hashlib
import io
import json
import os
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

import check_distributions
import sbom

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
authors = [{ name = "Somebody" }]
keywords = ["nothing"]
description = "Nothing."
readme = "README.md"

[project.urls]
Changelog = "https://example.org/changes"
Documentation = "https://example.org/documents"
Issues = "https://example.org/issues"
Source = "https://example.org/source"
[tool.hatch.build.targets.wheel]
packages = ["src/some_package"]

[tool.hatch.build.targets.sdist]
include = ["src", "tests"]
"""

FILES = {
    "pyproject.toml": WORKSPACE,
    "packages/some-package/pyproject.toml": PROJECT,
    "packages/some-package/LICENSE": "As you like.\n",
    "packages/some-package/README.md": "See [the page](https://example.org/page).\n",
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
    assert check_distributions.main([str(built(root)), "--repository", str(root)]) == 0
    assert "every file is complete" in capsys.readouterr().out


def test_a_stray_file_is_named_in_both(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (root / "packages/some-package/src/some_package/notes.txt").write_text("Mine.", encoding="utf-8")
    assert check_distributions.main([str(built(root)), "--repository", str(root)]) == 1
    told = capsys.readouterr().err.splitlines()
    assert len(told) == 2
    assert all("src/some_package/notes.txt does not belong there" in line for line in told)


def test_check_distributions_refuses_tests_in_a_wheel(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = built(root)
    with zipfile.ZipFile(folder / "some_package-1.0-py3-none-any.whl", "a") as archive:
        archive.writestr("tests/test_nothing.py", "")
    assert check_distributions.main([str(folder), "--repository", str(root)]) == 1
    assert "src/tests/test_nothing.py does not belong there" in capsys.readouterr().err


def test_check_distributions_names_missing_files(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    replace(
        root,
        "[tool.hatch.build.targets.sdist]",
        '[tool.hatch.build]\nexclude = ["py.typed"]\n\n[tool.hatch.build.targets.sdist]',
    )
    (root / "packages/some-package/LICENSE").unlink()
    assert check_distributions.main([str(built(root)), "--repository", str(root)]) == 1
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
        ('keywords = ["nothing"]', "", "its metadata have no Keywords"),
        ('Issues = "https://example.org/issues"', "", "its metadata have no address for Issues"),
    ],
)
def test_metadata_that_are_not_right_are_named(
    root: Path, capsys: pytest.CaptureFixture[str], old: str, new: str, told: str
) -> None:
    replace(root, old, new)
    assert check_distributions.main([str(built(root)), "--repository", str(root)]) == 1
    assert capsys.readouterr().err.count(told) == 2


def test_a_relative_link_in_the_description_is_named(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (root / "packages/some-package/README.md").write_text("See [the page](../page.md).\n", encoding="utf-8")
    assert check_distributions.main([str(built(root)), "--repository", str(root)]) == 1
    assert capsys.readouterr().err.count("leads nowhere on the package index: ../page.md") == 2


def test_a_sibling_is_required_by_a_range(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    other = root / "packages/other-package"
    other.mkdir()
    (other / "pyproject.toml").write_text(PROJECT.replace("some-package", "other-package"), encoding="utf-8")
    replace(root, "numpy>=1", "other-package>=1")
    assert check_distributions.main([str(built(root)), "--repository", str(root)]) == 1
    told = capsys.readouterr().err
    assert "it requires a sibling without a range: other-package>=1" in told
    assert "other-package: 0 files are called other_package-*.whl, there must be one" in told


def test_a_file_of_no_package_is_named(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = built(root)
    (folder / "stranger-1.0.tar.gz").write_bytes(b"")
    assert check_distributions.main([str(folder), "--repository", str(root)]) == 1
    assert "stranger-1.0.tar.gz is of no package" in capsys.readouterr().err


@pytest.mark.parametrize("arguments", [[], ["missing"]])
def test_without_a_folder_nothing_is_checked(arguments: list[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        check_distributions.main(arguments)
    assert ended.value.code == 2


def sdist_of_setuptools(path: Path, time: int, user: str) -> None:
    """An sdist as setuptools writes it: with the time of the build and the name of the user."""
    with tarfile.open(path, "w:gz") as archive:
        for name in ("some_package-1.0/b.py", "some_package-1.0/a.py"):
            member = tarfile.TarInfo(name)
            member.mtime, member.uname, member.size = time, user, 5
            archive.addfile(member, io.BytesIO(b"x = 1"))


def test_sdists_of_two_builds_are_equal_after_packing_them_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("SOURCE_DATE_EPOCH", "1700000000")
    folders = [tmp_path / "first", tmp_path / "second"]
    for number, folder in enumerate(folders):
        folder.mkdir()
        sdist_of_setuptools(folder / "some_package-1.0.tar.gz", 1000 + number, f"user{number}")
    equal = [str(folders[0]), "--equal", str(folders[1])]
    assert check_distributions.main(equal) == 1
    assert "some_package-1.0.tar.gz differs between two builds" in capsys.readouterr().err
    for folder in folders:
        assert check_distributions.main([str(folder), "--normalise"]) == 0
    assert check_distributions.main(equal) == 0
    (folders[1] / "another.whl").write_bytes(b"")
    assert check_distributions.main(equal) == 1


def test_the_list_of_parts_names_the_wheel_and_what_it_requires(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SOURCE_DATE_EPOCH", "1700000000")
    folder, lists = built(root), root.parent / "lists"
    written = []
    for _ in range(2):
        assert sbom.main([str(folder), str(lists)]) == 0
        written.append((lists / "some_package-1.0-py3-none-any.cdx.json").read_bytes())
    assert written[0] == written[1]
    parts = json.loads(written[0])
    digest = hashlib.sha256((folder / "some_package-1.0-py3-none-any.whl").read_bytes()).hexdigest()
    assert parts["metadata"]["component"]["hashes"] == [{"alg": "SHA-256", "content": digest}]
    assert [(part["name"], part["scope"]) for part in parts["components"]] == [("numpy", "required")]


@pytest.mark.parametrize("folder", sorted(ROOT.glob("packages/*")), ids=lambda folder: folder.name)
def test_every_package_carries_the_licence(folder: Path) -> None:
    assert (folder / "LICENSE").read_bytes() == (ROOT / "LICENSE").read_bytes()
