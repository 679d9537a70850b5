"""The protocol of a checked collective.

    with CheckedCall(transport, "gather", {}) as call:     # logged; calls of other threads wait
        plan, leaves = call.plan(data)              # what must agree, and how it travels
        rows = call.agree(plan, leaves)             # slots exchanged and compared: after this, sizes are equal
        ...                                         # data that did not fit moves
        call.wait(works)

What fails before `agree` is told to the other processes in place of it, so that they raise too instead of waiting.
"""

from __future__ import annotations

import struct
import threading
import weakref
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import replace
from datetime import timedelta
from types import TracebackType
from typing import Any, Final

import torch

from accel_ops.call_log import CallLog
from accel_ops.failure import explain
from accel_ops.plan import Description, Plan, check_leaf, fingerprint_of, plan_for
from accel_ops.slot import Header, Slot
from accel_ops.tree import Structure, flatten, leaves_with_paths
from accel_ops.verify import mismatch
from accel_ops.watch import Watch
from accel_ops.whole import is_dtensor, placement_of, whole
from accel_state.errors import AccelError, ShapeMismatch
from accel_state.transport.base import Transport, Work

__all__ = ("CheckedCall", "Exchange", "exchange_of", "share_exchange")

_SLICE: Final = timedelta(seconds=1)
"""How long a wait lasts before Python looks up, so that a signal such as Ctrl-C is acted on."""

_HOST: Final = torch.device("cpu")
_DIFFERENT: Final = 0
"""The fingerprint of a process that has none, or none that counts."""

_REFUSED: Final = 1
_DESCRIBED: Final = 2
_PLANS_KEPT: Final = 1024


class Exchange:
    """What is kept for the calls on one transport: slot, call log, plans, and the watch.

    Args:
        transport: how the slots travel; not kept.
        like: the exchange of another transport between the same processes, to go on with its log.
    """

    __slots__ = ("__weakref__", "bare", "lock", "log", "plans", "slot", "watch")

    def __init__(self, transport: Transport, like: Exchange | None = None) -> None:
        self.slot = Slot(transport.world_size)
        self.plans: dict[Hashable, Plan] = {}
        self.bare: dict[Hashable, tuple[int, Description]] = {}
        self.lock: threading.RLock = like.lock if like else threading.RLock()
        self.log: CallLog = like.log if like else CallLog()
        self.watch: Watch = like.watch if like else self._begin_watch(transport)

    def _begin_watch(self, transport: Transport) -> Watch:
        watch = Watch(self.log, transport.store(), transport.rank, transport.world_size)
        weakref.finalize(self, watch.stop)
        return watch


_exchanges: weakref.WeakKeyDictionary[Transport, Exchange] = weakref.WeakKeyDictionary()


def exchange_of(transport: Transport) -> Exchange:
    """What is kept for a transport; made at the first call."""
    exchange = _exchanges.get(transport)
    if exchange is None:
        exchange = _exchanges[transport] = Exchange(transport)
    return exchange


def share_exchange(transport: Transport, original: Transport) -> None:
    """Let a transport that passes its calls on to `original` go on with the log of that one."""
    _exchanges[transport] = Exchange(transport, like=exchange_of(original))


class CheckedCall:
    """One checked collective; a context manager.

    Args:
        transport: between more than one process.
        operation: name of the function that the user called.
        arguments: what must be equal on all processes, by name.
    """

    __slots__ = ("_arguments", "_exchange", "_met", "_no_grad", "_operation", "_transport")

    def __init__(self, transport: Transport, operation: str, **arguments: Any) -> None:
        self._transport = transport
        self._operation = operation
        self._arguments = {name: str(value) for name, value in arguments.items()}
        self._exchange = exchange_of(transport)
        self._met = False
        self._no_grad = torch.no_grad()

    def __enter__(self) -> CheckedCall:
        self._exchange.lock.acquire()
        self._exchange.log.enter(self._operation)
        self._no_grad.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if isinstance(error, Exception) and not self._met:
                self._refuse(error)
        finally:
            self._no_grad.__exit__(kind, error, trace)
            self._exchange.log.leave()
            self._exchange.lock.release()

    def plan(
        self,
        data: Any,
        shape_of: Callable[[torch.Tensor], Any] | None = None,
        check: Callable[[str, torch.Tensor, str], None] = check_leaf,
        move: bool = True,
    ) -> tuple[Plan, list[torch.Tensor]]:
        """How nested data travel, and their leaves where the transport can move them.

        Args:
            data: nested data with tensors alone at its leaves.
            shape_of: the part of a leaf's shape that must be equal on all processes; by default all of it.
            check: raises when a leaf, given with path and operation, cannot take part.
            move: bring the leaves to where the transport moves tensors.

        Raises:
            UnknownKind: a leaf cannot travel.
        """
        leaves, structure = flatten(data, self._operation)
        return self.plan_of(data, leaves, structure, shape_of, check, move)

    def plan_of(
        self,
        data: Any,
        leaves: list[torch.Tensor],
        structure: Structure,
        shape_of: Callable[[torch.Tensor], Any] | None = None,
        check: Callable[[str, torch.Tensor, str], None] = check_leaf,
        move: bool = True,
    ) -> tuple[Plan, list[torch.Tensor]]:
        """Like `plan`, for data whose leaves and structure `flatten` has found already."""
        if any(is_dtensor(leaf) for leaf in leaves if type(leaf) is not torch.Tensor):
            leaves = self._whole(data, leaves)
        plan = self._plan(data, leaves, structure, shape_of, check)
        if move and plan.devices:
            leaves = [leaf.to(self._transport.device) for leaf in leaves]
        return plan, leaves

    def fits(self, plan: Plan) -> bool:
        """Whether the small leaves, if there are any, travel in the slot itself, which lies on the CPU."""
        nbytes = plan.packing.nbytes
        return not nbytes or (nbytes <= self._exchange.slot.capacity and self._transport.device == _HOST)

    def agree(self, plan: Plan, leaves: Sequence[torch.Tensor] | None = None) -> torch.Tensor | None:
        """Meet the other processes and check that all have the same plan.

        Args:
            plan: that of this process.
            leaves: all leaves, if the small ones are to go along where they fit.

        Returns:
            The small leaves of all processes, uint8 of shape (world_size, packing.nbytes), valid inside of this call;
            None when they do not fit.

        Raises:
            ShapeMismatch: on every process, when the plans differ.
            CollectiveError: a process did not come.
        """
        slot, nbytes = self._exchange.slot, plan.packing.nbytes
        along = self.fits(plan)
        if along and leaves is not None:
            plan.packing.write([leaves[position] for position in plan.small], slot.payload(nbytes))
        self._meet(plan.fingerprint, plan.description, nbytes if along else 0)
        return slot.rows(nbytes) if along else None

    def swap_bytes(self, data: bytes) -> list[bytes]:
        """The bytes of all processes, which may differ in length, by rank."""
        return self._swap(*self._bare(), data)

    def swap_numbers(self, plan: Plan, numbers: Sequence[int]) -> list[tuple[int, ...]]:
        """One number for each leaf of the plan, of all processes, by rank."""
        layout = struct.Struct(f"<{len(numbers)}q")
        return [layout.unpack(row) for row in self._swap(plan.fingerprint, plan.description, layout.pack(*numbers))]

    def bytes_of(self, data: bytes | None, source: int) -> bytes:
        """The bytes of process `source`; the others give None."""
        slot = self._exchange.slot
        length = 0 if data is None else len(data)
        if data is not None and length <= slot.capacity:
            slot.write(data)
        self._meet(*self._bare(), length)
        length = slot.lengths()[source]
        if length <= slot.capacity:
            return slot.row(source, length)
        buffer = torch.empty(length, dtype=torch.uint8)
        if data is not None:
            buffer = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        buffer = buffer.to(self._transport.device)
        self.wait([self._transport.broadcast(buffer, source)])
        return buffer.cpu().numpy().tobytes()

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

    def _whole(self, data: Any, leaves: Sequence[Any]) -> list[torch.Tensor]:
        """All DTensors as whole tensors, once all processes were seen to have the same: making one is a collective."""
        paths = [path for path, leaf in leaves_with_paths(data) if isinstance(leaf, torch.Tensor)]
        spread = [
            (path, placement_of(leaf), str(leaf.dtype))
            for path, leaf in zip(paths, leaves, strict=True)
            if is_dtensor(leaf)
        ]
        description = self._describe(sorted(spread))
        self._meet(fingerprint_of(description), description, 0)
        self._met = False
        return [whole(leaf) if is_dtensor(leaf) else leaf for leaf in leaves]

    def _plan(
        self,
        data: Any,
        leaves: Sequence[torch.Tensor],
        structure: Structure,
        shape_of: Callable[[torch.Tensor], Any] | None,
        check: Callable[[str, torch.Tensor, str], None],
    ) -> Plan:
        shapes = self._shapes(data, leaves, shape_of)
        key = (
            self._operation,
            tuple(self._arguments.items()),
            structure,
            shapes,
            tuple([leaf.dtype for leaf in leaves]),
            tuple([leaf.device for leaf in leaves]),
            tuple([leaf.layout for leaf in leaves]),
            tuple(map(type, leaves)),
        )
        plans = self._exchange.plans
        plan = plans.get(key)
        if plan is None:
            if len(plans) >= _PLANS_KEPT:
                plans.clear()
            paths = [path for path, leaf in leaves_with_paths(data) if isinstance(leaf, torch.Tensor)]
            device, world_size = self._transport.device, self._transport.world_size
            plan = plan_for(self._operation, self._arguments, paths, leaves, shapes, device, world_size, check)
            plans[key] = plan
        return plan

    def _shapes(
        self, data: Any, leaves: Sequence[torch.Tensor], shape_of: Callable[[torch.Tensor], Any] | None
    ) -> tuple[Any, ...]:
        try:
            return tuple([leaf.shape if shape_of is None else shape_of(leaf) for leaf in leaves])
        except RuntimeError:
            for path, leaf in leaves_with_paths(data):
                check_leaf(path, leaf, self._operation)
            raise

    def _bare(self) -> tuple[int, Description]:
        """Fingerprint and description of a call in which operation and arguments alone must be equal."""
        bare, key = self._exchange.bare, (self._operation, *self._arguments.items())
        found = bare.get(key)
        if found is None:
            if len(bare) >= _PLANS_KEPT:
                bare.clear()
            description = self._describe([])
            found = bare[key] = (fingerprint_of(description), description)
        return found

    def _describe(self, leaves: list[tuple[str, str, str]]) -> Description:
        return Description(self._operation, self._arguments, leaves)

    def _swap(self, fingerprint: int, description: Description, data: bytes, flags: int = 0) -> list[bytes]:
        slot = self._exchange.slot
        if len(data) <= slot.capacity:
            slot.write(data)
        self._meet(fingerprint, description, len(data), flags)
        lengths = slot.lengths()
        longest = max(lengths)
        if longest <= slot.capacity:
            return [slot.row(rank, length) for rank, length in enumerate(lengths)]
        given = torch.frombuffer(bytearray(data.ljust(longest, b"\0")), dtype=torch.uint8)
        received = torch.empty(len(lengths), longest, dtype=torch.uint8)
        self.wait([self._transport.all_gather(received.view(-1), given, header=True)])
        return [received[rank, :length].numpy().tobytes() for rank, length in enumerate(lengths)]

    def _meet(self, fingerprint: int, description: Description, length: int, flags: int = 0) -> None:
        """Exchange slots, and raise on every process when fingerprints or flags differ."""
        self._met = True
        slot, log = self._exchange.slot, self._exchange.log
        log.fingerprint = fingerprint
        self._wait_in_slices(slot.start(self._transport, Header(fingerprint, flags, length, log.number)))
        if not slot.agreed():
            raise self._difference(description)

    def _difference(self, description: Description) -> AccelError:
        """What the calls of the processes differ in; asked only after all have seen that they differ."""
        call = self._exchange.log.last()
        described = replace(description, location=str(call.location) if call else "")
        rows = self._swap(_DIFFERENT, described, described.to_json(), _DESCRIBED)
        return mismatch([Description.from_json(row) for row in rows])

    def _refuse(self, error: Exception) -> None:
        """Tell the others that this process cannot take part, so that they raise as well."""
        if isinstance(error, AccelError):
            reason = (error.asked, error.obstacle, error.remedy)
        else:
            reason = (f"{type(error).__name__}: {error}", "", "See the traceback of that process.")
        try:
            self._meet(_DIFFERENT, replace(self._describe([]), refusal=reason), 0, _REFUSED)
        except ShapeMismatch:
            return

    def _wait_in_slices(self, work: Work) -> None:
        while True:
            try:
                work.wait(_SLICE)
            except RuntimeError as error:
                if work.is_completed():
                    raise self._failure(error) from error
            else:
                return

    def _failure(self, error: BaseException) -> AccelError:
        exchange, transport = self._exchange, self._transport
        exchange.slot.renew()
        return explain(error, exchange.log.last(), transport.rank, transport.world_size, exchange.watch)
