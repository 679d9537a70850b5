"""Config files as public repositories ship them: what acts, and what is only a note."""

from __future__ import annotations

import json
import os
from typing import Any

import pytest

from accel_cli.launch.outer_launch import WRITTEN
from accel_cli.launch.request import request_of

pytestmark = pytest.mark.usefixtures("preloaded_python")

ENVIRONMENT = """
import json, os, sys
named = ("ACCEL", "FSDP", "RANK", "WORLD_SIZE", "LOCAL_", "MASTER_", "PYTHONPATH")
found = {name: value for name, value in os.environ.items() if name.startswith(named)}
os.write(1, (json.dumps(found) + "\\n").encode())
"""

WIZARD = """
compute_environment: LOCAL_MACHINE
debug: false
downcast_bf16: 'no'
machine_rank: 0
main_training_function: main
num_machines: 1
rdzv_backend: static
same_network: true
tpu_env: []
tpu_use_cluster: false
tpu_use_sudo: false
"""


@pytest.fixture
def launch(accel, script, tmp_path):
    """Launch with a config file; return the processes' variables and the notes of the launcher."""

    def run(text, *words, env=None):
        (tmp_path / "run.yaml").write_text(WIZARD + text, encoding="utf-8")
        finished = accel("launch", "--config_file", "run.yaml", *words, script(ENVIRONMENT), env=env)
        assert finished.returncode == 0, finished.stderr
        processes: list[dict[str, Any]] = [json.loads(line) for line in finished.stdout.splitlines()]
        return processes, finished.stderr

    return run


def test_a_run_that_is_not_distributed_has_one_process(launch):
    processes, notes = launch("distributed_type: 'NO'\nnum_processes: 8\nuse_cpu: false\n")
    assert len(processes) == 1
    assert "num_processes=8 (run.yaml:14) is ignored: distributed_type=NO (run.yaml:13) is one process" in notes


def test_a_flag_for_the_processes_comes_before_a_file_that_is_not_distributed(launch):
    processes, notes = launch("distributed_type: 'NO'\nnum_processes: 8\n", "--num_processes", "2")
    assert len(processes) == 2
    assert "ignored" not in notes


@pytest.mark.parametrize("steps", ["", "gradient_accumulation_steps: 3\n"])
def test_accumulation_of_an_engine_that_is_not_used_does_not_act(launch, steps):
    table = "deepspeed_config:\n  gradient_accumulation_steps: 4\n  zero_stage: 2\n"
    (process, *_), notes = launch(f"distributed_type: MULTI_GPU\nnum_processes: 2\n{table}{steps}")
    assert process.get("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "1") == (steps[-2:-1] or "1")
    assert "gradient_accumulation_steps=4 (run.yaml:16) is ignored: it needs --use_deepspeed" in notes


def test_accumulation_of_an_engine_by_a_flag_acts_everywhere(launch):
    (process,), _ = launch("distributed_type: 'NO'\n", "--gradient_accumulation_steps", "2")
    assert process["ACCELERATE_GRADIENT_ACCUMULATION_STEPS"] == "2"


def test_a_file_for_several_devices_that_selects_the_cpu_is_told(launch):
    table = "fsdp_config:\n  fsdp_sharding_strategy: FULL_SHARD\n"
    _, notes = launch(f"distributed_type: FSDP\nnum_processes: 1\nuse_cpu: true\n{table}")
    assert "the run uses the CPU: cpu=True (run.yaml:15)." in notes


@pytest.mark.parametrize(
    ("table", "told"),
    [
        ("mpirun_config:\n  mpirun_ccl: '0'\n", "mpirun_config.mpirun_ccl=0 (run.yaml:15) has no effect"),
        ("fsdp_config:\n  fsdp_versio: 2\n", "Did you mean 'fsdp_config.fsdp_version'?"),
        ("deepspeed_config:\n  optimizer:\n    params:\n      betas: [0.9, [1]]\n", "deepspeed_config.optimizer={...}"),
    ],
)
def test_an_unknown_key_of_a_table_is_one_note(launch, table, told):
    processes, notes = launch(f"distributed_type: 'NO'\n{table}")
    assert len(processes) == 1
    assert told in notes
    assert notes.count("has no effect") == 1


def test_an_old_key_for_the_backward_prefetch_acts(launch):
    table = "fsdp_config:\n  fsdp_backward_prefetch_policy: BACKWARD_POST\n  fsdp_sharding_strategy: 1\n"
    (process,), notes = launch(f"distributed_type: FSDP\nnum_processes: 1\nuse_cpu: true\n{table}")
    assert process["FSDP_BACKWARD_PREFETCH"] == "BACKWARD_POST"
    assert "has no effect" not in notes


@pytest.mark.parametrize("strategy", ["FULL_SHARD", "SHARD_GRAD_OP"])
def test_a_strategy_under_the_key_of_version_2_is_the_strategy_of_version_1(accel, script, tmp_path, strategy):
    table = f"fsdp_config:\n  fsdp_version: 1\n  fsdp_reshard_after_forward: {strategy}\n"
    (tmp_path / "run.yaml").write_text(f"{WIZARD}distributed_type: FSDP\nnum_processes: 1\nuse_cpu: true\n{table}")
    job = script(
        """
        from accel_plugins.fsdp.config import FullyShardedDataParallelPlugin
        print(FullyShardedDataParallelPlugin().sharding_strategy.name)
        """
    )
    finished = accel("launch", "--config_file", "run.yaml", job)
    assert (finished.returncode, finished.stdout) == (0, f"{strategy}\n"), finished.stderr
    assert ("Accelerate uses FULL_SHARD" in finished.stderr) == (strategy != "FULL_SHARD")


def test_the_last_of_two_equal_keys_wins(launch):
    table = "deepspeed_config:\n  zero_stage: 2\n  zero_stage: 3\n  gradient_clipping: auto\n"
    (process,), notes = launch(f"distributed_type: 'NO'\nnum_processes: 1\n{table}num_processes: 1\n")
    assert process["ACCELERATE_DEEPSPEED_ZERO_STAGE"] == "3"
    assert "run.yaml:17 replaces deepspeed_config.zero_stage of line 16." in notes
    assert "num_processes" not in notes


def test_a_value_that_cannot_be_read_is_a_note_where_nothing_reads_it(launch):
    (process,), notes = launch("distributed_type: 'NO'\nfp8_config:\n  fp8_margin: none\n")
    assert process.get("ACCELERATE_FP8_MARGIN") is None
    assert "fp8_config.fp8_margin (run.yaml:15) has no effect without --mixed_precision fp8" in notes


def test_words_for_a_switch_of_tpus_are_a_note_elsewhere(accel, script, tmp_path):
    (tmp_path / "run.yaml").write_text("distributed_type: 'NO'\ndowncast_bf16: fp16\n")
    finished = accel("launch", "--config_file", "run.yaml", script("print('ran')"))
    assert (finished.returncode, finished.stdout) == (0, "ran\n"), finished.stderr
    assert "downcast_bf16 (run.yaml:2) has no effect without --launcher tpu" in finished.stderr


def test_a_value_that_cannot_be_read_is_an_error_where_it_is_read(accel, script, tmp_path):
    (tmp_path / "run.yaml").write_text("distributed_type: FSDP\nfsdp_config:\n  fsdp_version: two\n")
    finished = accel("launch", "--config_file", "run.yaml", script("print('ran')"))
    assert (finished.returncode, finished.stdout) == (2, "")
    assert "Cannot use fsdp_version='two' (run.yaml:3)." in finished.stderr


def test_an_address_of_another_machine_is_ignored_on_one_machine(launch):
    processes, notes = launch("distributed_type: MULTI_CPU\nnum_processes: 2\nmain_process_ip: 192.0.2.1\n")
    assert {process["MASTER_ADDR"] for process in processes} == {"127.0.0.1"}
    assert "main_process_ip=192.0.2.1 (run.yaml:15) is ignored: the run is on this machine alone" in notes


@pytest.mark.parametrize("address", ["127.0.0.1", "localhost"])
def test_an_own_address_is_kept_on_one_machine(launch, address):
    processes, notes = launch(f"distributed_type: MULTI_CPU\nnum_processes: 2\nmain_process_ip: {address}\n")
    assert {process["MASTER_ADDR"] for process in processes} == {address}
    assert "ignored" not in notes


def test_variables_of_another_launch_are_ignored_on_one_machine(launch):
    others = {"MASTER_ADDR": "192.0.2.1", "MASTER_PORT": "29500", "RANK": "0", "WORLD_SIZE": "2"}
    processes, notes = launch("distributed_type: MULTI_CPU\nnum_processes: 2\n", env=others)
    assert sorted(process["RANK"] for process in processes) == ["0", "1"]
    assert {process["MASTER_ADDR"] for process in processes} == {"127.0.0.1"}
    assert "main_process_ip=192.0.2.1 ($MASTER_ADDR) is ignored" in notes
    assert "main_process_port=29500 ($MASTER_PORT) is ignored" in notes
    assert "$RANK=0 and $WORLD_SIZE=2 are ignored: this launch is a run of its own." in notes


def test_a_process_alone_does_not_inherit_the_address_of_another_run(launch):
    (process,), notes = launch("distributed_type: 'NO'\n", env={"MASTER_ADDR": "192.0.2.1"})
    assert "MASTER_ADDR" not in process
    assert "main_process_ip=192.0.2.1 ($MASTER_ADDR) is ignored" in notes


@pytest.mark.parametrize(
    ("kind", "expected"), [("DEEPSPEED", ["/lib/mine", "{folder}"]), ("FSDP", None), ("MULTI_CPU", None)]
)
def test_scripts_of_an_engine_import_from_the_working_directory(tmp_path, monkeypatch, kind, expected):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run.yaml").write_text(f"distributed_type: {kind}\nnum_processes: 1\n")
    request = request_of(["--config_file", "run.yaml"], {"PYTHONPATH": "/lib/mine"})
    environment = request.environment(1)
    paths = environment.get("PYTHONPATH")
    assert paths == (expected and os.pathsep.join(expected).format(folder=tmp_path))
    assert "PYTHONPATH" not in environment[WRITTEN]


def test_other_libraries_find_the_defaults_of_a_sharded_run(launch):
    (process,), _ = launch("distributed_type: FSDP\nnum_processes: 1\nuse_cpu: true\n")
    assert process["FSDP_CPU_RAM_EFFICIENT_LOADING"] == "true"
    assert process["FSDP_VERSION"] == "1"
    assert process["ACCELERATE_MIXED_PRECISION"] == "no"


def test_the_defaults_of_a_sharded_run_cause_no_warning(accel, script):
    job = script(
        """
        from accel_plugins.fsdp.config import FullyShardedDataParallelPlugin
        from accel_state.settings.environ import from_environment
        print(from_environment(FullyShardedDataParallelPlugin).fsdp_version)
        """
    )
    finished = accel("launch", "--cpu", "--use_fsdp", "--fsdp_version", "2", "--num_processes", "1", job)
    assert (finished.returncode, finished.stdout) == (0, "2\n"), finished.stderr
    assert len(finished.stderr.splitlines()) == 1


def test_other_libraries_find_the_precision_of_every_run(launch):
    (process,), _ = launch("distributed_type: 'NO'\n")
    assert process["ACCELERATE_MIXED_PRECISION"] == "no"
    assert "FSDP_VERSION" not in process
