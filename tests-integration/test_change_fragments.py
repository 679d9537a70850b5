"""Change fragments say what a release needs, and versions move as their kinds say."""

from __future__ import annotations

from pathlib import Path

import pytest
from packaging.version import Version

import release
from releasing.fragments import KINDS, faults
from releasing.workspace import Step, next_version, read_workspace, series_end, short

ROOT = Path(__file__).resolve().parents[1]


def test_the_fragments_of_this_repository_are_well_formed(capsys: pytest.CaptureFixture[str]) -> None:
    assert release.main(["check"]) == 0
    assert capsys.readouterr().out == "fragments: those of 11 packages are well formed\n"


def test_the_layers_of_this_repository_stand_upward() -> None:
    order = [package.name for package in read_workspace(ROOT)]
    assert order[:2] == ["accel-state", "accel-ops"]
    assert set(order[2:5]) == {"accel-bigmodel", "accel-data", "accel-tracking"}
    assert order[5:7] == ["accel-plugins", "accel-cli"]
    assert [name for name in order[7:] if name not in ("accel-ray", "accel-torchft")] == ["accel-torch", "accelerate"]


@pytest.mark.parametrize("kind", KINDS)
def test_a_sentence_of_any_kind_is_well_formed(tmp_path: Path, kind: str) -> None:
    path = tmp_path / f"+some-change.{kind}.md"
    path.write_text("`f` takes `x`,\nwhich was asked for.\n", encoding="utf-8")
    assert list(faults(path)) == []


@pytest.mark.parametrize(
    ("name", "text", "told"),
    [
        ("change.fix.md", "Text.\n", "its name is not of the form"),
        ("+Change.fix.md", "Text.\n", "its name is not of the form"),
        ("+change.fix.rst", "Text.\n", "its name is not of the form"),
        ("+change.novelty.md", "Text.\n", "there is no kind 'novelty'"),
        ("+change.fix.md", "", "it is empty"),
        ("+change.fix.md", "\n", "it is empty"),
        ("+change.fix.md", "- Text.\n", "it must be plain sentences"),
        ("+change.fix.md", "# Text.\n", "it must be plain sentences"),
        ("+change.fix.md", "Text.", "end with one line break"),
        ("+change.fix.md", "Text.\n\n", "end with one line break"),
        ("+change.fix.md", "text.\n", "it must be whole sentences"),
        ("+change.fix.md", "Text\n", "it must be whole sentences"),
        ("+change.fix.md", f"Te{'x' * 120}t.\n", "a line is longer than 120"),
    ],
)
def test_faults_of_change_fragments(tmp_path: Path, name: str, text: str, told: str) -> None:
    path = tmp_path / name
    path.write_text(text, encoding="utf-8")
    assert any(told in fault for fault in faults(path))


@pytest.mark.parametrize(
    ("version", "step", "after"),
    [
        ("0.1.0", Step.FIX, "0.1.1"),
        ("0.1.9", Step.FEATURE, "0.1.10"),
        ("0.1.3", Step.BREAKING, "0.2.0"),
        ("1.2.3", Step.FIX, "1.2.4"),
        ("1.2.3", Step.FEATURE, "1.3.0"),
        ("1.2.3", Step.BREAKING, "2.0.0"),
        ("1.15.0+accel.1", Step.FIX, "1.15.0+accel.2"),
        ("1.15.0+accel.9", Step.BREAKING, "1.15.0+accel.10"),
    ],
)
def test_versions_move_by_steps(version: str, step: Step, after: str) -> None:
    assert next_version(Version(version), step) == Version(after)


@pytest.mark.parametrize(("version", "end"), [("0.1.7", "0.2"), ("0.9.0", "0.10"), ("1.2.3", "2.0")])
def test_a_series_ends_where_something_may_break(version: str, end: str) -> None:
    assert short(series_end(Version(version))) == end


@pytest.mark.parametrize(
    ("version", "text"), [("0.2.0", "0.2"), ("0.2.1", "0.2.1"), ("1.0.0", "1.0"), ("1.10.0", "1.10")]
)
def test_bounds_are_written_short(version: str, text: str) -> None:
    assert short(Version(version)) == text
