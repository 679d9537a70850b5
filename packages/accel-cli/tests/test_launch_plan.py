"""The plan of a launch, compared as data: what would be started for which settings."""

from __future__ import annotations

from dataclasses import replace

import pytest

from accel_cli.launch.interface import RUNNER, LaunchPlan, Script
from accel_cli.launch.outer_launch import WRITTEN, without_outer
from accel_cli.launch.torchrun import AGENT
from accel_state.devices.specs import SPECS
from accel_state.errors import Conflict, Missing, SettingError
from accel_state.network import loopback_variables
from accel_state.settings.environ import ORIGINS
from accel_testing.launchers import make_plan, make_request

JOB = Script("script", "job.py", ("--lr", "1e-3"))
ALWAYS = {"TORCH_CPP_LOG_LEVEL": "ERROR", "PYTORCH_ENABLE_MPS_FALLBACK": "1", "ACCELERATE_MIXED_PRECISION": "no"}
VISIBILITY = ("CUDA_VISIBLE_DEVICES", "ZE_AFFINITY_MASK", "ASCEND_RT_VISIBLE_DEVICES", "HABANA_VISIBLE_MODULES")


def plan(processors=8, script=JOB, devices=1, environ=None, file=None, **values):
    environ = environ or {}
    request = make_request(values, script, file=file, devices=devices, environ=environ)
    made = make_plan(replace(request, machine=request.machine._replace(processors=processors)))
    assert set(made.environment[WRITTEN].split(",")) >= {n for n, v in made.environment.items() if n != WRITTEN} - set(
        environ
    )
    return made


def variables(made):
    return {name: value for name, value in made.environment.items() if name not in (WRITTEN, ORIGINS)}


def test_plan_of_one_process_is_local_without_a_port():
    made = plan()
    assert (made.launcher, made.processes, made.port) == ("local", 1, None)
    assert made.argv == ("python", RUNNER, "script", "job.py", "--lr", "1e-3")
    assert variables(made) == ALWAYS


def test_several_processes_share_the_processors():
    made = plan(num_processes=2, cpu=True, mixed_precision="bf16", gradient_accumulation_steps=4, debug=True)
    assert (made.launcher, made.processes, made.address) == ("local", 2, "127.0.0.1")
    assert variables(made) == {
        **ALWAYS,
        **SPECS["cpu"].sharing,
        "ACCELERATE_USE_CPU": "true",
        "ACCELERATE_DEBUG_MODE": "true",
        "ACCELERATE_MIXED_PRECISION": "bf16",
        "ACCELERATE_GRADIENT_ACCUMULATION_STEPS": "4",
        "OMP_NUM_THREADS": "4",
        **loopback_variables({}),
    }


@pytest.mark.parametrize(("processors", "processes", "threads"), [(8, 3, "2"), (2, 4, "1"), (1, 2, "1"), (96, 8, "12")])
def test_threads_of_each_process(processors, processes, threads):
    assert plan(num_processes=processes, processors=processors).environment["OMP_NUM_THREADS"] == threads


def test_threads_that_were_asked_for_are_kept():
    assert plan(num_processes=4, num_cpu_threads_per_process=3).environment["OMP_NUM_THREADS"] == "3"
    assert plan(num_processes=4, environ={"OMP_NUM_THREADS": "5"}).environment["OMP_NUM_THREADS"] == "5"
    assert "OMP_NUM_THREADS" not in plan(num_processes=1).environment


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({}, 4),
        ({"num_processes": 2}, 2),
        ({"cpu": True}, 1),
        ({"gpu_ids": "1,3"}, 2),
        ({"gpu_ids": "all"}, 4),
        ({"distributed_type": "NO"}, 1),
        ({"distributed_type": "NO", "num_processes": 3}, 3),
        ({"distributed_type": "MULTI_GPU"}, 4),
    ],
)
def test_number_of_processes(values, expected):
    assert plan(devices=4, **values).processes == expected


def test_devices_are_counted_only_when_needed():
    request = make_request({"num_processes": 2})
    machine = request.machine._replace(devices=lambda: pytest.fail("torch was asked"))
    assert make_plan(replace(request, machine=machine)).processes == 2


def test_chosen_devices_are_shown_to_every_vendors_driver():
    made = variables(plan(gpu_ids="0,2"))
    assert {made[name] for name in VISIBILITY} == {"0,2"}
    assert not set(VISIBILITY) & set(variables(plan(gpu_ids="all")))


def test_log_level_of_the_user_is_kept():
    assert plan(environ={"TORCH_CPP_LOG_LEVEL": "INFO"}).environment["TORCH_CPP_LOG_LEVEL"] == "INFO"


def test_port_and_address():
    made = plan(num_processes=2, main_process_ip="127.0.0.2", main_process_port=29555)
    assert (made.address, made.port) == ("127.0.0.2", 29555)
    assert plan(num_processes=2, main_process_port=0).port is None
    assert plan(num_processes=2, environ={"MASTER_PORT": "29556"}).port == 29556


@pytest.mark.parametrize(
    ("script", "argv"),
    [
        (Script("module", "pkg.train", ("-m",)), ("module", "pkg.train", "-m")),
        (Script("program", "./train"), ("program", "./train")),
    ],
)
def test_modules_and_programs(script, argv):
    assert plan(script=script).argv == ("python", RUNNER, *argv)


def test_restarts_go_through_torchrun():
    made = plan(num_processes=2, max_restarts=3, grace_period=5.0)
    assert (made.launcher, made.processes) == ("torchrun", 2)
    assert made.argv == (
        "python",
        AGENT,
        "--nnodes=1",
        "--nproc-per-node=2",
        "--standalone",
        "--max-restarts=3",
        "--monitor-interval=0.1",
        "--role=default",
        "--tee=0",
        RUNNER,
        "script",
        "job.py",
        "--lr",
        "1e-3",
    )
    assert made.environment["TORCH_ELASTIC_SHUTDOWN_TIMEOUT"] == "5"


def test_several_machines():
    made = plan(num_processes=8, num_machines=2, machine_rank=1, main_process_ip="10.0.0.1", processors=16)
    assert made.processes == 4
    assert made.environment["OMP_NUM_THREADS"] == "4"
    assert made.argv[2:8] == (
        "--nnodes=2",
        "--nproc-per-node=4",
        "--node-rank=1",
        "--master-addr=10.0.0.1",
        "--master-port=29500",
        "--max-restarts=0",
    )


def test_several_machines_without_a_number_of_processes_take_all_devices_of_each():
    made = plan(devices=8, num_machines=2, main_process_ip="10.0.0.1")
    assert made.argv[3] == "--nproc-per-node=8"


def test_rendezvous_by_a_store():
    made = plan(
        num_processes=2,
        num_machines=2,
        main_process_ip="10.0.0.1",
        main_process_port=1234,
        rdzv_backend="c10d",
        rdzv_conf="timeout=60",
        log_dir="/logs",
        tee="3",
    )
    assert made.argv[4:6] == ("--rdzv-backend=c10d", "--rdzv-endpoint=10.0.0.1:1234")
    assert made.environment["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] == "1"
    assert {"--rdzv-conf=timeout=60", "--log-dir=/logs", "--tee=3"} < set(made.argv)


@pytest.mark.parametrize("values", [{"launcher": "torchrun"}, {"log_dir": "x"}, {"role": "trainer"}, {"tee": "1"}])
def test_what_asks_for_torchrun(values):
    assert plan(num_processes=2, **values).launcher == "torchrun"


def test_torchrun_on_a_given_port():
    made = plan(num_processes=2, launcher="torchrun", main_process_port=29600)
    assert made.argv[4:7] == ("--node-rank=0", "--master-addr=127.0.0.1", "--master-port=29600")


def test_a_backend_that_follows_from_a_config_file_is_passed_on():
    file = {"distributed_type": "NO"}
    assert plan(file=file).environment["ACCEL_BACKEND"] == "single"
    assert plan(file=file, environ={"ACCEL_BACKEND": "ddp"}).environment["ACCEL_BACKEND"] == "ddp"


@pytest.mark.parametrize(
    ("values", "kind", "named"),
    [
        ({"machine_rank": 2, "num_machines": 2}, Conflict, ["machine_rank=2", "num_machines=2", "--machine_rank"]),
        ({"machine_rank": 1}, Conflict, ["machine_rank=1", "num_machines=1", "(default)"]),
        ({"num_machines": 2}, SettingError, ["num_machines=2", "--main_process_ip"]),
        (
            {"num_machines": 2, "main_process_ip": "h", "num_processes": 3},
            Conflict,
            ["num_processes=3", "multiple of 2"],
        ),
        ({"num_machines": 2, "main_process_ip": "h", "num_processes": 1}, Conflict, ["num_processes=1"]),
        ({"cpu": True, "gpu_ids": "0"}, Conflict, ["cpu=True", "gpu_ids=0"]),
        ({"launcher": "local", "max_restarts": 1}, Conflict, ["launcher=local", "max_restarts=1"]),
        ({"launcher": "local", "num_machines": 2, "main_process_ip": "h"}, Conflict, ["num_machines=2"]),
        ({"prefix_output": True, "max_restarts": 1}, Conflict, ["prefix_output=True", "max_restarts=1"]),
        ({"prefix_output": True, "launcher": "torchrun"}, Conflict, ["prefix_output=True", "launcher=torchrun"]),
    ],
)
def test_contradictions_name_both_sides(values, kind, named):
    with pytest.raises(kind) as caught:
        plan(**values)
    assert all(part in str(caught.value) for part in named)
    assert caught.value.failure
    assert caught.value.obstacle
    assert caught.value.remedy


def test_a_kind_of_run_that_no_backend_carries():
    with pytest.raises(Missing) as caught:
        make_request({}, file={"distributed_type": "NOBODYS"})
    assert "run.yaml:2" in caught.value.failure


def test_a_launch_inside_a_launch_sees_what_the_user_set_and_not_what_the_outer_one_wrote():
    user = {"PATH": "/bin", "ACCELERATE_MIXED_PRECISION": "bf16", "MASTER_PORT": "1"}
    made = plan(num_processes=2, cpu=True, environ=user)
    inside = {**user, **made.environment, "RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}
    assert without_outer(inside) == {"PATH": "/bin", "ACCELERATE_MIXED_PRECISION": "bf16"}


def test_a_launch_inside_torchrun_is_a_run_by_itself():
    inside = {"PATH": "/bin", "RANK": "1", "WORLD_SIZE": "2", "MASTER_PORT": "1", "ROLE_NAME": "x", "GROUP_RANK": "0"}
    assert without_outer(inside) == inside
    assert without_outer({**inside, "TORCHELASTIC_RUN_ID": "none"}) == {"PATH": "/bin"}


def test_launch_plans_compare_by_value():
    assert plan(num_processes=2) == plan(num_processes=2)
    assert plan(num_processes=2) != plan(num_processes=3)
    assert isinstance(plan(), LaunchPlan)
