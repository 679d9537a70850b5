"""A backend that somebody else wrote is installed, chosen and configured without any change to this repository.

Its wheel is installed into a folder of its own, and a script that knows nothing of it is launched. `nox -s third-party`
runs these tests in a fresh environment where it is installed next to the wheels of this repository, and those of the
backend itself.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from accel_state.settings.installed import importable
from accel_testing.processes import run_command

# The first test also builds and installs.
pytestmark = [pytest.mark.usefixtures("preloaded_python")]
PRELOADED = ("accel_torch.accelerator", "accel_check.fake_world", "accel_check.recorder")

ROOT = Path(__file__).resolve().parents[1]
EXAMPLE = ROOT / "tests-integration" / "accel-backend-example"

SCRIPT = """
import json, sys
import torch
from accel_torch import Accelerator

torch.manual_seed(0)
accelerator = Accelerator(cpu=True)
model = torch.nn.Linear(8, 1)
model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
for step in range(3):
    loss = model(torch.full((4, 8), 1.0 + accelerator.process_index)).square().mean()
    accelerator.backward(loss)
    optimizer.step()
    optimizer.zero_grad()
strategy = accelerator.session.strategy
if accelerator.is_main_process:
    told = [type(strategy).__name__, strategy.config.keep, strategy.config.feedback, strategy.sent_bytes()]
    print(json.dumps(told), file=open(sys.argv[1], "w"))
accelerator.end_training()
"""


@pytest.fixture(scope="module")
def installed(preloaded_python: None, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Variables with which Python finds the example, installed from its wheel."""
    processes = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    if importable("accel_backend_example"):
        return processes
    folder = tmp_path_factory.mktemp("third-party")
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check"]
    build = ["wheel", "-q", "--no-deps", "--no-build-isolation", "-w", str(folder), str(EXAMPLE)]
    built = run_command([*pip, *build])
    assert built.returncode == 0, built.stderr
    (wheel,) = folder.glob("*.whl")
    placed = run_command([*pip, "install", "-q", "--no-deps", "--target", str(folder / "site"), str(wheel)])
    assert placed.returncode == 0, placed.stderr
    paths = os.pathsep.join(filter(None, [str(folder / "site"), os.environ.get("PYTHONPATH")]))
    return {**processes, "PYTHONPATH": paths}


def accel(environment: dict[str, str], *arguments: str) -> Any:
    return run_command([sys.executable, "-m", "accel_cli.main", *arguments], env=environment)


def launched(environment: dict[str, str], folder: Path, *arguments: str) -> list[Any]:
    """What a launched script tells about the strategy that trained it."""
    script, answer = folder / "train.py", folder / "answer.json"
    script.write_text(SCRIPT, encoding="utf-8")
    done = accel(environment, "launch", "--cpu", "--num_processes", "2", *arguments, str(script), str(answer))
    assert done.returncode == 0, done.stderr
    told: list[Any] = json.loads(answer.read_text(encoding="utf-8"))
    return told


def test_backend_chosen_by_flag(installed: dict[str, str], tmp_path: Path) -> None:
    flags = ["--backend", "example", "--example_keep", "0.5", "--example-feedback", "false"]
    assert launched(installed, tmp_path, *flags) == ["TopKStrategy", 0.5, False, 3 * 8 * (4 + 1)]


def test_by_config_file(installed: dict[str, str], tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("backend: example\nexample_config:\n  keep: 0.25\n", encoding="utf-8")
    assert launched(installed, tmp_path, "--config_file", str(file))[:3] == ["TopKStrategy", 0.25, True]


def test_backend_chosen_by_variable(installed: dict[str, str], tmp_path: Path) -> None:
    given = {"ACCEL_BACKEND": "example", "ACCEL_EXAMPLE_KEEP": "0.125"}
    assert launched({**installed, **given}, tmp_path)[:3] == ["TopKStrategy", 0.125, True]


def test_a_flag_comes_before_a_variable_and_a_variable_before_the_file(
    installed: dict[str, str], tmp_path: Path
) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("backend: example\nexample_config:\n  keep: 0.1\n  feedback: false\n", encoding="utf-8")
    given = {**installed, "ACCEL_EXAMPLE_KEEP": "0.2", "ACCEL_EXAMPLE_FEEDBACK": "true"}
    told = launched(given, tmp_path, "--config_file", str(file), "--example_keep", "0.3")
    assert told[1:3] == [0.3, True]


@pytest.mark.parametrize(
    ("arguments", "variables", "said"),
    [
        (["--example_keep", "lots"], {}, "example_keep"),
        (["--example_keep", "7"], {}, "above 0 and at most 1"),
        ([], {"ACCEL_EXAMPLE_KEEP": "lots"}, "$ACCEL_EXAMPLE_KEEP"),
        (["--exmaple_keep", "0.5"], {}, "Did you mean --example_keep?"),
    ],
)
def test_what_cannot_be_used_is_refused(
    installed: dict[str, str], tmp_path: Path, arguments: list[str], variables: dict[str, str], said: str
) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT, encoding="utf-8")
    given = ["--cpu", "--num_processes", "2", "--backend", "example", *arguments]
    done = accel({**installed, **variables}, "launch", *given, str(script), str(tmp_path / "answer"))
    assert done.returncode != 0
    assert said in done.stderr
    assert not (tmp_path / "answer").exists()


def test_help_and_explain_know_its_settings(installed: dict[str, str]) -> None:
    assert "--example_keep" in accel(installed, "launch", "--help-all").stdout
    explained = accel(installed, "explain", "--json", "--", "--backend", "example", "--example_keep", "0.5", "train.py")
    assert "example_config.keep" in explained.stdout


def test_a_plan_runs_its_strategy_as_each_of_many_ranks(installed: dict[str, str], tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT, encoding="utf-8")
    options = ["--json", "--processes", "64", "--backend", "example", "--launch=--example_keep 0.25"]
    done = accel(installed, "check-plan", *options, str(script), str(tmp_path / "answer"))
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads(done.stdout)
    assert (report["verdict"], report["backend"]) == ("equal", "example")
    assert report["collectives"]
