"""What processes told each other through the store is gone when their state is made anew."""

from __future__ import annotations

from accel_state import PartialState, current
from accel_testing.processes import Processes


def told_before_and_after() -> list[bool]:
    PartialState(cpu=True)
    found = []
    for _ in range(3):
        store = current.process().transport.store()
        assert store is not None
        found.append(store.check(["key"]))
        PartialState().wait_for_everyone()
        store.set("key", "told")
        found.append(store.check(["key"]))
        PartialState._reset_state()
        PartialState(cpu=True)
    return found


def test_a_new_state_does_not_read_store_keys_of_the_old_one(two: Processes) -> None:
    assert two.run(told_before_and_after) == [[False, True] * 3] * 2
