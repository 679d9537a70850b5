"""The commands of the original: console scripts, `python -m`, and the functions that libraries call."""

from __future__ import annotations

import argparse
import sys
from importlib.metadata import entry_points
from pathlib import Path

import pytest

import accelerate
from accel_testing.processes import run_command
from accelerate.commands import env
from accelerate.commands.config import default_config_file
from accelerate.commands.config import main as config_main
from accelerate.commands.estimate import estimate_command, estimate_command_parser
from accelerate.commands.launch import launch_command, launch_command_parser

# One write for each line: the processes share what they write to.
SCRIPT = """
import os, sys
os.write(1, f"{os.environ.get('RANK', '0')} {os.environ.get('WORLD_SIZE', '1')} {sys.argv[1:]}\\n".encode())
sys.exit(3 if "fail" in sys.argv else 0)
"""

TWO = ["--cpu", "--num_processes", "2"]


@pytest.fixture
def script(tmp_path: Path) -> str:
    path = tmp_path / "script.py"
    path.write_text(SCRIPT, encoding="utf-8")
    return str(path)


def test_the_console_scripts_of_the_original() -> None:
    found = {
        point.name: point.value
        for point in entry_points(group="console_scripts")
        if point.dist is not None and point.dist.name == "accelerate"
    }
    assert found["accelerate"] == "accelerate.commands.accelerate_cli:main"
    assert found["accelerate-config"] == "accelerate.commands.config:main"
    assert found["accelerate-estimate-memory"] == "accelerate.commands.estimate:main"
    assert found["accelerate-launch"] == "accelerate.commands.launch:main"


@pytest.mark.parametrize(
    "command",
    [
        ["-m", "accelerate.commands.launch"],
        ["-m", "accelerate.commands.accelerate_cli", "launch"],
        ["-c", "import sys; from accelerate.commands.launch import main; sys.exit(main())"],
    ],
    ids=["-m launch", "-m accelerate_cli launch", "main()"],
)
def test_accelerate_launch_starts_two_processes(command: list[str], script: str) -> None:
    done = run_command([sys.executable, *command, *TWO, script, "--epochs", "3"])
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == ["0 2 ['--epochs', '3']", "1 2 ['--epochs', '3']"]


def test_a_failure_has_its_exit_code_and_errors_the_old_program_name(script: str, tmp_path: Path) -> None:
    done = run_command([sys.executable, "-m", "accelerate.commands.launch", "--cpu", script, "fail"])
    assert done.returncode == 3
    lost = run_command([sys.executable, "-m", "accelerate.commands.launch", str(tmp_path / "lost.py")])
    assert lost.returncode == 2
    assert lost.stderr.startswith("accelerate: ")
    assert "Traceback" not in lost.stderr


def test_launching_from_a_library(script: str) -> None:
    code = (
        "from accelerate.commands.launch import launch_command, launch_command_parser\n"
        f"launch_command(launch_command_parser().parse_args({[*TWO, script, 'fail']}))\n"
    )
    done = run_command([sys.executable, "-c", code])
    assert done.returncode == 3
    # The first that fails ends the other, which may not have come to its line.
    assert set(done.stdout.splitlines()) & {"0 2 ['fail']", "1 2 ['fail']"}


def test_the_parser_of_launch_inside_another_one() -> None:
    program = argparse.ArgumentParser()
    subparsers = program.add_subparsers()
    launch_command_parser(subparsers)
    estimate_command_parser(subparsers)
    assert program.parse_args(["launch", "--cpu", "train.py"]).func == launch_command
    assert program.parse_args(["estimate-memory", "torch.nn:Linear"]).func == estimate_command


def test_writing_a_config_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "config.yaml"
    monkeypatch.setattr(sys, "argv", ["accelerate-config", "--config_file", str(path), "default"])
    assert config_main() == 0
    assert "num_processes:" in path.read_text(encoding="utf-8")
    assert str(path) in capsys.readouterr().out


def test_where_the_config_file_lies() -> None:
    assert Path(default_config_file).name == "default_config.yaml"
    assert Path(default_config_file).parent.name == "accelerate"


def test_estimating_memory(capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--arguments", '{"in_features": 256, "out_features": 256, "bias": false}', "--dtypes", "float32"]
    estimate_command(estimate_command_parser().parse_args(["torch.nn:Linear", *options]))
    assert "256.0 KiB" in capsys.readouterr().out


def test_showing_the_environment(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["accelerate"])
    assert env.main() == 0
    shown = capsys.readouterr().out
    assert accelerate.__version__ in shown
    done = run_command([sys.executable, "-m", "accelerate.commands.env"])
    assert done.returncode == 0
    assert accelerate.__version__ in done.stdout
