"""The place of a process, read from the variables of each kind of launcher."""

from __future__ import annotations

import pytest

from accel_state.errors import SettingError
from accel_state.topology import Topology, read_topology


def test_read_topology_without_launcher_variables_is_a_single_process() -> None:
    place = read_topology({})
    assert place == Topology()
    assert not place.distributed
    assert place.is_main
    assert place.is_last


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        (
            {
                "RANK": "3",
                "WORLD_SIZE": "4",
                "LOCAL_RANK": "1",
                "LOCAL_WORLD_SIZE": "2",
                "MASTER_ADDR": "host",
                "MASTER_PORT": "29500",
                "TORCHELASTIC_RESTART_COUNT": "2",
                "TORCHELASTIC_USE_AGENT_STORE": "True",
            },
            Topology(3, 4, 1, 2, 1, "host", 29500, 2, "torchrun"),
        ),
        (
            # Each attempt has a store of its own, and machines that replaced others count fewer restarts.
            {
                "RANK": "1",
                "WORLD_SIZE": "2",
                "TORCHELASTIC_RESTART_COUNT": "2",
                "TORCHELASTIC_USE_AGENT_STORE": "False",
            },
            Topology(1, 2, 1, 2, 0, None, None, 0, "torchrun"),
        ),
        (
            # By DeepSpeed's launcher, on the second of two machines with different numbers of processes.
            {
                "RANK": "3",
                "WORLD_SIZE": "4",
                "LOCAL_RANK": "0",
                "LOCAL_SIZE": "1",
                "CROSS_RANK": "1",
                "CROSS_SIZE": "2",
            },
            Topology(3, 4, 0, 1, 1, None, None, scheme="torchrun"),
        ),
        ({"RANK": "1", "WORLD_SIZE": "2"}, Topology(1, 2, 1, 2, 0, scheme="torchrun")),
        (
            {
                "OMPI_COMM_WORLD_RANK": "1",
                "OMPI_COMM_WORLD_SIZE": "2",
                "OMPI_COMM_WORLD_LOCAL_RANK": "0",
                "OMPI_COMM_WORLD_LOCAL_SIZE": "1",
            },
            Topology(1, 2, 0, 1, 1, None, 29500, scheme="OpenMPI"),
        ),
        (
            {"PMI_RANK": "1", "PMI_SIZE": "2", "MPI_LOCALRANKID": "1"},
            Topology(1, 2, 1, 2, 0, None, 29500, scheme="Intel MPI"),
        ),
        (
            {"MV2_COMM_WORLD_RANK": "0", "MV2_COMM_WORLD_SIZE": "2", "MV2_COMM_WORLD_LOCAL_RANK": "0"},
            Topology(0, 2, 0, 2, 0, None, 29500, scheme="MVAPICH"),
        ),
    ],
)
def test_read_topology_of_each_launcher(environ: dict[str, str], expected: Topology) -> None:
    assert read_topology(environ) == expected


@pytest.mark.parametrize(
    ("environ", "named"),
    [
        ({"RANK": "2", "WORLD_SIZE": "2"}, "RANK=2"),
        ({"RANK": "one", "WORLD_SIZE": "2"}, "RANK='one'"),
        ({"RANK": "-1", "WORLD_SIZE": "2"}, "RANK='-1'"),
        ({"RANK": "0", "WORLD_SIZE": "0"}, "WORLD_SIZE=0"),
        ({"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "3"}, "LOCAL_RANK=3"),
        ({"RANK": "0", "WORLD_SIZE": "2", "MASTER_PORT": "http"}, "MASTER_PORT='http'"),
    ],
)
def test_read_topology_names_invalid_variables(environ: dict[str, str], named: str) -> None:
    with pytest.raises(SettingError) as caught:
        read_topology(environ)
    assert named in str(caught.value)
