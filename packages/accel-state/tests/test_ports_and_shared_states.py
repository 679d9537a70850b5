"""Ports of this machine; the state's dictionaries as other libraries see them."""

from __future__ import annotations

import socket
from contextlib import suppress
from typing import Any

import pytest

from accel_state import AcceleratorState, PartialState, current, network
from accel_state.errors import SettingError
from accel_state.network import get_free_port, is_port_in_use
from accel_state.process import do_nothing, wait_for_everyone
from accel_state.run_state import is_initialized
from accel_testing.processes import ReservedPort

pytestmark = pytest.mark.usefixtures("fresh_state")


def test_is_port_in_use(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as listening:
        listening.bind(("localhost", 0))
        port = listening.getsockname()[1]
        assert not is_port_in_use(port)
        listening.listen()
        assert is_port_in_use(port)
        assert is_port_in_use(str(port))
        monkeypatch.setattr(network, "DEFAULT_PORT", port)
        assert is_port_in_use()
    assert not is_port_in_use(0)


@pytest.mark.parametrize("port", [-1, 65536, "http"])
def test_is_port_in_use_refuses_impossible_ports(port: Any) -> None:
    with pytest.raises(SettingError, match="from 0 to 65535"):
        is_port_in_use(port)


def test_get_free_port_returns_a_port_that_can_be_bound() -> None:
    def can_be_listened_on(port: int) -> bool:
        with socket.socket() as listening, suppress(OSError):
            listening.bind(("", port))
            return True
        return False

    # Another program of this machine may be given the port meanwhile, but not every time.
    ports = (get_free_port() for _ in range(20))
    assert any(not is_port_in_use(port) and can_be_listened_on(port) for port in ports)


def test_reserved_ports_differ_until_they_are_released() -> None:
    holders = [ReservedPort() for _ in range(20)]
    ports = [holder.reserve() for holder in holders]
    assert len(set(ports)) == 20
    taken = set(ports)
    one_more = ReservedPort()
    assert {one_more.reserve() for _ in range(50)}.isdisjoint(taken)
    for holder in (*holders, one_more):
        holder.release()


def test_a_port_in_use_is_not_reserved(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        listening.listen()
        port = listening.getsockname()[1]
        monkeypatch.setattr("accel_testing.processes._PORTS", (port, port))
        with pytest.raises(OSError, match="no free port"):
            ReservedPort().reserve()


def test_shared_state_is_empty_until_a_state_exists() -> None:
    assert PartialState._shared_state == {}
    assert AcceleratorState._shared_state == {}
    assert not is_initialized()

    PartialState(cpu=True)
    assert PartialState._shared_state["num_processes"] == 1
    assert AcceleratorState._shared_state == {}
    assert not is_initialized()

    state = AcceleratorState("bf16", cpu=True)
    assert state._shared_state["mixed_precision"] == "bf16"
    assert state._shared_state["device"].type == "cpu"
    assert is_initialized()
    current.clear()
    assert PartialState._shared_state == {}


def test_do_nothing_and_wait_for_everyone_of_one_process_return() -> None:
    assert do_nothing(1, a=2) is None
    wait_for_everyone()
    assert PartialState().num_processes == 1
