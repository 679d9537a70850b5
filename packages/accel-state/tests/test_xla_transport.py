"""The transport between XLA devices, on two real processes: torch_xla's collectives are stood in for by those of gloo.

That the stand-ins are called as torch_xla's own functions are is checked where torch_xla is installed.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from types import ModuleType
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from accel_state.devices.xla import XLA
from accel_state.errors import NotOffered
from accel_state.process import PartialState
from accel_state.settings.installed import importable
from accel_state.topology import Topology
from accel_state.transport.xla import XLATransport
from accel_testing.processes import Processes


def all_gather(value: torch.Tensor, dim: int = 0) -> torch.Tensor:
    parts = [torch.empty_like(value) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, value)
    return torch.cat(parts, dim)


def all_reduce(reduce_type: str, inputs: list[torch.Tensor]) -> None:
    for tensor in inputs:
        dist.all_reduce(tensor, getattr(dist.ReduceOp, reduce_type.upper()))


@contextmanager
def stand_in(events: list[str], **runtime: Any) -> Iterator[None]:
    """torch_xla's modules, as far as they are used."""

    def told(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            events.append(name)
            return function(*args, **kwargs)

        return call

    model: Any = ModuleType("torch_xla.core.xla_model")
    model.all_gather, model.all_reduce = told("all_gather", all_gather), told("all_reduce", all_reduce)
    place: Any = ModuleType("torch_xla.runtime")
    for name, value in {"is_spmd": False, **runtime}.items():
        setattr(place, name, lambda value=value: value)
    core: Any = ModuleType("torch_xla.core")
    core.xla_model = model
    whole: Any = ModuleType("torch_xla")
    whole.core, whole.runtime, whole.sync = core, place, told("sync", lambda: None)
    names = {module.__name__: module for module in (whole, core, model, place)}
    with mock.patch.dict(sys.modules, names):
        yield


def transport() -> XLATransport:
    PartialState(cpu=True)
    return XLATransport(torch.device("cpu"), timedelta(seconds=60))


def every_collective(spmd: bool) -> dict[str, Any]:
    events: list[str] = []
    with stand_in(events, is_spmd=spmd):
        way, answers = transport(), {}
        mine = torch.tensor([[1.0, float("nan")], [3.0, 4.0]]) + way.rank
        output = torch.zeros(2, 2, 2)
        way.all_gather(output, mine).wait()
        answers["gathered"] = output[:, :, 0].tolist()
        for operation in ("sum", "max", "min"):
            reduced = torch.tensor([1, 5 * way.rank])
            way.all_reduce(reduced, operation).wait()  # type: ignore[arg-type]
            answers[operation] = reduced.tolist()
        into = torch.zeros(1)
        source = torch.tensor([2.0])
        way.all_reduce(source, "sum", into).wait()
        answers["into"] = (source.item(), into.item())
        sent = torch.tensor([True, False]) if way.rank == 1 else torch.tensor([False, False])
        way.broadcast(sent, 1).wait()
        answers["broadcast"] = sent.tolist()
        infinite = torch.tensor(float("inf") if way.rank == 0 else 7.0)
        way.broadcast(infinite, 1).wait()
        answers["from a finite one"] = infinite.item()
        part = torch.zeros(2)
        way.scatter(part, [torch.tensor([1.0, 2.0]), torch.tensor([3.0, 4.0])] if way.rank == 0 else None, 0).wait()
        answers["scattered"] = part.tolist()
        held = [torch.zeros(2) for _ in range(2)] if way.rank == 1 else None
        way.gather(held, torch.full((2,), float(way.rank)), 1).wait()
        answers["held"] = None if held is None else [one.tolist() for one in held]
        before = len(events)
        heads = torch.zeros(2, dtype=torch.int64)
        way.all_gather(heads, torch.tensor([way.rank]), header=True).wait()
        way.barrier()
        answers["heads"], answers["header events"] = heads.tolist(), events[before:]
        answers["events"] = events
        way.shutdown()
    return answers


@pytest.mark.parametrize("spmd", [False, True])
def test_every_collective_between_two_processes(two: Processes, spmd: bool) -> None:
    answers = two.run(every_collective, spmd)
    for rank, answer in enumerate(answers):
        assert answer["gathered"] == [[1.0, 3.0], [2.0, 4.0]]
        assert (answer["sum"], answer["max"], answer["min"]) == ([2, 5], [1, 5], [1, 0])
        assert answer["into"] == (2.0, 4.0)
        assert answer["broadcast"] == [True, False]
        assert answer["from a finite one"] == 7.0
        assert answer["scattered"] == [[1.0, 2.0], [3.0, 4.0]][rank]
        assert answer["held"] == (None if rank == 0 else [[0.0, 0.0], [1.0, 1.0]])
        assert answer["heads"] == [0, 1]


def test_each_collective_on_devices_is_a_graph_of_its_own(two: Processes) -> None:
    for answer in two.run(every_collective, False):
        events = answer["events"]
        for place, name in enumerate(events):
            if name != "sync":
                assert (events[place - 1], events[place + 1]) == ("sync", "sync")
        assert {"all_gather", "all_reduce"} < set(events)
        assert answer["header events"] == []


def test_processes_that_drive_several_devices_meet_on_the_host(two: Processes) -> None:
    assert [answer["events"] for answer in two.run(every_collective, True)] == [[], []]


@pytest.mark.skipif(not importable("torch_xla"), reason="needs torch_xla")
@pytest.mark.parametrize("stand_in_for", [all_gather, all_reduce])
def test_torch_xla_has_the_signatures_of_the_stand_ins(stand_in_for: Any) -> None:
    import torch_xla.core.xla_model as xla_model

    real = inspect.signature(getattr(xla_model, stand_in_for.__name__)).parameters
    mine = inspect.signature(stand_in_for).parameters
    assert list(real)[: len(mine)] == list(mine)


REPLICAS = {
    "process_count": 4,
    "world_size": 4,
    "addressable_runtime_device_count": 1,
    "global_ordinal": 2,
    "local_ordinal": 2,
    "local_process_count": 4,
    "host_index": 0,
    "get_master_ip": "10.0.0.1",
}


def topology_of_xla(topology: Topology, **runtime: Any) -> Topology:
    with stand_in([], **runtime):
        return XLA().runtime_topology(topology)


def test_replicas_have_the_place_that_the_runtime_gave_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MASTER_PORT", raising=False)
    monkeypatch.delenv("MASTER_ADDR", raising=False)
    place = topology_of_xla(Topology(), **REPLICAS)
    assert (place.rank, place.world_size, place.local_rank, place.local_world_size) == (2, 4, 2, 4)
    assert (place.master_addr, place.master_port, place.scheme) == ("10.0.0.1", 12355, "torch_xla")


def test_processes_that_drive_whole_hosts_are_counted_themselves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MASTER_ADDR", "head")
    monkeypatch.setenv("MASTER_PORT", "1234")
    hosts = REPLICAS | {"process_count": 2, "world_size": 1, "process_index": 1, "host_index": 1}
    place = topology_of_xla(Topology(), **hosts | {"addressable_runtime_device_count": 4})
    assert (place.rank, place.world_size, place.local_rank, place.local_world_size) == (1, 2, 0, 1)
    assert (place.node_rank, place.master_addr, place.master_port) == (1, "head", 1234)


def test_replicas_in_threads_are_refused() -> None:
    with pytest.raises(NotOffered, match="threads of one process"):
        topology_of_xla(Topology(), **REPLICAS | {"addressable_runtime_device_count": 2})


def test_processes_of_another_launcher_are_refused() -> None:
    alone = REPLICAS | {"process_count": 1, "world_size": 1}
    with pytest.raises(NotOffered, match="connects only processes that it started itself"):
        topology_of_xla(Topology(rank=1, world_size=2, scheme="torchrun"), **alone)
    launched = Topology(scheme="torchrun", master_addr="localhost", master_port=1)
    assert topology_of_xla(launched, **alone) == Topology(scheme="torchrun")
