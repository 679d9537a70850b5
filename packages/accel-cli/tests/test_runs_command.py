from __future__ import annotations

import io
import json
import math
import os
import subprocess
import sys
from argparse import ArgumentParser
from pathlib import Path

import pytest

from accel_cli.command import find_command
from accel_cli.commands.runs import COMMAND
from accel_state.errors import Missing, SettingError
from accel_tracking import JSONLinesTracker, curves
from accel_tracking.curves import sparkline


@pytest.fixture
def run_file(tmp_path: Path) -> Path:
    tracker = JSONLinesTracker("digits", tmp_path)
    tracker.start()
    tracker.store_init_configuration({"lr": 0.1, "name": "<b>"})
    for step in range(100):
        tracker.log({"loss": 1 / (step + 1), "eval": {"accuracy": step / 100}}, step=step)
    tracker.finish()
    (path,) = tmp_path.rglob("*.jsonl")
    return path


def call(*arguments: object) -> int:
    parser = ArgumentParser()
    COMMAND.add_arguments(parser)
    return COMMAND.run(parser.parse_args([str(argument) for argument in arguments]))


def without_matplotlib(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)


def test_the_command_has_an_entry_point() -> None:
    assert find_command("runs") is COMMAND


def test_runs_of_a_folder_are_listed(run_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (run_file.parent / "other.jsonl").write_text('{"text": "a data set"}\n')
    open_run = JSONLinesTracker("letters", run_file.parent)
    open_run.start()
    open_run.log({"loss": 1.0}, step=4)
    assert call("list", run_file.parent, "--json") == 0
    rows = {
        row["run"]: row for row in map(json.loads, capsys.readouterr().out.splitlines()) if row["state"] != "running"
    }
    open_run.finish()
    assert {name: (row["state"], row["steps"]) for name, row in rows.items()} == {
        "digits": ("finished", 99),
        "letters": ("unfinished", 4),
    }
    assert call("list", run_file.parent) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert lines[0] == ["run", "state", "started", "steps", "where"]
    assert next(line for line in lines if line[0] == "digits")[-1] == str(run_file)


def test_a_folder_that_is_absent_is_a_typed_error(tmp_path: Path) -> None:
    with pytest.raises(SettingError, match="is not a folder"):
        call("list", tmp_path / "none")


def test_a_run_is_shown_as_text(
    run_file: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    without_matplotlib(monkeypatch)
    assert call("show", run_file) == 0
    shown = capsys.readouterr().out
    assert "digits" in shown
    assert "lr: 0.1" in shown
    assert "finished after" in shown
    assert "eval/accuracy  ▁" in shown
    assert "last 0.01, 0.01 .. 1, 100 points" in shown
    assert [path.name for path in run_file.parent.iterdir()] == [run_file.name]


def test_show_of_a_folder_shows_its_newest_run_and_whether_it_finished(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "a.jsonl").write_text(json.dumps({"run": "cut", "format": 1, "time": 1.0}) + '\n{"step": 1, "ti')
    call("show", tmp_path, "--text")
    shown = capsys.readouterr().out
    assert "not finished, 1 damaged lines skipped" in shown
    assert "the run logged no numbers" in shown


def test_output_without_matplotlib_is_an_error(run_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    without_matplotlib(monkeypatch)
    with pytest.raises(Missing, match='pip install "matplotlib"'):
        call("show", run_file, "--output", run_file.with_suffix(".svg"))


@pytest.mark.parametrize(
    ("suffix", "start"), [(".png", b"\x89PNG"), (".svg", b"<?xml"), (".pdf", b"%PDF"), (".html", b"<!doctype html>")]
)
def test_pictures(run_file: Path, suffix: str, start: bytes) -> None:
    pytest.importorskip("matplotlib", reason="pictures are drawn by matplotlib")
    call("show", run_file, "--output", run_file.with_suffix(suffix))
    content = run_file.with_suffix(suffix).read_bytes()
    assert content.startswith(start)
    assert len(content) > 5000
    if suffix == ".html":
        assert b"&lt;b&gt;" in content


def test_without_output_the_picture_is_beside_the_run(run_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib", reason="pictures are drawn by matplotlib")
    call("show", run_file)
    assert run_file.with_suffix(".png").exists()
    assert "Picture written to" in capsys.readouterr().out


def test_other_suffixes_empty_runs_and_missing_folders_are_refused(
    run_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(curves, "MATPLOTLIB", curves.Requirement("json"))
    with pytest.raises(SettingError, match=r"'\.bmp'"):
        call("show", run_file, "--output", "x.bmp")
    empty = tmp_path / "empty.jsonl"
    empty.write_text(json.dumps({"run": "r", "format": 1, "time": 1.0}))
    with pytest.raises(SettingError, match="no numbers"):
        call("show", empty, "--output", "x.png")
    pytest.importorskip("matplotlib", reason="pictures are drawn by matplotlib")
    with pytest.raises(SettingError, match="cannot write it"):
        call("show", run_file, "--output", tmp_path / "no" / "such" / "folder.png")


def test_a_terminal_without_bar_characters_prints_question_marks(
    run_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    terminal = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr(sys, "stdout", terminal)
    call("show", run_file, "--text")
    terminal.flush()
    assert b"?" in terminal.buffer.getvalue()


@pytest.mark.parametrize(
    ("values", "line"),
    [
        ([], ""),
        ([1.0], "▁"),
        ([2, 2, 2], "▁▁▁"),
        ([0, 1, 2, 3], "▁▃▆█"),
        ([math.nan, 0, math.inf, 1], " ▁ █"),
        ([math.nan], " "),
        ([-1e308, 1e308], "▁█"),
    ],
)
def test_sparklines(values: list[float], line: str) -> None:
    assert sparkline(values) == line


def test_long_curves_are_averaged() -> None:
    assert sparkline(list(range(1000)), width=8) == "▁▂▃▄▅▆▇█"


def test_show_with_text_imports_neither_matplotlib_nor_torch(run_file: Path) -> None:
    code = (
        "import sys, argparse; from accel_cli.commands.runs import COMMAND as c\n"
        "p = argparse.ArgumentParser(); c.add_arguments(p)\n"
        f"c.run(p.parse_args(['show', {str(run_file)!r}, '--text']))\n"
        "sys.exit(bool({'matplotlib', 'torch', 'numpy'} & set(sys.modules)))"
    )
    environment = {**os.environ, "PYTHONIOENCODING": "utf-8"}
    assert subprocess.run([sys.executable, "-c", code], env=environment, timeout=250, check=False).returncode == 0
