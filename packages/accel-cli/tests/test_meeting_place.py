"""Which machine serves the store of a run, by its own addresses."""

from __future__ import annotations

import pytest

from accel_cli.launch.addresses import seat_at
from accel_cli.launch.agent import _seated
from accel_testing.processes import ReservedPort

OPTIONS = ["--nnodes=2", "--rdzv-backend=c10d"]


def test_one_agent_of_a_machine_serves_and_the_others_join():
    reserved = ReservedPort()
    port = reserved.reserve()
    first, second = seat_at("127.0.0.1", port), seat_at("127.0.0.1", port)
    assert (first.serves, second.serves) == (True, False)
    assert first.address == second.address == "127.0.0.1"
    first.port.close()
    third = seat_at("127.0.0.1", port)
    assert third.serves
    third.port.close()
    reserved.release()


def test_a_machine_whose_address_is_another_one_joins():
    seat = seat_at("192.0.2.1", 29500)
    assert (seat.serves, seat.port) == (False, None)


@pytest.mark.parametrize("conf", ["", "timeout=60"])
def test_torch_is_told_who_serves(conf):
    given = [f"--rdzv-conf={conf}"] if conf else []
    made, port = _seated([*OPTIONS, "--rdzv-endpoint=192.0.2.1:29500", *given, "job.py", "--lr=1"])
    assert port is None
    told = next(argument for argument in reversed(made) if argument.startswith("--rdzv-conf="))
    assert told == f"--rdzv-conf={conf}{',' if conf else ''}is_host=false"
    assert made[-2:] == ["job.py", "--lr=1"]


def test_what_the_user_says_counts(monkeypatch):
    monkeypatch.setenv("PET_LOCAL_ADDR", "10.0.0.7")
    arguments = [*OPTIONS, "--rdzv-endpoint=192.0.2.1:29500", "--rdzv-conf=is_host=true", "job.py"]
    assert _seated(arguments) == (arguments, None)
