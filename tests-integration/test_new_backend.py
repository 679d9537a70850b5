"""What `accel new-backend` writes is a complete package that passes the test kit."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest

from accel_cli.main import main
from accel_plugins.commands.new_backend import COMMAND
from accel_state.plugins import plugins_of
from accel_testing.processes import run_command

ROOT = Path(__file__).resolve().parents[1]

NEEDLESS = (
    "the processes of very-fancy do not change",
    "the suite of very-fancy has no reference()",
    "very-fancy declares that it lacks unused_parameters",
)
"""Why a test of the kit does not apply to exact data parallelism by torch's wrapper."""


def test_the_package_passes_the_kit_as_it_is_written(tmp_path: Path) -> None:
    assert main(["new-backend", "very-fancy", "--into", str(tmp_path)]) == 0
    package, site = tmp_path / "accel-backend-very-fancy", tmp_path / "site"
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "install", "-q", "--no-build-isolation"]
    placed = run_command([*pip, "--no-deps", "--target", str(site), str(package)])
    assert placed.returncode == 0, placed.stderr
    paths = os.pathsep.join(filter(None, [str(site), os.environ.get("PYTHONPATH")]))
    env = {**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}

    listed = run_command([sys.executable, "-m", "accel_cli.main", "backends", "--json", "--no_probe"], env=env)
    (row,) = [row for row in json.loads(listed.stdout) if row["name"] == "very-fancy"]
    assert (row["package"], row["version"], row["failure"]) == ("accel-backend-very-fancy", "0.1.0", "")

    helped = run_command([sys.executable, "-m", "accel_cli.main", "launch", "--help-all"], env=env)
    assert "--very_fancy_bucket_mb" in helped.stdout

    settings = ["-c", str(ROOT / "pyproject.toml"), "--rootdir", str(tmp_path), "-p", "no:cacheprovider", "-q", "-rs"]
    command = [sys.executable, "-m", "pytest", "-n", "0", *settings, str(package / "tests")]
    tested = run_command(command, timeout=900, env=env)
    assert tested.returncode == 0, tested.stdout
    skipped = [line for line in tested.stdout.splitlines() if line.startswith("SKIPPED")]
    assert [line for line in skipped if not any(reason in line for reason in NEEDLESS)] == []


def test_what_is_written_follows_the_style_of_this_repository(tmp_path: Path) -> None:
    assert main(["new-backend", "very-fancy", "--into", str(tmp_path)]) == 0
    first_party = 'lint.isort.known-first-party = ["accel_plugins", "accel_state", "accel_backend_very_fancy"]'
    ruff = [str(Path(sys.executable).with_name("ruff"))]
    config = ["--config", str(ROOT / "pyproject.toml"), "--config", first_party]
    checked = run_command([*ruff, "check", *config, str(tmp_path)])
    assert checked.returncode == 0, checked.stdout
    formatted = run_command([*ruff, "format", "--check", *config, str(tmp_path)])
    assert formatted.returncode == 0, formatted.stdout


@pytest.mark.parametrize("name", ["", "Fancy", "fancy backend", "../fancy", "-fancy", "fancy_", "f" * 49, "ddp"])
def test_a_name_that_cannot_be_used_is_refused(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["new-backend", "--into", str(tmp_path), "--", name]) == 2
    assert repr(name) in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_the_command_enters_through_an_entry_point() -> None:
    (found,) = [found for found in plugins_of("accel.commands") if found.name == "new-backend"]
    assert found.load() is COMMAND


def test_new_backend_overwrites_no_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "accel-backend-fancy").mkdir()
    assert main(["new-backend", "fancy", "--into", str(tmp_path)]) == 2
    assert "The folder exists already." in capsys.readouterr().err
    assert list((tmp_path / "accel-backend-fancy").iterdir()) == []
