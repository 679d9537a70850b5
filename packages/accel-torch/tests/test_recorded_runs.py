"""The record of runs that are started as users start them: by `accel launch`, by Python, and again after a kill."""

from __future__ import annotations

import json
import logging
import os
import shutil
import stat
import subprocess
import sys
from collections.abc import Iterator
from importlib.resources import files
from pathlib import Path

import jsonschema
import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from accel_testing.preloaded import PreloadedPython
from accel_testing.processes import Finished, run_command
from accel_torch import Accelerator, ProjectConfiguration
from accel_torch.run_recorder import wait_for_records
from accel_tracking import read_run
from accel_tracking.record import RECORD, read_run_record

SCRIPT = Path(__file__).with_name("recorded_script.py")
SCHEMAS = files("accel_cli").joinpath("schemas")
ACCEL = (sys.executable, "-m", "accel_cli.main")

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="kills processes, and reads /proc")


@pytest.fixture(scope="module", autouse=True)
def preloaded() -> Iterator[None]:
    with PreloadedPython(("accel_torch.accelerator",)):
        yield


def run(folder: Path, *words: object, **variables: str) -> Finished:
    environment = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "TMPDIR": str(folder), **variables}
    return run_command([str(word) for word in words], timeout=280, env=environment, cwd=folder)


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the run of two processes that was killed once, and started again."""
    folder = tmp_path_factory.mktemp("killed")
    (folder / "config.yaml").write_text("gradient_accumulation_steps: 1\nmax_restarts: 2\n")
    options = ("--config_file", "config.yaml", "--cpu", "--num_processes", 2, "--project_dir", "run")
    words = ("launch", *options, "--restart_policy", "auto", SCRIPT, "--kill_at", 2, "--hf_token", "hunter2xyz")
    finished = run(folder, *ACCEL, *words, WANDB_API_KEY="0123456789abcdef")
    assert finished.returncode == 0, finished.stderr
    return folder


def test_a_launch_and_its_restart_are_recorded(killed: Path) -> None:
    found = read_run_record(killed / "run")
    settings = {name: tuple(entry.values()) for name, entry in found["settings"].items()}
    assert settings["num_processes"] == (2, "--num_processes")
    assert settings["restart_policy"] == ("auto", "--restart_policy")
    assert settings["max_restarts"][0] == 2
    assert "config.yaml:2" in settings["max_restarts"][1]
    assert settings["mixed_precision"] == ("no", "default")
    assert settings["project_dir"] == ("run", "--project_dir")
    assert settings["project_config.total_limit"] == (20, "argument")
    assert [(one["restarts"], one["changed"]) for one in found["attempts"]] == [(0, []), (1, [])]
    assert len({one["launch"] for one in found["attempts"]}) == 1
    written = json.loads((killed / "run" / RECORD).read_text())
    jsonschema.validate(written, json.loads(SCHEMAS.joinpath("run.json").read_text()))
    assert found["world"]["processes"] == 2
    assert found["seeds"] == {"torch": 0, "given": True, "data_seed": None, "PYTHONHASHSEED": None}
    assert [(one["class"].rpartition(".")[2], one["length"]) for one in found["data"]] == [("TensorDataset", 48)]
    assert found["code"]["script"] == str(SCRIPT)
    assert found["command"]["words"][:2] == ["accel", "launch"]
    assert found["command"]["folder"] == str(killed)
    assert found["devices"]["torch"]["version"] == torch.__version__
    assert found["packages"]["torch"].partition("+")[0] == torch.__version__.partition("+")[0]


def test_no_secret_of_a_launch_is_written(killed: Path) -> None:
    text = (killed / "run" / RECORD).read_text()
    assert "--hf_token" in text
    assert not [secret for secret in ("hunter2xyz", "0123456789abcdef") if secret in text]


def test_a_script_without_a_launcher_is_recorded_before_it_ends(tmp_path: Path) -> None:
    code = "from accel_torch import Accelerator; Accelerator(cpu=True, project_dir='run', mixed_precision='bf16')"
    (tmp_path / "script.py").write_text(code)
    words = [sys.executable, "script.py", "--api_key", "hunter2xyz"]
    subprocess.run(words, cwd=tmp_path, check=True, timeout=280)
    found = read_run_record(tmp_path / "run")
    assert found["command"]["words"][1:] == ["script.py", "--api_key", "***"]
    assert found["settings"]["mixed_precision"] == {"value": "bf16", "source": "argument"}
    assert not found["command"]["launched"]
    assert not found["seeds"]["given"]


def written(folder: Path) -> dict[str, object]:
    accelerator = Accelerator(cpu=True, project_dir=folder)
    accelerator.prepare(DataLoader(TensorDataset(torch.ones(6, 1))))
    wait_for_records()
    return read_run_record(folder)


def test_a_folder_of_checkpoints_alone_gets_no_record(tmp_path: Path) -> None:
    accelerator = Accelerator(cpu=True, project_config=ProjectConfiguration(tmp_path, automatic_checkpoint_naming=True))
    accelerator.save_state()
    wait_for_records()
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoints"]
    Accelerator(cpu=True, project_config=ProjectConfiguration(tmp_path), log_with="jsonl")
    wait_for_records()
    assert (tmp_path / RECORD).exists()


def test_accelerators_of_a_process_are_one_start(tmp_path: Path) -> None:
    first, second = written(tmp_path), written(tmp_path)
    assert first["attempts"] == second["attempts"]
    assert json.loads((tmp_path / RECORD).read_text())["data"][0]["length"] == 6


def test_a_run_goes_on_where_nothing_can_be_written(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / RECORD).mkdir()
    (tmp_path / RECORD / "kept").touch()
    with caplog.at_level(logging.WARNING), pytest.raises(Exception, match="Cannot read the record"):
        written(tmp_path)
    # Once, although preparing the loader has changed it.
    assert caplog.text.count("The record of the run cannot be written") == 1
    if os.geteuid():
        read_only = tmp_path / "read only"
        read_only.mkdir()
        read_only.chmod(stat.S_IRUSR | stat.S_IXUSR)
        with pytest.raises(Exception, match="Cannot read the record"):
            written(read_only)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run of one process that saved after each step."""
    folder = tmp_path_factory.mktemp("trained")
    finished = run(folder, *ACCEL, "launch", "--cpu", "--num_processes", 1, SCRIPT, "--project_dir", "run")
    assert finished.returncode == 0, finished.stderr
    return folder / "run"


def losses(folder: Path) -> list[tuple[float, float]]:
    return read_run(folder).curves()["loss"]


def test_a_repeated_run_has_the_same_losses(trained: Path) -> None:
    shown = run(trained.parent, *ACCEL, "runs", "repeat", trained, "--steps", 5)
    assert shown.returncode == 0, shown.stderr
    assert "Add --start" in shown.stdout
    assert not (trained.parent / "run-repeat-1").exists()
    repeated = run(trained.parent, *ACCEL, "runs", "repeat", trained, "--steps", 5, "--start")
    assert repeated.returncode == 0, repeated.stderr
    assert "All metrics are equal: 5 steps compared." in repeated.stdout
    new = trained.parent / "run-repeat-1"
    assert losses(new) == losses(trained)[:5]
    assert len(losses(trained)) == 12
    assert sorted(path.name for path in new.iterdir()) == ["checkpoints", "recorded", "repeated.yaml", RECORD]
    assert len(read_run_record(trained)["attempts"]) == 1


def test_what_cannot_be_repeated_is_said(trained: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(trained, tmp_path / "copy")
    record = json.loads((folder / RECORD).read_text())
    record["code"]["script_sha256"] = "0"
    record["packages"]["numpy"] = "0.1"
    record["packages"]["a-package-of-that-day"] = "1"
    record["seeds"]["given"] = False
    record["command"]["words"] += ["--hf_token", "***"]
    (folder / RECORD).write_text(json.dumps(record))
    finished = run(tmp_path, *ACCEL, "runs", "repeat", folder, "--start")
    assert finished.returncode == 2
    for said in (
        "has changed",
        "instead of 0.1",
        "a-package-of-that-day is missing",
        "gave no seed",
        "not contain sec",
    ):
        assert said in finished.stderr


CASES = {
    "bad data": (("--bad_sample", 21), 6, True, True, "the data or the numerics"),
    "a fault that came once": (("--fault_at", 6), 6, True, False, "the machine or a race"),
    "unseeded random numbers": (("--random",), 4, False, False, "differ"),
}


@pytest.mark.parametrize("case", CASES)
def test_a_replayed_step_tells_its_cause(case: str, tmp_path: Path) -> None:
    options, step, repeats, again, verdict = CASES[case]
    words = ("launch", "--cpu", "--num_processes", 1, SCRIPT, "--project_dir", "run", *options)
    finished = run(tmp_path, *ACCEL, *words)
    assert finished.returncode == 0, finished.stderr
    replayed = run(tmp_path, *ACCEL, "runs", "replay", "run", "--step", step, "--json")
    found = json.loads(replayed.stdout)
    jsonschema.validate(found, json.loads(SCHEMAS.joinpath("runs-replay.json").read_text()))
    assert (found["repeats"], found["bad_again"], found["checkpoint"]) == (repeats, again, f"checkpoint_{step - 2}")
    assert verdict in found["verdict"], found
    assert replayed.returncode == int(again or not repeats)
    assert found["bad_before"] is (case != "unseeded random numbers")


def test_a_step_without_a_checkpoint_before_it_is_a_typed_error(trained: Path) -> None:
    finished = run(trained.parent, *ACCEL, "runs", "replay", trained, "--step", 1)
    assert finished.returncode == 2
    assert "no automatic checkpoint from before this step" in finished.stderr
