"""Switches such as `--use_fsdp`, `distributed_type` in a file, and what both mean for a launch."""

from __future__ import annotations

import json

import pytest

from accel_cli.config.resolved import resolve_settings
from accel_cli.launch.backends import SwitchSettings, select
from accel_cli.launch.launchers import launch_classes
from accel_cli.launch.request import check_request
from accel_state.choices import SageMakerDistributedType
from accel_state.errors import Conflict, SettingError
from accel_state.labels import DistributedType
from accel_state.settings.environ import Given
from accel_state.settings.schema import settings_of
from accel_testing.launchers import make_plan, make_request


def settings(file=None, **flags):
    return make_request(flags, file=file)


def plan(devices=1, file=None, **flags):
    return make_plan(make_request(flags, file=file, devices=devices))


@pytest.mark.parametrize("name", {one.value for kinds in (DistributedType, SageMakerDistributedType) for one in kinds})
def test_every_kind_of_a_file_is_understood(name):
    given = {"distributed_type": Given(name, "run.yaml:1")}
    selection = select(resolve_settings(launch_classes(), {}, {}, given))
    assert (selection.label, selection.source.origin) == (name, "run.yaml:1")


def test_kind_of_default_settings_is_none():
    assert settings().selection is None


@pytest.mark.parametrize(
    ("switch", "name"),
    [
        ("multi_gpu", "MULTI_GPU"),
        ("use_deepspeed", "DEEPSPEED"),
        ("use_fsdp", "FSDP"),
        ("tpu", "XLA"),
    ],
)
def test_a_switch_comes_before_the_file(switch, name):
    selection = settings({"distributed_type": "MULTI_CPU"}, **{switch: True}).selection
    assert (selection.label, selection.source.origin) == (name, f"--{switch}")


def test_every_switch_stands_for_a_kind():
    for name in settings_of(SwitchSettings):
        assert settings(**{name: True}).selection.source.definition.name == name


def test_use_deepspeed_and_use_fsdp_conflict():
    with pytest.raises(Conflict, match=r"--use_deepspeed.*--use_fsdp"):
        settings(use_fsdp=True, use_deepspeed=True)


@pytest.mark.parametrize("other", [{"cpu": True}, {"num_processes": 1}])
def test_several_devices_contradict_the_cpu_and_one_process(other):
    with pytest.raises(Conflict, match="multi_gpu"):
        check_request(settings(multi_gpu=True, **other))


def test_a_variable_for_the_cpu_does_not_contradict_several_devices(accel, script):
    job = script("import os; os.write(1, (os.environ['RANK'] + os.environ['ACCELERATE_USE_CPU'] + '\\n').encode())")
    done = accel("launch", "--multi_gpu", "--num_processes", "2", job, env={"ACCELERATE_USE_CPU": "true"})
    assert (done.returncode, sorted(done.stdout.split())) == (0, ["0true", "1true"]), done.stderr


def test_several_devices_where_there_is_one():
    with pytest.raises(SettingError, match="--multi_gpu"):
        plan(devices=1, multi_gpu=True)
    assert plan(devices=4, multi_gpu=True).processes == 4
    assert plan(devices=1, multi_gpu=True, num_processes=2).processes == 2


@pytest.mark.parametrize(
    ("flags", "file", "variables"),
    [
        ({"use_fsdp": True}, {}, {"ACCELERATE_USE_FSDP": "true"}),
        ({}, {"distributed_type": "FSDP"}, {"ACCELERATE_USE_FSDP": "true"}),
        ({}, {"distributed_type": "DEEPSPEED"}, {"ACCELERATE_USE_DEEPSPEED": "true"}),
        ({}, {"distributed_type": "MULTI_GPU"}, {}),
        (
            {"parallelism_config.parallelism_config_tp_size": 2},
            {},
            {"PARALLELISM_CONFIG_TP_SIZE": "2", "ACCELERATE_USE_PARALLELISM_CONFIG": "true"},
        ),
        (
            {"parallelism_config.parallelism_config_tp_size": 2, "use_parallelism_config": False},
            {},
            {"PARALLELISM_CONFIG_TP_SIZE": "2", "ACCELERATE_USE_PARALLELISM_CONFIG": "false"},
        ),
        (
            {"fp8_config.fp8_override_linear_precision": (True, False, True)},
            {},
            {
                "ACCELERATE_FP8_OVERRIDE_FPROP": "True",
                "ACCELERATE_FP8_OVERRIDE_DGRAD": "False",
                "ACCELERATE_FP8_OVERRIDE_WGRAD": "True",
            },
        ),
        ({"gradient_accumulation_steps": 2}, {}, {"ACCELERATE_GRADIENT_ACCUMULATION_STEPS": "2"}),
    ],
)
def test_environment_variables_of_each_kind_of_run(flags, file, variables):
    told = plan(file=file, num_processes=2, **flags).environment
    names = ("ACCELERATE_", "PARALLELISM_")
    expected = {"ACCELERATE_MIXED_PRECISION": "no", **variables}
    assert {name: value for name, value in told.items() if name.startswith(names)} == expected


def test_flags_and_a_file_reach_the_script_alike(accel, script, tmp_path):
    job = script(
        """
        import json, os
        from accel_plugins.transforms.config import TorchDynamoPlugin
        from accel_state.data_shards import parallelism_config_from_environment
        mesh, dynamo = parallelism_config_from_environment(), TorchDynamoPlugin()
        print(json.dumps([mesh.tp_size, mesh.dp_shard_size, dynamo.to_dict(), os.environ["FSDP_VERSION"]]))
        """
    )
    (tmp_path / "run.yaml").write_text(
        "distributed_type: FSDP\nnum_processes: 2\nfsdp_config:\n  fsdp_version: 2\n"
        "parallelism_config:\n  parallelism_config_tp_size: 2\n  parallelism_config_dp_shard_size: 1\n"
        "dynamo_config:\n  backend: INDUCTOR\n  use_fullgraph: true\n"
    )
    flags = ["--use_fsdp", "--num_processes", "2", "--fsdp_version", "2", "--parallelism_config_tp_size=2"]
    flags += ["--parallelism-config-dp-shard-size", "1", "--dynamo_backend", "inductor", "--dynamo_use_fullgraph"]
    by_flags = accel("launch", *flags, job)
    by_file = accel("launch", "--config_file", tmp_path / "run.yaml", job)
    assert (by_flags.returncode, by_file.returncode) == (0, 0), by_flags.stderr + by_file.stderr
    assert by_flags.stdout == by_file.stdout
    tp, shard, dynamo, version = json.loads(by_file.stdout.splitlines()[0])
    assert (tp, shard, version) == (2, 1, "2")
    assert (dynamo["backend"], dynamo["fullgraph"]) == ("inductor", True)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--multi_gpu", "--cpu"], "--multi_gpu"),
        (["--fsdp_offload_params", "job.py"], "cpu_offload='job.py'"),
        (["--fp8_override_linear_precision", "true,maybe,false"], "three bools"),
        (["--zero_stage", "4"], "a stage from 0 to 3"),
    ],
)
def test_launch_refuses_bad_values_of_the_kinds_of_runs(accel, script, words, said):
    done = accel("launch", *words, script("print('started')"))
    assert done.returncode == 2
    assert said in done.stderr
    assert "Traceback" not in done.stderr
    assert "started" not in done.stdout
