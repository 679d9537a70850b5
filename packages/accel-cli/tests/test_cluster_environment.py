"""What batch systems say about machines, and when they say nothing."""

from __future__ import annotations

import pytest

from accel_cli.launch.check import check_launchers
from accel_cli.launch.cluster_environment import ClusterEnvironment, read_cluster_environment
from accel_state.errors import Conflict, SettingError

SLURM = {
    "SLURM_JOB_ID": "1234",
    "SLURM_STEP_ID": "0",
    "SLURM_PROCID": "2",
    "SLURM_NODEID": "2",
    "SLURM_STEP_NUM_NODES": "4",
    "SLURM_STEP_NUM_TASKS": "4",
    "SLURM_STEP_TASKS_PER_NODE": "1(x4)",
    "SLURM_STEP_NODELIST": "gpu[07-10]",
}
BATCH_SCRIPT = {"SLURM_JOB_ID": "1234", "SLURM_PROCID": "0", "SLURM_NODEID": "0", "SLURM_NNODES": "4"}
OPEN_MPI = {"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_LOCAL_SIZE": "1"}
KUBERNETES = {"KUBERNETES_SERVICE_HOST": "x", "RANK": "1", "WORLD_SIZE": "3", "MASTER_ADDR": "job-0"}


def values(environ, host="node"):
    return {name: given.value for name, given in read_cluster_environment(environ, host).values.items()}


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({}, {}),
        (
            SLURM,
            {"num_machines": 4, "machine_rank": 2, "main_process_ip": "gpu07", "main_process_port": 15000 + 1234},
        ),
        ({**SLURM, "SLURM_STEP_NUM_NODES": "1", "SLURM_NODEID": "0"}, {"num_machines": 1, "machine_rank": 0}),
        (BATCH_SCRIPT, {}),
        (OPEN_MPI, {"num_machines": 2, "machine_rank": 1}),
        ({"PMI_RANK": "0", "PMI_SIZE": "2", "MPI_LOCALNRANKS": "1"}, {"num_machines": 2, "machine_rank": 0}),
        (KUBERNETES, {"num_machines": 3, "machine_rank": 1}),
        ({**KUBERNETES, "LOCAL_RANK": "0"}, {}),
        (
            {
                "PET_NNODES": "2",
                "PET_NODE_RANK": "1",
                "PET_NPROC_PER_NODE": "8",
                "PET_MASTER_ADDR": "a",
                "PET_MASTER_PORT": "7",
            },
            {
                "num_machines": 2,
                "machine_rank": 1,
                "num_processes": 16,
                "main_process_ip": "a",
                "main_process_port": 7,
            },
        ),
        ({"PET_NNODES": "2", "PET_NPROC_PER_NODE": "auto"}, {"num_machines": 2}),
        ({"PET_NNODES": "1:4"}, {}),
        ({"LSB_MCPU_HOSTS": "c1 4 c2 4"}, {}),
        (
            {"LSB_MCPU_HOSTS": "c1.site 4 node.site 4 c1.site 2", "LSF_PM_TASKID": "2"},
            {"num_machines": 2, "machine_rank": 1, "main_process_ip": "c1.site"},
        ),
        ({"LSB_MCPU_HOSTS": "c1 4 c2 4", "LSF_PM_TASKID": "2"}, {}),
    ],
)
def test_machines_of_each_batch_system(environ, expected):
    assert values(environ) == expected


def test_values_name_their_variables():
    found = read_cluster_environment(SLURM, "node")
    assert found.system == "Slurm"
    assert found.values["num_machines"].origin == "$SLURM_STEP_NUM_NODES"
    assert found.values["main_process_ip"].origin == "$SLURM_STEP_NODELIST"


@pytest.mark.parametrize(
    "environ",
    [
        {**SLURM, "SLURM_STEP_NUM_TASKS": "16", "SLURM_STEP_TASKS_PER_NODE": "4(x4)"},
        {**OPEN_MPI, "OMPI_COMM_WORLD_SIZE": "8", "OMPI_COMM_WORLD_LOCAL_SIZE": "4"},
    ],
)
def test_several_launchers_on_a_machine_are_single_processes_or_a_mistake(environ):
    found = read_cluster_environment(environ, "node")
    assert (found.values, found.launchers) == ({}, 4)
    check_launchers(found, 1)
    with pytest.raises(Conflict, match="started 4 launchers"):
        check_launchers(found, 2)


def test_one_launcher_may_start_many():
    check_launchers(ClusterEnvironment(), 8)


def test_a_variable_that_is_no_number_is_named():
    with pytest.raises(SettingError, match="SLURM_NODEID='x'"):
        read_cluster_environment({**SLURM, "SLURM_NODEID": "x"}, "node")


def explained(accel, *arguments, env):
    finished = accel("explain", "--json", "--", *arguments, env=env)
    assert finished.returncode == 0, finished.stderr
    import json

    return {row["setting"]: (row["value"], row["origin"]) for row in json.loads(finished.stdout)}


def test_flags_and_variables_that_name_a_setting_come_first(accel):
    rows = explained(accel, "--machine_rank", "3", env={**SLURM, "MASTER_ADDR": "10.0.0.9"})
    assert rows["num_machines"] == (4, "$SLURM_STEP_NUM_NODES")
    assert rows["machine_rank"] == (3, "--machine_rank")
    assert rows["main_process_ip"] == ("10.0.0.9", "$MASTER_ADDR")


def test_a_launch_on_several_machines_says_where_it_is(accel):
    assert "Note: this is machine 2 of 4 (from Slurm)." in accel("explain", env=SLURM).stdout


def test_a_launch_in_a_step_of_one_machine(accel, script):
    one = {"SLURM_STEP_NUM_NODES": "1", "SLURM_NODEID": "0", "SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "1"}
    body = script("import os; print(os.environ['WORLD_SIZE'])")
    finished = accel("launch", "--num_processes", "2", body, env={**SLURM, **one})
    assert finished.stdout == "2\n2\n"
    assert finished.stderr == "accel launch: 2 processes, device cpu, backend automatic, precision no.\n"
