"""Command lines of DeepSpeed's launcher for each way of reaching machines, and faults of hostfiles, as data."""

from __future__ import annotations

import pytest

from accel_cli.config.resolved import label
from accel_cli.launch.deepspeed import DEEPSPEED_LAUNCHERS
from accel_cli.launch.interface import RUNNER, Script
from accel_cli.launch.launchers import launch_classes
from accel_state.errors import Conflict, SettingError
from accel_state.settings.schema import settings_of
from accel_testing.launchers import make_plan, make_request

KNOWN = {label(known): known for cls in launch_classes() for known in settings_of(cls).values()}
PROGRAM = (RUNNER, "script", "job.py", "--lr", "1")


def plan(**flags):
    names = {name if name in KNOWN else f"deepspeed_config.{name}": value for name, value in flags.items()}
    return make_plan(make_request({**names, "use_deepspeed": True}, Script("script", "job.py", ("--lr", "1"))))


@pytest.fixture
def hosts(tmp_path):
    path = tmp_path / "hosts"
    path.write_text("node1 slots=4\nnode2 slots=4\n")
    return str(path)


MPI = ["mpich", "mvapich", "openmpi"]


@pytest.mark.parametrize("launcher", sorted(set(DEEPSPEED_LAUNCHERS) - {"standard", "nossh"}))
def test_machines_that_deepspeed_reaches(hosts, launcher):
    made = plan(
        num_machines=2,
        num_processes=8,
        deepspeed_hostfile=hosts,
        deepspeed_multinode_launcher=launcher,
        main_process_ip="10.0.0.1",
        main_process_port=1234,
    )
    assert made.argv == (
        "deepspeed",
        "--no_local_rank",
        f"--hostfile={hosts}",
        f"--launcher={launcher}",
        *(() if launcher in MPI else ("--num_nodes=2", "--num_gpus=4")),
        "--master_addr=10.0.0.1",
        "--master_port=1234",
        *PROGRAM,
    )


@pytest.mark.parametrize("launcher", MPI)
@pytest.mark.parametrize(
    "other", [{"num_machines": 3}, {"num_processes": 4}, {"num_machines": 2, "deepspeed_inclusion_filter": "node1"}]
)
def test_mpi_launchers_refuse_to_take_fewer_machines_or_slots(hosts, launcher, other):
    with pytest.raises(Conflict, match="every slot"):
        plan(**{"num_machines": 2, **other}, deepspeed_hostfile=hosts, deepspeed_multinode_launcher=launcher)


def test_machines_that_start_their_processes_themselves(hosts):
    made = plan(
        num_machines=2,
        num_processes=8,
        machine_rank=1,
        deepspeed_hostfile=hosts,
        deepspeed_multinode_launcher="nossh",
        main_process_ip="10.0.0.1",
    )
    assert made.argv[:6] == (
        "deepspeed",
        "--no_local_rank",
        f"--hostfile={hosts}",
        "--no_ssh",
        "--node_rank=1",
        "--num_nodes=2",
    )


@pytest.mark.parametrize("launcher", sorted(set(DEEPSPEED_LAUNCHERS) - {"standard"}))
def test_every_multinode_launcher_needs_a_hostfile(launcher):
    with pytest.raises(SettingError, match="no hostfile"):
        plan(num_machines=2, deepspeed_multinode_launcher=launcher, main_process_ip="10.0.0.1")


def test_machines_by_themselves_are_told_where_the_first_one_is(hosts):
    with pytest.raises(SettingError, match="main_process_ip"):
        plan(num_machines=2, deepspeed_hostfile=hosts, deepspeed_multinode_launcher="nossh")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("node1 slots=4\nnode2 slots=4\nnode1 slots=2\n", "hosts:3 lists node1 a second time"),
        ("node1 slots=4\nnode2\n", "does not set the number of processes on node2"),
        ("node1 slots=four\n", "hosts:1 is not a machine"),
        ("# nobody\n", "lists no machine"),
    ],
)
def test_hostfiles_that_deepspeed_would_misread(tmp_path, text, said):
    path = tmp_path / "hosts"
    path.write_text(text)
    with pytest.raises(SettingError) as caught:
        plan(num_machines=2, deepspeed_hostfile=str(path))
    assert said in str(caught.value)
    assert "--deepspeed_hostfile" in str(caught.value)


@pytest.mark.parametrize("name", ["deepspeed_inclusion_filter", "deepspeed_exclusion_filter"])
@pytest.mark.parametrize("text", ["node1", "node1:0,3", "node1@node2:1"])
def test_filters_of_machines_and_slots(hosts, name, text):
    made = plan(num_machines=2, deepspeed_hostfile=hosts, **{name: text})
    option = "--include" if name == "deepspeed_inclusion_filter" else "--exclude"
    assert f"{option}={text}" in made.argv
    assert not any(word.startswith(("--num_nodes", "--num_gpus")) for word in made.argv)


def test_inclusion_and_exclusion_filters_conflict(hosts):
    filters = {"deepspeed_inclusion_filter": "node1", "deepspeed_exclusion_filter": "node2"}
    with pytest.raises(Conflict, match="Cannot combine"):
        plan(num_machines=2, deepspeed_hostfile=hosts, **filters)
