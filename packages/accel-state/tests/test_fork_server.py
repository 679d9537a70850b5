"""Processes of tests are forked from one that has imported what they need."""

from __future__ import annotations

import gc
import os
import sys
import threading

import pytest

from accel_state.testing.processes import Processes

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="there are new interpreters instead")


def imported(*names: str) -> list[str]:
    return [name for name in names if name in sys.modules]


def test_what_the_tests_have_imported_of_torch_is_imported_before_the_fork() -> None:
    import torch.distributed.checkpoint.state_dict as found

    with Processes(2) as group:
        assert group.run(imported, found.__name__, "torch.no_such_module") == [[found.__name__]] * 2


def import_alone() -> int:
    import torch.distributed.checkpoint.state_dict  # noqa: F401

    return threading.active_count()


def test_a_process_begins_with_one_thread() -> None:
    with Processes(1) as group:
        assert group.run(import_alone) == [1]


def test_a_group_ends_although_its_pipe_stays_open_elsewhere() -> None:
    with Processes(1) as group:
        group.run(imported)
        (member,) = group._members
        held = os.dup(member._calls.fileno())  # as a process has it that the tests forked
    os.close(held)
    assert member.process.returncode == 0


def objects_that_collections_spare() -> int:
    return gc.get_freeze_count()


def test_collections_spare_what_was_there_before_the_tests(one: Processes) -> None:
    assert objects_that_collections_spare() > 50_000
    assert one.run(objects_that_collections_spare)[0] > 50_000
