"""Write folders of shards of `torch.distributed.checkpoint`: each process writes its shards, planned once per layout.

Planning and writing the metadata need two exchanges between the processes, up and down a tree. Each process receives
from at most log2(W) others and sends to as many; for a known layout, plans are empty. In contrast, torch's `save`
gathers from all processes on the first one and sends the complete metadata back to each.
"""

from __future__ import annotations

import dataclasses
import io
import math
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any, Final, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystem, FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, StorageMeta
from torch.distributed.checkpoint.planner import SavePlan, WriteItem

from accel_ops.objects import dumps, loads
from accel_plugins.checkpoint.files import FlushedWhileWritten
from accel_state.errors import CheckpointError

__all__ = (
    "BalancedSavePlanner",
    "PortableWriter",
    "SavePlans",
    "neighbours",
    "write_shards",
)

_BUFFER: Final = 1 << 18

T = TypeVar("T")
R = TypeVar("R")


class PortableWriter(FileSystemWriter):
    """Stores the paths of shards as strings, because another system or Python may not be able to read a pickled path.

    Files are not flushed here: `checkpoint.commit` flushes them while the next ones are being written.

    Args:
        target: the folder of shards.
    """

    def __init__(self, target: Path) -> None:
        super().__init__(target, sync_files=False)
        self.fs = _EarlyFlush()

    def storage_meta(self) -> StorageMeta | None:
        """The content of `.metadata` besides the tensors."""
        meta = super().storage_meta()
        if meta is not None:
            meta.checkpoint_id = str(meta.checkpoint_id)
        return meta


class _EarlyFlush(FileSystem):
    """Starts the writeback of a file while it is being written."""

    @contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Iterator[io.IOBase]:
        """An open file."""
        with FlushedWhileWritten(path, mode) as raw, io.BufferedWriter(raw, _BUFFER) as stream:
            yield stream


@dataclasses.dataclass
class SavePlans:
    """The plans of the last save, reused by the next save of the same layout.

    Args:
        local: the items that this process could write.
        final: the items that it wrote.
        known: the items that each process could write; on the first process.
        metadata: the metadata of the folder; on the first process.
    """

    local: SavePlan | None = None
    final: SavePlan | None = None
    known: list[SavePlan] | None = None
    metadata: Metadata | None = None

    def forget(self) -> None:
        """Discard the plans, because other processes may not have the same ones."""
        self.local = self.final = self.known = self.metadata = None


class BalancedSavePlanner(DefaultSavePlanner):
    """Balances the bytes that processes write, and plans once for all saves of the same layout.

    An item that only one process has is written by this process. Replicated items are assigned to one process each,
    largest first, to the process with the fewest bytes so far. If the layout has not changed since the last save,
    processes send empty plans and the first one reuses its plan; each process then only compares its own plans.

    Args:
        plans: the plans of the last save; replaced by those of this save.
    """

    def __init__(self, plans: SavePlans) -> None:
        super().__init__()
        self._plans = plans
        self._local: SavePlan | None = None

    def create_local_plan(self) -> SavePlan:
        """The items that this process could write; empty if the first process already knows them."""
        self._local = super().create_local_plan()
        return SavePlan([], usable=False) if self._local == self._plans.local else self._local

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        """The items that each process writes, and the metadata; on the first process."""
        plans, changed = self._plans, any(plan.usable for plan in all_plans)
        if plans.metadata is not None and not changed:
            return [SavePlan([], usable=False) for _ in all_plans], dataclasses.replace(plans.metadata)
        earlier: Sequence[SavePlan | None] = plans.known or [None] * len(all_plans)
        offered = [new if new.usable else old for new, old in zip(all_plans, earlier, strict=True)]
        known = [plan for plan in offered if plan is not None]
        if len(known) < len(all_plans):
            raise ValueError("some processes sent an empty plan, but this process has no plans of an earlier save")
        planned, metadata = super().create_global_plan(_balanced(known))
        plans.known, plans.metadata = known, metadata
        return planned, dataclasses.replace(metadata)

    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        """The items that this process writes."""
        final = new_plan if new_plan.usable else self._plans.final
        if final is None:
            raise ValueError("the first process reused a plan, but this process has no plans of an earlier save")
        self._plans.local, self._plans.final = self._local, final
        self.plan = final
        return final


def _balanced(plans: list[SavePlan]) -> list[SavePlan]:
    """Plans without the items that another process writes; replicated items are assigned largest first."""
    holders: dict[MetadataIndex, list[int]] = {}
    sizes: dict[MetadataIndex, int] = {}
    for rank, plan in enumerate(plans):
        for item in plan.items:
            holders.setdefault(item.index, []).append(rank)
            sizes[item.index] = _bytes_of(item)
    writers, load = dict[MetadataIndex, int](), [0] * len(plans)
    # Items of a single process come first.
    for index in sorted(holders, key=lambda index: (len(holders[index]) > 1, -sizes[index])):
        writers[index] = min(holders[index], key=lambda rank: (load[rank], rank))
        load[writers[index]] += sizes[index]
    return [
        dataclasses.replace(plan, items=[item for item in plan.items if writers[item.index] == rank])
        for rank, plan in enumerate(plans)
    ]


def _bytes_of(item: WriteItem) -> int:
    """The size of an item in bytes; 1 for an object, of which the size is not known yet."""
    data = item.tensor_data
    return 1 if data is None else math.prod(data.chunk.sizes) * data.properties.dtype.itemsize


def write_shards(state: dict[str, Any], target: Path, plans: SavePlans, group: Any = None) -> None:
    """Write the shards of a state; called on every process.

    Args:
        state: nested containers with tensors that are sharded or equal on all processes.
        target: the folder of shards.
        plans: the plans of the last save of this state.
        group: a separate process group for planning, with a backend that supports CPU tensors.

    Raises:
        CheckpointError: this or another process cannot write.
    """
    planner, writer, processes = BalancedSavePlanner(plans), PortableWriter(target), _Processes(group)
    is_first, described = processes.rank == 0, list[Metadata]()

    def local_plan() -> SavePlan:
        planner.set_up_planner(state, storage_meta=writer.storage_meta(), is_coordinator=is_first)
        writer.set_up_storage_writer(is_first, rank=processes.rank, use_collectives=True)
        return writer.prepare_local_plan(planner.create_local_plan())

    def global_plan(offered: list[SavePlan]) -> list[SavePlan]:
        planned, metadata = planner.create_global_plan(offered)
        described.append(metadata)
        return writer.prepare_global_plan(planned)

    def finish(written: list[Any]) -> list[None]:
        writer.finish(described[0], written)
        return [None] * len(written)

    try:
        plan = processes.exchange(local_plan, global_plan)
        processes.exchange(lambda: writer.write_data(planner.finish_plan(plan), planner).wait(), finish)
    except BaseException as error:
        plans.forget()
        if not isinstance(error, Exception):
            raise
        raise CheckpointError(
            f"Cannot save the shards in {target}.",
            (str(error).strip().splitlines() or [type(error).__name__])[0],
            "Check the free space and the permissions of the folder.",
        ) from error


def neighbours(rank: int, size: int) -> tuple[int | None, list[int]]:
    """The parent and the children of a process in a binomial tree.

    The subtree of each child has the ranks from its own up to that of the next child.

    Args:
        rank: rank of the process.
        size: number of processes.

    Example:
        >>> neighbours(0, 6), neighbours(4, 6), neighbours(5, 6)
        ((None, [1, 2, 4]), (0, [5]), (4, []))
    """
    reach, below = 1, list[int]()
    while reach < size and not rank & reach:
        if rank + reach < size:
            below.append(rank + reach)
        reach *= 2
    return (rank - reach if rank else None), below


def _device_of(group: Any) -> str:
    """The type of the devices whose tensors a group sends; the CPU if it sends several."""
    types = [pair.partition(":")[0] for pair in dist.get_backend_config(group).split(",")]
    return "cpu" if "cpu" in types else types[0]


class _FailedError(Exception):
    """The error of a process, as it is sent to all.

    Args:
        rank: rank of the process.
        text: class and message of the error.
    """

    def __init__(self, rank: int, text: str) -> None:
        super().__init__(rank, text)
        self._rank, self._text = rank, text

    def __str__(self) -> str:
        return f"Process {self._rank} failed: {self._text}"


class _Processes:
    """Exchanges objects between the processes of a group, up and down a tree.

    Args:
        group: a process group; None: that of all processes.
    """

    def __init__(self, group: Any) -> None:
        alone = not dist.is_initialized()
        self.rank, self.size = (0, 1) if alone else (dist.get_rank(group), dist.get_world_size(group))
        self._group = group
        self._device = torch.device("cpu" if alone else _device_of(group))
        self._above, self._below = neighbours(self.rank, self.size)

    def exchange(self, work: Callable[[], T], combine: Callable[[list[T]], list[R]]) -> R:
        """Call `work` on every process, combine the results on the first, and return this process's part.

        Args:
            work: called on each process.
            combine: receives the results in the order of ranks; returns a part for each process.

        Raises:
            _FailedError: at least one process failed.
        """
        results = self._gather(self._outcome(work))
        parts: list[Any] | None = None
        if results is not None:
            failed = [result for result in results if isinstance(result, _FailedError)]
            combined = failed[0] if failed else self._outcome(lambda: combine(results))
            parts = [combined] * self.size if isinstance(combined, _FailedError) else combined
        part = self._scatter(parts)
        if isinstance(part, _FailedError):
            raise part
        return part  # type: ignore[no-any-return]

    def _outcome(self, work: Callable[[], Any]) -> Any:
        try:
            return work()
        except BaseException as error:
            if not isinstance(error, Exception):
                # An interrupt ends this process; the others then raise because it is missing.
                raise
            return _FailedError(self.rank, f"{type(error).__name__}: {error}")

    def _gather(self, own: Any) -> list[Any] | None:
        """The objects of all processes, in the order of ranks, on the first one; None on others."""
        held = [own]
        for rank in self._below:
            held += self._receive(rank)
        if self._above is None:
            return held
        self._send(held, self._above)
        return None

    def _scatter(self, parts: Sequence[Any] | None) -> Any:
        """This process's part of the objects that the first one sends."""
        if parts is None:
            assert self._above is not None
            received: Sequence[Any] = self._receive(self._above)
            parts = received
        # The child with the largest subtree comes first.
        for begin, end in reversed([*pairwise([*(rank - self.rank for rank in self._below), len(parts)])]):
            self._send(parts[begin:end], self.rank + begin)
        return parts[0]

    # torch's send_object_list does not sign its pickles.
    def _send(self, value: Any, rank: int) -> None:
        data = torch.frombuffer(bytearray(dumps(value)), dtype=torch.uint8).to(self._device)
        dist.send(torch.tensor([data.numel()], device=self._device), group=self._group, group_dst=rank)
        dist.send(data, group=self._group, group_dst=rank)

    def _receive(self, rank: int) -> Any:
        length = torch.zeros(1, dtype=torch.int64, device=self._device)
        dist.recv(length, group=self._group, group_src=rank)
        data = torch.empty(int(length), dtype=torch.uint8, device=self._device)
        dist.recv(data, group=self._group, group_src=rank)
        return loads(data.cpu().numpy().tobytes())
