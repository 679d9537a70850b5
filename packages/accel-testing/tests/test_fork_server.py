"""Processes of tests are forked from one that has imported what they need."""

from __future__ import annotations

import gc
import os
import sys
import threading

import pytest

from accel_testing.processes import Processes, fork_server_of

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


class Interrupted(Exception):
    """The timeout of a test, which comes anywhere."""


def interrupt(*_: object) -> None:
    raise Interrupted


def test_a_group_whose_end_was_interrupted_can_be_closed_again(monkeypatch: pytest.MonkeyPatch) -> None:
    with Processes(2) as group:
        group.run(imported)
        started = [member.process for member in group._members]
        with monkeypatch.context() as patched:
            patched.setattr(type(group._members[1]), "end", interrupt)
            with pytest.raises(Interrupted):
                group.close()
        group.close()
        assert [process.returncode for process in started] == [0, 0]
        assert group.run(imported) == [[], []]


def test_a_group_whose_start_was_interrupted_starts_as_a_whole_at_the_next_call(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with Processes(2) as group:
        with monkeypatch.context() as patched:
            patched.setattr(fork_server_of(1), "fork", interrupt)
            with pytest.raises(Interrupted):
                group.run(imported)
        assert not group._members
        assert group.run(imported) == [[], []]


def objects_that_collections_spare() -> int:
    return gc.get_freeze_count()


def test_collections_spare_what_was_there_before_the_tests(one: Processes) -> None:
    assert objects_that_collections_spare() > 50_000
    assert one.run(objects_that_collections_spare)[0] > 50_000
