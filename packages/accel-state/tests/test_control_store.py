"""Control messages: signed, and with deadlines that hold whatever the host of the store does."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch.distributed as dist

from accel_state import PartialState, current
from accel_state.errors import CollectiveError, NotReady, StoreUnreachable
from accel_state.transport.control import ControlStore, find_absent
from accel_testing.processes import Processes

HOST = """
import sys, time
import torch.distributed as dist
store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
print(store.port, flush=True)
sys.stdin.read()
"""

PATIENT = 250.0


class Host:
    """A process that hosts a store."""

    def __init__(self) -> None:
        environment = {**os.environ, "TORCH_CPP_LOG_LEVEL": "ERROR"}
        self.process = subprocess.Popen(
            [sys.executable, "-c", HOST], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
        )
        assert self.process.stdout is not None
        self.port = int(self.process.stdout.readline())

    def connect(self) -> dist.Store:
        return dist.TCPStore("127.0.0.1", self.port, is_master=False, wait_for_workers=False)

    def stop(self) -> None:
        """Returns when it has really stopped."""
        os.kill(self.process.pid, signal.SIGSTOP)
        os.waitid(os.P_PID, self.process.pid, os.WSTOPPED | os.WNOWAIT)

    def go_on(self) -> None:
        self.process.send_signal(signal.SIGCONT)

    def end(self) -> None:
        self.go_on()
        self.process.communicate()


@pytest.mark.parametrize("absent", [[], [0], [1023], [5, 6, 700]])
def test_absent_keys_are_found_in_few_requests(absent: list[int]) -> None:
    requests = []

    def check(keys: list[str]) -> bool:
        requests.append(keys)
        return not any(int(key) in absent for key in keys)

    assert find_absent(check, [str(number) for number in range(1024)], 16) == absent
    assert len(requests) <= 1 + 20 * len(absent)


def test_no_more_absent_keys_are_found_than_asked_for() -> None:
    assert find_absent(lambda _: False, [str(number) for number in range(1024)], 16) == list(range(16))


def connections() -> set[threading.Thread]:
    """The threads of all connections, those of earlier tests that have not ended yet among them."""
    return {thread for thread in threading.enumerate() if thread.name == "accel-control-store"}


@pytest.fixture(scope="module")
def lasting() -> Iterator[Host]:
    started = Host()
    yield started
    started.end()


@pytest.fixture
def host(lasting: Host) -> Iterator[Host]:
    yield lasting
    lasting.go_on()


def test_messages_of_other_processes_are_read() -> None:
    store = dist.HashStore()
    first, second = (ControlStore(store, rank, secret="s") for rank in range(2))
    first.set("a/0", b"zero \xff", PATIENT)
    second.set("a/1", b"", PATIENT)
    assert first.receive(["a/0", "a/1"], PATIENT) == {"a/0": b"zero \xff", "a/1": b""}
    assert second.get_many(["a/1", "absent"], PATIENT) == {"a/1": b""}
    assert second.check(["a/0", "a/1"], PATIENT)
    second.delete(["a/0", "absent"], PATIENT)
    assert not first.check(["a/0"], PATIENT)


def test_receive_returns_nothing_if_a_message_does_not_come_in_time() -> None:
    store = ControlStore(dist.HashStore(), 0, secret="s")
    store.set("here", b"1", PATIENT)
    assert store.receive(["here", "never"], 0.1) == {}


@pytest.mark.parametrize("forged", [b"", b"yes", b"accel1 - 1 9 yes", b"accel1 " + b"0" * 32 + b" 1 99 yes"])
def test_unsigned_messages_are_ignored_and_reported_once(forged: bytes, caplog: pytest.LogCaptureFixture) -> None:
    shared = dist.HashStore()
    shared.set("asked", forged)
    store = ControlStore(shared, 0, secret="s")
    with caplog.at_level(logging.WARNING):
        assert store.get_many(["asked"], PATIENT) == {}
        assert store.get_many(["asked"], PATIENT) == {}
    assert len(caplog.records) == 1
    assert "'asked'" in caplog.text


@pytest.mark.parametrize(
    "writer",
    [
        pytest.param({"secret": "another"}, id="secret of another run"),
        pytest.param({"secret": ""}, id="no secret"),
        pytest.param({"secret": "s", "scope": "attempt0"}, id="another attempt"),
    ],
)
def test_messages_of_other_runs_are_ignored(writer: dict[str, str]) -> None:
    shared = dist.HashStore()
    ControlStore(shared, 1, **writer).set("asked", b"yes", PATIENT)
    assert ControlStore(shared, 0, secret="s", scope="attempt1").get_many(["asked"], PATIENT) == {}


def test_messages_moved_to_another_key_are_ignored() -> None:
    shared = dist.HashStore()
    ControlStore(shared, 1, secret="s").set("vote/1", b"yes", PATIENT)
    shared.set("vote/2", shared.get("vote/1"))
    assert ControlStore(shared, 0, secret="s").get_many(["vote/1", "vote/2"], PATIENT) == {"vote/1": b"yes"}


def test_older_messages_played_again_are_ignored() -> None:
    shared = dist.HashStore()
    writer, reader = ControlStore(shared, 1, secret="s"), ControlStore(shared, 0, secret="s")
    writer.set("step", b"1", PATIENT)
    old = shared.get("step")
    writer.set("step", b"2", PATIENT)
    assert reader.get_many(["step"], PATIENT) == {"step": b"2"}
    shared.set("step", old)
    assert reader.get_many(["step"], PATIENT) == {}
    # A process that takes the rank of one that ended goes on after it.
    ControlStore(shared, 1, secret="s").set("step", b"3", PATIENT)
    assert reader.get_many(["step"], PATIENT) == {"step": b"3"}


def test_receive_leaves_out_a_forged_message() -> None:
    shared = dist.HashStore()
    shared.set("vote", b"forged")
    reader, writer = ControlStore(shared, 0, secret="s"), ControlStore(shared, 1, secret="s")
    assert reader.receive(["vote"], PATIENT) == {}
    writer.set("vote", b"mine", PATIENT)
    assert reader.receive(["vote"], PATIENT) == {"vote": b"mine"}


def test_processes_without_a_secret_read_each_others_messages() -> None:
    shared = dist.HashStore()
    ControlStore(shared, 1, secret="").set("vote", b"yes", PATIENT)
    assert ControlStore(shared, 0, secret="").get_many(["vote"], PATIENT) == {"vote": b"yes"}


def set_again(store: ControlStore, key: str, value: bytes) -> None:
    """Write a message to a store that answers again, as soon as an earlier request has its answer."""
    deadline = time.monotonic() + PATIENT
    while time.monotonic() < deadline:
        try:
            return store.set(key, value, 5)
        except StoreUnreachable:
            time.sleep(0.05)
    pytest.fail("the store answers again, and is not asked")


@pytest.mark.skipif(not hasattr(signal, "SIGSTOP"), reason="needs signals that stop a process")
@pytest.mark.parametrize("connected", [True, False], ids=["connected", "before the first request"])
def test_every_call_keeps_its_deadline_while_the_host_is_stopped(host: Host, connected: bool) -> None:
    before = connections()
    store = ControlStore(host.connect(), 0, secret="s")
    if connected:
        store.set("before", b"1", PATIENT)
    host.stop()
    calls = [
        lambda: store.check(["before"], 0.2),
        lambda: store.get_many(["before"], 0.2),
        lambda: store.receive(["before"], 0.2),
        lambda: store.delete(["before"], 0.2),
        lambda: store.check(["before"], 0.2),
        lambda: store.check(["before"], 0.2),
    ]
    begun = time.monotonic()
    for call in calls:
        with pytest.raises(StoreUnreachable) as caught:
            call()
        assert isinstance(caught.value, CollectiveError)
        assert all((caught.value.failure, caught.value.obstacle, caught.value.remedy))
    # torch's own deadline of the store is five minutes.
    assert time.monotonic() - begun < PATIENT
    assert len(connections() - before) <= 4
    host.go_on()
    set_again(store, "after", b"2")
    assert store.get_many(["after"], PATIENT) == {"after": b"2"}


def test_a_host_that_is_gone_is_reported_by_a_typed_error() -> None:
    host = Host()
    store = ControlStore(host.connect(), 0, secret="s")
    store.set("before", b"1", PATIENT)
    host.process.kill()
    host.process.communicate()
    with pytest.raises(StoreUnreachable):
        store.receive(["before"], PATIENT)


def test_a_request_that_waits_delays_no_other(host: Host) -> None:
    before = connections()
    store = ControlStore(host.connect(), 0, secret="s")
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(store.receive, ["vote of another thread"], PATIENT)
        while not connections() - before and not waiting.done():
            time.sleep(0.01)
        store.set("vote of another thread", b"yes", PATIENT)
        assert waiting.result() == {"vote of another thread": b"yes"}
    opened = connections() - before
    for number in range(3):
        store.set(f"later/{number}", b"", PATIENT)
    assert connections() - before == opened
    assert len(opened) <= 2


class SlowNameServer:
    """A store to which no further connection is opened until the name server answers.

    Attributes:
        asked: number of connections that were begun.
    """

    def __init__(self) -> None:
        self.store = dist.HashStore()
        self.asked = threading.Semaphore(0)
        self.answers = threading.Event()

    def clone(self) -> dist.Store:
        self.asked.release()
        assert self.answers.wait(PATIENT)
        return self.store.clone()


def test_a_connection_that_is_opened_first_may_take_longer_than_a_request() -> None:
    slow = SlowNameServer()
    store = ControlStore(slow, 0, secret="s")
    with ThreadPoolExecutor(1) as pool:
        opening = pool.submit(store.open, PATIENT)
        assert slow.asked.acquire(timeout=PATIENT)
        slow.answers.set()
        opening.result()
    slow.answers.clear()
    store.set("step", b"1", PATIENT)
    assert store.get_many(["step"], PATIENT) == {"step": b"1"}
    assert not slow.asked.acquire(blocking=False)


def test_a_request_takes_a_connection_that_becomes_free_while_another_is_being_opened() -> None:
    slow = SlowNameServer()
    slow.answers.set()
    store = ControlStore(slow, 0, secret="s")
    store.open(PATIENT)
    assert slow.asked.acquire(blocking=False)
    slow.answers.clear()
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(store.receive, ["vote"], PATIENT)
        second = pool.submit(store.check, ["vote"], PATIENT)
        # One of them has the only connection; if it is the first one, the vote ends its wait.
        slow.store.set("vote", b"")
        assert (first.result(), second.result()) in [({}, True), ({}, False)]
    slow.answers.set()


def test_threads_that_wait_for_each_others_messages_all_get_connections() -> None:
    missed = []

    def talk(store: ControlStore, sent: str, received: str) -> None:
        for number in range(3):
            store.set(f"{sent}/{number}", b"", PATIENT)
            if not store.receive([f"{received}/{number}"], 20):
                missed.append(received)

    for _ in range(200):
        store = ControlStore(dist.HashStore(), 0, secret="s")
        pairs = [(f"{pair}a", f"{pair}b") for pair in range(3)]
        threads = [
            threading.Thread(target=talk, args=(store, *names)) for pair in pairs for names in (pair, pair[::-1])
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert missed == []


def test_a_connection_that_opens_too_late_serves_later_requests() -> None:
    slow = SlowNameServer()
    store = ControlStore(slow, 0, secret="s")
    for _ in range(3):
        with pytest.raises(StoreUnreachable):
            store.set("step", b"1", 0.1)
    with pytest.raises(StoreUnreachable, match="has not answered 3 requests"):
        store.set("step", b"1", PATIENT)
    slow.answers.set()
    set_again(store, "step", b"1")
    assert store.get_many(["step"], PATIENT) == {"step": b"1"}
    assert [slow.asked.acquire(blocking=False) for _ in range(4)] == [True, True, True, False]


def messages_without_further_connections() -> list[bytes]:
    """What each process reads from all, while no name server answers since the process has started."""
    PartialState(cpu=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("accel_state.transport.control._connect", lambda _: threading.Event().wait())
        process = current.process()
        control = process.transport.control()
        assert control is not None
        control.set(f"greeting/{process.rank}", b"%d" % process.rank, PATIENT)
        return sorted(control.receive(["greeting/0", "greeting/1"], PATIENT).values())


def test_a_process_has_a_connection_for_messages_once_it_has_started() -> None:
    with Processes(2) as two:
        assert two.run(messages_without_further_connections) == [[b"0", b"1"]] * 2


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system does not fork")
def test_a_forked_process_is_refused() -> None:
    store = ControlStore(dist.HashStore(), 0, secret="s")
    store.set("a", b"1", PATIENT)
    child = os.fork()
    if child == 0:
        code = 4
        try:
            store.check(["a"], PATIENT)
        except NotReady:
            code = 3
        finally:
            # Whatever happens, the child does not go on with the tests of its parent.
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 3


def test_a_process_exits_without_an_error_while_its_store_is_stopped(host: Host) -> None:
    script = f"""
import torch.distributed as dist
from accel_state.errors import StoreUnreachable
from accel_state.transport.control import ControlStore
store = ControlStore(dist.TCPStore("127.0.0.1", {host.port}, is_master=False, wait_for_workers=False), 0, secret="s")
store.set("a", b"1", 60)
print("ready", flush=True)
input()
try:
    store.check(["a"], 0.5)
except StoreUnreachable:
    print("left", flush=True)
"""
    ending = subprocess.Popen([sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert ending.stdout is not None
    assert ending.stdout.readline() == "ready\n"
    host.stop()
    output, _ = ending.communicate("\n", timeout=PATIENT)
    assert (output, ending.returncode) == ("left\n", 0)


OPENING = """
import threading, time
import torch.distributed as dist
from accel_state.errors import StoreUnreachable
from accel_state.transport.control import ControlStore

class SlowNameServer:
    def clone(self):
        begun.set()
        time.sleep(4)
        print("opened", flush=True)
        return dist.HashStore()

begun = threading.Event()
try:
    ControlStore(SlowNameServer(), 0, secret="s").check(["a"], 0.1)
except StoreUnreachable:
    begun.wait()
    print("left", flush=True)
"""


def test_a_process_waits_at_its_end_for_a_connection_that_is_being_opened() -> None:
    ended = subprocess.run([sys.executable, "-c", OPENING], capture_output=True, text=True, timeout=PATIENT)
    assert (ended.stdout, ended.returncode) == ("left\nopened\n", 0), ended.stderr


POLLING = """
import threading
import torch.distributed as dist
from accel_state.errors import StoreUnreachable
from accel_state.transport.control import ControlStore
store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
polling = threading.Barrier(9)

def poll():
    control = ControlStore(store, rank=0, secret="of the run")
    control.check(["absent"], 250)
    polling.wait()
    try:
        while True:
            control.check(["absent"], 250)
    except StoreUnreachable:
        pass

for _ in range(8):
    threading.Thread(target=poll, daemon=True).start()
polling.wait()
"""


def test_threads_that_poll_do_not_abort_a_process_at_its_end() -> None:
    ended = subprocess.run(
        [sys.executable, "-c", POLLING], capture_output=True, text=True, timeout=PATIENT, check=False
    )
    assert (ended.returncode, ended.stdout) == (0, "")
