"""Collectives over gloo that use less CPU time than gloo's own.

gloo gathers in a ring, into a buffer that it allocates for each call, and copies from there. Here, every process sends
small tensors to all others in one all_to_all, which takes half the time. The calling thread sends large tensors in
point-to-point messages without a buffer, which takes two thirds of the time. The number of bytes sent is the same.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any, Final

import torch
import torch.distributed as dist

from accel_state.transport.base import Reduction

__all__ = (
    "ALL_TO_ALL_LIMIT",
    "AllGatherByAllToAll",
    "P2PWork",
    "abort_p2p",
    "all_gather_p2p",
    "all_reduce_p2p",
    "broadcast_p2p",
    "scatter_p2p",
)

ALL_TO_ALL_LIMIT: Final = 256 * 1024
"""Bytes for all processes together up to which a process copies the tensor for each and sends one all_to_all."""

_NEVER_SENT: Final = 1
"""Tag of a message that no process sends; all others have the tag 0."""

_AT_ONCE: Final = timedelta(milliseconds=1)

_OPTIONS: Final = dist.AllToAllOptions()

_MOST_BOUND: Final = 4
"""Number of outputs with cached views: the header of the run, and those of pending calls."""

_COMBINE: Final[dict[str, Callable[..., torch.Tensor]]] = {
    "sum": torch.add,
    "product": torch.mul,
    "max": torch.maximum,
    "min": torch.minimum,
}


class AllGatherByAllToAll:
    """Gathers small tensors: every process sends a copy to each of the others in one all_to_all.

    Args:
        group: the process group over gloo.
    """

    __slots__ = ("_bound", "_copies", "_group", "_last", "_world_size")

    def __init__(self, group: Any) -> None:
        self._group = group
        self._world_size = group.size()
        self._copies = self._new_copies()
        # Output and tensor of recent calls, and the views of them: eager headers use the same tensors again and again,
        # and a view costs as much as the copy of a header.
        self._bound: dict[int, tuple[torch.Tensor, ...]] = {}
        # Keeps the buffers of the last call alive: a backend's thread would need the GIL to release them.
        self._last: tuple[Any, ...] = ()

    def all_gather(self, output: torch.Tensor, tensor: torch.Tensor) -> Any:
        """Start to collect `tensor` of every process into `output`, by rank; both are contiguous."""
        if self._last and not self._last[0].is_completed():
            # The last call may still read from its buffer.
            self._copies, self._bound = self._new_copies(), {}
        bound = self._bound.get(id(output))
        if bound is None or bound[0] is not output or bound[1] is not tensor:
            if len(self._bound) >= _MOST_BOUND:
                self._bound.clear()
            bound = self._bound[id(output)] = self._bind(output, tensor)
        _, _, given, rows, received = bound
        rows.copy_(given)
        # dist.all_to_all_single would repeat the caller's checks, which cost a quarter of the call.
        work = self._group.alltoall_base(received, rows, [], [], _OPTIONS)
        self._last = (work, received, rows)
        return work

    def _bind(self, output: torch.Tensor, tensor: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Both tensors, and views of input, copies and output as bytes, since gloo does not support all dtypes."""
        # Views that are created in inference mode could not be written to outside of it.
        with torch.inference_mode(False):
            given = tensor.view(-1).view(torch.uint8)
            shape = (self._world_size, given.numel())
            rows = self._copies[: shape[0] * shape[1]].view(shape)
            return output, tensor, given, rows, output.view(-1).view(torch.uint8).view(shape)

    def _new_copies(self) -> torch.Tensor:
        with torch.inference_mode(False):
            return torch.empty(max(ALL_TO_ALL_LIMIT, self._world_size), dtype=torch.uint8)


class P2PWork:
    """Messages that were started together, as one work; complete when all have arrived and were processed.

    `wait` also raises the errors of the start.

    Args:
        start: starts the messages and returns their works.
        finish: processes the messages that arrived.
    """

    __slots__ = ("_ended", "_error", "_finish", "_works")

    def __init__(self, start: Callable[[], list[Any]], finish: Callable[[], None] | None = None) -> None:
        self._finish = finish
        self._ended = False
        self._error: RuntimeError | None = None
        self._works: list[Any] = []
        try:
            self._works = start()
        except RuntimeError as error:
            self._error = error

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Block until all are complete.

        Ignores a `timeout` shorter than the group's: gloo would close the connections after it.
        """
        if not self._ended:
            self._ended = True
            try:
                for work in self._works:
                    work.wait()
                if self._finish is not None and self._error is None:
                    self._finish()
            except RuntimeError as error:
                self._error = error
        if self._error is not None:
            raise self._error
        return True

    def is_completed(self) -> bool:
        """Whether `wait` has completed them."""
        return self._ended


def all_gather_p2p(output: torch.Tensor, tensor: torch.Tensor, group: Any) -> P2PWork:
    """Collect `tensor` of every process into `output`, by rank; both are contiguous."""
    rank, world_size = group.rank(), group.size()
    rows, mine = output.view(world_size, -1), tensor.view(-1)

    def start() -> list[Any]:
        works = []
        for distance in range(1, world_size):
            before, after = (rank - distance) % world_size, (rank + distance) % world_size
            works.append(group.recv([rows[before]], before, 0))
            works.append(group.send([mine], after, 0))
        rows[rank].copy_(mine)
        return works

    return P2PWork(start)


def scatter_p2p(output: torch.Tensor, inputs: Sequence[torch.Tensor] | None, src: int, group: Any) -> P2PWork:
    """Send each process its element of the `inputs` of process `src`; that of `src` may be `output` itself."""
    if inputs is None:
        return P2PWork(lambda: [group.recv([output], src, 0)])
    own = inputs[src]
    if own is not output:
        output.copy_(own)
    others = [(rank, tensor) for rank, tensor in enumerate(inputs) if rank != src]
    return P2PWork(lambda: [group.send([tensor], rank, 0) for rank, tensor in others])


def broadcast_p2p(tensor: torch.Tensor, src: int, group: Any) -> P2PWork:
    """Overwrite `tensor` with that of process `src`, between two processes."""
    if group.rank() == src:
        return P2PWork(lambda: [group.send([tensor], 1 - src, 0)])
    return P2PWork(lambda: [group.recv([tensor], src, 0)])


def all_reduce_p2p(tensor: torch.Tensor, op: Reduction, into: torch.Tensor, group: Any) -> P2PWork:
    """Reduce `tensor` of two processes into `into`, which may be the same tensor."""
    other = 1 - group.rank()
    received = torch.empty_like(tensor) if into is tensor else into
    # Both processes reduce in the order of the ranks, so that the results are bitwise equal.
    first, second = (received, tensor) if other == 0 else (tensor, received)

    def start() -> list[Any]:
        return [
            group.recv([received], other, 0),
            group.send([tensor], other, 0),
        ]

    def finish() -> None:
        # Tensors that were created in inference mode can be written to only in that mode; it does not affect others.
        with torch.inference_mode():
            _COMBINE[op](first, second, out=into)

    return P2PWork(start, finish)


def abort_p2p(group: Any) -> None:
    """Close the connections of this process: gloo does so when a message does not arrive in time."""
    other = (group.rank() + 1) % group.size()
    with suppress(RuntimeError):
        group.recv([torch.empty(1, dtype=torch.uint8)], other, _NEVER_SENT).wait(_AT_ONCE)
