"""The protocol of a checked call between processes.

    with HeaderCall(transport, "gather_object") as call:    # logged; calls of other threads wait
        rows = call.all_gather_bytes(data)                  # headers exchanged and compared, then the data

    pending = start_all_gather_bytes(transport, "DataLoader.__next__", data)    # the same, without waiting
    rows = pending.wait()

Backends do not check sizes: on a mismatch gloo aborts the process, waits forever, or returns garbage. Therefore every
process first sends an eager header in each call. Its size depends only on the number of processes. It describes the
call and contains as much of the data as fits. If the headers differ, all processes raise the same error. A process that
fails before it sends its header sends a refusal instead, so that the others raise too and do not wait. All further
messages have sizes that the headers have shown to be equal.

The steps of a message stream have no headers. Each process counts them, and every header contains the count.
"""

from __future__ import annotations

import copy
import functools
import json
import struct
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from contextlib import suppress
from datetime import timedelta
from hashlib import blake2b
from types import CodeType, TracebackType
from typing import TYPE_CHECKING, Any, Final, NamedTuple, NoReturn

import torch

from accel_state.errors import AccelError, CollectiveError, NotReady, ShapeMismatch
from accel_state.hang_report.call_log import CallLog, Location, call_text, caller, format_ranks, locate
from accel_state.transport.base import Transport, Work
from accel_state.turn import Turn, is_raised_by_handler

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
"""Alignment of the segments of a payload, in bytes: the size of complex128, so that every dtype can be read there."""

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
    """The fields of one process's header.

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
        generation: how often the buffers were renewed; views of them are valid until it changes.
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
        """Allocate new buffers, because an abandoned collective may still write to the old ones."""
        # Buffers that are created in inference mode could not be written to outside of it.
        with torch.inference_mode(False):
            self._sent = torch.zeros(self._size, dtype=torch.uint8)
            self._received = torch.empty(self._world_size, self._size, dtype=torch.uint8)
            # Cached: a backend's thread would release a view that was created for one call, and needs the GIL for that.
            self._flat = self._received.view(-1)
        self.generation += 1
        self._memory = memoryview(self._sent.numpy().data)
        self._table = self._received.numpy()
        self._compared = self._table[:, :_COMPARED_BYTES]

    def own_payload(self, length: int) -> torch.Tensor:
        """The buffer for this process's payload, uint8 of shape (length,)."""
        return self._sent.narrow(0, HEADER_BYTES, length)

    def write(self, data: bytes) -> None:
        """Write bytes into this process's payload."""
        self._memory[HEADER_BYTES : HEADER_BYTES + len(data)] = data

    def all_gather(self, transport: Transport, fields: HeaderFields) -> Work:
        """Start to send this process's header and to receive those of all processes."""
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
    "Make every process reach the same calls in the same order. The usual cause is a branch on the rank around one of "
    "them."
)
_HOME: Final = "the thread in which the run began"
_ONE_THREAD: Final = (
    "Call collectives in one thread, and in the same one on all processes; or pass each thread a process group of its "
    "own with `group`. Threads that take turns have the same name on all processes."
)
_DEFER: Final = (
    "End the run after an interrupt of a collective. To react to a signal and go on, set a variable in its handler, "
    "and read it between two steps."
)
_PAD: Final = "Call pad_across_processes() on the data first, or gather_object() if the shapes are meant to differ."


class CallDescription(NamedTuple):
    """The call of one process as text; the processes exchange it only when the fingerprints differ.

    Args:
        operation: name of the collective.
        arguments: the arguments that must be equal, as text by name.
        leaves: path, shape and dtype of each leaf.
        location: the line of the user's code.
        refusal: why the process could not take part, as the three parts of an error; None if it could.
        group: name of the group of the call in messages; empty for all processes of the run.
        messages: steps of message streams that the process has completed.
        thread: the thread that called, see `accel_state.turn`.
    """

    operation: str
    arguments: dict[str, str]
    leaves: list[tuple[str, str, str]]
    location: str = ""
    refusal: tuple[str, str, str] | None = None
    group: str = ""
    messages: int = 0
    thread: str = ""

    def to_json(self) -> bytes:
        """The description as JSON."""
        return json.dumps(self._asdict()).encode()

    @classmethod
    def from_json(cls, text: bytes) -> CallDescription:
        """The description that `to_json` wrote."""
        fields = json.loads(text)
        fields["leaves"] = [tuple(leaf) for leaf in fields["leaves"]]
        fields["refusal"] = fields["refusal"] and tuple(fields["refusal"])
        return cls(**fields)


def fingerprint_of(description: CallDescription) -> int:
    """A 64-bit hash, equal on all processes for equal descriptions; Python's `hash` differs between processes."""
    fields = (_PROTOCOL_VERSION, description.operation, description.arguments, description.leaves)
    text = json.dumps(fields, sort_keys=True)
    return int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "little")


@functools.lru_cache(maxsize=64)
def _hash_of(thread: str) -> int:
    return int.from_bytes(blake2b(thread.encode(), digest_size=8).digest(), "little")


def mismatch_error(descriptions: Sequence[CallDescription], ranks: Sequence[int] = ()) -> ShapeMismatch:
    """The error for calls that differ; equal on all processes.

    Args:
        descriptions: what each process called.
        ranks: ranks of the processes in the run; by default from 0.
    """
    ranks = ranks or range(len(descriptions))
    return (
        _refusal_error(descriptions, ranks)
        or _thread_error(descriptions, ranks)
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


def _thread_error(descriptions: Sequence[CallDescription], ranks: Sequence[int]) -> ShapeMismatch | None:
    threads = [f"the thread {call.thread!r}" if call.thread else _HOME for call in descriptions]
    if len(set(threads)) == 1:
        return None
    return ShapeMismatch(
        f"Cannot run {_call_text(descriptions[0])}: the processes called it in different threads.",
        f"The call comes from {_by_rank(threads, ranks)}, so each process may get values of another thread.",
        _ONE_THREAD,
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
        f"The number of batches that each process has received is {_by_rank(steps, ranks)}.",
        "Make every process take the same number of batches and leave the loop at the same step.",
    )


def _argument_error(descriptions: Sequence[CallDescription], ranks: Sequence[int]) -> ShapeMismatch | None:
    for name in descriptions[0].arguments:
        values = [call.arguments[name] for call in descriptions]
        if len(set(values)) > 1:
            return ShapeMismatch(
                f"Cannot run {_call_text(descriptions[0])}: the processes passed different values of {name}.",
                f"{name} is {_by_rank(values, ranks)}.",
                f"Pass the same {name} on every process.",
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
        what, remedy = "structures", "Pass the same structure on every process, with the same keys and lengths."
    elif any(len({own[path][1] for own in leaves}) > 1 for path in differing):
        what, remedy = "dtypes", "Convert the tensors to one dtype before the call."
    else:
        pads = descriptions[0].operation == "gather"
        what, remedy = "shapes", _PAD if pads else "Pass tensors of the same shapes on every process."
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
    """The state that all calls on one transport share: header buffers, call log, pending calls, and the hang monitor.

    Args:
        transport: the transport between the processes; the state does not refer to it.
        like: the state of another transport between the same processes; this one continues its log.
        world: for the transport of a group, the state of the transport between all processes.

    Attributes:
        plans: cache of upper layers for calls with the same structure.
        sites: cache of upper layers for the last call of each line of the user's code.
        pending: calls that were started and not yet waited for, in order.
        spare_headers: headers of pending calls that have ended, for reuse.
        listeners: called with `log.exchanges` whenever this process begins to wait for headers.
        world_size: number of processes of the run.
        turn: the call that is under way.
    """

    __slots__ = (
        "__weakref__",
        "header",
        "header_only",
        "listeners",
        "log",
        "monitor",
        "pending",
        "plans",
        "sites",
        "spare_headers",
        "turn",
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
        self.turn: Turn
        if like is not None:
            self.turn = like.turn
        else:
            self.turn = Turn(world.turn.home, numbers=False) if world else Turn(threading.current_thread())
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
    """The state of a transport, created at the first call."""
    state = _states.get(transport)
    if state is None:
        state = _states[transport] = ProtocolState(transport)
    return state


def add_group_state(transport: Transport, world: Transport) -> None:
    """Connect the transport of a group to the log and the monitor of the whole run.

    Its calls have their own lock: calls of several groups may run at the same time.
    """
    if transport not in _states:
        _states[transport] = ProtocolState(transport, world=protocol_state(world))


def share_protocol_state(transport: Transport, original: Transport) -> None:
    """Make a transport that forwards its calls to `original` continue the log of `original`."""
    _states[transport] = ProtocolState(transport, like=protocol_state(original))


# ---------------------------------------------------------------------- calls

_SLICE: Final = timedelta(seconds=1)
"""How long a wait blocks before Python regains control and can handle a signal such as Ctrl-C."""

_GRACE: Final = 1.0
"""Seconds beyond the timeout in which the backend may fail by itself."""

_NO_FINGERPRINT: Final = 0
"""The fingerprint of a process that has none, or one that is ignored."""

_REFUSES: Final = 1
_DESCRIBES: Final = 2
"""Flags of a header: its process refuses to take part, or sends its description."""

_FLAG_BITS: Final = 8
"""Above these bits, a header without flags contains the number of stream steps that its process has completed."""

_MOST_KEPT: Final = 1024


def barrier(transport: Transport, operation: str) -> None:
    """Return when every process has called this with the same operation.

    Args:
        transport: the transport between the processes.
        operation: name of the function that the user called.

    Raises:
        ShapeMismatch: on every process, when one of them called another collective.
        CollectiveError: a process ended or did not call this in time.
    """
    if transport.world_size > 1:
        with HeaderCall(transport, operation) as call:
            call.barrier()


def start_all_gather_bytes(transport: Transport, operation: str, data: bytes) -> PendingCall:
    """Start to gather bytes of every process on all processes, and return at once.

    Calls that begin afterwards complete it first, so that the processes compare calls in the order in which they made
    them.

    Args:
        transport: the transport between the processes.
        operation: name of the function that the user called.
        data: as many bytes as fit into an eager header.
    """
    return PendingCall(transport, operation, data)


class InterruptedCall(NamedTuple):
    """A call that an exception ended while the other processes may have completed it.

    Args:
        call: the call; it knows whether more data follow its header.
        text: its operation and the line of the user's code.
        cause: name of the exception.
        owes: how many more headers the other processes wait for before that of the next call.
        header: the buffers of its header; None if the header has arrived, or was not sent.
        work: the exchange of its headers, if it is still under way.
        broken: whether the other processes wait for data that this process does not send any more.
    """

    call: HeaderCall
    text: str
    cause: str
    owes: int
    header: EagerHeader | None = None
    work: Work | None = None
    broken: bool = False


class HeaderCall:
    """One checked call; a context manager.

    Args:
        transport: the transport between at least two processes.
        operation: name of the function that the user called.
        arguments: values that must be equal on all processes, by name.
    """

    __slots__ = (
        "_arguments",
        "_more",
        "_moves",
        "_no_grad",
        "_operation",
        "_sent",
        "_site",
        "_state",
        "_thread",
        "_transport",
        "_under_way",
    )

    def __init__(self, transport: Transport, operation: str, **arguments: Any) -> None:
        self._transport = transport
        self._operation = operation
        self._arguments = {name: str(value) for name, value in arguments.items()}
        self._state = protocol_state(transport)
        # Whether this process has sent its header; after that a failure needs no refusal.
        self._sent = False
        # The exchange of headers that is under way, and whether the processes move data after it.
        self._under_way: Work | None = None
        self._moves = False
        # Whether the call exchanges other headers afterwards.
        self._more = False
        self._thread = ""
        self._site: tuple[CodeType, int] | None = None
        self._no_grad = torch.no_grad()

    def __enter__(self) -> Any:
        turn = self._state.turn
        self._check_not_inside_a_call()
        try:
            turn.begin(self)
            # A pending call has the thread that started it.
            self._thread = self._thread or turn.name()
            self._site = self._state.log.enter(self._operation)
            self._no_grad.__enter__()
        except BaseException as error:
            # The other processes may wait for this call.
            self._interrupt(type(error).__name__)
            if self._site is not None:
                self._state.log.leave()
            turn.end()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            try:
                if error is not None:
                    self._end_early(error)
            finally:
                self._no_grad.__exit__(kind, error, trace)
                self._state.log.leave()
        finally:
            self._state.turn.end()

    def _check_not_inside_a_call(self) -> None:
        """Raise in a signal handler (or in a finalizer) that was called inside a call of the same thread.

        Raises:
            NotReady: the headers of both calls would be mixed.
        """
        state = self._state
        if state.turn.thread != threading.get_ident():
            return
        if state.turn.is_left():
            state.turn.call._interrupt("a signal")
            state.turn.end()
            return
        outer = state.log.active()
        raise NotReady(
            f"Cannot call {self._operation}() inside {f'{outer}' if outer else 'another collective'}.",
            "A signal handler or a finalizer interrupted that call, and the processes would mix the data of both.",
            "Set a variable in the handler, and call the collective after the other one has returned.",
        )

    def _end_early(self, error: BaseException) -> None:
        """Send a refusal, so that the other processes raise as well; or remember an interrupt of this call."""
        if not self._sent and isinstance(error, Exception):
            try:
                self._refuse(error)
            except BaseException as interruption:
                self._end_early(interruption)
                raise
        # All processes raise these, or this one cannot reach the others.
        elif not (self._sent and isinstance(error, (ShapeMismatch, CollectiveError))):
            self._interrupt(type(error).__name__)

    def _interrupt(self, cause: str) -> None:
        """Remember that this call was interrupted, so that the next one is refused on all processes."""
        state, text, owes = self._state, self._text(), 0
        before = state.turn.interrupted
        if before is not None:
            if self._under_way is None:
                return
            text, cause, owes = before.text, before.cause, before.owes
        state.monitor.interruption = f"{text} was interrupted by {cause}"
        if self._moves:
            # The other processes wait for the data of this one, and must not wait until their timeout.
            self._transport.abort()
        kept = None
        if self._under_way is not None:
            # The next call must not overwrite the buffers.
            kept = copy.copy(state.header)
            state.header.renew()
        owes += not self._sent or (kept is not None and self._more)
        state.turn.interrupted = InterruptedCall(self, text, cause, owes, kept, self._under_way, self._moves)

    def _refuse_after(self, interrupted: InterruptedCall) -> NoReturn:
        """Refuse this call on all processes, because an earlier one was interrupted on this one.

        The others may still be in the interrupted call; they complete it, or get an error there.
        """
        # From here on, an exception interrupts this call too.
        self._sent, self._moves = True, False
        failed = f"{interrupted.text} was interrupted by {interrupted.cause}."
        reason = (failed, "Its result is missing here, so that later calls could get results of others.", _DEFER)
        description = self._describe([])._replace(refusal=reason)
        broken = interrupted.broken
        if not broken and interrupted.work is not None and interrupted.header is not None:
            self._wait_in_slices(interrupted.work)
            is_equal, lengths = interrupted.header.are_equal(), interrupted.header.lengths()
            broken = is_equal and not interrupted.call._is_complete(lengths)
            if broken:
                self._transport.abort()
            self._state.turn.interrupted = interrupted._replace(header=None, work=None, broken=broken)
            if not is_equal:
                self._mismatch(description, more=True)
        if broken:
            raise CollectiveError(
                f"Cannot run {self._text()}: this process has closed its connections.",
                f"{failed} The other processes waited for its data.",
                "Restart the run.",
            )
        for owes in reversed(range(interrupted.owes)):
            self._state.turn.interrupted = self._state.turn.interrupted._replace(owes=owes)
            with suppress(ShapeMismatch):
                self._exchange(_NO_FINGERPRINT, description, 0, _REFUSES, more=True)
        self._state.turn.interrupted, self._state.monitor.interruption = None, ""
        self._exchange(_NO_FINGERPRINT, description, 0, _REFUSES)
        # All processes have refused the call.
        raise mismatch_error([description], [self._transport.rank_in_run(self._transport.rank)])

    def _is_complete(self, lengths: Sequence[int]) -> bool:
        """Whether a call ends when its headers have arrived, with payloads of these lengths."""
        return not self._moves and max(lengths) <= self._state.header.capacity

    def barrier(self) -> None:
        """Return when every process is in this call.

        Raises:
            ShapeMismatch: on every process, when their calls differ.
            CollectiveError: a process did not call this in time.
        """
        self._exchange_headers(*self._header_only(), 0)

    def all_gather_bytes(self, data: bytes, more: bool = False) -> list[bytes]:
        """The bytes of all processes, by rank; their lengths may differ. With `more`, the call goes on afterwards."""
        return self._all_gather_bytes(*self._header_only(), data, more=more)

    def wait(self, works: Iterable[Work]) -> None:
        """Wait until data has arrived.

        Raises:
            CollectiveError: a process ended or does not answer.
        """
        try:
            for work in works:
                work.wait()
        except RuntimeError as error:
            if is_raised_by_handler(error):
                raise
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
        self, fingerprint: int, description: CallDescription, data: bytes, flags: int = 0, more: bool = False
    ) -> list[bytes]:
        header = self._state.header
        if len(data) <= header.capacity:
            header.write(data)
        exchange = self._exchange if flags == _DESCRIBES else self._exchange_headers
        exchange(fingerprint, description, len(data), flags, more)
        lengths = header.lengths()
        longest = max(lengths)
        if longest <= header.capacity:
            return [header.payload_of(rank, length) for rank, length in enumerate(lengths)]
        given = torch.frombuffer(bytearray(data.ljust(longest, b"\0")), dtype=torch.uint8)
        received = torch.empty(len(lengths), longest, dtype=torch.uint8)
        self._moves = True
        self.wait([self._transport.all_gather(received.view(-1), given, header=True)])
        self._moves = False
        return [received[rank, :length].numpy().tobytes() for rank, length in enumerate(lengths)]

    def _exchange_headers(
        self, fingerprint: int, description: CallDescription, length: int, flags: int = 0, more: bool = False
    ) -> None:
        """Send the header and receive all; raise on every process when fingerprints or flags differ.

        With `more`, the call exchanges other headers afterwards.
        """
        interrupted = self._state.turn.interrupted
        if interrupted is not None:
            self._refuse_after(interrupted)
        self._exchange(fingerprint, description, length, flags, more)

    def _exchange(
        self, fingerprint: int, description: CallDescription, length: int, flags: int, more: bool = False
    ) -> None:
        self._sent, self._more = True, more
        pending, log, header = self._state.pending, self._state.log, self._state.header
        while pending:
            pending[0].complete()
        log.fingerprint = fingerprint
        fields = HeaderFields(self._marked(fingerprint), flags or log.messages << _FLAG_BITS, length, log.number)
        self._under_way = header.all_gather(self._transport, fields)
        self._wait_in_slices(self._under_way)
        self._under_way = None
        if not header.are_equal():
            raise self._mismatch(description, more and flags == _REFUSES)
        self._sent = not more

    def _marked(self, fingerprint: int) -> int:
        """A fingerprint that is equal only for calls of the same thread; most calls come from where the run began."""
        return fingerprint ^ _hash_of(self._thread) if self._thread and fingerprint else fingerprint

    def _mismatch(self, description: CallDescription, more: bool = False) -> AccelError:
        """The error that shows how the calls differ; called only after all processes have seen that they do."""
        described = description._replace(
            location=str(self._location_of_call() or ""),
            group=self._transport.group,
            messages=self._state.log.messages,
            thread=self._thread,
        )
        # All processes have reached this point, and start their counts again.
        self._state.log.messages = 0
        rows = self._all_gather_bytes(_NO_FINGERPRINT, described, described.to_json(), _DESCRIBES, more)
        return mismatch_error([CallDescription.from_json(row) for row in rows], self._transport.ranks)

    def _text(self) -> str:
        return call_text(self._operation, self._transport.group, str(self._location_of_call() or ""))

    def _location_of_call(self) -> Location | None:
        """The line of the user's code that called this."""
        if self._site is None:
            return None
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
                if is_raised_by_handler(error):
                    raise
                # Work may complete just after a wait for it timed out. Only a later wait raises the work's own error.
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
        transport: the transport between the processes.
        operation: name of the function that the user called.
        data: as many bytes as fit into an eager header.
    """

    __slots__ = ("_error", "_header", "_location", "_received", "_work")

    def __init__(self, transport: Transport, operation: str, data: bytes) -> None:
        super().__init__(transport, operation)
        self._error: AccelError | None = None
        self._received: list[bytes] | None = None
        self._work: Work | None = None
        self._location = caller()
        state = self._state
        self._check_not_inside_a_call()
        if state.turn.interrupted is not None:
            with self:
                self._refuse_after(state.turn.interrupted)
        try:
            state.turn.begin(self)
            self._start(data)
        except BaseException as error:
            self._interrupt(type(error).__name__)
            raise
        finally:
            state.turn.end()

    def _start(self, data: bytes) -> None:
        state, transport = self._state, self._transport
        self._thread = state.turn.name()
        with torch.no_grad():
            # Calls that begin while this one is pending use the header of the state.
            self._header = state.spare_headers.pop() if state.spare_headers else EagerHeader(transport.world_size)
            self._header.write(data)
            flags = state.log.messages << _FLAG_BITS
            fields = HeaderFields(self._marked(self._header_only()[0]), flags, len(data), state.log.number)
            self._work = self._header.all_gather(transport, fields)
            self._sent = True
            state.pending.append(self)

    def wait(self, works: Iterable[Work] = ()) -> list[bytes]:  # type: ignore[override]
        """Wait for this call and for further works of it; return the bytes of all processes, by rank.

        Raises:
            ShapeMismatch: on every process, when their calls differ.
            CollectiveError: a process ended or did not call this in time.
        """
        if self._state.turn.thread == threading.get_ident():
            # Inside another call, such as in the finalizer of a loader. The header was sent before that call.
            return self._receive(works)
        with self:
            return self._receive(works)

    def _receive(self, works: Iterable[Work]) -> list[bytes]:
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
        """Wait for this call, the oldest pending one; `wait` raises its error as well.

        It remains pending if the wait is interrupted.
        """
        work = self._work
        assert work is not None
        try:
            self._wait_in_slices(work)
            self._leave_queue()
            if not self._header.are_equal():
                raise self._mismatch(self._header_only()[1])
        except AccelError as error:
            self._leave_queue()
            self._error = error
            raise

    def _leave_queue(self) -> None:
        self._work = None
        if self in self._state.pending:
            self._state.pending.remove(self)

    def _location_of_call(self) -> Location | None:
        return locate(self._location[0].co_filename, self._location[1])
