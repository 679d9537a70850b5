"""Command lines of DeepSpeed's launcher, mpirun, torch_xla, and the description of a job of SageMaker, as data."""

from __future__ import annotations

import os
import sys
import types
from dataclasses import replace

import pytest

from accel_cli.config.file import ConfigFile
from accel_cli.config.resolved import label
from accel_cli.launch import tpu_runner
from accel_cli.launch.interface import RUNNER, Script
from accel_cli.launch.launchers import launch_classes
from accel_cli.launch.local import environment_lines
from accel_cli.launch.mpi import Host, Mpi, find_mpi, read_hostfile
from accel_cli.launch.sagemaker import hyperparameters
from accel_cli.launch.tpu import RUNNER_OF_TPU
from accel_state.errors import Conflict, NotFound, NotOffered, SettingError
from accel_state.network import SECRET_VARIABLE
from accel_state.settings.schema import settings_of
from accel_testing.launchers import make_plan, make_request

KNOWN = {label(known): known for cls in launch_classes() for known in settings_of(cls).values()}
JOB = Script("script", "job.py", ("--lr", "1"))
PROGRAM = (RUNNER, "script", "job.py", "--lr", "1")


def plan(script=JOB, mpi="Open MPI", **flags):
    flags = {
        next(name for name in KNOWN if name in (short, f"{_table(short)}.{short}")): v for short, v in flags.items()
    }
    request = make_request(flags, script)
    return Mpi(lambda: mpi).plan(request) if "mpirun_config.mpirun_hostfile" in flags else make_plan(request)


def _table(name):
    return name.split("_")[0] + "_config"


@pytest.fixture
def hosts(tmp_path):
    path = tmp_path / "hosts"
    path.write_text("# two\nnode1 slots=4\nnode2 slots=4  # the other\n")
    return str(path)


def test_deepspeed_over_pdsh(hosts):
    made = plan(use_deepspeed=True, num_machines=2, num_processes=8, deepspeed_hostfile=hosts, main_process_ip="node1")
    assert made.argv == (
        "deepspeed",
        "--no_local_rank",
        f"--hostfile={hosts}",
        "--launcher=pdsh",
        "--num_nodes=2",
        "--num_gpus=4",
        "--master_addr=node1",
        "--master_port=29500",
        *PROGRAM,
    )
    assert (made.launcher, made.environment_file, made.processes) == ("deepspeed", "DS_ENV_FILE", 1)
    assert made.environment["ACCELERATE_USE_DEEPSPEED"] == "true"


@pytest.mark.parametrize(
    ("filters", "words"),
    [
        ({"deepspeed_inclusion_filter": "node1:0"}, ("--include=node1:0",)),
        ({"deepspeed_exclusion_filter": "node2"}, ("--exclude=node2",)),
    ],
)
def test_deepspeed_with_a_choice_of_machines(hosts, filters, words):
    made = plan(
        use_deepspeed=True,
        num_machines=2,
        deepspeed_hostfile=hosts,
        deepspeed_multinode_launcher="slurm",
        main_process_port=1234,
        **filters,
    )
    assert made.argv[2:6] == (f"--hostfile={hosts}", "--launcher=slurm", *words, "--master_port=1234")


def test_deepspeed_on_one_machine_and_machine_by_machine_is_started_as_anything_else():
    assert plan(use_deepspeed=True, num_processes=2).launcher == "local"
    by_machine = {"num_machines": 2, "main_process_ip": "h", "deepspeed_multinode_launcher": "standard"}
    assert plan(use_deepspeed=True, num_processes=2, **by_machine).launcher == "torchrun"


def test_what_deepspeeds_launcher_is_refused(hosts):
    with pytest.raises(SettingError, match="deepspeed_hostfile"):
        plan(use_deepspeed=True, num_machines=2, deepspeed_multinode_launcher="pdsh")
    with pytest.raises(Conflict, match="lists 2 machine"):
        plan(use_deepspeed=True, num_machines=3, deepspeed_hostfile=hosts)
    both = {"deepspeed_inclusion_filter": "a", "deepspeed_exclusion_filter": "b"}
    with pytest.raises(Conflict, match="inclusion"):
        plan(use_deepspeed=True, num_machines=2, deepspeed_hostfile=hosts, **both)


def test_variables_for_other_machines_leave_out_what_a_shell_would_take_apart():
    lines = environment_lines({"B": "2", "A": "1", "C": "a b", "D": "x;y", "E": "l\nm", "F": "a<b", "G": ""})
    assert list(lines) == [f"A=1{os.linesep}", f"B=2{os.linesep}"]


def test_command_line_of_open_mpi(hosts):
    made = plan(mpirun_hostfile=hosts, num_processes=4, cpu=True)
    assert made.argv[:8] == ("mpirun", "--hostfile", hosts, "--map-by", "ppr:2:node", "-n", "4", "-x")
    assert made.argv[-6:] == ("python", *PROGRAM)
    words = [word for before, word in zip(made.argv, made.argv[1:], strict=False) if before == "-x"]
    exported = dict(word.split("=", 1) for word in words if "=" in word)
    assert (exported["MASTER_ADDR"], exported["MASTER_PORT"], exported["OMP_NUM_THREADS"]) == ("node1", "29500", "4")
    assert exported["ACCELERATE_USE_CPU"] == "true"


@pytest.mark.parametrize("mpi", ["Open MPI", "Hydra"])
def test_the_secret_of_a_run_with_mpi_is_passed_in_the_environment(hosts, mpi):
    first, second = (plan(mpirun_hostfile=hosts, num_processes=4, mpi=mpi) for _ in range(2))
    secret = first.inherited[SECRET_VARIABLE]
    assert secret != second.inherited[SECRET_VARIABLE]
    assert not any(secret in word for word in first.argv)
    assert (first.argv[first.argv.index(SECRET_VARIABLE) - 1] == "-x") if mpi == "Open MPI" else True


def test_command_line_of_hydra_mpi(hosts):
    made = plan(mpirun_hostfile=hosts, num_processes=4, mpi="Hydra", main_process_ip="10.0.0.1")
    assert made.argv[:7] == ("mpirun", "-f", hosts, "-ppn", "2", "-n", "4")
    place = made.argv.index("MASTER_ADDR")
    assert made.argv[place - 1 : place + 2] == ("-genv", "MASTER_ADDR", "10.0.0.1")


def test_as_many_processes_as_the_hostfile_says(hosts):
    assert plan(mpirun_hostfile=hosts).argv[4:7] == ("ppr:4:node", "-n", "8")
    with pytest.raises(Conflict, match="lists 2 machine"):
        plan(mpirun_hostfile=hosts, num_machines=3)


def test_find_mpi_without_mpirun(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(NotFound, match="`mpirun` is not on the path"):
        find_mpi()


@pytest.mark.parametrize(
    ("said", "family"), [("mpirun (Open MPI) 5.0.1", "Open MPI"), ("HYDRA build details:", "Hydra")]
)
def test_family_of_an_installed_mpi(monkeypatch, tmp_path, said, family):
    program = tmp_path / "mpirun"
    program.write_text(f"#!/bin/sh\necho '{said}'\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    assert find_mpi() == family


def test_mpirun_is_started_and_its_exit_code_kept(accel, script, hosts, tmp_path):
    program = tmp_path / "bin" / "mpirun"
    program.parent.mkdir()
    program.write_text(
        f"#!{sys.executable}\nimport os, sys\nwords = sys.argv[1:]\n"
        "if words == ['--version']:\n    print('mpirun (Open MPI) 5'); sys.exit()\n"
        "start = words.index(sys.executable)\nos.execv(words[start], words[start:])\n"
    )
    program.chmod(0o755)
    job = script("import os, sys; print(os.environ['ACCELERATE_USE_CPU'], sys.argv[1:]); sys.exit(3)")
    env = {"PATH": f"{program.parent}{os.pathsep}{os.environ['PATH']}"}
    done = accel("launch", "--cpu", "--mpirun_hostfile", hosts, "--num_processes", "2", job, "--lr", "1", env=env)
    assert (done.stdout, done.returncode) == ("true ['--lr', '1']\n", 3), done.stderr


@pytest.mark.parametrize(
    ("text", "expected"),
    [("a", [Host("a")]), ("a slots=2\n\nb max_slots=1\n", [Host("a", 2), Host("b", 1)]), ("h1:4\n", [Host("h1", 4)])],
)
def test_read_hostfile(tmp_path, text, expected):
    path = tmp_path / "hosts"
    path.write_text(text)
    assert list(read_hostfile(str(path), "--x")) == expected


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "lists no machine"),
        ("a\nb c d\n", "hosts:2 is not a machine"),
        ("a\na\n", "hosts:2 lists a a second time"),
        ("a slots=x", ":1"),
    ],
)
def test_hostfiles_that_are_none(tmp_path, text, said):
    path = tmp_path / "hosts"
    path.write_text(text)
    with pytest.raises(SettingError) as caught:
        read_hostfile(str(path), "--deepspeed_hostfile")
    assert said in caught.value.obstacle
    assert "--deepspeed_hostfile" in caught.value.failure


def test_read_hostfile_of_a_missing_file(tmp_path):
    with pytest.raises(SettingError, match="cannot be read"):
        read_hostfile(str(tmp_path / "no"), "--x")


def test_command_line_for_the_cores_of_a_tpu():
    made = plan(tpu=True, mixed_precision="bf16", main_training_function="train")
    assert made.argv == ("python", RUNNER_OF_TPU, "train", "script", "job.py", "--lr", "1")
    assert made.environment["XLA_USE_BF16"] == "1"
    assert plan(tpu=True, mixed_precision="bf16", downcast_bf16=True).environment["XLA_DOWNCAST_BF16"] == "1"
    assert "XLA_USE_BF16" not in plan(tpu=True).environment
    with pytest.raises(NotOffered, match="--no_python"):
        plan(tpu=True, script=Script("program", "./train"))


def test_command_line_for_a_tpu_pod():
    pod = {"tpu": True, "tpu_use_cluster": True, "tpu_name": "my-tpu"}
    made = plan(**pod, tpu_vm=("a", "b"), tpu_env=("X=1",), tpu_use_sudo=True, script=Script("module", "pkg", ("-v",)))
    words = "--tpu=my-tpu --vm=a --vm=b --env=X=1 --env=ACCELERATE_IN_TPU_POD=1 -- sudo python3 -m accel_cli.main"
    assert made.argv[:3] == ("python", "-m", "torch_xla.distributed.xla_dist")
    assert made.argv[3 : 4 + len(words.split())] == (*words.split(), "launch")
    assert made.argv[-3:] == ("--module", "pkg", "-v")
    with pytest.raises(SettingError, match="name of the TPU is missing"):
        plan(tpu=True, tpu_use_cluster=True)
    with pytest.raises(SettingError, match="no value"):
        plan(**pod, tpu_env=("X",))


def test_each_core_calls_the_function_of_the_script(monkeypatch, tmp_path, capsys):
    (tmp_path / "on_a_tpu.py").write_text("import sys\ndef train():\n    print(sys.argv)\n")
    started = types.SimpleNamespace(
        launch=lambda function, args, start_method: [function(index, *args) for index in range(2)]
    )
    monkeypatch.setitem(sys.modules, "torch_xla", started)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setattr(sys, "argv", ["runner", "train", "script", str(tmp_path / "on_a_tpu.py"), "--lr", "1"])
    tpu_runner.main()
    assert capsys.readouterr().out.count("'--lr', '1'") == 2


def test_describe_job_for_sagemaker(tmp_path):
    (tmp_path / "inputs").write_text("channel\tplace\ntrain\ts3://data\n")
    (tmp_path / "metrics").write_text("name\tregex\nloss\tloss=(.*)\n")
    values = {
        "compute_environment": "AMAZON_SAGEMAKER",
        "distributed_type": "DATA_PARALLEL",
        "ec2_instance_type": "ml.p3.16xlarge",
        "iam_role_name": "role",
        "num_machines": 2,
        "profile": "me",
        "sagemaker_inputs_file": str(tmp_path / "inputs"),
        "sagemaker_metrics_file": str(tmp_path / "metrics"),
        "mixed_precision": "bf16",
    }
    script = Script("script", "src/train.py", ("--lr", "1e-3", "--epochs=2", "--shuffle", "true"))
    config = ConfigFile("run.yaml", {}, additional={"volume_size": "30"})
    made = make_plan(replace(make_request(values, script), config=config))
    described = made.details
    job = described.estimator
    assert (job["entry_point"], job["source_dir"], job["instance_count"]) == ("train.py", "src", 2)
    assert job["hyperparameters"] == {"lr": 1e-3, "epochs": 2, "shuffle": True}
    assert job["distribution"] == {"smdistributed": {"dataparallel": {"enabled": True}}}
    assert job["environment"] == {
        "ACCELERATE_MIXED_PRECISION": "bf16",
        "ACCELERATE_USE_SAGEMAKER": "true",
        "ACCELERATE_SAGEMAKER_DISTRIBUTED_TYPE": "DATA_PARALLEL",
    }
    assert (job["volume_size"], job["metric_definitions"]) == ("30", [{"Name": "loss", "Regex": "loss=(.*)"}])
    assert described.inputs == {"train": "s3://data"}
    assert made.environment == {"AWS_PROFILE": "me", "AWS_DEFAULT_REGION": "us-east-1"}


@pytest.mark.parametrize("arguments", [["lr"], ["--lr"], ["--fast", "--lr", "1"]])
def test_arguments_that_sagemaker_cannot_hand_over(arguments):
    with pytest.raises(SettingError, match="Write --name value"):
        hyperparameters(arguments)


def test_a_job_of_sagemaker_that_lacks_something(accel, script, tmp_path):
    config = tmp_path / "job.yaml"
    config.write_text("compute_environment: AMAZON_SAGEMAKER\ndistributed_type: 'NO'\niam_role_name: r\n")
    done = accel("launch", "--config_file", config, script(""))
    assert (done.returncode, "ec2_instance_type is missing" in done.stderr) == (2, True), done.stderr
    config.write_text(config.read_text() + "ec2_instance_type: ml.p3.2xlarge\n")
    done = accel("launch", "--config_file", config, script(""))
    assert (done.returncode, "pip install" in done.stderr) == (2, True), done.stderr
    config.write_text(config.read_text().replace("'NO'", "MODEL_PARALLEL"))
    done = accel("launch", "--config_file", config, script(""))
    assert (done.returncode, "MODEL_PARALLEL" in done.stderr) == (2, True), done.stderr


# The names of the parameters are those of the SDK 2.
ESTIMATOR = """
import json

class HuggingFace:
    def __init__(
        self, py_version, entry_point, transformers_version=None, tensorflow_version=None, pytorch_version=None,
        source_dir=None, hyperparameters=None, image_uri=None, distribution=None, compiler_config=None, **kwargs
    ):
        print(entry_point, json.dumps(hyperparameters), kwargs["instance_type"])

    def fit(self, inputs=None, wait=True, logs="All", job_name=None, experiment_config=None):
        if inputs is not None:
            raise RuntimeError("Error for Training job accel-1: Failed. Reason: AlgorithmError")
        print("submitted")
"""


@pytest.mark.parametrize("fails", [False, True])
def test_a_job_is_submitted_to_sagemaker_and_its_failure_is_a_typed_error(accel, script, tmp_path, fails):
    site = tmp_path / "site"
    (site / "sagemaker-2.250.0.dist-info").mkdir(parents=True)
    (site / "sagemaker-2.250.0.dist-info" / "METADATA").write_text("Name: sagemaker\nVersion: 2.250.0\n")
    (site / "sagemaker").mkdir()
    (site / "sagemaker" / "__init__.py").write_text("")
    (site / "sagemaker" / "huggingface.py").write_text(ESTIMATOR)
    config = tmp_path / "job.yaml"
    text = "compute_environment: AMAZON_SAGEMAKER\ndistributed_type: 'NO'\niam_role_name: r\nec2_instance_type: ml.p3\n"
    if fails:
        (tmp_path / "inputs").write_text("channel\tplace\ntrain\ts3://data\n")
        text += f"sagemaker_inputs_file: {tmp_path / 'inputs'}\n"
    config.write_text(text)
    done = accel("launch", "--config_file", config, script(""), "--lr", "1", env={"PYTHONPATH": str(site)})
    assert '{"lr": 1} ml.p3' in done.stdout, done.stderr
    assert (done.returncode, "submitted" in done.stdout) == ((2, False) if fails else (0, True)), done.stderr
    assert ("The training job of SageMaker failed." in done.stderr) == fails
    assert "Traceback" not in done.stderr
