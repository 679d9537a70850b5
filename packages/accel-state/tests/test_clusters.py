"""What each batch system says about the machines of a run, and when it says nothing."""

from __future__ import annotations

import pytest

from accel_state import library
from accel_state.clusters import ClusterEnvironment, Machines, cluster_environments, machines_of
from accel_state.errors import SettingError
from accel_state.plugins import Plugin

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


def machines(environ: dict[str, str], host: str = "node") -> Machines:
    found = (cluster.machines() for cluster in cluster_environments(environ, host))
    return next((one for one in found if one is not None), Machines())


def values(environ: dict[str, str], host: str = "node") -> dict[str, object]:
    return {name: given.value for name, given in machines(environ, host).values.items()}


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
        (
            {"SM_HOSTS": '["algo-2", "algo-1"]', "SM_CURRENT_HOST": "algo-2"},
            {"num_machines": 2, "machine_rank": 1, "main_process_ip": "algo-1"},
        ),
        ({"SM_HOSTS": '["algo-1"]', "SM_CURRENT_HOST": "algo-1"}, {}),
        ({"SM_HOSTS": "algo-1", "SM_CURRENT_HOST": "algo-1"}, {}),
        ({**SLURM, **OPEN_MPI}, {"num_machines": 2, "machine_rank": 1}),
    ],
)
def test_machines_of_each_batch_system(environ: dict[str, str], expected: dict[str, object]) -> None:
    assert values(environ) == expected


def test_values_name_their_variables() -> None:
    found = machines_of(SLURM)
    assert found.system == "Slurm"
    assert found.values["num_machines"].origin == "$SLURM_STEP_NUM_NODES"
    assert found.values["main_process_ip"].origin == "$SLURM_STEP_NODELIST"


JOBSET = {
    "JOB_COMPLETION_INDEX": "1",
    "JOBSET_NAME": "train",
    "JOBSET_JOB_INDEX": "2",
    "JOBSET_REPLICAS": "3",
    "JOBSET_PODS": "4",
    "JOBSET_RESTART_ATTEMPT": "5",
}


def test_pods_of_a_jobset_are_machines() -> None:
    found = machines(JOBSET, "train-slice-2-1")
    assert (found.system, found.restarts) == ("JobSet", 5)
    assert {name: given.value for name, given in found.values.items()} == {
        "num_machines": 12,
        "machine_rank": 9,
        "main_process_ip": "train-slice-0-0.train",
    }


def test_the_subdomain_of_a_jobset_and_its_main_pod() -> None:
    network = {**JOBSET, "JOBSET_SUBDOMAIN": "net", "JOB_COMPLETION_INDEX": "0", "JOBSET_JOB_INDEX": "0"}
    found = values(network, "train-slice-0-0.net.namespace.svc")
    assert (found["machine_rank"], found["main_process_ip"]) == (0, "train-slice-0-0.net")


def test_one_job_of_single_pods_needs_no_numbers() -> None:
    alone = {"JOB_COMPLETION_INDEX": "0", "JOBSET_JOB_INDEX": "0"}
    assert values(alone, "train-job-0-0") == {"num_machines": 1, "machine_rank": 0}
    assert values({**JOBSET, "LOCAL_RANK": "0"}, "train-slice-2-1") == {}


@pytest.mark.parametrize("name", ["JOBSET_JOB_INDEX", "JOBSET_PODS", "JOB_COMPLETION_INDEX"])
def test_a_label_of_a_jobset_that_is_no_number_is_named(name: str) -> None:
    with pytest.raises(SettingError, match=f"{name}='x'"):
        machines({**JOBSET, name: "x"})


@pytest.mark.parametrize(
    "environ",
    [
        {**SLURM, "SLURM_STEP_NUM_TASKS": "16", "SLURM_STEP_TASKS_PER_NODE": "4(x4)"},
        {**OPEN_MPI, "OMPI_COMM_WORLD_SIZE": "8", "OMPI_COMM_WORLD_LOCAL_SIZE": "4"},
    ],
)
def test_several_launchers_on_a_machine_are_counted(environ: dict[str, str]) -> None:
    found = machines(environ)
    assert (found.values, found.launchers) == ({}, 4)


def test_a_variable_that_is_no_number_is_named() -> None:
    with pytest.raises(SettingError, match="SLURM_NODEID='x'"):
        machines({**SLURM, "SLURM_NODEID": "x"})


class Own(ClusterEnvironment):
    """A system of another package, which also starts every process."""

    name = "Own"
    rank_names = ("OWN_RANK",)
    world_size_names = ("OWN_SIZE",)


def test_a_system_of_another_package_is_asked_first(monkeypatch: pytest.MonkeyPatch) -> None:
    from accel_state import clusters
    from accel_state.topology import read_topology

    other = Plugin("accel.clusters", "own", f"{__name__}:Own", "other 1.0")
    group = type(clusters.CLUSTERS)(
        "accel.clusters", "cluster environment", built_in=(*clusters.CLUSTERS.built_in, other)
    )
    monkeypatch.setattr(clusters, "CLUSTERS", group)
    # Loading it makes the package of this module a library, which later tests must not see.
    monkeypatch.setattr(library, "_libraries", set(library._libraries))
    topology = read_topology({"OWN_RANK": "1", "OWN_SIZE": "2", "RANK": "0", "WORLD_SIZE": "4"})
    assert (topology.rank, topology.world_size, topology.scheme, topology.distributed) == (1, 2, "Own", True)
