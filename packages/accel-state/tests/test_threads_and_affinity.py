"""Threads and processors of a process: its part of the node, and those nearest to its device."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from accel_state import PartialState, processors, start
from accel_state.devices.cpu import CPU
from accel_state.errors import NotOffered
from accel_testing.processes import Processes

pytestmark = pytest.mark.usefixtures("fresh_state")


can_bind = pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="processes cannot be bound here")


def threads(told: str | None) -> tuple[int, int]:
    os.environ.pop("OMP_NUM_THREADS")
    if told is not None:
        os.environ["OMP_NUM_THREADS"] = told
    torch.set_num_threads(7)
    PartialState(cpu=True)
    return torch.get_num_threads(), processors.physical_cores()


def test_processes_of_a_node_share_its_cores(two: Processes) -> None:
    for found, cores in two.run(threads, None):
        assert found == max(1, cores // 2)


def test_omp_num_threads_is_respected(two: Processes) -> None:
    assert [found for found, _ in two.run(threads, "3")] == [7, 7]


def test_a_single_process_keeps_its_number_of_threads() -> None:
    torch.set_num_threads(3)
    PartialState(cpu=True)
    assert torch.get_num_threads() == 3


def layout(root: Path, nodes: dict[int, str], siblings: dict[int, str]) -> Path:
    for node, text in nodes.items():
        (root / f"node/node{node}").mkdir(parents=True)
        (root / f"node/node{node}/cpulist").write_text(text + "\n")
    for processor, text in siblings.items():
        (root / f"cpu/cpu{processor}/topology").mkdir(parents=True)
        (root / f"cpu/cpu{processor}/topology/thread_siblings_list").write_text(text + "\n")
    return root


def test_cores_and_numa_nodes_are_read_from_sys(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = layout(tmp_path, {0: "0-1,8", 10: "2-3", 2: ""}, {0: "0,2", 2: "0,2", 1: "1,3", 3: "1,3"})
    assert processors.numa_nodes(root) == {0: {0, 1, 8}, 10: {2, 3}}
    monkeypatch.setattr(processors, "available_processors", lambda: frozenset({0, 1, 2, 3, 8}))
    assert processors.physical_cores(root) == 3
    assert processors.numa_nodes(tmp_path / "nowhere") == {}


@can_bind
def test_this_machine_has_as_many_cores_as_processors_or_fewer() -> None:
    assert 1 <= processors.physical_cores() <= len(processors.available_processors()) == len(os.sched_getaffinity(0))


def bound() -> list[int]:
    allowed = sorted(os.sched_getaffinity(0))
    nodes = {index: frozenset({processor}) for index, processor in enumerate(allowed[:2])}
    kept = processors.numa_nodes
    vars(processors)["numa_nodes"] = lambda: nodes
    try:
        PartialState(cpu=True)
        return [allowed.index(processor) for processor in os.sched_getaffinity(0)]
    finally:
        vars(processors)["numa_nodes"] = kept


@can_bind
@pytest.mark.skipif(len(processors.available_processors()) < 2, reason="needs two processors")
def test_each_process_runs_on_the_processors_of_its_node(two: Processes) -> None:
    assert two.run(bound, environment={"ACCELERATE_CPU_AFFINITY": "1"}) == [[0], [1]]
    assert [len(found) >= 2 for found in two.run(bound)] == [True, True]


@can_bind
def test_an_unknown_numa_node_warns_and_leaves_the_process_unbound(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    before = os.sched_getaffinity(0)
    monkeypatch.setattr(processors, "numa_nodes", dict)
    start.bind(CPU(), 0)
    assert os.sched_getaffinity(0) == before
    assert "stays unbound" in caplog.text


def test_bind_raises_on_systems_without_affinity(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "sched_setaffinity", raising=False)
    monkeypatch.setenv("ACCELERATE_CPU_AFFINITY", "true")
    with pytest.raises(NotOffered, match="Unset ACCELERATE_CPU_AFFINITY"):
        PartialState(cpu=True)


class TwoDevices(CPU):
    """A family of two devices that are made of host memory; each is attached to a node of its own."""

    def device(self, local_rank: int) -> torch.device:
        return self.device_at(local_rank % 2)

    def device_at(self, index: int) -> torch.device:
        return torch.device("meta", index)

    def numa_node(self, index: int) -> int | None:
        return index


@pytest.mark.parametrize(("local_rank", "given", "node"), [(0, "meta:1", 1), (3, "", 1), (1, "", 1), (2, "", 0)])
def test_a_process_is_bound_to_the_node_of_its_device_not_of_its_local_rank(
    local_rank: int, given: str, node: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    bound_to: list[int] = []
    monkeypatch.setattr(start, "bind", lambda family, index, verbose: bound_to.append(family.numa_node(index)))
    monkeypatch.setattr(start, "wanted_family", lambda settings: TwoDevices())
    monkeypatch.setattr(
        TwoDevices, "runtime_topology", lambda self, topology: topology._replace(local_rank=local_rank), raising=False
    )
    monkeypatch.setenv("ACCELERATE_CPU_AFFINITY", "1")
    if given:
        monkeypatch.setenv("ACCELERATE_TORCH_DEVICE", given)
    start.start_process()
    assert bound_to == [node]


def test_a_single_process_does_not_count_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    class Counted(CPU):
        """A family whose devices are opened when they are counted, after which they cannot be arranged."""

        def count(self) -> int:
            raise AssertionError("the devices were counted")

    monkeypatch.setattr(start, "wanted_family", lambda settings: Counted())
    assert start.start_process().topology.world_size == 1
