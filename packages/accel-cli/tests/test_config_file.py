"""Config files: where they lie, which keys they may hold, and what their values become."""

from __future__ import annotations

import os
from dataclasses import dataclass

import pytest

from accel_cli.config.file import default_path, read_config, with_prefix
from accel_cli.launch.launchers import launcher_settings
from accel_cli.launch.settings import LAUNCH_CLASSES
from accel_state.errors import SettingError
from accel_state.settings.environ import Given
from accel_state.settings.schema import INTEGER, JSON, listing, setting

OF_LAUNCH = tuple(dict.fromkeys((*LAUNCH_CLASSES, *launcher_settings())))

# As `accelerate config default` and the wizard of Accelerate 1.15 write them.
WRITTEN_BY_DEFAULT = """{
  "compute_environment": "LOCAL_MACHINE",
  "debug": false,
  "distributed_type": "NO",
  "downcast_bf16": false,
  "enable_cpu_affinity": false,
  "machine_rank": 0,
  "main_training_function": "main",
  "mixed_precision": "no",
  "num_machines": 1,
  "num_processes": 1,
  "rdzv_backend": "static",
  "same_network": false,
  "tpu_use_cluster": false,
  "tpu_use_sudo": false,
  "use_cpu": true
}
"""
WRITTEN_BY_WIZARD = """compute_environment: LOCAL_MACHINE
debug: false
distributed_type: FSDP
downcast_bf16: 'no'
dynamo_config:
  dynamo_backend: INDUCTOR
enable_cpu_affinity: false
fsdp_config:
  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP
  fsdp_version: 2
machine_rank: 1
main_process_ip: 10.0.0.1
main_process_port: 29500
main_training_function: main
mixed_precision: bf16
num_machines: 2
num_processes: 8
rdzv_backend: static
same_network: true
tpu_env: []
tpu_use_cluster: false
tpu_use_sudo: false
use_cpu: false
"""


@dataclass
class Extra:
    """Settings as a backend brings them."""

    stage: int = setting(2, type=INTEGER, key="deepspeed_config.zero_stage")
    names: tuple[str, ...] = setting((), type=listing(), key="fsdp_config.fsdp_names")
    free: object = setting(None, type=JSON, key="extra_options")


@pytest.fixture
def config(tmp_path):
    def read(text, name="run.yaml", classes=OF_LAUNCH):
        path = tmp_path / name
        path.write_text(text)
        file = read_config(str(path), classes)
        for error in file.refused.values():
            raise error
        return file

    return read


def test_values_remember_file_and_line(config, tmp_path):
    read = config("# mine\nnum_processes: 4\nuse_cpu: yes\nmixed_precision: no\n")
    assert read.values == {
        "num_processes": Given(4, f"{tmp_path}/run.yaml:2"),
        "cpu": Given(True, f"{tmp_path}/run.yaml:3"),
        "mixed_precision": Given("no", f"{tmp_path}/run.yaml:4"),
    }


@pytest.mark.parametrize("name", ["default_config.yaml", "default_config.json"])
def test_a_file_that_accelerate_wrote_by_default(config, name):
    read = config(WRITTEN_BY_DEFAULT, name)
    assert read.unread == ()
    expected = {
        "compute_environment": "LOCAL_MACHINE",
        "debug": False,
        "distributed_type": "NO",
        "machine_rank": 0,
        "mixed_precision": "no",
        "num_machines": 1,
        "num_processes": 1,
        "rdzv_backend": "static",
        "cpu": True,
    }
    assert expected.items() <= {name: given.value for name, given in read.values.items()}.items()


def test_a_file_for_parts_that_are_not_installed_says_what_nothing_reads(config):
    read = config(WRITTEN_BY_WIZARD)
    assert read.values["distributed_type"].value == "FSDP"
    assert [(entry.key, entry.line) for entry in read.unread] == [
        ("fsdp_config.fsdp_auto_wrap_policy", 9),
        ("fsdp_config.fsdp_version", 10),
    ]


def test_settings_of_a_backend_are_read_once_it_is_there(config):
    text = "deepspeed_config:\n  zero_stage: 3\nfsdp_config:\n  names: [a, b]\nextra_options: [1, x]\n"
    read = config(text, classes=(Extra,))
    assert {name: given.value for name, given in read.values.items()} == {
        "deepspeed_config.zero_stage": 3,
        "fsdp_config.fsdp_names": ("a", "b"),
        "free": ["1", "x"],
    }
    assert read.unread == ()


def test_keys_may_leave_out_the_prefix_of_their_table():
    assert with_prefix("fsdp_config.version") == "fsdp_config.fsdp_version"
    assert with_prefix("fsdp_config.fsdp_version") == "fsdp_config.fsdp_version"
    assert with_prefix("deepspeed_config.zero_stage") == "deepspeed_config.zero_stage"
    assert with_prefix("fsdp_config") == "fsdp_config"


def test_keys_of_older_config_files_are_read(config):
    assert config("fp16: true\n").values["mixed_precision"].value == "fp16"
    assert config("fp16: false\n").values == {}
    assert config("dynamo_backend: 'NO'\n").unread == ()
    eight = config("fp8_config:\n  amax_history_length: 7\n  fp8_optimization_level: O1\n").values
    assert {name: given.value for name, given in eight.items()} == {
        "fp8_config.fp8_amax_history_len": 7,
        "fp8_config.fp8_opt_level": "O1",
    }
    assert config("dynamo_backend: INDUCTOR\n").values["dynamo_config.dynamo_backend"].value == "INDUCTOR"


@pytest.mark.parametrize("text", ["num_processes: -1\n", "num_processes:\n", "main_process_ip: null\n", "gpu_ids: ~\n"])
def test_empty_and_null_keys_of_a_config_file_set_nothing(config, text):
    assert config(text).values == {}


@pytest.mark.parametrize(
    ("text", "obstacle", "remedy"),
    [
        ("a: 1\nmixed_precison: no\n", "run.yaml:1 has the unknown key 'a'", "Remove the line"),
        ("num_machines: 1\nmixed_precison: no\n", "run.yaml:2 has the unknown key", "Did you mean 'mixed_precision'?"),
        ("num_processes:\n  a: 1\n", "unknown key 'num_processes.a'", "Did you mean 'num_processes'?"),
    ],
)
def test_unknown_keys_are_refused_with_the_closest(config, text, obstacle, remedy):
    with pytest.raises(SettingError) as caught:
        config(text)
    assert obstacle in caught.value.obstacle
    assert remedy in caught.value.remedy


@pytest.mark.parametrize(
    ("text", "asked"),
    [
        ("num_processes: two\n", "Cannot use num_processes='two' (FILE:1)"),
        ("num_processes: 0\n", "Cannot use num_processes='0' (FILE:1)"),
        ("num_processes: 2.5\n", "Cannot use num_processes='2.5' (FILE:1)"),
        ("num_processes: [1, 2]\n", "Cannot use num_processes='1,2' (FILE:1)"),
        ("\nmixed_precision: bf17\n", "Cannot use mixed_precision='bf17' (FILE:2)"),
        ("use_cpu: perhaps\n", "Cannot use cpu='perhaps' (FILE:1)"),
        ("main_process_port: 70000\n", "Cannot use main_process_port='70000' (FILE:1)"),
        ("distributed_type: MULTI_GPUS\n", "Cannot use distributed_type='MULTI_GPUS' (FILE:1)"),
        ("grace_period: -1\n", "Cannot use grace_period='-1' (FILE:1)"),
        ("grace_period: nan\n", "Cannot use grace_period='nan' (FILE:1)"),
    ],
)
def test_values_of_the_wrong_kind_are_refused_with_their_line(config, tmp_path, text, asked):
    with pytest.raises(SettingError) as caught:
        config(text)
    assert caught.value.failure.startswith(asked.replace("FILE", f"{tmp_path}/run.yaml"))


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({"HF_HOME": "/data/hf"}, "/data/hf/accelerate/default_config.yaml"),
        ({"HF_HOME": "/data/hf", "XDG_CACHE_HOME": "/x"}, "/data/hf/accelerate/default_config.yaml"),
        ({"XDG_CACHE_HOME": "/x"}, "/x/huggingface/accelerate/default_config.yaml"),
        ({"HF_HOME": ""}, "~/.cache/huggingface/accelerate/default_config.yaml"),
        ({}, "~/.cache/huggingface/accelerate/default_config.yaml"),
    ],
)
def test_the_users_own_file_lies_where_it_lay(environ, expected):
    assert default_path(environ) == os.path.expanduser(expected)
