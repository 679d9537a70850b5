"""Writing folders of shards of `torch.distributed.checkpoint`: each process its own, planned once for a layout.

Planning and the description of the folder take two exchanges between the processes, up and down a tree: each process
receives from at most log2(W) others and sends to as many, and what is sent to all is an empty plan or nothing. torch's
own `save` gathers from all processes on the first one, and sends the description of everything back to each.
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

import torch.distributed as dist
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystem, FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, StorageMeta
from torch.distributed.checkpoint.planner import SavePlan, WriteItem

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
    """Stores the paths of shards as text, because another system or Python may not read a pickled path.

    Files are left to the page cache: `checkpoint.commit` flushes them while the next ones are being written.

    Args:
        target: the folder of shards.
    """

    def __init__(self, target: Path) -> None:
        super().__init__(target, sync_files=False)
        self.fs = _EarlyFlush()

    def storage_meta(self) -> StorageMeta | None:
        """What the `.metadata` holds besides the tensors."""
        meta = super().storage_meta()
        if meta is not None:
            meta.checkpoint_id = str(meta.checkpoint_id)
        return meta


class _EarlyFlush(FileSystem):
    """Lets the disk begin with a file while it is being written."""

    @contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Iterator[io.IOBase]:
        """An open file."""
        with FlushedWhileWritten(path, mode) as raw, io.BufferedWriter(raw, _BUFFER) as stream:
            yield stream


@dataclasses.dataclass
class SavePlans:
    """What the processes planned for the last save of some tensors, for the next one of the same layout.

    Args:
        local: what this process had to offer.
        final: what it wrote of that.
        known: what each process had to offer; on the first one.
        metadata: the description of all; on the first one.
    """

    local: SavePlan | None = None
    final: SavePlan | None = None
    known: list[SavePlan] | None = None
    metadata: Metadata | None = None

    def forget(self) -> None:
        """Plan anew next time, because others may not know what this process knows."""
        self.local = self.final = self.known = self.metadata = None


class BalancedSavePlanner(DefaultSavePlanner):
    """Lets processes write about the same number of bytes, and plans once for all saves of the same layout.

    What one process alone holds it writes itself. What several hold, as replicated tensors, is written once: the
    largest first, each by the process that has least to write. Where nothing has changed since the last save, processes
    send empty plans and the first one repeats what it planned; each process then only compares its own plans.

    Args:
        plans: those of the last save, which this one replaces.
    """

    def __init__(self, plans: SavePlans) -> None:
        super().__init__()
        self._plans = plans
        self._local: SavePlan | None = None

    def create_local_plan(self) -> SavePlan:
        """What this process could write; empty where the others know it."""
        self._local = super().create_local_plan()
        return SavePlan([], usable=False) if self._local == self._plans.local else self._local

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        """Who writes what, and its description; on the first process."""
        plans, changed = self._plans, any(plan.usable for plan in all_plans)
        if plans.metadata is not None and not changed:
            return [SavePlan([], usable=False) for _ in all_plans], dataclasses.replace(plans.metadata)
        earlier: Sequence[SavePlan | None] = plans.known or [None] * len(all_plans)
        offered = [new if new.usable else old for new, old in zip(all_plans, earlier, strict=True)]
        known = [plan for plan in offered if plan is not None]
        if len(known) < len(all_plans):
            raise ValueError("some processes send no plan, because they know of a save that this one does not know of")
        planned, metadata = super().create_global_plan(_balanced(known))
        plans.known, plans.metadata = known, metadata
        return planned, dataclasses.replace(metadata)

    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        """What this process writes."""
        final = new_plan if new_plan.usable else self._plans.final
        if final is None:
            raise ValueError("the first process knows of a save that this one does not know of")
        self._plans.local, self._plans.final = self._local, final
        self.plan = final
        return final


def _balanced(plans: list[SavePlan]) -> list[SavePlan]:
    """Plans without what another process writes; the largest of what several could write is assigned first."""
    holders: dict[MetadataIndex, list[int]] = {}
    sizes: dict[MetadataIndex, int] = {}
    for rank, plan in enumerate(plans):
        for item in plan.items:
            holders.setdefault(item.index, []).append(rank)
            sizes[item.index] = _bytes_of(item)
    writers, load = dict[MetadataIndex, int](), [0] * len(plans)
    # Those with a single holder come first.
    for index in sorted(holders, key=lambda index: (len(holders[index]) > 1, -sizes[index])):
        writers[index] = min(holders[index], key=lambda rank: (load[rank], rank))
        load[writers[index]] += sizes[index]
    return [
        dataclasses.replace(plan, items=[item for item in plan.items if writers[item.index] == rank])
        for rank, plan in enumerate(plans)
    ]


def _bytes_of(item: WriteItem) -> int:
    """Bytes of what is written; of an object, whose size is not known yet, one."""
    data = item.tensor_data
    return 1 if data is None else math.prod(data.chunk.sizes) * data.properties.dtype.itemsize


def write_shards(state: dict[str, Any], target: Path, plans: SavePlans, group: Any = None) -> None:
    """Write the shards of a state; called on every process.

    Args:
        state: nested, with tensors that are sharded or the same on all processes.
        target: the folder of shards.
        plans: those of the last save of this state.
        group: on which processes agree about shards, apart from training's; of a backend that sends from the host.

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
    """The process that one hands its share to, and those that hand theirs to it, of a binomial tree.

    Each of the latter has the ranks from its own up to the next one's.

    Args:
        rank: of the process.
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


class _FailedError(Exception):
    """What a process met, as all of them hear of it.

    Args:
        rank: of the process.
        text: class and message of its error.
    """

    def __init__(self, rank: int, text: str) -> None:
        super().__init__(rank, text)
        self._rank, self._text = rank, text

    def __str__(self) -> str:
        return f"Process {self._rank} failed: {self._text}"


class _Processes:
    """The processes of a group, which exchange objects up and down a tree.

    Args:
        group: a process group; that of all when None.
    """

    def __init__(self, group: Any) -> None:
        alone = not dist.is_initialized()
        self.rank, self.size = (0, 1) if alone else (dist.get_rank(group), dist.get_world_size(group))
        self._group = group
        self._above, self._below = neighbours(self.rank, self.size)

    def exchange(self, work: Callable[[], T], combine: Callable[[list[T]], list[R]]) -> R:
        """Work on every process, combine the results on the first, and return this process's part of that.

        Args:
            work: what each process does.
            combine: makes a part for each process of the results in the order of the ranks.

        Raises:
            _FailedError: some process failed, maybe this one.
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
                # An interrupt ends this process, and the others miss it.
                raise
            return _FailedError(self.rank, f"{type(error).__name__}: {error}")

    def _gather(self, own: Any) -> list[Any] | None:
        """What all processes give, in their order, on the first one; None elsewhere."""
        held = [own]
        for rank in self._below:
            received: list[Any] = [None]
            dist.recv_object_list(received, group=self._group, group_src=rank)
            held += received[0]
        if self._above is None:
            return held
        dist.send_object_list([held], group=self._group, group_dst=self._above)
        return None

    def _scatter(self, parts: Sequence[Any] | None) -> Any:
        """The part for this process of what the first one gives."""
        if parts is None:
            received: list[list[Any]] = [[]]
            dist.recv_object_list(received, group=self._group, group_src=self._above)
            parts = received[0]
        # Whoever hands on to the most comes first.
        for begin, end in reversed([*pairwise([*(rank - self.rank for rank in self._below), len(parts)])]):
            dist.send_object_list([parts[begin:end]], group=self._group, group_dst=self.rank + begin)
        return parts[0]
