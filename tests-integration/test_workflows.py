"""The workflows call the commands that this repository has, and install and publish nothing else."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import tomli
import yaml

ROOT = Path(__file__).resolve().parents[1]
WORKFLOWS = {
    path.stem: yaml.safe_load(path.read_text(encoding="utf-8")) for path in (ROOT / ".github/workflows").glob("*")
}


def commands(workflow: dict[str, Any]) -> list[str]:
    """What the steps of a workflow run."""
    return [step["run"] for job in workflow["jobs"].values() for step in job["steps"] if "run" in step]


def sessions(*arguments: str) -> list[dict[str, Any]]:
    """What nox lists here."""
    command = [sys.executable, "-m", "nox", "--list", "--json", *arguments]
    return json.loads(subprocess.run(command, cwd=ROOT, capture_output=True, check=True, timeout=120).stdout)


@pytest.mark.parametrize("name", sorted(WORKFLOWS))
def test_a_workflow_names_files_and_sessions_that_exist(name: str) -> None:
    for command in commands(WORKFLOWS[name]):
        for session in re.findall(r"nox .*-s ([\w-]+)", command):
            assert {row["name"] for row in sessions("-s", session)} == {session}
        assert all((ROOT / path).is_file() for path in re.findall(r"(?:tools|\.ci)/[\w.]+", command))


@pytest.mark.parametrize("name", sorted(WORKFLOWS))
def test_a_workflow_gives_rights_job_by_job(name: str) -> None:
    assert WORKFLOWS[name]["permissions"] == {}
    for job in WORKFLOWS[name]["jobs"].values():
        assert set(job["permissions"].values()) <= {"read", "write"}
        assert "contents" not in job["permissions"] or job["permissions"]["contents"] == "read"


def test_every_change_runs_the_same_commands_as_here() -> None:
    assert ".ci/run" in commands(WORKFLOWS["ci"])
    assert (ROOT / ".ci/run").stat().st_mode & 0o100


def test_the_table_has_every_supported_python_and_torch() -> None:
    (command,) = [line for line in commands(WORKFLOWS["ci"]) if "--list --json" in line]
    assert "nox --list --json -s matrix)" in command
    rows = {(row["python"], row["call_spec"]["torch"]) for row in sessions("-s", "matrix")}
    supported = tomli.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["accel"]["supported"][
        "torch"
    ]
    assert rows == {(python, torch) for torch, pythons in supported.items() for python in pythons}


def test_only_the_job_that_publishes_may_publish_and_runs_nothing_of_the_repository() -> None:
    publish = WORKFLOWS["release"]["jobs"]["publish"]
    assert publish["permissions"] == {"id-token": "write"}
    assert publish["environment"] == {"name": "pypi"}
    assert [step["uses"].partition("@")[0] for step in publish["steps"]] == [
        "actions/download-artifact",
        "pypa/gh-action-pypi-publish",
    ]
    assert publish["steps"][-1]["with"]["attestations"] is True
    others = [name for name, workflow in WORKFLOWS.items() if "gh-action-pypi-publish" in json.dumps(workflow)]
    assert others == ["release"]
