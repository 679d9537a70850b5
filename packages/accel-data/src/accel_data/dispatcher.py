"""The loader in which the main process reads for all: each process receives its own part of every step, and no other.

Every step is one message to each process. It announces the next one, so nobody is asked for sizes; the message after it
is on its way while the loop works on this one.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from dataclasses import replace
from typing import Any

from accel_data.dispatched import DispatchedSource
from accel_data.feed import fed
from accel_data.loader import source_of
from accel_data.mesh import coordinates
from accel_data.postal import Arrival, alone, receive, send
from accel_data.prepared import END, PreparedLoader
from accel_data.progress import Outlook, Position, Progress
from accel_ops.conversion import send_to_device
from accel_ops.objects import gather_object
from accel_state import current
from accel_state.gradient import GradientState

__all__ = ("DataLoaderDispatcher",)


class DataLoaderDispatcher(PreparedLoader):
    """Gives each process its part of what the main process reads.

    Args:
        dataset: the data set; only the main process reads it.
        split_batches: cut each batch of the loader; otherwise a step takes one batch for each process.
        skip_batches: batches left out at the beginning of every epoch, counted in what a process receives.
        use_stateful_dataloader: read through torchdata's `StatefulDataLoader`.
        slice_fn: `f(batch, slice, process_index=, num_processes=)` that cuts a batch for one process.
        torch_device_mesh: mesh whose data axes say which processes get different parts.
        iteration: number of the first epoch.
        gradient: state of the Accelerator that the loader belongs to; the current one when None.
        restore_position: continue in the middle of the epoch after `load_state_dict`.
        kwargs: of `torch.utils.data.DataLoader`.
    """

    source: DispatchedSource

    def __init__(
        self,
        dataset: Any,
        split_batches: bool = False,
        skip_batches: int = 0,
        use_stateful_dataloader: bool = False,
        _drop_last: bool = False,
        _non_blocking: bool = False,
        slice_fn: Callable[..., Any] | None = None,
        torch_device_mesh: Any = None,
        iteration: int = 0,
        *,
        gradient: GradientState | None = None,
        restore_position: bool = False,
        **kwargs: Any,
    ) -> None:
        super().__init__(dataset, use_stateful_dataloader=use_stateful_dataloader, **kwargs)
        parts = max(coordinates(torch_device_mesh, current.process_or_start().world_size)) + 1
        inner = source_of(self.base_dataloader)
        source = DispatchedSource(inner, parts, split_batches, _drop_last, slice_fn).skipping(skip_batches)
        self.hold(source.base, use_stateful_dataloader)
        self._set(
            source,
            device=current.process_or_start().device,
            skip_batches=skip_batches,
            skips=skip_batches > 0,
            restores=restore_position or use_stateful_dataloader,
            gradient_state=gradient,
            progress=Progress(iteration),
            torch_device_mesh=torch_device_mesh,
            _drop_last=_drop_last,
            _non_blocking=_non_blocking,
        )

    @property
    def split_batches(self) -> bool:
        """Whether each batch of the loader is cut."""
        return self.source.split

    @property
    def slice_fn(self) -> Callable[..., Any] | None:
        """What cuts a batch for one process, if it was given."""
        return self.source.slice_fn

    def _outlook(self, at: Position | None, samples: int | None) -> Outlook:
        """That of the main process, whose data are the ones that are read."""
        own = super()._outlook(at, samples)
        if current.process_or_start().world_size == 1:
            return own
        base = self.base_dataloader
        mine = {
            "batch_size": base.batch_size,
            "split_batches": self.source.split,
            "drop_last": self.source.drop_last,
            "skip_batches": self.source.skipped()[0],
        }
        everyone = gather_object([(mine, own)])
        for rank, (theirs, _) in enumerate(everyone):
            self._check_alike(rank, everyone[0][0], theirs)
        outlook: Outlook = everyone[0][1]
        return outlook

    def _check_alike(self, rank: int, main: dict[str, Any], theirs: dict[str, Any]) -> None:
        name = next((name for name, value in theirs.items() if value != main[name]), None)
        if name is not None:
            raise self._error(
                "an epoch that the main process reads for all was begun.",
                f"Process 0 has {name}={main[name]}, process {rank} has {name}={theirs[name]}.",
                "Make the loader with the same arguments on every process.",
            )

    def _open(self, at: Position | None) -> Iterator[Any]:
        arrivals, feed = self._arrivals(at), self.feed
        if feed is None:
            return arrivals
        return fed(
            arrivals, feed, False, lambda arrival: arrival.part, lambda arrival, part: replace(arrival, part=part)
        )

    def _arrivals(self, at: Position | None) -> Iterator[Any]:
        process, source = current.process_or_start(), self.source
        transport = process.transport
        if transport.world_size == 1:
            return alone(source.open(at))
        if process.rank == 0:
            return send(transport, source.open(at), coordinates(self.torch_device_mesh, transport.world_size))
        return receive(transport, source.processes)

    def _give_out(self, batches: Iterator[Any], first: Any) -> Generator[Any, None, int]:
        progress, device, number = self.progress, self.device, 0
        arrival: Arrival | object = first
        while isinstance(arrival, Arrival):
            number += 1
            progress.steps += 1
            progress.base = arrival.base
            progress.padding = padding = arrival.padding
            progress.end_of_dataloader = arrival.last
            part = arrival.part
            if arrival.last and padding is not None and padding.total >= 0:
                progress.remainder = padding.total % (self.source.step_size or padding.total + 1)
            elif arrival.last:
                self._count_last(part)
            if arrival.last and arrival.base is not None:
                progress.final_base = self.source.base_state()
            yield part if device is None else send_to_device(part, device, self._non_blocking)
            arrival = END if arrival.last else self._next(batches)
        return number

    def __len__(self) -> int:
        batches = super().__len__()
        per_step, drops = self.source.per_step, self.source.drop_last
        return batches // per_step if drops else -(-batches // per_step)
