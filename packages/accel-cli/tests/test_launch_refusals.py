"""Bad input to `accel launch`: three parts, exit code 2, no traceback, nothing started."""

from __future__ import annotations

import json

import pytest

# The doctor imports torch in a process of its own.
pytestmark = pytest.mark.usefixtures("preloaded_python")


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
        (["missing.py"], "Cannot start the script missing.py."),
        (["train"], "add -m to run a module"),
        (["folder"], "It is a folder without the file __main__.py."),
        (["--num_processes", "0", "job.py"], "an integer of at least 1"),
        (["--num_processes", "many", "job.py"], "Cannot use num_processes='many' (--num_processes)."),
        (["--num-processes", "", "job.py"], "num_processes=''"),
        (["--num_processes", "80000000", "job.py"], "A machine starts at most 4096 processes."),
        (["--num_processes"], "expected one argument"),
        (["--main_process_port", "65536", "job.py"], "a port from 0"),
        (["--no_such_option", "job.py"], "--no_such_option"),
        (["--cpu=1", "job.py"], "ignored explicit argument"),
        ([], "The script is missing."),
        ([""], "The script is missing."),
        (["--backend", "dpp", "job.py"], "Did you mean 'ddp'?"),
        (
            ["--machine_rank", "2", "--num_machines", "2", "--main_process_ip", "h", "job.py"],
            "the rank must be from 0 to 1",
        ),
        (["--num_machines", "2", "job.py"], "Set --main_process_ip"),
        (["--launcher", "local", "--max_restarts", "2", "job.py"], "max_restarts=2 (--max_restarts)"),
        (["-m", "no_such_module.train"], "There is no module 'no_such_module'."),
        (["-m", "job.py"], "Remove -m, or write job."),
        (["-m", "./job.py"], "This is not a module name."),
        (["--no_python", "no-such-program"], "no such executable file"),
        (["--no_python", "-m", "x"], "--module and --no_python"),
        (["--config_file", "none.yaml", "job.py"], "There is no such file."),
        (["--config_file", "broken.yaml", "job.py"], "broken.yaml:2, column 2: it is not valid YAML"),
        (["--config_file", "unknown.yaml", "job.py"], "Did you mean 'mixed_precision'?"),
        (["--config_file", "wrong.yaml", "job.py"], "wrong.yaml:1"),
    ],
)
def test_launch_refuses_bad_arguments_and_files(accel, script, tmp_path, arguments, said):
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
    assert finished.stderr == (
        "accel launch: 2 processes, device cpu, backend automatic, precision bf16.\n"
        f"accel launch: the settings of {folder / 'default_config.yaml'} are used.\n"
    )
    assert accel("launch", "-q", script(body)).stderr == ""


def test_a_variable_that_overrides_the_file_is_told(accel, script, tmp_path):
    (tmp_path / "run.yaml").write_text("mixed_precision: fp16\n")
    body = "import os; print(os.environ['ACCELERATE_MIXED_PRECISION'])"
    both = {"ACCELERATE_MIXED_PRECISION": "bf16"}
    finished = accel("launch", "--config_file", "run.yaml", script(body), env=both)
    assert finished.stdout == "bf16\n"
    assert finished.stderr.partition("\n")[2] == (
        "accel launch: $ACCELERATE_MIXED_PRECISION=bf16 overrides mixed_precision=fp16 (run.yaml:1).\n"
    )
    flag = accel("launch", "--config_file", "run.yaml", "--mixed_precision", "no", script(body), env=both)
    assert (flag.stdout, "overrides" in flag.stderr) == ("no\n", False)


def test_launch_warns_about_settings_without_effect(accel, script, tmp_path):
    (tmp_path / "run.yaml").write_text("num_processes: 1\nfp8_config:\n  backend: TE\n")
    finished = accel("launch", "--config_file", "run.yaml", script(""))
    assert finished.returncode == 0
    assert "fp8_config.fp8_backend=te (run.yaml:3) has no effect" in finished.stderr
    finished = accel("launch", "--config_file", "run.yaml", "--mixed_precision", "fp8", script(""))
    assert "no effect" not in finished.stderr


def test_options_of_an_engine_that_is_not_used_are_told(accel, script):
    finished = accel("launch", "--zero_stage", "2", "--gradient_accumulation_steps", "2", script(""))
    assert finished.stderr.partition("\n")[2] == (
        "accel launch: deepspeed_config.zero_stage=2 (--zero_stage) has no effect without --use_deepspeed.\n"
    )


@pytest.mark.parametrize(
    ("options", "reported"),
    [
        ((), True),
        (("--use_fsdp",), False),
        (("--backend", "fsdp2"), False),
        (("--num_processes", "2", "--parallelism_config_dp_shard_size", "2"), False),
    ],
)
def test_fsdp_options_without_fsdp_are_reported(accel, script, options, reported):
    finished = accel("launch", "--cpu", *options, "--fsdp_version", "2", script(""))
    assert finished.returncode == 0
    sentence = "fsdp_config.fsdp_version=2 (--fsdp_version) has no effect without --use_fsdp."
    assert (sentence in finished.stderr) == reported


def test_a_broken_backend_is_told_and_takes_nothing_from_the_others(accel, script, tmp_path):
    metadata = tmp_path / "site" / "ruin-1.0.dist-info"
    metadata.mkdir(parents=True)
    (metadata / "entry_points.txt").write_text("[accel.backends]\nruin = no_such_module:MANIFEST\n")
    finished = accel("launch", script("print('ran')"), env={"PYTHONPATH": str(tmp_path / "site")})
    assert finished.stdout == "ran\n"
    assert "The backend 'ruin' is ignored. no_such_module:MANIFEST of ruin 1.0 could not be" in finished.stderr


BACKEND = """
from dataclasses import dataclass
from accel_plugins.manifest import Manifest
from accel_state.labels import DistributedType
from accel_state.settings.schema import INTEGER, setting

@dataclass
class Config:
    stage: int = setting(
        2, type=INTEGER, flag="--rockets", variable="ROCKET_STAGE", key="rocket_config.stage", group="Rockets"
    )

MANIFEST = Manifest("rocket", "rocket:Strategy", "rocket:Config", DistributedType.FSDP)
"""


@pytest.fixture
def rocket(script):
    script("[accel.backends]\nrocket = rocket:MANIFEST\n", "site/rocket-1.0.dist-info/entry_points.txt")
    return {"PYTHONPATH": str(script(BACKEND, "site/rocket.py").parent)}


def test_settings_of_a_strangers_backend_are_flags_and_keys_and_reach_the_process(accel, script, tmp_path, rocket):
    body = script("import os; print(os.environ.get('ROCKET_STAGE'), os.environ.get('ACCEL_BACKEND'))")
    assert "Rockets:\n  --rockets N" in accel("launch", "--help-all", env=rocket).stdout
    assert accel("launch", "--rockets", "3", body, env=rocket).stdout == "3 None\n"
    (tmp_path / "run.yaml").write_text("distributed_type: FSDP\nrocket_config:\n  stage: 4\n")
    # Several backends train in this way now, so that the processes choose.
    assert accel("launch", "--config_file", "run.yaml", body, env=rocket).stdout == "4 None\n"


REQUIRING = """
from accel_plugins.manifest import Manifest
from accel_state.labels import DistributedType
from accel_state.settings.installed import Requirement
MANIFEST = Manifest(
    "comet",
    "comet:Strategy",
    label=DistributedType.XLA,
    requires=(Requirement("no_such_engine", install="comet[engine]"),),
)
"""


@pytest.fixture
def comet(script):
    script("[accel.backends]\ncomet = comet:MANIFEST\n", "site/comet-1.0.dist-info/entry_points.txt")
    return {"PYTHONPATH": str(script(REQUIRING, "site/comet.py").parent)}


@pytest.mark.parametrize("count", [1, 2])
def test_a_backend_whose_requirement_is_missing_is_refused_before_any_process_starts(accel, script, comet, count):
    body = script("open(__file__ + '.started', 'x')")
    finished = accel("launch", "--cpu", "--num_processes", count, "--backend", "comet", body, env=comet)
    assert (finished.returncode, body.with_suffix(".py.started").exists()) == (2, False)
    assert finished.stderr.splitlines() == [
        "accel: Cannot start the backend 'comet' (--backend).",
        "  The package 'no_such_engine' is not installed.",
        '  Run: pip install "comet[engine]"',
    ]


def test_the_line_of_the_file_that_chose_a_backend_is_named(accel, script, tmp_path, comet):
    (tmp_path / "run.yaml").write_text("mixed_precision: 'no'\nbackend: comet\n")
    finished = accel("launch", "--config_file", "run.yaml", script("print('ran')"), env=comet)
    assert (finished.returncode, finished.stdout) == (2, "")
    assert "Cannot start the backend 'comet' (run.yaml:2)." in finished.stderr


def test_a_program_of_another_installation_may_have_what_this_one_lacks(accel, comet):
    assert accel("launch", "--backend", "comet", "--no_python", "true", env=comet).returncode == 0


def test_a_chosen_backend_that_cannot_be_loaded_is_refused(accel, script):
    script("[accel.backends]\nruin = ruin:MANIFEST\n", "site/ruin-1.0.dist-info/entry_points.txt")
    env = {"PYTHONPATH": str(script("import no_such_module_anywhere", "site/ruin.py").parent)}
    finished = accel("launch", "--backend", "ruin", script("print('ran')"), env=env)
    assert (finished.returncode, finished.stdout) == (2, "")
    assert "Cannot start the backend 'ruin' (--backend)." in finished.stderr
    assert "no_such_module_anywhere" in finished.stderr


@pytest.mark.parametrize("module", ["whole", "whole.job", "whole.moved"])
def test_launch_runs_packages_and_modules_by_name(accel, script, module):
    script("import os; __path__.append(os.path.join(os.path.dirname(__file__), 'more'))", "whole/__init__.py")
    for name in ("whole/__main__.py", "whole/job.py", "whole/more/moved.py"):
        script("print('ran')", name)
    assert accel("launch", "-m", module).stdout == "ran\n"


@pytest.mark.parametrize("named", ["script.py", "--num_processes 2 script.py"])
def test_a_script_that_does_not_exist_is_found_by_the_doctor(accel, named):
    finished = accel("doctor", "--json", "--", *named.split())
    (found,) = [finding for finding in json.loads(finished.stdout) if finding["subject"] == "script"]
    assert (finished.returncode, found["verdict"]) == (1, "error")
    assert "There is no such file" in found["message"]


def test_a_requirement_that_is_missing_is_found_by_the_doctor(accel, script, comet):
    finished = accel("doctor", "--json", "--", "--backend", "comet", script(""), env=comet)
    findings = {finding["subject"]: finding for finding in json.loads(finished.stdout)}
    assert (finished.returncode, findings["script"]["verdict"]) == (1, "ok")
    assert "(--backend). The package 'no_such_engine' is not installed." in findings["backend"]["message"]


ORIGINS_READ = """
from accel_state.settings.environ import resolve
from accel_state.settings.run import ProcessSettings, RunSettings
import os
os.environ["ACCELERATE_GRADIENT_ACCUMULATION_STEPS"] = "3"
given = {**resolve(RunSettings, {}), **resolve(ProcessSettings, {})}
print(*(given[name].origin for name in ("mixed_precision", "cpu", "backend", "gradient_accumulation_steps")))
"""


def test_processes_know_which_flag_a_variable_was_derived_from(accel, script, tmp_path):
    (tmp_path / "run.yaml").write_text("use_cpu: true\n")
    words = ("--config_file", "run.yaml", "--mixed_precision", "bf16", "--gradient_accumulation_steps", "2")
    finished = accel("launch", *words, script(ORIGINS_READ), env={"ACCEL_BACKEND": "ddp"})
    assert finished.stdout == "--mixed_precision run.yaml:1 $ACCEL_BACKEND $ACCELERATE_GRADIENT_ACCUMULATION_STEPS\n"


def test_sizes_of_axes_that_the_processes_do_not_fit_are_refused_with_their_flags(accel, script):
    words = ("--cpu", "--num_processes", "2", "--parallelism_config_tp_size", "3")
    finished = accel("launch", *words, script("print('ran')"))
    assert (finished.returncode, finished.stdout) == (2, "")
    assert "tp_size=3 (--parallelism_config_tp_size) and num_processes=2 (--num_processes)" in finished.stderr
