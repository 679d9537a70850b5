"""Launching from notebooks, preparing launches, config classes and commands, by their old names."""

from __future__ import annotations

import argparse
import os
import sys

import pytest
import yaml

from accel_testing.processes import run_command
from accelerate.commands import launch, to_fsdp2, tpu
from accelerate.commands.config import config_args
from accelerate.utils import launch as preparing
from accelerate.utils import write_basic_config


@pytest.fixture
def job(tmp_path, monkeypatch):
    for name in [name for name in os.environ if name.startswith(("ACCEL", "WORLD_SIZE", "RANK", "LOCAL_", "MASTER_"))]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))
    path = tmp_path / "job.py"
    path.write_text("")
    return str(path)


def parsed(*words):
    return launch.launch_command_parser().parse_args(list(words))


@pytest.mark.usefixtures("preloaded_python")
def test_a_notebook_launches_by_the_old_name(tmp_path):
    code = (
        "from pathlib import Path\n"
        "from accelerate import debug_launcher, notebook_launcher\n"
        "def work():\n"
        "    from accelerate import PartialState\n"
        "    state = PartialState()\n"
        "    Path(f'rank-{state.process_index}').write_text(str(state.num_processes))\n"
        "debug_launcher(work)\n"
        "notebook_launcher(Path('alone').write_text, ('1',), num_processes=1)\n"
    )
    done = run_command([sys.executable, "-c", code], timeout=250, env={"GLOO_SOCKET_IFNAME": "lo"}, cwd=tmp_path)
    written = {path.name: path.read_text() for path in tmp_path.iterdir()}
    assert written == {"rank-0": "2", "rank-1": "2", "alone": "1"}, done.stderr


def test_command_and_variables_of_one_process(job):
    command, environment = preparing.prepare_simple_launcher_cmd_env(
        parsed("--cpu", "--num_processes", "1", "--mixed_precision", "bf16", job, "--lr", "1")
    )
    assert command[0] == sys.executable
    assert command[-3:] == [job, "--lr", "1"]
    assert (environment["ACCELERATE_MIXED_PRECISION"], environment["ACCELERATE_USE_CPU"]) == ("bf16", "true")
    assert environment["PATH"] == os.environ["PATH"]


def test_variables_of_several_processes(job):
    words = ("--use_fsdp", "--fsdp_version", "2", "--num_processes", "2", "--cpu", job)
    environment = preparing.prepare_multi_gpu_env(parsed(*words))
    assert (environment["ACCELERATE_USE_FSDP"], environment["FSDP_VERSION"]) == ("true", "2")


def test_a_namespace_names_what_the_command_line_gave(job):
    arguments = parsed("--num-processes=2", "-m", "--tpu-use-sudo", "--env", "A=1", "--env", "B=2", "job", "--lr", "1")
    assert (arguments.num_processes, arguments.module, arguments.no_python) == (2, True, None)
    assert (arguments.training_script, arguments.training_script_args) == ("job", ["--lr", "1"])
    assert (arguments.tpu_use_sudo, arguments.env, arguments.vm) == (True, ["A=1", "B=2"], None)
    given = {"num_processes", "module", "tpu_use_sudo", "env", "training_script", "training_script_args"}
    assert arguments.nondefault == given


@pytest.mark.parametrize(
    "words", [["--frob", "job.py"], ["--num_processes", "two", "job.py"], ["--num_proc", "2", "x"], []]
)
def test_a_wrong_command_line_leaves_with_the_code_of_argparse(words):
    with pytest.raises(SystemExit) as left:
        parsed(*words)
    assert left.value.code == 2


def test_the_help_of_launch_shows_options_in_one_spelling():
    shown = launch.launch_command_parser().format_help()
    assert "--num_processes" in shown
    assert "--config-file" not in shown


def test_an_argument_changed_after_parsing_counts(job):
    arguments = parsed("--cpu", job)
    arguments.mixed_precision = "bf16"
    _, environment = preparing.prepare_simple_launcher_cmd_env(arguments)
    assert environment["ACCELERATE_MIXED_PRECISION"] == "bf16"


@pytest.mark.parametrize(
    ("words", "beginning"),
    [
        (("train.py", "--lr", "1"), [sys.executable, "train.py"]),
        (("-m", "train", "--lr", "1"), [sys.executable, "-m", "train"]),
        (("--no_python", "train", "--lr", "1"), ["train"]),
    ],
)
def test_a_prepared_command_runs_the_script_and_nothing_else(job, words, beginning):
    command, _ = preparing.prepare_simple_launcher_cmd_env(parsed("--cpu", *words))
    assert command == [*beginning, "--lr", "1"]


def test_a_module_that_is_no_python(job):
    with pytest.raises(ValueError, match="--module and --no_python"):
        preparing.prepare_simple_launcher_cmd_env(parsed("-m", "--no_python", "train"))


def test_a_prepared_command_of_mpirun(job, tmp_path, monkeypatch):
    program = tmp_path / "mpirun"
    program.write_text("#!/bin/sh\necho 'Intel(R) MPI Library'\n")
    program.chmod(0o755)
    words = ("--mpirun_hostfile", "/no/such/file", "--num_processes", "4", "--num_machines", "2", "--cpu")
    place = ("--main_process_ip", "10.0.0.1", "--main_process_port", "99")
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    command, environment = preparing.prepare_simple_launcher_cmd_env(parsed(*words, *place, job, "--lr"))
    assert command == ["mpirun", "-f", "/no/such/file", "-ppn", "2", "-n", "4", sys.executable, job, "--lr"]
    assert (environment["MASTER_ADDR"], environment["MASTER_PORT"]) == ("10.0.0.1", "99")
    monkeypatch.setenv("PATH", str(tmp_path / "empty"))
    with pytest.raises(OSError, match="`mpirun` is not on the path"):
        preparing.prepare_simple_launcher_cmd_env(parsed(*words, *place, job))


def test_arguments_of_torchrun_that_preparing_sets(job):
    several = parsed(
        "--num_processes", "4", "--num_machines", "2", "--main_process_ip", "10.0.0.1", "--machine_rank", "1", job
    )
    preparing.prepare_multi_gpu_env(several)
    assert (several.nproc_per_node, several.nnodes, several.node_rank) == ("2", "2", 1)
    assert several.rdzv_endpoint == "10.0.0.1:29500"
    # A namespace that no parser made, with a port to be chosen.
    alone = argparse.Namespace(
        num_processes=1, num_machines=1, main_process_port=0, multi_gpu=True, mixed_precision="no"
    )
    preparing.prepare_multi_gpu_env(alone)
    assert alone.nproc_per_node == "1"
    assert 0 < int(alone.master_port) < 65536


def test_a_validated_namespace_has_what_the_file_and_the_machine_say(job, tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text(
        "distributed_type: FSDP\nnum_processes: 4\ndebug: true\nuse_cpu: true\n"
        "fsdp_config:\n  fsdp_sync_module_states: false\n  fsdp_transformer_layer_cls_to_wrap: A,B\n"
    )
    before = parsed("--config_file", str(path), "--num_processes", "2", job)
    arguments, config, precise = launch._validate_launch_command(before)
    assert arguments is before
    assert (type(config), precise) == (config_args.ClusterConfig, False)
    assert (arguments.num_processes, arguments.debug, arguments.use_fsdp, arguments.use_cpu) == (2, True, True, True)
    assert (arguments.fsdp_sync_module_states, arguments.fsdp_transformer_layer_cls_to_wrap) == (False, "A,B")
    assert (arguments.mixed_precision, arguments.dynamo_backend, arguments.num_machines) == ("no", "no", 1)
    _, environment = preparing.prepare_simple_launcher_cmd_env(arguments)
    assert environment["FSDP_SYNC_MODULE_STATES"] == "false"


def test_validating_without_a_file(job):
    arguments, config, precise = launch._validate_launch_command(parsed("--cpu", "--mixed_precision", "bf16", job))
    assert (config, precise) == (None, False)
    assert (arguments.use_cpu, arguments.num_processes, arguments.mixed_precision) == (True, 1, "bf16")


@pytest.mark.parametrize(
    ("words", "kind"),
    [
        (("--tpu", "--use_fsdp"), ValueError),
        (("--multi_gpu", "--num_processes", "1"), ValueError),
        (("--multi_gpu", "--cpu"), ValueError),
        (("--config_file", "/no/such/file.yaml"), FileNotFoundError),
    ],
)
def test_what_cannot_be_launched_is_refused_by_validating(job, words, kind):
    with pytest.raises(kind):
        launch._validate_launch_command(parsed(*words, job))


@pytest.mark.parametrize("suffix", ["yaml", "json"])
def test_a_config_file_that_is_not_there(tmp_path, suffix):
    path = str(tmp_path / f"no.{suffix}")
    for read in (config_args.load_config_from_file, getattr(config_args.ClusterConfig, f"from_{suffix}_file")):
        with pytest.raises(FileNotFoundError, match="no such file"):
            read(path)


def test_a_config_of_words_that_yaml_takes_for_truth_values(tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text("distributed_type: NO\nmixed_precision: no\ndebug: false\ndebug: false\n")
    config = config_args.load_config_from_file(str(path))
    assert (config.distributed_type, config.mixed_precision) == ("NO", "no")
    assert (config.num_processes, config.enable_cpu_affinity) == (1, False)


def test_a_file_with_a_key_of_fsdp_that_says_nothing(job, tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text("distributed_type: FSDP\nfsdp_config:\n  fsdp_ignored_modules: null\n")
    arguments, _, _ = launch._validate_launch_command(parsed("--config_file", str(path), job))
    assert arguments.use_fsdp


def test_arguments_of_a_script_as_sagemaker_takes_them():
    words = ["--name", "bert", "--train", "False", "--epochs", "3", "--lr", "5e-5"]
    assert preparing._convert_nargs_to_dict(words) == {"name": "bert", "train": False, "epochs": 3, "lr": 5e-5}
    with pytest.raises(ValueError, match="has no value"):
        preparing._convert_nargs_to_dict(["--train", "--epochs", "3"])


def test_a_function_that_knows_its_place(monkeypatch):
    for name in ("RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "FORK_LAUNCHED"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    monkeypatch.setenv("WORLD_SIZE", "4")
    seen = []
    preparing.PrepareForLaunch(lambda word: seen.append((word, os.environ["RANK"])), "multi_cpu")(3, "hello")
    assert seen == [("hello", "3")]


@pytest.mark.parametrize("suffix", ["yaml", "json"])
def test_a_config_is_written_and_read_back(tmp_path, suffix):
    config = config_args.ClusterConfig(
        "LOCAL_MACHINE", "FSDP", "bf16", False, False, num_processes=4, fsdp_config={"fsdp_version": 2}
    )
    path = str(tmp_path / f"run.{suffix}")
    getattr(config, f"to_{suffix}_file")(path)
    again = config_args.load_config_from_file(path)
    assert again == config
    assert getattr(config_args.ClusterConfig, f"from_{suffix}_file")(path) == config
    assert config.to_dict()["distributed_type"] == "FSDP"
    assert "gpu_ids" not in config.to_dict()


def test_old_configs_and_wrong_ones(tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text("distributed_type: 'NO'\nfp16: true\ndynamo_backend: INDUCTOR\n")
    config = config_args.load_config_from_file(str(path))
    assert (config.mixed_precision, config.dynamo_config) == ("fp16", {"dynamo_backend": "INDUCTOR"})
    path.write_text("distributed_type: 'NO'\nnum_proceses: 2\n")
    with pytest.raises(ValueError, match=r"run.yaml:2 has the unknown key 'num_proceses'"):
        config_args.load_config_from_file(str(path))
    path.write_text("num_processes: 2\n")
    with pytest.raises(ValueError, match="distributed_type is missing"):
        config_args.load_config_from_file(str(path))


def test_the_usual_file(tmp_path):
    path = tmp_path / "run.yaml"
    assert write_basic_config("bf16", str(path)) == path
    assert yaml.safe_load(path.read_text())["mixed_precision"] == "bf16"
    assert write_basic_config("bf16", str(path)) is False


def test_a_config_for_the_second_version_of_fsdp():
    config = {"distributed_type": "FSDP", "fsdp_config": {"fsdp_version": 1, "fsdp_sharding_strategy": "FULL_SHARD"}}
    converted = to_fsdp2.convert_config_to_fsdp2(config)
    assert converted["fsdp_config"]["fsdp_version"] == 2
    assert converted["fsdp_config"]["fsdp_reshard_after_forward"] is True
    assert to_fsdp2.convert_config_to_fsdp2(converted) == converted


def test_a_key_of_fsdp_that_nobody_knows_is_carried_over_and_removed_ones_are_logged(caplog):
    config = {"fsdp_config": {"fsdp_use_orig_params": True, "fsdp_forward_prefetch": True, "mine": 5}}
    assert to_fsdp2.convert_config_to_fsdp2(config) is config
    assert config == {"fsdp_config": {"mine": 5, "fsdp_version": 2}}
    assert [record.levelname for record in caplog.records] == ["WARNING", "WARNING"]


@pytest.mark.parametrize("config", [{}, {"fsdp_config": {}}, {"num_processes": 2, "fsdp_config": None}])
def test_a_config_without_fsdp_needs_no_conversion(config):
    assert to_fsdp2.convert_config_to_fsdp2(dict(config)) == config


def test_files_that_the_conversion_refuses(tmp_path):
    parse = to_fsdp2.to_fsdp2_command_parser().parse_args
    config, there = tmp_path / "run.yaml", tmp_path / "there.yaml"
    with pytest.raises(FileNotFoundError, match="no such file"):
        to_fsdp2.to_fsdp2_command(parse(["--config_file", str(config)]))
    config.write_text("fsdp_config:\n  fsdp_sharding_strategy: FULL_SHARD\n")
    there.write_text("")
    with pytest.raises(ValueError, match="No output file"):
        to_fsdp2.to_fsdp2_command(parse(["--config_file", str(config)]))
    words = ["--config_file", str(config), "--output-file", str(there)]
    with pytest.raises(FileExistsError, match="already exists"):
        to_fsdp2.to_fsdp2_command(parse(words))
    to_fsdp2.to_fsdp2_command(parse([*words, "--overwrite"]))
    converted = {"fsdp_config": {"fsdp_version": 2, "fsdp_reshard_after_forward": True}}
    assert yaml.safe_load(there.read_text()) == converted
    (tmp_path / "empty.yaml").touch()
    with pytest.raises(ValueError, match="It is empty"):
        to_fsdp2.load_config(str(tmp_path / "empty.yaml"))


def test_the_command_converts_what_a_patched_function_loads(tmp_path, monkeypatch, caplog):
    (tmp_path / "run.yaml").write_text("a: 1\n")
    monkeypatch.setattr("accelerate.commands.to_fsdp2.load_config", lambda path: {"fsdp_config": {"fsdp_version": 2}})
    words = ["--config_file", str(tmp_path / "run.yaml"), "--output_file", str(tmp_path / "new.yaml")]
    to_fsdp2.to_fsdp2_command(to_fsdp2.to_fsdp2_command_parser().parse_args(words))
    assert "already" in caplog.text
    assert yaml.safe_load((tmp_path / "new.yaml").read_text()) == {"fsdp_config": {"fsdp_version": 2}}


def test_the_command_line_for_a_pod_is_shown(job, capsys):
    words = ["--tpu_name", "n", "--tpu_zone", "z", "--command", "ls", "--command", "a", "b", "--install_accelerate"]
    parsed_words = tpu.tpu_command_parser().parse_args([*words, "--accelerate_version", "1.0.0", "--debug"])
    tpu.tpu_command_launcher(parsed_words)
    assert capsys.readouterr().out == (
        "Running gcloud compute tpus tpu-vm ssh n --zone z"
        " --command cd /usr/share; pip install accelerate==1.0.0; ls; a; b --worker all\n"
    )
    with pytest.raises(FileNotFoundError):
        tpu.tpu_command_launcher(tpu.tpu_command_parser().parse_args([*words[:4], "--command_file", job + ".sh"]))
