"""What a test leaves to the tests behind it in the same process: no recorder of its time."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from accel_state.watch.record import BEGAN, STATUS_RECORD
from accel_torch.hooks import PROCESS_HOOKS
from accel_torch.time_recorder import TimeRecorder


@pytest.fixture(autouse=True)
def no_recorder_afterwards() -> Iterator[None]:
    """The recorder of a process serves every later Accelerator, also those of other tests."""
    hooks, account, began = PROCESS_HOOKS[:], STATUS_RECORD.account, STATUS_RECORD.cells[BEGAN]
    yield
    for hook in PROCESS_HOOKS:
        if isinstance(hook, TimeRecorder) and hook not in hooks:
            hook.forget_steps()
    PROCESS_HOOKS[:], STATUS_RECORD.account, STATUS_RECORD.cells[BEGAN] = hooks, account, began
