"""Launches with Megatron-LM: with accel-megatron its settings are options, without it an error names the package."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from accel_plugins import resolve
from accel_plugins.separate import package_of
from accel_state import plugins
from accel_state.errors import Missing
from accel_testing.processes import Finished, run_command

Launch = Callable[..., Finished]

WITHOUT = """
import sys

from accel_state import plugins

scan = plugins._scan
plugins._scan = lambda path: tuple(one for one in scan(path) if not one.origin.startswith("accel-megatron "))

from accel_cli.main import main

sys.exit(main(sys.argv[1:]))
"""


@pytest.fixture
def launch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Launch:
    monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))
    (tmp_path / "job.py").write_text(
        "import os\nprint([os.environ.get(name) for name in ('ACCEL_BACKEND', 'MEGATRON_LM_TP_DEGREE')])\n"
    )
    (tmp_path / "run.yaml").write_text(
        "distributed_type: MEGATRON_LM\nmegatron_lm_config:\n  megatron_lm_tp_degree: 4\n"
    )
    # Looks like the engine, and need not be more to be launched.
    engine = tmp_path / "site/megatron/core"
    engine.mkdir(parents=True)
    (engine / "__init__.py").touch()
    searched = os.pathsep.join(filter(None, (str(tmp_path / "site"), os.environ.get("PYTHONPATH"))))

    def run(*arguments: str, installed: bool = True) -> Finished:
        program = ("-m", "accel_cli.main") if installed else ("-c", WITHOUT)
        command = [sys.executable, *program, "launch", *arguments, "job.py"]
        return run_command(command, env={"PYTHONPATH": searched}, cwd=tmp_path)

    return run


@pytest.mark.parametrize(
    ("arguments", "settings"),
    [
        (("--use_megatron_lm", "--megatron_lm_tp_degree", "2"), "['megatron', '2']"),
        (("--config_file", "run.yaml"), "['megatron', '4']"),
    ],
)
def test_settings_reach_the_process(launch: Launch, arguments: tuple[str, ...], settings: str) -> None:
    finished = launch(*arguments)
    assert finished.stdout.splitlines() == [settings], finished.stderr


def test_a_wrong_value_is_refused(launch: Launch) -> None:
    finished = launch("--megatron_lm_tp_degree", "0")
    assert finished.returncode == 2
    assert "tp_degree='0'" in finished.stderr


@pytest.mark.parametrize(
    "arguments",
    [("--use_megatron_lm",), ("--megatron-lm-tp-degree=2",), ("--config_file", "run.yaml")],
)
def test_without_the_package_an_error_names_it(launch: Launch, arguments: tuple[str, ...]) -> None:
    finished = launch(*arguments, installed=False)
    assert finished.returncode == 2
    assert "Install accel-megatron" in finished.stderr


def test_without_the_package_a_note_tells_that_its_settings_have_no_effect(launch: Launch, tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text("megatron_lm_config:\n  megatron_lm_tp_degree: 4\n")
    finished = launch("--cpu", "--num_processes", "1", "--config_file", "run.yaml", installed=False)
    assert finished.returncode == 0, finished.stderr
    assert "has no effect: accel-megatron, which reads it, is not installed" in finished.stderr


def test_without_the_package_its_variable_is_an_error(fresh_state: None, monkeypatch: pytest.MonkeyPatch) -> None:
    scan = plugins._scan
    monkeypatch.setattr(
        plugins,
        "_scan",
        lambda path: tuple(one for one in scan(path) if not one.origin.startswith("accel-megatron ")),
    )
    assert resolve.choose().name == "single"
    monkeypatch.setenv("ACCELERATE_USE_MEGATRON_LM", "true")
    with pytest.raises(Missing, match="ACCELERATE_USE_MEGATRON_LM") as caught:
        resolve.choose()
    assert "accel-megatron" in str(caught.value.remedy)
    monkeypatch.setenv("ACCELERATE_USE_MEGATRON_LM", "false")
    assert resolve.choose().name == "single"


@pytest.mark.parametrize("name", ["--use_deepspeed", "MULTI_GPU", "fsdp_config.fsdp_version"])
def test_other_settings_name_no_package(name: str) -> None:
    assert package_of(name) is None
