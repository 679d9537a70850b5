"""Loads a checkpoint on several processes, which share the weights of a model or receive them from the first one.

The processes synchronise before the first write and after the last read: if one of them raises an error, all do.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from hashlib import blake2b
from typing import Any, Final

import torch
from torch import Tensor, nn

from accel_bigmodel.loading import LoadGuard, Loading, LoadReport, compare_names, load_guard, load_progress
from accel_bigmodel.tensors import canonical_name, holds_sharded_weights, tensors_of
from accel_bigmodel.weight_files.reading import (
    Copy,
    StoredWeight,
    copy_all,
    find_weights,
    local_checkpoint,
    open_weights,
)
from accel_bigmodel.weight_layout import WeightLayout, layout_of
from accel_ops.agreement import StoreBarrier
from accel_ops.collectives import broadcast
from accel_ops.dtensors import local_chunks, write_full_tensor
from accel_state import current
from accel_state.errors import AccelError, CheckpointError
from accel_state.identity import Process

__all__ = ("load_together",)

_FAILURE: Final = "Cannot load a checkpoint on several processes."
_DEADLINE: Final = 7200.0
"""Seconds to wait for a process that reads; the first one may read a large checkpoint alone."""


def load_together(
    model: nn.Module,
    checkpoint: Any,
    dtype: torch.dtype | None,
    strict: bool,
    full_state_dict: bool,
    broadcast_from_rank0: bool,
) -> LoadReport:
    """Load on every process; if one of them raises an error, all do.

    Args:
        dtype: dtype of floating-point weights; if None, that of the model.
        full_state_dict: the files contain whole weights. Otherwise each process loads its own files.
        broadcast_from_rank0: only the first process reads.

    The other arguments are those of `load_checkpoint_in_model`.

    Raises:
        CheckpointError, ShapeMismatch, SettingError: on every process if it occurs on one; another error is raised
            where it occurs, and becomes a CheckpointError on the other processes.
    """
    sharded = holds_sharded_weights(model)
    process = current.process_or_start()
    barrier = StoreBarrier(process, "load_checkpoint_in_model", _FAILURE, _DEADLINE, CheckpointError)
    with load_guard(model, checkpoint) as guard:
        with barrier.reporting():
            view = _View(model, checkpoint, strict)
            # A process that does not find the files gets the weights from the first one.
            optional = full_state_dict and process.rank > 0
            if not optional or not broadcast_from_rank0:
                view.open(optional and sharded)
        answer = json.loads(barrier.wait("files", view.described(), _from_first if full_state_dict else _from_each))
        report = LoadReport(answer["missing"], answer["unexpected"])
        if not sharded:
            return _read_by_first(model, view, answer["weights"], dtype, barrier, process, guard, report)
        with barrier.reporting():
            guard.writes = True
            if dtype is not None:
                model.to(dtype)
            if answer["all"]:
                report = _read_shards(model, view, report)
        barrier.wait("read", last=True)
        if not full_state_dict:
            _read_own(model, view)
        elif not answer["all"]:
            _distribute(model, view, answer["weights"], process)
        return report


class _View:
    """One process's view of a checkpoint: empty until `open` finds the files."""

    def __init__(self, model: nn.Module, checkpoint: Any, strict: bool) -> None:
        self.model = model
        self.checkpoint = checkpoint
        self.strict = strict
        self.layout = _with_canonical_names(layout_of(model))
        self.stored: dict[str, StoredWeight] = {}
        self.report: LoadReport | None = None

    def open(self, optional: bool) -> None:
        """Check all files, names and shapes.

        Args:
            optional: the files may be absent.
        """
        try:
            sources = find_weights(local_checkpoint(self.checkpoint))
        except AccelError:
            if optional:
                return
            raise
        stored = open_weights(sources)
        self.report = compare_names(self.model, self.layout, stored, self.strict)
        self.stored = {name: weight for name, weight in stored.items() if name in self.layout.weights}

    def described(self) -> str:
        """The view as text, equal on processes that see the same files; empty without files."""
        if self.report is None:
            return ""
        weights = {name: str(weight.dtype).removeprefix("torch.") for name, weight in self.stored.items()}
        places = [
            (name, weight.path.name, weight.path.stat().st_size, weight.shape) for name, weight in self.stored.items()
        ]
        return json.dumps(
            {
                "missing": self.report.missing,
                "unexpected": self.report.unexpected,
                "weights": weights,
                "places": blake2b(repr(places).encode(), digest_size=16).hexdigest(),
            }
        )


def _from_first(views: Sequence[str]) -> str:
    """Decide which processes read the same files: all if all see them, otherwise only the first one."""
    seen = {view for view in views if view}
    if len(seen) > 1:
        others = [str(rank) for rank, view in enumerate(views) if view and view != views[0]]
        raise CheckpointError(
            _FAILURE,
            f"The files that process {', '.join(others[:10])} sees differ from those of process 0.",
            "Make the same files available to all processes, or pass broadcast_from_rank0=True.",
        )
    return json.dumps({**json.loads(views[0]), "all": all(views)})


def _from_each(views: Sequence[str]) -> str:
    """The first process's view; each process loads its own files, and no process reads ranges of whole weights."""
    return json.dumps({**json.loads(views[0]), "all": False})


def _with_canonical_names(layout: WeightLayout) -> WeightLayout:
    """The layout with the names in files, without the prefixes of torch's wrappers."""
    named = {canonical_name(name): replace(spec, name=canonical_name(name)) for name, spec in layout.weights.items()}
    return replace(layout, weights=named, tied=tuple(tuple(map(canonical_name, names)) for names in layout.tied))


@contextmanager
def _memory_of(model: nn.Module, names: Collection[str]) -> Iterator[dict[str, Any]]:
    """The model's tensors with these names, each once. Those without data get memory, and are in the model at the end.

    Args:
        model: the model.
        names: canonical names.
    """
    tensors, fresh, seen = dict[str, Any](), dict[str, Tensor](), set[int]()
    for name, own in tensors_of(model).items():
        if canonical_name(name) not in names or id(own) in seen:
            continue
        seen.add(id(own))
        if own.is_meta:
            memory = torch.empty_like(own, device=_device_of(own))
            is_parameter = isinstance(own, nn.Parameter)
            own = fresh[name] = nn.Parameter(memory, own.requires_grad) if is_parameter else memory
        tensors[canonical_name(name)] = own
    yield tensors
    if fresh:
        # Tied parameters stay tied: each name gets the tensor of its group.
        for tied in layout_of(model).tied:
            first = next((fresh[name] for name in tied if name in fresh), None)
            fresh.update({name: first for name in tied if first is not None})
        model.load_state_dict(fresh, strict=False, assign=True)


def _read_shards(model: nn.Module, view: _View, report: LoadReport) -> LoadReport:
    """Read the parts of weights that this process holds."""
    copies = list[Copy]()
    with _memory_of(model, view.stored) as tensors:
        for name, own in tensors.items():
            if hasattr(own, "to_local"):
                copies += [Copy(chunk.local, view.stored[name], chunk.offsets) for chunk in local_chunks(own)]
            else:
                copies.append(Copy(own, view.stored[name], None))
        with load_progress(model, sum(copy.size for copy in copies)) as advance:
            read = copy_all(copies, advance)
    return replace(report, bytes_read=read)


def _device_of(own: Any) -> torch.device:
    """The device for the memory of a tensor without data: that of its mesh, or that of the process."""
    mesh = getattr(own, "device_mesh", None)
    return current.process_or_start().device if mesh is None else torch.device(mesh.device_type)


def _read_own(model: nn.Module, view: _View) -> None:
    """Load each process's own files, in which the weights are sharded as they are saved there."""
    with _memory_of(model, view.stored) as tensors, torch.no_grad():
        for name, own in tensors.items():
            own.copy_(view.stored[name].mapped())


def _distribute(model: nn.Module, view: _View, names: Collection[str], process: Process) -> None:
    """Let the first process send one full weight after the other, of which every process keeps its part.

    torch's own functions are wrong for shards that consist of several parts.
    """
    with _memory_of(model, names) as tensors:
        for name, own in tensors.items():
            full = torch.empty(own.shape, dtype=own.dtype, device=process.device)
            if name in view.stored:
                full.copy_(view.stored[name].mapped())
            broadcast(full)
            if hasattr(own, "to_local"):
                write_full_tensor(own, full)
            else:
                own.detach().copy_(full)


def _read_by_first(
    model: nn.Module,
    view: _View,
    dtypes: Mapping[str, str],
    dtype: torch.dtype | None,
    barrier: StoreBarrier,
    process: Process,
    guard: LoadGuard,
    report: LoadReport,
) -> LoadReport:
    """Read on the first process while the others allocate memory, then send one weight after the other."""
    with barrier.reporting():
        guard.writes = True
        loading = Loading(model, layout_of(model), dtype_of=lambda name: dtype)
        shapes = {name: spec.shape for name, spec in view.layout.weights.items()}
        sent = {name: StoredWeight(name, shapes[name], getattr(torch, dtypes[name]), file=None) for name in dtypes}
        read = loading.bring(view.stored or sent)
    barrier.wait("read", last=True)
    tensors = {id(tensor): tensor for name, tensor in tensors_of(model).items() if name in dtypes}
    for tensor in tensors.values():
        _send(tensor.detach(), process)
    return replace(report, bytes_read=read)


def _send(tensor: Tensor, process: Process) -> None:
    """Broadcast the values of the first process, through the device that the transport supports."""
    sent = tensor.to(process.device).contiguous()
    broadcast(sent)
    if process.rank > 0 and sent is not tensor:
        with torch.no_grad():
            tensor.copy_(sent)
