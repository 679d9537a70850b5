"""The protocol of a checked call between processes.

    with HeaderCall(transport, "gather_object") as call:    # logged; calls of other threads wait
        rows = call.all_gather_bytes(data)                  # headers exchanged and compared, then the data

    pending = start_all_gather_bytes(transport, "DataLoader.__next__", data)    # the same, without waiting
    rows = pending.wait()

Backends do not check sizes: on a mismatch gloo aborts the process, waits for ever, or returns garbage. So in each call
every process first sends an eager header, whose size depends on the number of processes alone. It says what the call is
about, and carries as much of the data as fits. Processes that call different things see so in the headers, and all of
them raise the same error. A process that fails before it sends its header sends a refusal in place of it, so that the
others raise too instead of waiting. All further messages have sizes that the headers have shown to be equal.

The steps of a stream of messages travel without headers. Each process counts them, and every header has the count.
"""

from __future__ import annotations

import json
import struct
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from datetime import timedelta
from hashlib import blake2b
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import torch

from accel_state.errors import AccelError, ShapeMismatch
from accel_state.hang_report.call_log import CallLog, Location, call_text, caller, format_ranks, locate
from accel_state.transport.base import Transport, Work

if TYPE_CHECKING:
    from accel_state.hang_report.monitor import HangMonitor

__all__ = (
    "ALIGNMENT",
    "HEADER_BYTES",
    "CallDescription",
    "EagerHeader",
    "HeaderCall",
    "HeaderFields",
    "PendingCall",
    "ProtocolState",
    "add_group_state",
    "barrier",
    "eager_header_bytes",
    "fingerprint_of",
    "mismatch_error",
    "protocol_state",
    "share_protocol_state",
    "start_all_gather_bytes",
)

# ---------------------------------------------------------------------- the eager header

ALIGNMENT: Final = 16
"""Bytes; the size of complex128, so that every dtype can be read where a segment of a payload begins."""

_LAYOUT: Final = struct.Struct("<QQQQ")
HEADER_BYTES: Final = _LAYOUT.size
"""Bytes of the fields before the payload, a multiple of `ALIGNMENT`."""

_COMPARED_BYTES: Final = 16
"""Bytes at the start of the header that must be equal on all processes: fingerprint and flags."""

_LARGEST: Final = 48 * 1024
_SMALLEST: Final = 1024
_RECEIVED: Final = 256 * 1024


def eager_header_bytes(world_size: int) -> int:
    """Bytes of an eager header. It shrinks with the number of processes, because every process receives all of them.

    48 KiB for up to 5 processes, 256 KiB in all for up to 256, and 1 KiB for each beyond: 1 MiB for 1,024. The
    largest fits into one segment of the loopback device (64 KiB); a second segment costs a third more.
    """
    fair = _RECEIVED // world_size // ALIGNMENT * ALIGNMENT
    return max(_SMALLEST, min(_LARGEST, fair))


class HeaderFields(NamedTuple):
    """What the call of one process is about.

    Args:
        fingerprint: hash of operation, arguments, structure, shapes and dtypes.
        flags: 0, or what else must be equal on all processes.
        length: bytes of payload.
        number: number of the call in the log of that process.
    """

    fingerprint: int
    flags: int
    length: int
    number: int


class EagerHeader:
    """The buffers of one process for its eager headers: the one that it sends, and those that it receives.

    Args:
        world_size: number of processes.

    Attributes:
        capacity: bytes of payload that fit.
        generation: how often the buffers were renewed; views of them are of use until it changes.
    """

    __slots__ = (
        "_compared",
        "_flat",
        "_memory",
        "_received",
        "_sent",
        "_size",
        "_table",
        "_world_size",
        "capacity",
        "generation",
    )

    def __init__(self, world_size: int) -> None:
        self._world_size = world_size
        self._size = eager_header_bytes(world_size)
        self.capacity = self._size - HEADER_BYTES
        self.generation = 0
        self.renew()

    def renew(self) -> None:
        """Take new buffers; a collective that was given up may still write to the old ones."""
        # Buffers made in inference mode could not be written to outside of it.
        with torch.inference_mode(False):
            self._sent = torch.zeros(self._size, dtype=torch.uint8)
            self._received = torch.empty(self._world_size, self._size, dtype=torch.uint8)
            # Kept, because a thread of the backend would release a view made for a call, and take the GIL for it.
            self._flat = self._received.view(-1)
        self.generation += 1
        self._memory = memoryview(self._sent.numpy().data)
        self._table = self._received.numpy()
        self._compared = self._table[:, :_COMPARED_BYTES]

    def own_payload(self, length: int) -> torch.Tensor:
        """Where this process writes its payload, uint8 of shape (length,)."""
        return self._sent.narrow(0, HEADER_BYTES, length)

    def write(self, data: bytes) -> None:
        """Put bytes into the payload of this process."""
        self._memory[HEADER_BYTES : HEADER_BYTES + len(data)] = data

    def all_gather(self, transport: Transport, fields: HeaderFields) -> Work:
        """Start to send the header of this process and to receive all."""
        _LAYOUT.pack_into(self._memory, 0, fields.fingerprint, fields.flags, fields.length, fields.number)
        return transport.all_gather(self._flat, self._sent, header=True)

    def are_equal(self) -> bool:
        """Whether the fingerprints and flags that were received are those of this process."""
        return self._compared.tobytes() == bytes(self._memory[:_COMPARED_BYTES]) * self._world_size

    def lengths(self) -> list[int]:
        """Bytes of payload that each process announced."""
        return [HeaderFields(*_LAYOUT.unpack_from(row)).length for row in self._table]

    def payloads(self, length: int) -> torch.Tensor:
        """The payloads that were received, uint8 of shape (world_size, length); the next call overwrites them."""
        return self._received.narrow(1, HEADER_BYTES, length)

    def payload_of(self, rank: int, length: int) -> bytes:
        """A copy of the payload of one process."""
        return self._table[rank, HEADER_BYTES : HEADER_BYTES + length].tobytes()


# ---------------------------------------------------------------------- descriptions, and how they differ

_PROTOCOL_VERSION: Final = 1
"""Part of every fingerprint, so that processes with different versions of the protocol notice each other."""

_MOST_LEAVES: Final = 5
_ABSENT: Final = "absent"

_SAME_CALL: Final = (
    "Let every process reach the same calls in the same order. A branch on the rank around one of them is the usual "
    "cause."
)
_PAD: Final = "Call pad_across_processes() on the data first, or gather_object() if the shapes are meant to differ."


class CallDescription(NamedTuple):
    """What one process called, in words; the processes exchange it only when the fingerprints differ.

    Args:
        operation: name of the collective.
        arguments: those that must be equal, as text by name.
        leaves: path, shape and dtype of each leaf.
        location: the line of the user's code.
        refusal: why the process could not take part, in the three parts of an error; None when it could.
        group: what messages call the processes of the call; empty when they are all of the run.
        messages: steps of streams of messages that the process has completed.
    """

    operation: str
    arguments: dict[str, str]
    leaves: list[tuple[str, str, str]]
    location: str = ""
    refusal: tuple[str, str, str] | None = None
    group: str = ""
    messages: int = 0

    def to_json(self) -> bytes:
        """The description as it travels."""
        return json.dumps(self._asdict()).encode()

    @classmethod
    def from_json(cls, text: bytes) -> CallDescription:
        """The description that `to_json` wrote."""
        fields = json.loads(text)
        fields["leaves"] = [tuple(leaf) for leaf in fields["leaves"]]
        fields["refusal"] = fields["refusal"] and tuple(fields["refusal"])
        return cls(**fields)


def fingerprint_of(description: CallDescription) -> int:
    """64 bits that are equal on all processes for equal descriptions; Python's own `hash` differs between them."""
    fields = (_PROTOCOL_VERSION, description.operation, description.arguments, description.leaves)
    text = json.dumps(fields, sort_keys=True)
    return int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "little")


def mismatch_error(descriptions: Sequence[CallDescription], ranks: Sequence[int] = ()) -> ShapeMismatch:
    """The error for calls that differ; equal on all processes.

    Args:
        descriptions: what each process called.
        ranks: of the processes in the run; by default from 0.
    """
    ranks = ranks or range(len(descriptions))
    return (
        _refusal_error(descriptions, ranks)
        or _operation_error(descriptions, ranks)
        or _step_error(descriptions, ranks)
        or _argument_error(descriptions, ranks)
        or _leaf_error(descriptions, ranks)
        or ShapeMismatch(
            f"Cannot run {_call_text(descriptions[0])}: the processes disagree on the protocol.",
            "They run different versions of this library or of Python.",
            "Install the same versions everywhere.",
        )
    )


def _call_text(call: CallDescription) -> str:
    return call_text(call.operation, call.group, call.location)


def _refusal_error(descriptions: Sequence[CallDescription], ranks: Sequence[int]) -> ShapeMismatch | None:
    refused = {rank: call.refusal for rank, call in zip(ranks, descriptions, strict=True) if call.refusal}
    if not refused:
        return None
    rank, (failed, obstacle, remedy) = next(iter(refused.items()))
    return ShapeMismatch(
        f"Cannot run {_call_text(descriptions[0])}: {format_ranks(list(refused))} could not take part.",
        f"On rank {rank}: {failed} {obstacle}".rstrip(),
        remedy,
    )


def _operation_error(descriptions: Sequence[CallDescription], ranks: Sequence[int]) -> ShapeMismatch | None:
    if len({call.operation for call in descriptions}) == 1:
        return None
    called = _by_rank([_call_text(call) for call in descriptions], ranks)
    return ShapeMismatch("The processes called different collectives at the same time.", f"{called}.", _SAME_CALL)


def _step_error(descriptions: Sequence[CallDescription], ranks: Sequence[int]) -> ShapeMismatch | None:
    steps = [str(call.messages) for call in descriptions]
    if len(set(steps)) == 1:
        return None
    return ShapeMismatch(
        f"Cannot run {_call_text(descriptions[0])}: the processes are at different steps of a loader.",
        f"The numbers of batches received from the process that reads for all are {_by_rank(steps, ranks)}.",
        "Let every process take the same number of batches and leave the loop at the same step.",
    )


def _argument_error(descriptions: Sequence[CallDescription], ranks: Sequence[int]) -> ShapeMismatch | None:
    for name in descriptions[0].arguments:
        values = [call.arguments[name] for call in descriptions]
        if len(set(values)) > 1:
            return ShapeMismatch(
                f"Cannot run {_call_text(descriptions[0])}: the processes gave different values of {name}.",
                f"{name} is {_by_rank(values, ranks)}.",
                f"Give every process the same {name}.",
            )
    return None


def _leaf_error(descriptions: Sequence[CallDescription], ranks: Sequence[int]) -> ShapeMismatch | None:
    leaves = [{path: (shape, dtype) for path, shape, dtype in call.leaves} for call in descriptions]
    paths = dict.fromkeys(path for own in leaves for path in own)
    differing = [path for path in paths if len({own.get(path) for own in leaves}) > 1]
    if not differing:
        return None
    texts = [
        f"{path or 'the tensor'}: {_by_rank([_leaf_text(path, own) for own in leaves], ranks)}" for path in differing
    ]
    more = len(texts) - _MOST_LEAVES
    obstacle = "; ".join(texts[:_MOST_LEAVES]) + (f"; and {more} more leaves" if more > 0 else "")
    if any(path not in own for path in differing for own in leaves):
        what, remedy = "structures", "Give every process the same structure, with the same keys and lengths."
    elif any(len({own[path][1] for own in leaves}) > 1 for path in differing):
        what, remedy = "dtypes", "Convert the tensors to one dtype before the call."
    else:
        pads = descriptions[0].operation == "gather"
        what, remedy = "shapes", _PAD if pads else "Give every process tensors of the same shapes."
    return ShapeMismatch(
        f"Cannot run {_call_text(descriptions[0])}: the data of the processes have different {what}.",
        f"{obstacle}.",
        remedy,
    )


def _leaf_text(path: str, leaves: Mapping[str, tuple[str, str]]) -> str:
    return f"{leaves[path][0]} {leaves[path][1]}" if path in leaves else _ABSENT


def _by_rank(values: Sequence[str], ranks: Sequence[int]) -> str:
    """Values with the ranks that have them: "3 on rank 0, 4 on ranks 1-3"."""
    members: dict[str, list[int]] = {}
    for rank, value in zip(ranks, values, strict=True):
        members.setdefault(value, []).append(rank)
    return ", ".join(f"{value} on {format_ranks(owners)}" for value, owners in members.items())


# ---------------------------------------------------------------------- the state of a transport


class ProtocolState:
    """What the calls on one transport share: header buffers, call log, pending calls, and the hang monitor.

    Args:
        transport: between the processes; not kept.
        like: the state of another transport between the same processes, whose log this one continues.
        world: the state of the transport between all processes, where this one is between some of them.

    Attributes:
        plans: what upper layers keep for calls with the same structure.
        sites: what upper layers keep of the last call of each line of the user's code.
        pending: calls that were started and not waited for, in their order.
        spare_headers: headers of pending calls that have ended, for the next ones.
        listeners: called whenever this process begins to wait for headers, with `log.exchanges`.
        world_size: number of processes of the run.
    """

    __slots__ = (
        "__weakref__",
        "header",
        "header_only",
        "listeners",
        "lock",
        "log",
        "monitor",
        "pending",
        "plans",
        "sites",
        "spare_headers",
        "world_size",
    )

    def __init__(
        self, transport: Transport, like: ProtocolState | None = None, world: ProtocolState | None = None
    ) -> None:
        self.header = EagerHeader(transport.world_size)
        self.plans: dict[Hashable, Any] = {}
        self.sites: dict[Hashable, Any] = {}
        self.spare_headers: list[EagerHeader] = []
        self.header_only: dict[tuple[Any, ...], tuple[int, CallDescription]] = {}
        self.listeners: list[Callable[[int], None]] = like.listeners if like else []
        self.lock: threading.RLock = like.lock if like else threading.RLock()
        self.log: CallLog
        self.monitor: HangMonitor
        self.world_size: int
        if world is not None:
            self.log = CallLog(world=world.log, group=transport.group)
            self.monitor, self.world_size = world.monitor, world.world_size
        elif like is not None:
            self.log, self.monitor, self.world_size = like.log, like.monitor, like.world_size
        else:
            self.log, self.world_size = CallLog(), transport.world_size
            self.monitor = self._start_monitor(transport)
        self.pending: deque[PendingCall] = like.pending if like else deque()

    def _start_monitor(self, transport: Transport) -> HangMonitor:
        # Only runs of several processes need it.
        from accel_state.hang_report.monitor import HangMonitor

        monitor = HangMonitor(self.log, transport.control(), transport.rank, transport.world_size)
        weakref.finalize(self, monitor.stop)
        return monitor


_states: weakref.WeakKeyDictionary[Transport, ProtocolState] = weakref.WeakKeyDictionary()


def protocol_state(transport: Transport) -> ProtocolState:
    """The state of a transport, made at the first call."""
    state = _states.get(transport)
    if state is None:
        state = _states[transport] = ProtocolState(transport)
    return state


def add_group_state(transport: Transport, world: Transport) -> None:
    """Let the calls on the transport of a group show in the log, and be watched by the monitor, of the whole run.

    They have a lock of their own: calls of several groups may run at the same time.
    """
    if transport not in _states:
        _states[transport] = ProtocolState(transport, world=protocol_state(world))


def share_protocol_state(transport: Transport, original: Transport) -> None:
    """Let a transport that passes its calls on to `original` continue the log of that one."""
    _states[transport] = ProtocolState(transport, like=protocol_state(original))


# ---------------------------------------------------------------------- calls

_SLICE: Final = timedelta(seconds=1)
"""How long a wait lasts before Python regains control, so that it acts on a signal such as Ctrl-C."""

_GRACE: Final = 1.0
"""Seconds beyond the timeout in which the backend may fail by itself."""

_NO_FINGERPRINT: Final = 0
"""The fingerprint of a process that has none, or none that counts."""

_REFUSES: Final = 1
_DESCRIBES: Final = 2
"""Flags of a header: its process refuses to take part, or sends its description."""

_FLAG_BITS: Final = 8
"""Above these bits, a header without flags has the number of steps of streams that its process has completed."""

_MOST_KEPT: Final = 1024


def barrier(transport: Transport, operation: str) -> None:
    """Return when every process has called this with the same operation.

    Args:
        transport: between the processes.
        operation: name of the function that the user called.

    Raises:
        ShapeMismatch: on every process, when one of them called something else.
        CollectiveError: a process is gone or did not come in time.
    """
    if transport.world_size > 1:
        with HeaderCall(transport, operation) as call:
            call.barrier()


def start_all_gather_bytes(transport: Transport, operation: str, data: bytes) -> PendingCall:
    """Start to bring bytes of every process to all, and return at once.

    Calls that begin afterwards complete it first, so that the processes compare calls in the order in which they made
    them.

    Args:
        transport: between the processes.
        operation: name of the function that the user called.
        data: as many bytes as fit into an eager header.
    """
    return PendingCall(transport, operation, data)


class HeaderCall:
    """One checked call; a context manager.

    Args:
        transport: between more than one process.
        operation: name of the function that the user called.
        arguments: what must be equal on all processes, by name.
    """

    __slots__ = ("_arguments", "_no_grad", "_operation", "_sent", "_site", "_state", "_transport")

    def __init__(self, transport: Transport, operation: str, **arguments: Any) -> None:
        self._transport = transport
        self._operation = operation
        self._arguments = {name: str(value) for name, value in arguments.items()}
        self._state = protocol_state(transport)
        # Whether this process has sent its header, so that a failure needs no refusal any more.
        self._sent = False
        self._no_grad = torch.no_grad()

    def __enter__(self) -> Any:
        self._state.lock.acquire()
        self._site = self._state.log.enter(self._operation)
        self._no_grad.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if isinstance(error, Exception) and not self._sent:
                self._refuse(error)
        finally:
            self._no_grad.__exit__(kind, error, trace)
            self._state.log.leave()
            self._state.lock.release()

    def barrier(self) -> None:
        """Return when every process is in this call.

        Raises:
            ShapeMismatch: on every process, when they call different things.
            CollectiveError: a process did not come.
        """
        self._exchange_headers(*self._header_only(), 0)

    def all_gather_bytes(self, data: bytes) -> list[bytes]:
        """The bytes of all processes, by rank; their lengths may differ."""
        return self._all_gather_bytes(*self._header_only(), data)

    def wait(self, works: Iterable[Work]) -> None:
        """Wait until data has arrived.

        Raises:
            CollectiveError: a process is gone or does not answer.
        """
        try:
            for work in works:
                work.wait()
        except RuntimeError as error:
            raise self._failure(error) from error

    def _header_only(self) -> tuple[int, CallDescription]:
        """Fingerprint and description of a call without leaves: only operation and arguments must be equal."""
        kept, key = self._state.header_only, (self._operation, *self._arguments.items())
        found = kept.get(key)
        if found is None:
            if len(kept) >= _MOST_KEPT:
                kept.clear()
            description = self._describe([])
            found = kept[key] = (fingerprint_of(description), description)
        return found

    def _describe(self, leaves: list[tuple[str, str, str]]) -> CallDescription:
        return CallDescription(self._operation, self._arguments, leaves)

    def _all_gather_bytes(
        self, fingerprint: int, description: CallDescription, data: bytes, flags: int = 0
    ) -> list[bytes]:
        header = self._state.header
        if len(data) <= header.capacity:
            header.write(data)
        self._exchange_headers(fingerprint, description, len(data), flags)
        lengths = header.lengths()
        longest = max(lengths)
        if longest <= header.capacity:
            return [header.payload_of(rank, length) for rank, length in enumerate(lengths)]
        given = torch.frombuffer(bytearray(data.ljust(longest, b"\0")), dtype=torch.uint8)
        received = torch.empty(len(lengths), longest, dtype=torch.uint8)
        self.wait([self._transport.all_gather(received.view(-1), given, header=True)])
        return [received[rank, :length].numpy().tobytes() for rank, length in enumerate(lengths)]

    def _exchange_headers(self, fingerprint: int, description: CallDescription, length: int, flags: int = 0) -> None:
        """Send the header and receive all; raise on every process when fingerprints or flags differ."""
        self._sent = True
        pending, log, header = self._state.pending, self._state.log, self._state.header
        while pending:
            pending[0].complete()
        log.fingerprint = fingerprint
        fields = HeaderFields(fingerprint, flags or log.messages << _FLAG_BITS, length, log.number)
        self._wait_in_slices(header.all_gather(self._transport, fields))
        if not header.are_equal():
            raise self._mismatch(description)

    def _mismatch(self, description: CallDescription) -> AccelError:
        """How the calls of the processes differ; called only after all have seen that they do."""
        described = description._replace(
            location=str(self._location_of_call() or ""),
            group=self._transport.group,
            messages=self._state.log.messages,
        )
        # All processes are here, and count anew.
        self._state.log.messages = 0
        rows = self._all_gather_bytes(_NO_FINGERPRINT, described, described.to_json(), _DESCRIBES)
        return mismatch_error([CallDescription.from_json(row) for row in rows], self._transport.ranks)

    def _location_of_call(self) -> Location | None:
        """The line of the user's code that called this."""
        call = self._state.log.last()
        return call.location if call else None

    def _refuse(self, error: Exception) -> None:
        """Send a refusal, so that the other processes raise as well."""
        if isinstance(error, AccelError):
            reason = (error.failure, error.obstacle, error.remedy)
        else:
            reason = (f"{type(error).__name__}: {error}", "", "See the traceback of that process.")
        try:
            self._exchange_headers(_NO_FINGERPRINT, self._describe([])._replace(refusal=reason), 0, _REFUSES)
        except ShapeMismatch:
            return

    def _wait_in_slices(self, work: Work) -> None:
        log, deadline = self._state.log, time.monotonic() + self._transport.timeout.total_seconds() + _GRACE
        log.exchanges += 1
        for listener in self._state.listeners:
            listener(log.exchanges)
        completed = False
        while True:
            try:
                work.wait(_SLICE)
            except RuntimeError as error:
                # Work may complete just after a wait for it timed out: only the error of a later wait is its own.
                if completed or time.monotonic() > deadline:
                    raise self._failure(error) from error
                completed = work.is_completed()
            else:
                return

    def _failure(self, error: BaseException) -> AccelError:
        from accel_state.hang_report.report import collective_error

        state, transport = self._state, self._transport
        state.header.renew()
        rank = transport.rank_in_run(transport.rank)
        return collective_error(error, state.log.last(), rank, state.world_size, state.monitor, transport.ranks)


class PendingCall(HeaderCall):
    """A checked call that was started; see `start_all_gather_bytes`.

    Args:
        transport: between the processes.
        operation: name of the function that the user called.
        data: as many bytes as fit into an eager header.
    """

    __slots__ = ("_error", "_header", "_location", "_received", "_work")

    def __init__(self, transport: Transport, operation: str, data: bytes) -> None:
        super().__init__(transport, operation)
        self._sent = True
        self._error: AccelError | None = None
        self._received: list[bytes] | None = None
        state = self._state
        self._location = caller()
        with state.lock, torch.no_grad():
            # Calls that begin while this one is on its way use the header of the state.
            self._header = state.spare_headers.pop() if state.spare_headers else EagerHeader(transport.world_size)
            self._header.write(data)
            flags = state.log.messages << _FLAG_BITS
            fields = HeaderFields(self._header_only()[0], flags, len(data), state.log.number)
            self._work: Work | None = self._header.all_gather(transport, fields)
            state.pending.append(self)

    def wait(self, works: Iterable[Work] = ()) -> list[bytes]:  # type: ignore[override]
        """The bytes of all processes, by rank, once further works that belong to this call have completed too.

        Raises:
            ShapeMismatch: on every process, when they call different things.
            CollectiveError: a process is gone or did not come in time.
        """
        with self:
            while self._work is not None:
                self._state.pending[0].complete()
            if self._error is not None:
                raise self._error
            super().wait(works)
            if self._received is None:
                header = self._header
                self._received = [header.payload_of(rank, length) for rank, length in enumerate(header.lengths())]
                self._state.spare_headers.append(header)
        return self._received

    def complete(self) -> None:
        """Wait for this call, the oldest pending one; `wait` raises its error as well."""
        self._state.pending.popleft()
        work, self._work = self._work, None
        assert work is not None
        try:
            self._wait_in_slices(work)
            if not self._header.are_equal():
                raise self._mismatch(self._header_only()[1])
        except AccelError as error:
            self._error = error
            raise

    def _location_of_call(self) -> Location | None:
        return locate(self._location[0].co_filename, self._location[1])
