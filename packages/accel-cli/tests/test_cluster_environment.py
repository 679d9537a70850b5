"""What a launch makes of what batch systems say about machines; `accel_state.clusters` reads it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from accel_cli.launch.request import check_plan
from accel_state.clusters import Machines
from accel_state.errors import Conflict
from accel_testing.launchers import make_plan, make_request

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


def test_several_launchers_on_a_machine_are_single_processes_or_a_mistake():
    request = make_request({"num_processes": 1})
    four = replace(request, cluster=Machines("Slurm", launchers=4))
    one, two = (make_plan(make_request({"num_processes": count})) for count in (1, 2))
    check_plan(four, one)
    check_plan(request, two)
    with pytest.raises(Conflict, match="Slurm started 4 launchers"):
        check_plan(four, two)


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
