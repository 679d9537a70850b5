"""Each package declares exactly what it imports, and the check that says so can fail."""

from __future__ import annotations

from pathlib import Path

import pytest

import check_dependencies

PROJECT = """
[project]
name = "some-package"
dependencies = ["numpy>=1", "Typing_Extensions"]

[project.optional-dependencies]
fast = ["xxhash"]

[tool.accel.required-without-import]
typing-extensions = "a reason"
"""


@pytest.fixture
def packages(tmp_path: Path) -> Path:
    """One package that declares exactly what it imports."""
    source = tmp_path / "some-package/src/some_package"
    source.mkdir(parents=True)
    (tmp_path / "some-package/pyproject.toml").write_text(PROJECT, encoding="utf-8")
    (source / "__init__.py").write_text("import json\nimport numpy.linalg\n", encoding="utf-8")
    (source / "digest.py").write_text("def digest():\n    from xxhash import xxh3_64\n", encoding="utf-8")
    return tmp_path


def check(packages: Path, capsys: pytest.CaptureFixture[str]) -> str:
    """Runs the check, which must fail, and returns what it says."""
    assert check_dependencies.main([str(packages)]) == 1
    return capsys.readouterr().err


def rewrite(packages: Path, old: str, new: str) -> None:
    path = packages / "some-package/pyproject.toml"
    text = path.read_text(encoding="utf-8")
    assert old in text
    path.write_text(text.replace(old, new), encoding="utf-8")


def test_an_exact_list_passes(packages: Path) -> None:
    assert check_dependencies.main([str(packages)]) == 0


def test_an_undeclared_import_is_named_with_its_file(packages: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rewrite(packages, '["xxhash"]', "[]")
    assert "imports xxhash without declaring it (src/some_package/digest.py)" in check(packages, capsys)


def test_the_distribution_is_named_where_it_differs_from_the_module(
    packages: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (packages / "some-package/src/some_package/late.py").write_text("import yaml\n", encoding="utf-8")
    assert "imports pyyaml without" in check(packages, capsys)


def test_a_requirement_that_nothing_imports_is_named(packages: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rewrite(packages, '"numpy>=1"', '"numpy>=1", "psutil"')
    assert "requires psutil but never imports it" in check(packages, capsys)


def test_an_excuse_that_is_not_needed_is_named(packages: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rewrite(
        packages, 'typing-extensions = "a reason"', 'typing-extensions = "a reason"\nnumpy = "no reason"\nx = "none"'
    )
    told = check(packages, capsys)
    assert "imports numpy, so [tool.accel.required-without-import] must not list it" in told
    assert "does not require x, so" in told


@pytest.mark.parametrize(
    "text",
    [
        "import importlib\nimportlib.import_module('psutil.tests')",
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    pass\nelse:\n    import psutil",
        "try:\n    import psutil\nexcept ImportError:\n    psutil = None",
    ],
)
def test_imports_in_every_form_are_seen(packages: Path, capsys: pytest.CaptureFixture[str], text: str) -> None:
    (packages / "some-package/src/some_package/late.py").write_text(text, encoding="utf-8")
    assert "imports psutil without" in check(packages, capsys)


def test_what_the_stub_of_a_lazy_package_lists_needs_a_declaration(
    packages: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = packages / "some-package/src/some_package"
    (source / "late.pyi").write_text("from psutil import Process as Process\n", encoding="utf-8")
    assert check_dependencies.main([str(packages)]) == 0
    (source / "late.py").write_text("lazy_stub(__name__, __file__)\n", encoding="utf-8")
    assert "imports psutil without" in check(packages, capsys)


def test_an_entry_point_needs_a_declaration_too(packages: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rewrite(packages, "[tool.accel", '[project.scripts]\nrun = "psutil.tests:main"\n\n[tool.accel')
    assert "imports psutil without declaring it (scripts: run)" in check(packages, capsys)


def test_what_only_type_checkers_import_needs_no_declaration(packages: Path) -> None:
    text = "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import psutil\n"
    (packages / "some-package/src/some_package/late.py").write_text(text, encoding="utf-8")
    assert check_dependencies.main([str(packages)]) == 0
