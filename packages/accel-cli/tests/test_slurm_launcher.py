"""What the launcher of Slurm plans: job, step and processes of a node, as data; and its refusals without Slurm."""

from __future__ import annotations

import os
import signal

import pytest

from accel_cli.launch import slurm
from accel_cli.launch.launchers import SLURM
from accel_cli.launch.options import add_launch_arguments
from accel_cli.launch.request import read_request, request_of
from accel_cli.launch.torchrun import AGENT
from accel_cli.parser import Parser
from accel_state.errors import Conflict
from accel_testing.launchers import prepare_launch

BATCH = {"SLURM_JOB_ID": "12", "SLURM_JOB_NUM_NODES": "2", "ENVIRONMENT": "BATCH"}
STEP = {
    **BATCH,
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NUM_NODES": "2",
    "SLURM_STEP_TASKS_PER_NODE": "1(x2)",
    "SLURM_STEP_NODELIST": "gpu[07-08]",
    "SLURM_PROCID": "1",
    "SLURM_NODEID": "1",
}


@pytest.fixture
def plan(tmp_path, monkeypatch):
    (tmp_path / "job.py").write_text("")
    monkeypatch.chdir(tmp_path)

    def make(*words, environ=None, arguments=()):
        return prepare_launch([*words, "job.py", *arguments], {"HF_HOME": str(tmp_path), **(environ or {})})[1]

    return make


def test_a_job_is_a_script_that_runs_the_launch_again(plan):
    made = plan(
        *("--launcher=slurm", "--nnodes=2", "--num_processes=8", "--slurm_option=--time=1:30:00"),
        *("--slurm_option=--gpus-per-node=4", "--slurm_option=--constraint=a b", "--mixed_precision=bf16", "--wait"),
        arguments=("--name", "it's"),
    )
    assert made.argv == ("sbatch", "--parsable")
    assert made.details.wait
    lines = made.details.script.splitlines()
    assert lines[0] == "#!/bin/bash"
    assert {line.removeprefix("#SBATCH ") for line in lines[1:-1]} == {
        "--job-name=job.py",
        "--nodes=2",
        "--ntasks-per-node=1",
        "--time=1:30:00",
        "--gpus-per-node=4",
        "--output=slurm-%j.out",
        "--open-mode=append",
        "--signal=B:USR1@120",
        "--requeue",
        "'--constraint=a b'",
    }
    command = lines[-1]
    assert command.startswith("exec ")
    assert "-m accel_cli.main launch --launcher=slurm" in command
    assert "--num_machines=2 --num_processes=8" in command or "--num_processes=8 --num_machines=2" in command
    assert "--mixed_precision=bf16" in command
    assert "--wait" not in command
    assert command.endswith("""job.py --name 'it'"'"'s'""")


def test_a_job_without_a_signal_and_without_requeueing(plan):
    script = plan("--launcher=slurm", "--slurm_signal=0", "--slurm_requeue=false").details.script
    assert "#SBATCH --signal" not in script
    assert "#SBATCH --no-requeue" in script


def test_a_step_has_a_launcher_on_each_node_of_the_allocation(plan):
    made = plan("--cpu", "--num_processes=4", "--prefix_output", "--max_restarts=2", environ=BATCH)
    assert made.launcher == "slurm"
    assert made.argv[0] == "srun"
    options = made.argv[1 : made.argv.index("-m") - 1]
    assert {"--nodes=2", "--ntasks=2", "--ntasks-per-node=1", "--kill-on-bad-exit=1", "--label"} <= set(options)
    assert made.argv[made.argv.index("-m") :] == (
        *("-m", "accel_cli.main", "launch", "--launcher=slurm", "--cpu", "--num_processes=4", "job.py"),
    )
    assert (made.details.job, made.details.requeue, made.details.restarts) == ("12", True, 2)
    assert made.world_size == 4


def test_the_task_of_a_node_starts_its_processes_through_torchrun(plan):
    made = plan("--launcher=slurm", "--cpu", "--num_processes=4", environ=STEP)
    assert made.argv[1] == AGENT
    assert {"--nnodes=2", "--nproc-per-node=2", "--node-rank=1", "--master-addr=gpu07"} <= set(made.argv)


def test_the_only_node_of_a_step_starts_its_processes_itself(plan):
    alone = {**STEP, "SLURM_STEP_NUM_NODES": "1", "SLURM_STEP_TASKS_PER_NODE": "1", "SLURM_NODEID": "0"}
    made = plan("--launcher=slurm", "--cpu", "--num_processes=2", environ=alone)
    assert (made.launcher, made.processes) == ("local", 2)


def test_the_tasks_of_a_step_get_a_secret_in_their_environment(accel, script, tmp_path):
    # srun passes its environment on.
    srun = tmp_path / "srun"
    srun.write_text('#!/bin/sh\necho "$ACCEL_RUN_SECRET"\ncase "$*" in *"$ACCEL_RUN_SECRET"*) exit 1;; esac\n')
    srun.chmod(0o755)
    environ = {**BATCH, "PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}"}
    words = ("launch", "--cpu", "--num_processes=2", script("pass"))
    secrets = {accel(*words, env=environ).stdout for _ in range(2)}
    assert [len(secret) for secret in secrets] == [65, 65]
    assert accel(*words, env={**environ, "ACCEL_RUN_SECRET": "of the user"}).stdout == "of the user\n"


def test_an_allocation_that_is_too_small_is_refused(plan):
    with pytest.raises(Conflict, match="num_machines=3"):
        plan("--launcher=slurm", "--nnodes=3", environ=BATCH)
    with pytest.raises(Conflict, match="on 2 nodes"):
        plan("--num_processes=3", environ=BATCH)


def test_jobs_of_salloc_are_not_queued_again(plan):
    shell = {name: value for name, value in BATCH.items() if name != "ENVIRONMENT"}
    assert not plan("--cpu", environ=shell).details.requeue
    assert not plan("--cpu", "--slurm_requeue=false", environ=BATCH).details.requeue


@pytest.mark.parametrize(
    ("words", "environ", "chosen"),
    [
        ([], BATCH, "slurm"),
        ([], {**BATCH, "SLURM_JOB_NUM_NODES": "1"}, "local"),
        ([], {**STEP}, "torchrun"),
        (["--num_machines=2", "--machine_rank=1", "--main_process_ip=h"], BATCH, "torchrun"),
        (["--launcher=local"], BATCH, "local"),
        ([], {}, "local"),
    ],
)
def test_an_allocation_is_recognised_where_the_user_describes_no_machines(tmp_path, words, environ, chosen):
    request = request_of([*words, "job.py"], {"HF_HOME": str(tmp_path), **environ})
    assert request.launcher.name == chosen


def test_the_drop_in_does_in_an_allocation_what_the_original_does(tmp_path):
    parser = Parser("accel launch")
    add_launch_arguments(parser)
    parsed, environ = parser.parse_args(["job.py"]), {"HF_HOME": str(tmp_path), **BATCH}
    assert read_request(parsed, environ).launcher is SLURM
    assert read_request(parsed, environ, allocations=False).launcher.name == "local"


def test_slurm_that_is_absent_is_a_typed_error(accel, script, tmp_path):
    done = accel("launch", "--launcher", "slurm", script("pass"), env={"PATH": str(tmp_path)})
    assert done.returncode == 2
    assert "`sbatch` cannot be started" in done.stderr
    done = accel("launch", "--cpu", script("pass"), env={"PATH": str(tmp_path), **BATCH})
    assert done.returncode == 2
    assert "`srun` cannot be started" in done.stderr


def test_options_of_slurm_without_slurm_are_told_of(accel, script):
    done = accel("launch", "--slurm_signal", "10", script("pass"))
    assert (done.returncode, "slurm_signal=10 (--slurm_signal) has no effect" in done.stderr) == (0, True)


@pytest.mark.parametrize(
    ("said", "code"),
    [
        ("Exited with exit code 7", 7),
        ("Killed", 128 + signal.SIGKILL),
        ("Segmentation fault (core dumped)", 128 + signal.SIGSEGV),
        ("unknown", None),
    ],
)
def test_the_first_cause_is_read_from_what_srun_says(said, code):
    assert slurm._code_of(said) == code
