"""Bad input to `accel launch`: three parts, exit code 2, no traceback, nothing started."""

from __future__ import annotations

import pytest


def refused(finished):
    assert (finished.returncode, finished.stdout) == (2, "")
    assert "Traceback" not in finished.stderr
    lines = finished.stderr.splitlines()
    assert len(lines) == 3
    assert lines[0].startswith("accel: ")
    return finished.stderr


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--mixed_precision", "bf17", "job.py"], "Did you mean 'bf16'?"),
        (["missing.py"], "The script missing.py was to be started."),
        (["train"], "give -m to run a module"),
        (["folder"], "It is a folder without a __main__.py."),
        (["--num_processes", "0", "job.py"], "an integer of at least 1"),
        (["--num_processes", "many", "job.py"], "num_processes='many' was asked for (--num_processes)."),
        (["--num-processes", "", "job.py"], "num_processes=''"),
        (["--num_processes"], "expected one argument"),
        (["--main_process_port", "65536", "job.py"], "a port from 0"),
        (["--no_such_option", "job.py"], "--no_such_option"),
        (["--cpu=1", "job.py"], "ignored explicit argument"),
        ([], "No script was named."),
        ([""], "No script was named."),
        (["--backend", "dpp", "job.py"], "Did you mean 'ddp'?"),
        (
            ["--machine_rank", "2", "--num_machines", "2", "--main_process_ip", "h", "job.py"],
            "the ranks go from 0 to 1",
        ),
        (["--num_machines", "2", "job.py"], "Give --main_process_ip"),
        (["--launcher", "spawner", "--max_restarts", "2", "job.py"], "max_restarts=2 (--max_restarts)"),
        (["-m", "no_such_module.train"], "There is no module 'no_such_module'."),
        (["-m", "job.py"], "Leave out -m, or write job."),
        (["-m", "./job.py"], "That is no name of a module."),
        (["--no_python", "no-such-program"], "no such executable file"),
        (["--no_python", "-m", "x"], "--module and --no_python"),
        (["--config_file", "none.yaml", "job.py"], "There is no such file."),
        (["--config_file", "broken.yaml", "job.py"], "broken.yaml:2, column 2: it is not valid YAML"),
        (["--config_file", "unknown.yaml", "job.py"], "Did you mean 'mixed_precision'?"),
        (["--config_file", "wrong.yaml", "job.py"], "wrong.yaml:1"),
    ],
)
def test_bad_input(accel, script, tmp_path, arguments, said):
    script("raise SystemExit('started')")
    (tmp_path / "folder").mkdir()
    (tmp_path / "broken.yaml").write_text("a: [1\nb: 2")
    (tmp_path / "unknown.yaml").write_text("mixed_precison: no\n")
    (tmp_path / "wrong.yaml").write_text("num_processes: two\n")
    assert said in refused(accel("launch", *arguments))


def test_a_variable_of_the_wrong_kind(accel, script):
    finished = accel("launch", script(""), env={"ACCELERATE_MIXED_PRECISION": "half"})
    assert "($ACCELERATE_MIXED_PRECISION)" in refused(finished)


def test_the_users_own_file_is_used_and_named(accel, script, tmp_path):
    folder = tmp_path / "home" / "accelerate"
    folder.mkdir(parents=True)
    (folder / "default_config.yaml").write_text("num_processes: 2\nuse_cpu: true\nmixed_precision: bf16\n")
    body = "import os; print(os.environ['ACCELERATE_MIXED_PRECISION'], os.environ['WORLD_SIZE'])"
    finished = accel("launch", script(body))
    assert finished.stdout == "bf16 2\n" * 2
    assert finished.stderr == f"accel launch: the settings of {folder / 'default_config.yaml'} are used.\n"
    assert accel("launch", "-q", script(body)).stderr == ""


def test_a_variable_that_overrides_the_file_is_told(accel, script, tmp_path):
    (tmp_path / "run.yaml").write_text("mixed_precision: fp16\n")
    body = "import os; print(os.environ['ACCELERATE_MIXED_PRECISION'])"
    both = {"ACCELERATE_MIXED_PRECISION": "bf16"}
    finished = accel("launch", "--config_file", "run.yaml", script(body), env=both)
    assert finished.stdout == "bf16\n"
    assert finished.stderr == (
        "accel launch: $ACCELERATE_MIXED_PRECISION=bf16 overrides mixed_precision=fp16 (run.yaml:1).\n"
    )
    flag = accel("launch", "--config_file", "run.yaml", "--mixed_precision", "no", script(body), env=both)
    assert (flag.stdout, flag.stderr) == ("no\n", "")


def test_what_nothing_reads_is_told(accel, script, tmp_path):
    (tmp_path / "run.yaml").write_text("num_processes: 1\nfp8_config:\n  backend: TE\n")
    finished = accel("launch", "--config_file", "run.yaml", script(""))
    assert finished.returncode == 0
    assert "fp8_config.fp8_backend=te (run.yaml:3) has no effect" in finished.stderr
    finished = accel("launch", "--config_file", "run.yaml", "--mixed_precision", "fp8", script(""))
    assert "no effect" not in finished.stderr


def test_options_of_an_engine_that_is_not_used_are_told(accel, script):
    finished = accel("launch", "--zero_stage", "2", "--gradient_accumulation_steps", "2", script(""))
    assert finished.stderr == (
        "accel launch: deepspeed_config.zero_stage=2 (--zero_stage) has no effect without --use_deepspeed.\n"
    )


def test_a_broken_backend_is_told_and_takes_nothing_from_the_others(accel, script, tmp_path):
    metadata = tmp_path / "site" / "ruin-1.0.dist-info"
    metadata.mkdir(parents=True)
    (metadata / "entry_points.txt").write_text("[accel.backends]\nruin = no_such_module:MANIFEST\n")
    finished = accel("launch", script("print('ran')"), env={"PYTHONPATH": str(tmp_path / "site")})
    assert finished.stdout == "ran\n"
    assert "the backend 'ruin' (ruin 1.0) is broken: ModuleNotFoundError" in finished.stderr


BACKEND = """
from dataclasses import dataclass
from accel_plugins.manifest import Manifest
from accel_state.labels import DistributedType
from accel_state.settings.schema import INTEGER, setting

@dataclass
class Config:
    stage: int = setting(
        2, kind=INTEGER, flag="--rockets", variable="ROCKET_STAGE", key="rocket_config.stage", group="Rockets"
    )

MANIFEST = Manifest("rocket", "rocket:Strategy", "rocket:Config", DistributedType.MEGATRON_LM)
"""


@pytest.fixture
def rocket(script):
    script("[accel.backends]\nrocket = rocket:MANIFEST\n", "site/rocket-1.0.dist-info/entry_points.txt")
    return {"PYTHONPATH": str(script(BACKEND, "site/rocket.py").parent)}


def test_settings_of_a_strangers_backend_are_flags_and_keys_and_reach_the_process(accel, script, tmp_path, rocket):
    body = script("import os; print(os.environ.get('ROCKET_STAGE'), os.environ.get('ACCEL_BACKEND'))")
    assert "Rockets:\n  --rockets N" in accel("launch", "--help", env=rocket).stdout
    assert accel("launch", "--rockets", "3", body, env=rocket).stdout == "3 None\n"
    (tmp_path / "run.yaml").write_text("distributed_type: MEGATRON_LM\nrocket_config:\n  stage: 4\n")
    # Two backends train in this way now, so that the processes choose.
    assert accel("launch", "--config_file", "run.yaml", body, env=rocket).stdout == "4 None\n"


def test_a_kind_of_run_names_the_backend_that_offers_it(accel, script, tmp_path):
    (tmp_path / "run.yaml").write_text("distributed_type: MEGATRON_LM\n")
    body = script("import os; print(os.environ.get('ACCEL_BACKEND'))")
    assert accel("launch", "--config_file", "run.yaml", body).stdout == "megatron\n"
