"""What the launcher plans, as data, and what it refuses; none of it needs Ray."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from accel_cli.launch.launchers import find_launcher
from accel_cli.launch.request import request_of
from accel_ray.cluster import Layout
from accel_state.errors import SettingError
from accel_state.settings.installed import importable
from accel_testing.launchers import prepare_launch

Plan = Callable[..., Any]


@pytest.fixture
def plan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Plan:
    (tmp_path / "job.py").write_text("")
    monkeypatch.chdir(tmp_path)

    def make(*words: str, environ: dict[str, str] | None = None) -> Any:
        variables = {"HF_HOME": str(tmp_path), **(environ or {})}
        return prepare_launch(["--launcher=ray", *words, "job.py", "--lr", "1"], variables)[1]

    return make


@pytest.mark.parametrize(
    ("words", "layout", "world"),
    [
        (("--nnodes=2", "--num_processes=8"), Layout(2, 2, 4, True, 1, None), 8),
        (("--nnodes=1:4", "--num_processes=8"), Layout(4, 1, 2, True, 1, None), None),
        (("--nnodes=2",), Layout(2, 2, None, True, 1, None), None),
        (("--num_processes=3",), Layout(3, 3, 1, False, 1, None), 3),
        ((), Layout(None, 1, None, True, 1, None), None),
        (("--cpu", "--num_processes=1"), Layout(1, 1, 1, False, 1, 0), 1),
        (
            ("--ray_cpus_per_process=4", "--ray_resource=TPU=4"),
            Layout(None, 1, None, True, 4, None, (("TPU", 4.0),)),
            None,
        ),
        (("--num_processes=2", "--ray_gpus_per_process=2"), Layout(2, 2, 1, False, 1, 2), 2),
    ],
)
def test_the_options_say_how_a_run_is_divided(plan: Plan, words: tuple[str, ...], layout: Layout, world: int) -> None:
    made = plan(*words)
    assert made.details.layout == layout
    assert made.world_size == world


def test_a_plan_carries_the_script_and_the_settings(plan: Plan) -> None:
    made = plan("--mixed_precision=bf16", "--max_restarts=2", "--ray_lost_nodes=3", "--ray_wait=7")
    assert made.argv == ("script", "job.py", "--lr", "1")
    assert made.environment["ACCELERATE_MIXED_PRECISION"] == "bf16"
    assert (made.details.restarts, made.details.lost_nodes, made.details.patience) == (2, 3, 7.0)


def test_what_describes_this_machine_alone_stays_here(plan: Plan) -> None:
    made = plan(environ={"CUDA_VISIBLE_DEVICES": "0", "HOSTNAME": "here", "OF_THE_USER": "1"})
    assert {"CUDA_VISIBLE_DEVICES", "HOSTNAME"}.isdisjoint(made.inherited)
    assert made.inherited["OF_THE_USER"] == "1"
    assert "OMP_NUM_THREADS" not in made.environment
    assert plan("--num_cpu_threads_per_process=3").environment["OMP_NUM_THREADS"] == "3"


@pytest.mark.parametrize(
    ("words", "prefixed"),
    [
        ((), True),
        (("--num_processes=1",), False),
        (("--no_prefix_output",), False),
        (("--num_processes=1", "--prefix_output"), True),
    ],
)
def test_lines_begin_with_ranks_where_there_are_several(plan: Plan, words: tuple[str, ...], prefixed: bool) -> None:
    assert plan(*words).prefix_output is prefixed


def test_the_address_comes_from_the_flag_or_a_variable(plan: Plan) -> None:
    assert plan().details.address is None
    assert plan(environ={"RAY_ADDRESS": "a:1"}).details.address == "a:1"
    assert plan("--ray_address=b:2", environ={"RAY_ADDRESS": "a:1"}).details.address == "b:2"


def test_an_address_that_was_given_chooses_the_launcher(tmp_path: Path) -> None:
    own = {"HF_HOME": str(tmp_path)}
    request = request_of(["--ray_address=a:1", "job.py"], own)
    assert request.launcher.name == "ray"
    request = request_of(["job.py"], {**own, "RAY_ADDRESS": "a:1"})
    assert request.launcher.name == "local"


@pytest.mark.parametrize("resource", ["TPU", "=4", "TPU=", "TPU=none", "TPU=0", "TPU=-1", "TPU=inf"])
def test_a_resource_that_cannot_be_read_is_refused(plan: Plan, resource: str) -> None:
    with pytest.raises(SettingError, match="NAME=AMOUNT"):
        plan(f"--ray_resource={resource}")


def test_processes_that_do_not_divide_over_nodes_are_refused(plan: Plan, tmp_path: Path) -> None:
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "accel_cli.main",
            "launch",
            "--launcher=ray",
            "--nnodes=2",
            "--num_processes=3",
            "job.py",
        ],
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 2
    assert "num_machines=2" in done.stderr


@pytest.mark.skipif(importable("ray"), reason="Ray is installed here.")
def test_ray_that_is_not_installed_is_named(plan: Plan, tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "accel_cli.main", "launch", "--launcher=ray", "job.py"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 2
    assert "pip install" in done.stderr
    assert "ray" in done.stderr


def test_other_launchers_refuse_a_range_of_nodes(plan: Plan, tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "accel_cli.main", "launch", "--launcher=slurm", "--nnodes=1:4", "job.py"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 2
    assert "num_machines=1:4" in done.stderr
    assert find_launcher("ray", "test").elastic


def test_a_range_that_goes_down_is_refused(plan: Plan) -> None:
    with pytest.raises(SettingError, match="num_machines"):
        plan("--nnodes=4:2")
