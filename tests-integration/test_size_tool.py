"""What counts as a code line, and what the report of sizes shows."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import tomli

import size

ROOT = Path(__file__).resolve().parents[1]

SOURCE = '''"""A docstring
of two lines."""

from math import pi

__all__ = ("area", "LIMIT")

LIMIT = (
    1,
    2,  # a comment after code
)
"""A text after an attribute is code."""


# A comment.
def area(radius):
    """A docstring."""
    text = """
    a text in code
    """
    return pi * radius**2
'''


def test_docstrings_comments_and_blank_lines_are_no_code() -> None:
    assert size.size_of_file(SOURCE) == size.Size(code_lines=12, files=1, public_names=2)


def test_the_report_shows_each_package_and_its_growth(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    module = tmp_path / "packages/accel-one/src/accel_one/module.py"
    module.parent.mkdir(parents=True)
    module.write_text(SOURCE, encoding="utf-8")
    record = tmp_path / "sizes.json"
    assert size.main(["--write"], tmp_path, record) == 0
    assert json.loads(record.read_text(encoding="utf-8")) == {
        "accel-one": {"code_lines": 12, "files": 1, "public_names": 2}
    }
    module.write_text(SOURCE + "first = 1\nsecond = 2\n", encoding="utf-8")
    capsys.readouterr()
    assert size.main([], tmp_path, record) == 0
    assert [line.split() for line in capsys.readouterr().out.splitlines()[1:]] == [
        ["accel-one", "14", "1", "2", "+2"],
        ["all", "14", "1", "2", "+2"],
    ]


def test_an_unknown_option_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert size.main(["--wirte"]) == 2
    assert "--write" in capsys.readouterr().err


def test_every_package_is_recorded_and_has_owners() -> None:
    packages = sorted(path.parent.name for path in ROOT.glob("packages/*/pyproject.toml"))
    assert sorted(size.read_record()) == packages
    owned = (ROOT / "CODEOWNERS").read_text(encoding="utf-8")
    assert [package for package in packages if f"/packages/{package}/ " not in owned] == []
    backends = tomli.loads((ROOT / "packages/accel-plugins/pyproject.toml").read_text(encoding="utf-8"))
    targets = backends["project"]["entry-points"]["accel.backends"].values()
    folders = {target.partition(":")[0].split(".")[1] for target in targets}
    assert [folder for folder in sorted(folders) if f"/accel_plugins/{folder}/ " not in owned] == []
