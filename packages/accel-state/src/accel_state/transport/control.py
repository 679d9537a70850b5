"""Short signed messages between the processes of a run, through its store; every call respects its deadline.

A call of torch's store cannot be interrupted, and it blocks as long as the process that hosts the store is stopped or
unreachable. Therefore a thread of this module makes it, on a connection of its own. A request takes a free connection.
If there is none, it opens another one, and takes that or one that becomes free before: torch looks up the name of the
host for each connection, and waits seconds for a name server that does not answer. If the deadline of the caller
passes, it abandons the connection with its thread.

Any process that reaches the store's port can write to it. Messages are therefore signed, see
`accel_state.transport.signature`. A reader ignores a message that is not signed with the secret of the run, or is older
than one that it has already read, and warns once.
"""

from __future__ import annotations

import atexit
import logging
import os
import queue
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, wait
from contextlib import suppress
from datetime import timedelta
from typing import Any, Final, TypeVar
from weakref import WeakSet, finalize

import torch.distributed as dist

from accel_state.errors import NotReady, StoreUnreachable
from accel_state.transport.signature import Signer

__all__ = ("ControlStore", "find_absent")

T = TypeVar("T")

_logger: Final = logging.getLogger(__name__)

_REPLY_TIMEOUT_S: Final = 2.0
"""Seconds after which an answer counts as lost, in addition to the time that the request waits at the store."""

_CONNECT_TIMEOUT: Final = timedelta(seconds=3)
"""How long to try to reopen a connection, and to wait for a value that existed a moment ago."""

_MAX_ABANDONED_CONNECTIONS: Final = 3
"""Maximum number of abandoned threads with unanswered requests; beyond it, no further connection is opened."""

_EXIT_TIMEOUT_S: Final = 2.0
"""Seconds for which the interpreter, at its end, waits for open requests: a thread that returned from C++ later would
abort the process (before Python 3.14)."""

_OPENING_EXIT_TIMEOUT_S: Final = 12.0
"""The same for connections that are being opened: the time in which torch asks a name server twice in vain."""


class ControlStore:
    """The control messages of one process; several threads may send, read and wait at the same time.

    Args:
        store: the store of torch that the processes share, with the prefixes of the attempt; this only clones it.
        rank: index of this process, which signs its messages.
        scope: the prefix that `store` adds to keys; part of the signature.
        secret: secret of the run; by default that of the environment. If empty, messages are not authenticated.

    Example:
        >>> import torch.distributed as dist
        >>> control = ControlStore(dist.HashStore(), rank=0, secret="of the run")
        >>> control.set("greeting", b"hello", timeout=5)
        >>> control.get_many(["greeting", "absent"], timeout=5)
        {'greeting': b'hello'}
    """

    def __init__(self, store: Any, rank: int, scope: str = "", secret: str | None = None) -> None:
        self._store = store
        self._rank = rank
        self._signer = Signer(scope, secret)
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._free = _FreeConnections()
        self._abandoned: list[_Connection] = []
        self._reported = False

    def open(self, timeout: float) -> None:
        """Open a connection, so that no deadline of a first request has to allow for that.

        Raises:
            StoreUnreachable: that took longer than `timeout` seconds, or failed.
        """
        self._free.give(self._take(timeout))

    def set(self, key: str, value: bytes, timeout: float) -> None:
        """Write a message; it replaces this key's previous one.

        Raises:
            StoreUnreachable: the store did not answer within `timeout` seconds.
        """
        signed = self._signer.sign(key, self._rank, value)
        self._request(lambda store: store.set(key, signed), timeout)

    def compare_set(self, key: str, value: bytes, timeout: float) -> bytes:
        """Write a message if the key has none yet; return the message that the key has afterwards.

        Raises:
            StoreUnreachable: the store did not answer within `timeout` seconds.
        """
        signed = self._signer.sign(key, self._rank, value)
        raw = self._request(lambda store: bytes(store.compare_set(key, "", signed)), timeout)
        there = self._authentic({key: raw})
        if not there:
            # A program that does not belong to the run has written it.
            self._request(lambda store: store.set(key, signed), timeout)
        return there.get(key, value)

    def add(self, key: str, timeout: float) -> int:
        """Increment the counter of a key, and return it; not authenticated.

        Raises:
            StoreUnreachable: the store did not answer within `timeout` seconds.
        """
        return self._request(lambda store: int(store.add(key, 1)), timeout)

    def check(self, keys: Sequence[str], timeout: float) -> bool:
        """Whether all keys have a value; not authenticated, so read them with `get_many` afterwards.

        Raises:
            StoreUnreachable: the store did not answer within `timeout` seconds.
        """
        return self._request(lambda store: bool(store.check(list(keys))), timeout)

    def get_many(self, keys: Sequence[str], timeout: float) -> dict[str, bytes]:
        """The authentic messages of some keys, by key; keys without one are missing. Does not wait for any.

        Takes two requests if all keys have a value; if not, up to two more for each key.

        Raises:
            StoreUnreachable: the store did not answer within `timeout` seconds.
        """
        return self._authentic(self._request(lambda store: _read(store, list(keys)), timeout))

    def receive(self, keys: Sequence[str], timeout: float) -> dict[str, bytes]:
        """The authentic messages of some keys as soon as all have a value, none at the timeout; one request.

        The store itself waits. At the timeout, torch prints a warning. Polling with `check` would avoid it, at the cost
        of a request per poll: with 1,024 ranks that costs more than one line of output in a run that fails.

        Raises:
            StoreUnreachable: the store did not answer within `timeout` seconds.
        """
        wanted = list(keys)
        raw = self._request(lambda store: _await(store, wanted, timeout), timeout + _REPLY_TIMEOUT_S)
        return self._authentic(raw)

    def _authentic(self, raw: Mapping[str, bytes]) -> dict[str, bytes]:
        messages = {}
        for key, text in raw.items():
            with self._lock:
                message = self._signer.read(key, text)
            if message is None:
                self._report(key)
            else:
                messages[key] = message
        return messages

    def delete(self, keys: Iterable[str], timeout: float) -> None:
        """Remove keys, whether they exist or not; one request each.

        Raises:
            StoreUnreachable: the store did not answer within `timeout` seconds.
        """
        gone = list(keys)
        with self._lock:
            self._signer.forget(gone)

        def remove(store: Any) -> None:
            for key in gone:
                store.delete_key(key)

        self._request(remove, timeout)

    def _request(self, action: Callable[[Any], T], timeout: float) -> T:
        if os.getpid() != self._pid:
            raise NotReady(
                "Cannot send or read a message in a forked process.",
                "The connection to the store of the run belongs to the parent process.",
                "Send messages only from the processes that the launcher started.",
            )
        until = time.monotonic() + timeout
        connection = self._take(timeout)
        request: Future[T] = Future()
        connection.requests.put((request, action))
        try:
            answered = bool(wait([request], max(until - time.monotonic(), 0.0)).done)
        finally:
            if not request.done():
                # Also after an interrupt: it is unknown when this connection will be free again.
                self._abandoned.append(connection)
                connection.end()
        if not answered:
            raise _silent(timeout)
        error = request.exception()
        if isinstance(error, RuntimeError):
            connection.end()
            raise _unreachable(str(error).splitlines()[0]) from error
        # Connecting takes as long as the timeout of the cloned store: the next connection is cloned from this one.
        self._store = connection.store
        self._free.give(connection)
        return request.result()

    def _take(self, timeout: float) -> _Connection:
        """An open connection without a request."""
        claim = self._free.claim()
        try:
            if not claim.done():
                opening = self._open()
                if not wait([claim], max(timeout, 0.0)).done:
                    with self._lock:
                        self._abandoned.append(opening)
                    raise _silent(timeout)
        except BaseException:
            self._free.withdraw(claim)
            raise
        return self._usable(claim.result())

    def _open(self) -> _Connection:
        """Begin to open a connection."""
        with self._lock:
            self._abandoned = [connection for connection in self._abandoned if connection.thread.is_alive()]
            if len(self._abandoned) >= _MAX_ABANDONED_CONNECTIONS:
                raise _unreachable(f"It has not answered {len(self._abandoned)} requests yet.")
        try:
            opening = _Connection(self._store, self._free)
        except RuntimeError as error:
            # An interpreter that is ending starts no thread.
            raise _unreachable(str(error)) from error
        finalize(self, opening.end).atexit = False
        return opening

    def _usable(self, connection: _Connection) -> _Connection:
        with self._lock, suppress(ValueError):
            # It was open too late for the request for which it was opened.
            self._abandoned.remove(connection)
        if connection.error is not None:
            raise _unreachable(str(connection.error).splitlines()[0]) from connection.error
        return connection

    def _report(self, key: str) -> None:
        if not self._reported:
            self._reported = True
            _logger.warning(
                "Ignored a message in the store of this run, under %r: it is not signed with the secret of the run, or "
                "it is outdated. A program outside the run may be writing to its store. Further such messages are "
                "ignored without a warning.",
                key,
            )


def find_absent(check: Callable[[list[str]], bool], keys: Sequence[str], most: int) -> list[int]:
    """Positions of the first few keys without a value, found in few requests.

    Complete halves are not searched further, so one absent key of 1,024 takes at most 21 requests.

    Args:
        check: asks a store whether all of some keys have a value.
        keys: the keys to search.
        most: maximum number of positions to return.
    """
    absent: list[int] = []
    spans = [(0, len(keys))]
    while spans and len(absent) < most:
        low, high = spans.pop()
        if low == high or check(list(keys[low:high])):
            continue
        if high - low == 1:
            absent.append(low)
            continue
        middle = (low + high) // 2
        spans += [(middle, high), (low, middle)]
    return absent


def _await(store: Any, keys: list[str], seconds: float) -> dict[str, bytes]:
    """The values of the keys as soon as all exist; none at the timeout."""
    store.set_timeout(timedelta(seconds=max(seconds, 0.01)))
    try:
        return _values(store, keys)
    finally:
        store.set_timeout(_CONNECT_TIMEOUT)


def _read(store: Any, keys: list[str]) -> dict[str, bytes]:
    """The values of those keys that exist."""
    if len(keys) > 1 and (values := _read_all(store, keys)):
        return values
    return {key: value for key in keys for value in _read_all(store, [key]).values()}


def _read_all(store: Any, keys: list[str]) -> dict[str, bytes]:
    """The values of the keys if all exist, otherwise none."""
    return _values(store, keys) if store.check(keys) else {}


def _values(store: Any, keys: list[str]) -> dict[str, bytes]:
    """The values of the keys; none if one does not exist before the timeout of the connection."""
    try:
        if len(keys) > 1 and store.has_extended_api():
            return dict(zip(keys, map(bytes, store.multi_get(keys)), strict=True))
        return {key: bytes(store.get(key)) for key in keys}
    except dist.DistStoreError:
        return {}


def _unreachable(obstacle: str) -> StoreUnreachable:
    return StoreUnreachable(
        "Cannot exchange messages with the other processes.",
        f"The store of the run: {obstacle}",
        "Check the process that hosts the store (rank 0, or torchrun) and the network between the machines.",
    )


def _silent(timeout: float) -> StoreUnreachable:
    return _unreachable(f"It did not answer within {timeout:g} s.")


def _knock(store: Any) -> None:
    """Return when the host of a store accepts connections.

    torch tries for longer, prints its failures, and aborts a process that ends meanwhile; a Python socket does not.

    Raises:
        RuntimeError: the host accepts no connection.
    """
    while hasattr(store, "underlying_store"):
        store = store.underlying_store
    # Stores in files and in memory have no host.
    if hasattr(store, "host"):
        try:
            socket.create_connection((store.host, store.port), timeout=_CONNECT_TIMEOUT.total_seconds()).close()
        except OSError as error:
            raise RuntimeError(f"{store.host}:{store.port} cannot be reached: {error}") from error


class _FreeConnections:
    """The open connections without a request, and the requests that wait for one.

    A connection goes to the request that has waited longest. Each waiting request has begun to open a connection, so
    none waits for the end of another request, which may itself wait for the message of this one.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._free: list[_Connection] = []
        self._claims: deque[Future[_Connection]] = deque()

    def claim(self) -> Future[_Connection]:
        """A free connection, or the next one that is opened or becomes free."""
        claim: Future[_Connection] = Future()
        with self._lock:
            if self._free:
                claim.set_result(self._free.pop())
            else:
                self._claims.append(claim)
        return claim

    def give(self, connection: _Connection) -> None:
        """Add a connection that was opened, could not be opened, or has no request any more."""
        with self._lock:
            if self._claims:
                self._claims.popleft().set_result(connection)
            else:
                self._free.append(connection)

    def withdraw(self, claim: Future[_Connection]) -> None:
        """Take back a claim whose connection is not needed."""
        with self._lock:
            if claim in self._claims:
                self._claims.remove(claim)
                return
        self.give(claim.result())


class _Connection:
    """A connection and the only thread that uses it; the thread also opens it, because connecting blocks too.

    Args:
        store: a store to clone.
        free: gets the connection once it is open, or cannot be opened.

    Attributes:
        store: that store, then the connection.
        error: why it cannot be opened.
        opened: done when it is open, or cannot be opened.
        under_way: the request that the thread has begun; None between requests.
        requests: requests in the order in which they are made; None ends the thread.
    """

    __slots__ = ("__weakref__", "_free", "error", "opened", "requests", "store", "thread", "under_way")

    def __init__(self, store: Any, free: _FreeConnections) -> None:
        self.store = store
        self.error: Exception | None = None
        self.opened: Future[None] = Future()
        self.under_way: Future[Any] | None = None
        self.requests: queue.SimpleQueue[tuple[Future[Any], Callable[[Any], Any]] | None] = queue.SimpleQueue()
        self._free = free
        self.thread = threading.Thread(target=self._run, name="accel-control-store", daemon=True)
        self.thread.start()
        _connections.add(self)

    def end(self) -> None:
        """Let the thread end after its current request."""
        self.requests.put(None)

    def _run(self) -> None:
        try:
            _refuse_at_the_end()
            self.store = _connect(self.store)
        except Exception as error:
            self.error = error
        self.opened.set_result(None)
        self._free.give(self)
        if self.error is not None:
            return
        while (request := self.requests.get()) is not None:
            answer, action = request
            self.under_way = answer
            try:
                _refuse_at_the_end()
                answer.set_result(action(self.store))
            except BaseException as error:
                answer.set_exception(error)
            # A request for which no caller waits must not keep its references alive.
            self.under_way = None
            del request, answer, action


def _refuse_at_the_end() -> None:
    if _ending:
        raise RuntimeError("The interpreter is ending.")


def _connect(store: Any) -> Any:
    """A further connection to a store."""
    _knock(store)
    own = store.clone()
    own.set_timeout(_CONNECT_TIMEOUT)
    return own


_connections: Final[WeakSet[_Connection]] = WeakSet()

_ending: Final[list[bool]] = []
"""Not empty once the interpreter ends: then no request begins, for example of a thread that polls the store."""


@atexit.register
def _wait_for_requests() -> None:
    _ending.append(True)
    connections = list(_connections)
    under_way = [connection.under_way for connection in connections]
    wait([request for request in under_way if request is not None], _EXIT_TIMEOUT_S)
    wait([connection.opened for connection in connections], _OPENING_EXIT_TIMEOUT_S)
