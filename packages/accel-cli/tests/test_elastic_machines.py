"""A range of machines: how it is read, and which launchers take it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from accel_cli.launch.request import check_request, request_of
from accel_cli.launch.settings import MACHINES, fewest_machines
from accel_state.errors import Conflict


@pytest.mark.parametrize(("text", "fewest", "most"), [("4", 4, 4), ("1:4", 1, 4), ("2:2", 2, 2), (" 1:2 ", 1, 2)])
def test_a_range_is_its_largest_number_and_knows_its_least(text: str, fewest: int, most: int) -> None:
    machines = MACHINES.parse(text)
    assert (machines, fewest_machines(machines)) == (most, fewest)
    assert MACHINES.parse(MACHINES.format(machines)) == most
    assert fewest_machines(MACHINES.parse(MACHINES.format(machines))) == fewest


@pytest.mark.parametrize("text", ["0", "0:4", "4:1", "1:", ":4", "1:2:3", "-1", "many"])
def test_what_is_no_range_is_refused(text: str) -> None:
    with pytest.raises(ValueError):
        MACHINES.parse(text)


def test_a_launcher_that_needs_all_machines_refuses_a_range(tmp_path) -> None:
    home = {"HF_HOME": str(tmp_path)}
    address = "--main_process_ip=127.0.0.1"
    ranged = request_of(["--nnodes=1:4", address, "job.py"], home)
    with pytest.raises(Conflict, match=r"num_machines=1:4 \(--num_machines\)"):
        check_request(ranged)
    check_request(replace(ranged, launcher=replace(ranged.launcher, elastic=True)))
    check_request(request_of(["--nnodes=4", address, "job.py"], home))
