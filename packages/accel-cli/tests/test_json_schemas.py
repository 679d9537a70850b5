"""What commands print with `--json` has the schema that the wheel contains."""

from __future__ import annotations

import json
import os
import runpy
from importlib.resources import files
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from accel_cli.main import main
from accel_plugins.checkpoint.commit import staging
from accel_state import PartialState
from accel_state.watch.runs import announce_run, make_launch_folder, remove_launch_folder
from accel_testing.fresh import fresh
from accel_tracking import JSONLinesTracker
from accel_tracking.sample_counts import COLUMNS, TABLE

stored_run = runpy.run_path(str(Path(__file__).with_name("test_runs_report.py")))["stored_run"]
SCHEMAS = {
    path.name.removesuffix(".json"): json.loads(path.read_text(encoding="utf-8"))
    for path in files("accel_cli").joinpath("schemas").iterdir()
}


def printed(capsys: pytest.CaptureFixture[str], *words: object, lines: bool = False) -> Any:
    assert main([str(word) for word in words]) in (0, 1)
    text = capsys.readouterr().out
    return [json.loads(line) for line in text.splitlines()] if lines else json.loads(text)


def check(name: str, value: Any) -> None:
    jsonschema.Draft202012Validator.check_schema(SCHEMAS[name])
    jsonschema.validate(value, SCHEMAS[name])


@pytest.fixture
def project(tmp_path: Path) -> Path:
    return stored_run(tmp_path / "run")


def test_outputs_about_runs(project: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    other = stored_run(tmp_path / "other", lr=0.2)
    (line, *_) = printed(capsys, "runs", "list", tmp_path, "--json", lines=True)
    check("runs-list", line)
    check("runs-goodput", printed(capsys, "runs", "goodput", project, "--json"))
    check("runs-diff", printed(capsys, "runs", "diff", project, other, "--json"))
    check("runs-diff", printed(capsys, "runs", "diff", project, project, "--json"))
    tracker = JSONLinesTracker("mixed", tmp_path / "mixed")
    tracker.start()
    tracker.log_table(TABLE, COLUMNS, [[0, "code", 700, 23.3, 0.7, 0.7]], step=3)
    tracker.finish()
    check("runs-samples", printed(capsys, "runs", "samples", tmp_path / "mixed", "--json"))
    folder = make_launch_folder()
    try:
        announce_run(folder)
        check("runs-status", printed(capsys, "runs", "status", os.getpid(), "--json"))
    finally:
        remove_launch_folder(folder)


def test_outputs_about_checkpoints(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for number in range(2):
        place = tmp_path / "checkpoints" / f"checkpoint_{number}"
        with fresh():
            PartialState(cpu=True)
            with staging(place, facts={"world_size": 1}, fsync=False) as folder:
                (folder / "model.safetensors").write_bytes(b"123")
    check("checkpoint-list", printed(capsys, "checkpoint", "list", tmp_path, "--json"))
    check("checkpoint-verify", printed(capsys, "checkpoint", "verify", tmp_path, "--json"))
    one = tmp_path / "checkpoints" / "checkpoint_1"
    check("checkpoint-info", printed(capsys, "checkpoint", "info", one, "--json"))
    check("checkpoint-copy", printed(capsys, "checkpoint", "copy", one, tmp_path / "copy", "--json"))
    check("checkpoint-prune", printed(capsys, "checkpoint", "prune", tmp_path, "--keep", 1, "--json"))


def test_outputs_about_settings_and_the_machine(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = tmp_path / "config.yaml"
    config.write_text("mixed_precision: bf16\n")
    check("explain", printed(capsys, "explain", "--json", "--", "--num_processes", 2))
    check("explain-diff", printed(capsys, "explain", "--json", "--diff", config))
    check("env", printed(capsys, "env", "--json", "--light"))
    check("backends", printed(capsys, "backends", "--json", "--no_probe"))


@pytest.mark.slow
def test_the_output_of_the_doctor(capsys: pytest.CaptureFixture[str]) -> None:
    check("doctor", printed(capsys, "doctor", "--json"))


def test_a_schema_refuses_what_it_does_not_describe() -> None:
    wrong: list[tuple[str, Any]] = [
        ("runs-diff", {"runs": ["a"], "equal": True}),
        ("doctor", [{"subject": "a", "verdict": "perhaps", "message": "", "remedy": ""}]),
        ("checkpoint-list", [{"name": 3}]),
        ("explain", [{"setting": "a"}]),
    ]
    for name, value in wrong:
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate(value, SCHEMAS[name])
