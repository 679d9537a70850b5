"""The place of a process that Slurm or an MPI launcher started, and the process that they did not start."""

from __future__ import annotations

import pytest

from accel_state.clusters.systems import first_host, tasks_of_node
from accel_state.errors import SettingError
from accel_state.topology import Topology, read_topology

STEP = {
    "SLURM_JOB_ID": "123456",
    "SLURM_STEP_ID": "2",
    "SLURM_STEP_NUM_TASKS": "4",
    "SLURM_NTASKS": "4",
    "SLURM_PROCID": "3",
    "SLURM_LOCALID": "0",
    "SLURM_NODEID": "2",
    "SLURM_STEP_TASKS_PER_NODE": "2,1(x2)",
    "SLURM_STEP_NODELIST": "gpu[007-008,011]",
}


def test_topology_of_a_task_of_a_slurm_step() -> None:
    assert read_topology(STEP) == Topology(3, 4, 0, 1, 2, "gpu007", 15000 + 123458 % 10000, scheme="Slurm")


def test_a_set_master_addr_precedes_the_hosts_of_slurm() -> None:
    place = read_topology({**STEP, "MASTER_ADDR": "login1", "MASTER_PORT": "4000"})
    assert (place.master_addr, place.master_port) == ("login1", 4000)


def test_a_slurm_step_without_a_node_list() -> None:
    place = read_topology({"SLURM_PROCID": "1", "SLURM_NTASKS": "2", "SLURM_LOCALID": "1"})
    assert place == Topology(1, 2, 1, 2, 0, scheme="Slurm")


def test_a_slurm_batch_script_is_a_single_process() -> None:
    batch = {"SLURM_JOB_ID": "7", "SLURM_NTASKS": "4", "SLURM_PROCID": "0", "SLURM_LOCALID": "0"}
    assert read_topology(batch) == Topology()


def test_a_launcher_inside_a_slurm_job_has_precedence() -> None:
    torchrun = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1"}
    mpi = {
        "OMPI_COMM_WORLD_RANK": "1",
        "OMPI_COMM_WORLD_SIZE": "2",
        "OMPI_COMM_WORLD_LOCAL_RANK": "1",
        "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    }
    hydra = {"PMI_RANK": "1", "PMI_SIZE": "2", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"}
    for inner, name in ((torchrun, "torchrun"), (mpi, "OpenMPI"), (hydra, "Intel MPI")):
        place = read_topology({**STEP, **inner})
        assert (place.rank, place.world_size, place.local_rank, place.scheme) == (1, 2, 1, name)


def test_slurm_variables_precede_its_pmi_variables() -> None:
    assert read_topology({**STEP, "PMI_RANK": "3", "PMI_SIZE": "4"}).scheme == "Slurm"
    place = read_topology({"PMI_RANK": "1", "PMI_SIZE": "2"})
    assert (place.rank, place.world_size, place.scheme) == (1, 2, "PMI")


@pytest.mark.parametrize("kind", ["OMPI_COMM_WORLD", "MV2_COMM_WORLD"])
def test_mpi_uses_localhost_on_one_node_and_requires_an_address_on_several(kind: str) -> None:
    one = {f"{kind}_RANK": "1", f"{kind}_SIZE": "2", f"{kind}_LOCAL_RANK": "1", f"{kind}_LOCAL_SIZE": "2"}
    assert (read_topology(one).master_addr, read_topology(one).master_port) == ("127.0.0.1", 29500)
    assert read_topology({**one, "MASTER_PORT": "5"}).master_port == 5
    assert read_topology({**one, f"{kind}_LOCAL_SIZE": "1", f"{kind}_LOCAL_RANK": "0"}).master_addr is None


@pytest.mark.parametrize(
    ("tasks", "of_each"),
    [("2", [2]), ("2(x3),1", [2, 2, 2, 1]), ("3,1", [3, 1]), ("many", [None]), ("2(x1)", [2])],
)
def test_tasks_of_each_node(tasks: str, of_each: list[int | None]) -> None:
    assert [tasks_of_node(tasks, node) for node in range(len(of_each))] == of_each
    assert tasks_of_node(tasks, len(of_each)) is None


@pytest.mark.parametrize(
    ("hosts", "first"),
    [
        ("a", "a"),
        ("a,b", "a"),
        ("n[1-3]", "n1"),
        ("n[08,2-4],m1", "n08"),
        ("r[1-2]-n[03-04]", "r1-n03"),
        ("a.b.c", "a.b.c"),
    ],
)
def test_first_host_of_a_list(hosts: str, first: str) -> None:
    assert first_host(hosts) == first


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        ({"SLURM_PROCID": "x"}, "SLURM_PROCID='x'"),
        ({"SLURM_PROCID": "4"}, "SLURM_PROCID=4"),
        ({"SLURM_NODEID": "x"}, "SLURM_NODEID='x'"),
        ({"SLURM_STEP_NUM_TASKS": "-1"}, "SLURM_STEP_NUM_TASKS='-1'"),
    ],
)
def test_invalid_slurm_variables_are_named(changed: dict[str, str], named: str) -> None:
    with pytest.raises(SettingError) as caught:
        read_topology({**STEP, **changed})
    assert named in str(caught.value)


def test_a_world_size_without_a_rank_is_refused() -> None:
    with pytest.raises(SettingError, match="RANK is not set"):
        read_topology({"WORLD_SIZE": "2"})
    assert read_topology({"WORLD_SIZE": "1"}).rank == 0


def test_topology_variables_are_read_back_equal() -> None:
    place = read_topology(STEP)
    again = read_topology(place.variables())
    assert again.variables() == place.variables()
    assert again.scheme == "torchrun"
