"""Sessions of our Accelerator in a plan: their transport has the other processes answer as this one does."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, unset_fake_temporarily

from accel_check.meshes import READ_ALIKE
from accel_check.records import read, write_record
from accel_check.scratch_session import ScratchHook
from accel_state import current
from accel_state.creation import on_creation
from accel_state.protocol.header import COMPARED_BYTES
from accel_state.protocol.state import protocol_state
from accel_state.start import start_process
from accel_state.transport.base import DONE, Reduction, Transport, Work
from accel_torch.hooks import PROCESS_HOOKS

if TYPE_CHECKING:
    from accel_check.fake_world import FakeRank
    from accel_torch.options import Options
    from accel_torch.session import Session

__all__ = ("plan_sessions",)

_Note = Callable[[str, Sequence[Tensor]], None]


def plan_sessions(rank: FakeRank, scratch: str) -> None:
    """Let the sessions of this process run as one rank of a plan, until it ends.

    Args:
        rank: the rank that this process is.
        scratch: the folder for their records; no checkpoint is there.
    """

    def begin() -> None:
        if current.process_or_none() is not None:
            return
        if int(os.environ.get("WORLD_SIZE", "1")) == 1:
            return
        if not torch.distributed.is_initialized():
            # It is the group of the plan, which sends nothing.
            torch.distributed.init_process_group()
        # Buffers of headers have values.
        with unset_fake_temporarily():
            process = start_process(cpu=True)
            transport = _Alike(process.transport, rank.called, Path(scratch, "sent"), not process.rank)
            protocol_state(transport)
        current.set_process(process._replace(transport=transport))

    on_creation(begin)
    PROCESS_HOOKS.append(_PlanHook(scratch, rank))


class _PlanHook(ScratchHook):
    """Keeps a session from what needs values, and from the user's folders and trackers."""

    def __init__(self, scratch: str, rank: FakeRank) -> None:
        super().__init__(scratch)
        self._rank = rank

    def configure(self, options: Options) -> Options:
        """Train without a scaler, which decides by values whether to step: bf16 has the size of fp16."""
        precision = options.mixed_precision or os.environ.get("ACCELERATE_MIXED_PRECISION")
        return (
            super()
            .configure(options)
            ._replace(
                mixed_precision="bf16" if precision == "fp16" else options.mixed_precision,
                # The states of generators are values.
                rng_types=(),
            )
        )

    def start(self, session: Session) -> None:
        """Save nothing, and do not check the first steps, which compares values."""
        session.guards_first_steps = session.saves = False
        mesh = session.state.device_mesh
        if mesh is not None:
            for name in READ_ALIKE & set(mesh.mesh_dim_names or ()):
                self._rank.reads_alike(mesh[name])

    def loader_prepared(self, session: Session, loader: Any) -> None:
        """Let a prepared loader yield batches without values."""
        if hasattr(loader, "device_transfer"):
            loader.device_transfer = self._without_values

    def _without_values(self, pairs: Iterator[tuple[Any, Any]], ahead: bool) -> Iterator[tuple[Any, Any]]:
        while True:
            # A loader that sends batches to other processes needs their values.
            with unset_fake_temporarily():
                pair = next(pairs, None)
            if pair is None:
                return
            yield self._rank.without_values(pair[0]), pair[1]


class _Alike(Transport):
    """A transport on which every process sends what the first one sends.

    The first process is tried first, and what it sends is kept for the others. It itself receives what it sends.

    Args:
        process: the transport of the process, or of a group.
        note: called with the name and the tensors of each collective.
        kept: folder of what the first process sent.
        is_first: whether this is the first process of the run.
    """

    def __init__(self, process: Transport, note: _Note, kept: Path, is_first: bool) -> None:
        self.rank, self.world_size = process.rank, process.world_size
        self.device, self.timeout = process.device, timedelta(0)
        self.group, self.ranks = process.group, process.ranks
        self._process, self._note, self._kept, self._is_first = process, note, kept, is_first
        self._groups: dict[str, Transport] = {}
        self._calls = 0

    def subgroup(self, group: Any, label: str, meet: Callable[[], None]) -> Transport:
        if label not in self._groups:
            with unset_fake_temporarily():
                inner = self._process.subgroup(group, label, lambda: None)
            self._groups[label] = _Alike(inner, self._note, self._kept / str(len(self._groups)), self._is_first)
        return self._groups[label]

    def all_gather(self, output: Tensor, tensor: Tensor, *, header: bool = False) -> Work:
        self._note("header" if header else "all_gather", [tensor])
        (first,) = self._of_first([tensor])
        with _as_it_is(output, tensor):
            rows, own = output.view(self.world_size, -1), tensor.reshape(-1)
            rows.copy_(first.reshape(1, -1).expand(self.world_size, -1))
            rows[self.rank] = own
            if header:
                # Where calls differ, the check compares them, and tells the line.
                rows[:, :COMPARED_BYTES] = own[:COMPARED_BYTES]
        return DONE

    def all_reduce(self, tensor: Tensor, op: Reduction = "sum", into: Tensor | None = None) -> Work:
        self._note("all_reduce", [tensor])
        with _as_it_is(tensor):
            target = tensor if into is None else into.copy_(tensor)
            if op == "sum":
                target.mul_(self.world_size)
            elif op == "product":
                target.pow_(self.world_size)
        return DONE

    def broadcast(self, tensor: Tensor, src: int) -> Work:
        self._note("broadcast", [tensor])
        (first,) = self._of_first([tensor])
        with _as_it_is(tensor):
            tensor.copy_(first)
        return DONE

    def scatter(self, output: Tensor, inputs: Sequence[Tensor] | None, src: int) -> Work:
        self._note("scatter", [output])
        first = self._of_first(inputs or [output] * self.world_size)
        with _as_it_is(output, *first):
            output.copy_(first[self.rank])
        return DONE

    def gather(self, outputs: Sequence[Tensor] | None, tensor: Tensor, dst: int) -> Work:
        self._note("gather", [tensor])
        for output in outputs or ():
            with _as_it_is(output, tensor):
                output.copy_(tensor)
        return DONE

    def _of_first(self, sent: Sequence[Tensor]) -> Sequence[Tensor]:
        """What the first process sends where this one sends some tensors, if they have values."""
        path = self._kept / f"{self._calls}.pt"
        self._calls += 1
        if any(isinstance(tensor, FakeTensor) for tensor in sent):
            return sent
        with unset_fake_temporarily():
            if self._is_first:
                write_record(path, [tensor.clone() for tensor in sent])
                return sent
            first: Sequence[Tensor] = read(path) if path.is_file() else sent
        alike = [one.shape for one in first] == [one.shape for one in sent]
        return first if alike else sent

    def barrier(self) -> None:
        self._note("barrier", [])

    def store(self) -> None:
        """None: there is nobody else."""


def _as_it_is(*tensors: Tensor) -> AbstractContextManager[object]:
    """A block in which tensors that have values keep them."""
    fake = any(isinstance(tensor, FakeTensor) for tensor in tensors)
    return nullcontext() if fake else unset_fake_temporarily()
