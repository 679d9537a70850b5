"""The thread that publishes where a process is, after that process was forked."""

from __future__ import annotations

import os
import threading

import pytest
from torch.distributed import HashStore

from accel_state.transport.control import ControlStore
from accel_state.watch.calls import CallLog
from accel_state.watch.monitor import HangMonitor

pytestmark = [
    pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork"),
    # Python 3.12 and later: there are threads, which is what this is about.
    pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning"),
]


class Slow(ControlStore):
    """A connection whose messages are taken only when it is let."""

    def __init__(self) -> None:
        super().__init__(HashStore(), 0, secret="of the run")
        self.asked = threading.Event()
        self.let = threading.Event()

    def set(self, key: str, value: bytes, timeout: float) -> None:
        self.asked.set()
        self.let.wait()


def test_a_child_forked_while_the_thread_works_can_end() -> None:
    store = Slow()
    monitor = HangMonitor(CallLog(), store, 0, 2)
    assert store.asked.wait(250)
    child = os.fork()
    if child == 0:
        code = 1
        try:
            monitor.stop()
            code = 0
        finally:
            # Whatever happens, the child does not go on with the tests of its parent.
            os._exit(code)
    ended = threading.Event()
    status: list[int] = []

    def wait() -> None:
        status.append(os.waitpid(child, 0)[1])
        ended.set()

    threading.Thread(target=wait, daemon=True).start()
    if not ended.wait(250):
        os.kill(child, 9)
    store.let.set()
    monitor.stop()
    assert ended.wait(250)
    assert status == [0]
