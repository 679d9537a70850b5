"""What all calls on one transport share: buffers, the log, the turn, pending calls, and the hang monitor."""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Callable, Hashable
from typing import TYPE_CHECKING, Any

from accel_state.hang_report.call_log import CallLog
from accel_state.protocol.description import CallDescription
from accel_state.protocol.header import EagerHeader
from accel_state.protocol.turn import Turn
from accel_state.transport.base import Transport

if TYPE_CHECKING:
    from accel_state.hang_report.monitor import HangMonitor

__all__ = ("ProtocolState", "add_group_state", "protocol_state", "share_protocol_state")


class ProtocolState:
    """The state that all calls on one transport share: header buffers, call log, pending calls, and the hang monitor.

    Args:
        transport: the transport between the processes; the state does not refer to it.
        like: the state of another transport between the same processes; this one continues its log.
        world: for the transport of a group, the state of the transport between all processes.

    Attributes:
        plans: cache of upper layers for calls with the same structure.
        sites: cache of upper layers for the last call of each line of the user's code.
        pending: functions that complete the calls which were started and not yet waited for, in order.
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
        self.pending: deque[Callable[[], None]] = like.pending if like else deque()

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
