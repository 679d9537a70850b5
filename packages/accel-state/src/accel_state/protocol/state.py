"""What all calls on one transport share: buffers, the log, the turn, pending calls, and the hang monitor."""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Callable, Hashable
from typing import TYPE_CHECKING, Any, Protocol

from accel_state.protocol.description import CallDescription
from accel_state.protocol.header import EagerHeader
from accel_state.protocol.turn import Turn
from accel_state.transport.base import Transport
from accel_state.watch.calls import CallLog

if TYPE_CHECKING:
    from accel_state.watch.monitor import HangMonitor

__all__ = ("ProtocolState", "StartedCall", "add_group_state", "protocol_state")


class StartedCall(Protocol):
    """A call that was started and is not complete, as a later call sees it; `call.PendingCall` is one.

    The module of calls imports the state that they share, so this module cannot import that class.

    Attributes:
        differs: whether it has ended because the calls of the processes differ.
    """

    differs: bool

    def complete(self) -> None:
        """Wait for this call, the oldest pending one."""


class ProtocolState:
    """The state that all calls on one transport share: header buffers, call log, pending calls, and the hang monitor.

    Args:
        transport: the transport between the processes; the state does not refer to it.
        world: for the transport of a group, the state of the transport between all processes.

    Attributes:
        plans: cache of upper layers for calls with the same structure.
        pending: the calls that were started and are not complete, in order.
        spare_headers: headers of pending calls that have ended, for reuse.
        exchange_hooks: called with `log.exchanges` whenever this process begins to wait for headers.
        world_size: number of processes of the run.
        turn: the call that is under way.
    """

    __slots__ = (
        "__weakref__",
        "exchange_hooks",
        "header",
        "header_only",
        "log",
        "monitor",
        "pending",
        "plans",
        "spare_headers",
        "turn",
        "world_size",
    )

    def __init__(self, transport: Transport, world: ProtocolState | None = None) -> None:
        self.header = EagerHeader(transport.world_size)
        self.plans: dict[Hashable, Any] = {}
        self.spare_headers: list[EagerHeader] = []
        self.header_only: dict[tuple[Any, ...], tuple[int, CallDescription]] = {}
        self.exchange_hooks: list[Callable[[int], None]] = []
        self.turn: Turn = Turn(world.turn.home, numbers=False) if world else Turn(threading.current_thread())
        self.log: CallLog
        self.monitor: HangMonitor
        self.world_size: int
        if world is not None:
            self.log = CallLog(world=world.log, group=transport.group)
            self.monitor, self.world_size = world.monitor, world.world_size
        else:
            self.log, self.world_size = CallLog(), transport.world_size
            self.monitor = self._start_monitor(transport)
        self.pending: deque[StartedCall] = deque()

    def _start_monitor(self, transport: Transport) -> HangMonitor:
        # Only runs of several processes need it.
        from accel_state.watch.monitor import HangMonitor

        monitor = HangMonitor(self.log, transport.control(), transport.rank, transport.world_size)
        weakref.finalize(self, monitor.stop)
        return monitor


_states: weakref.WeakKeyDictionary[Transport, ProtocolState] = weakref.WeakKeyDictionary()


def protocol_state(transport: Transport) -> ProtocolState:
    """The state of a transport, created at the first call; transports that forward have that of the connected one."""
    connected = transport.connected
    state = _states.get(connected)
    if state is None:
        state = _states[connected] = ProtocolState(connected)
    return state


def add_group_state(transport: Transport, world: Transport) -> None:
    """Connect the transport of a group to the log and the monitor of the whole run.

    Its calls have their own lock: calls of several groups may run at the same time.
    """
    connected = transport.connected
    if connected not in _states:
        _states[connected] = ProtocolState(connected, world=protocol_state(world))
