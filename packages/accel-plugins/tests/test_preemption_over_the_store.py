"""Requests to end a run: only processes of the run can make them, and a store that fails does not lose them."""

from __future__ import annotations

import atexit
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist

from accel_plugins.checkpoint import boundaries
from accel_plugins.checkpoint.boundaries import Preemption
from accel_state import PartialState, current
from accel_state.errors import CheckpointError
from accel_state.exit_codes import RESUME
from accel_state.network import SECRET_VARIABLE
from accel_state.transport.control import ControlStore
from accel_testing.processes import Processes

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="there are no such signals")

PATIENT = 250.0


def ends_after(watching: Preemption, seconds: float) -> int:
    """The exit code with which the run ends within some seconds, or 0."""
    until = time.monotonic() + seconds
    try:
        while time.monotonic() < until:
            watching.between_batches()
            time.sleep(0.01)
    except SystemExit as leaving:
        return int(leaving.code or 0)
    return 0


def watch_alone() -> tuple[bool, int, list[str], int]:
    PartialState(cpu=True)
    process = current.process()
    registered = atexit._ncallbacks()
    watching = Preemption(process, lambda: None)
    signal.raise_signal(signal.SIGTERM)
    code = ends_after(watching, PATIENT)
    watching.leave()
    threads = [thread.name for thread in threading.enumerate() if thread.name == "accel-preemption"]
    return process.transport.store() is not None, code, threads, atexit._ncallbacks() - registered


def test_one_process_with_a_store_leaves_neither_a_thread_nor_an_exit_handler(one: Processes) -> None:
    assert one.run(watch_alone) == [(True, RESUME, [], 0)]


def hear_a_forged_request() -> tuple[int, list[str], int]:
    os.environ[SECRET_VARIABLE] = "of this run"
    PartialState(cpu=True)
    process = current.process()
    store: Any = process.transport.store()
    reports: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: reports.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("accel_state.transport.control").addHandler(handler)
    watching = Preemption(process, lambda: None, deadline=PATIENT)
    try:
        if process.rank == 0:
            # Anybody who reaches the port of the store can do this.
            store.set("accel/preemption/asked", "")
        until = time.monotonic() + PATIENT
        while not reports and time.monotonic() < until:
            watching.between_batches()
            time.sleep(0.01)
        process.transport.barrier()
        first = ends_after(watching, 1.0)
        if process.rank == 1:
            signal.raise_signal(signal.SIGTERM)
        return first, reports, ends_after(watching, PATIENT)
    finally:
        watching.leave()
        process.transport.barrier()


def test_a_forged_request_is_ignored_and_reported_and_a_real_one_heard(two: Processes) -> None:
    for first, reports, second in two.run(hear_a_forged_request):
        assert first == 0
        assert len(reports) == 1
        assert "accel/preemption/asked" in reports[0]
        assert second == RESUME


class FailsOnce:
    """A store whose first requests fail, as when a connection breaks."""

    def __init__(self, store: Any) -> None:
        self.store, self.failures = store, 2

    def clone(self) -> FailsOnce:
        return self

    def __getattr__(self, name: str) -> Any:
        if name == "check" and self.failures:
            self.failures -= 1
            raise RuntimeError("Connection reset by peer")
        return getattr(self.store, name)


def end_over_a_store_that_fails_once() -> int:
    PartialState(cpu=True)
    process = current.process()
    inner = process.transport
    broken = FailsOnce(inner.store())
    transport = SimpleNamespace(
        rank=inner.rank,
        world_size=inner.world_size,
        store=inner.store,
        control=lambda: ControlStore(broken, inner.rank),
    )
    watching = Preemption(process._replace(transport=transport), lambda: None, deadline=PATIENT)  # type: ignore[arg-type]
    try:
        until = time.monotonic() + PATIENT
        while broken.failures and time.monotonic() < until:
            time.sleep(0.01)
        if process.rank == 0:
            signal.raise_signal(signal.SIGTERM)
        return ends_after(watching, PATIENT)
    finally:
        watching.leave()
        inner.barrier()


def test_a_request_is_heard_after_a_failure_of_the_store(two: Processes) -> None:
    assert two.run(end_over_a_store_that_fails_once) == [RESUME, RESUME]


HOST = """
import sys
import torch.distributed as dist
store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
print(store.port, flush=True)
sys.stdin.read()
"""


@pytest.mark.usefixtures("preloaded_python")
def test_a_request_while_the_store_is_gone_ends_in_a_typed_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(boundaries, "_PATIENCE", 1.0)
    host = subprocess.Popen([sys.executable, "-c", HOST], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert host.stdout is not None
    store = dist.TCPStore("127.0.0.1", int(host.stdout.readline()), is_master=False, wait_for_workers=False)
    transport = SimpleNamespace(store=lambda: store, control=lambda: ControlStore(store, 1))
    watching = Preemption(SimpleNamespace(rank=1, world_size=2, transport=transport), lambda: None)  # type: ignore[arg-type]
    try:
        host.kill()
        host.communicate()
        signal.raise_signal(signal.SIGTERM)
        with pytest.raises(CheckpointError) as caught:
            ends_after(watching, PATIENT)
        assert all((caught.value.failure, caught.value.obstacle, caught.value.remedy))
    finally:
        watching.leave()
