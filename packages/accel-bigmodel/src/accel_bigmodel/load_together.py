"""Loading a checkpoint on several processes: each reads its own shards, or the first reads for all.

The processes agree before anything is written and after everything was read: what one of them raises, all raise.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from hashlib import blake2b
from typing import Any, Final

import torch
from torch import Tensor, nn

from accel_bigmodel.failed_load import LoadGuard, load_guard
from accel_bigmodel.hub import local_checkpoint
from accel_bigmodel.load import Loading, LoadReport, compare, load_progress, tensors_of
from accel_bigmodel.weight_files.range_reader import RangeReader
from accel_bigmodel.weight_files.reading import FileWeight, find_weights, open_weights
from accel_bigmodel.weight_layout import WeightLayout, layout_of
from accel_ops.agreement import StoreBarrier
from accel_ops.collectives import broadcast
from accel_state import current
from accel_state.errors import AccelError, CheckpointError
from accel_state.identity import Process

__all__ = ("holds_sharded_weights", "load_together")

_ASKED: Final = "Cannot load a checkpoint on several processes."
_DEADLINE: Final = 7200.0
"""Seconds to wait for a process that reads; the first one may read a large checkpoint alone."""

_WRAPPERS: Final = frozenset({"_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module"})
"""Modules that torch puts around others; files do not have their names."""


def holds_sharded_weights(model: nn.Module) -> bool:
    """Whether weights of the model are sharded over processes by torch, as FSDP2 and tensor parallelism do."""
    # The code that sharded them has imported this; importing it only to ask takes a third of a second.
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and any(isinstance(parameter, module.DTensor) for parameter in model.parameters())


def load_together(
    model: nn.Module,
    checkpoint: Any,
    dtype: torch.dtype | None,
    strict: bool,
    full_state_dict: bool,
    broadcast_from_rank0: bool,
) -> LoadReport:
    """Load on every process; all raise what one of them raises.

    Args:
        dtype: dtype that floating-point weights are given; that of the model when None.
        full_state_dict: the files hold whole weights. Otherwise each process loads its own files.
        broadcast_from_rank0: only the first process reads.

    The other arguments are those of `load_checkpoint_in_model`.

    Raises:
        CheckpointError, ShapeMismatch, SettingError: on every process, what one of them met; another error is raised
            where it occurred, and is a CheckpointError elsewhere.
    """
    sharded = holds_sharded_weights(model)
    process = current.process_or_start()
    barrier = StoreBarrier(process, "load_checkpoint_in_model", _ASKED, _DEADLINE, CheckpointError)
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
        if not answer["all"]:
            _distribute(model, view, full_state_dict)
        return report


class _View:
    """What one process sees of a checkpoint: nothing, before `open` finds it."""

    def __init__(self, model: nn.Module, checkpoint: Any, strict: bool) -> None:
        self.model = model
        self.checkpoint = checkpoint
        self.strict = strict
        self.layout = _with_file_names(layout_of(model))
        self.found: dict[str, FileWeight] = {}
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
        found = open_weights(sources)
        self.report = compare(self.model, self.layout, found, self.strict)
        self.found = {name: weight for name, weight in found.items() if name in self.layout.weights}

    def described(self) -> str:
        """The view as text, equal on processes that see the same files; empty where there are none."""
        if self.report is None:
            return ""
        weights = {name: str(weight.dtype).removeprefix("torch.") for name, weight in self.found.items()}
        places = [
            (name, weight.path.name, weight.shape, weight.entry and weight.entry.begin)
            for name, weight in self.found.items()
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
    """How processes that load the same files do so: all read where all see them, otherwise the first one."""
    seen = {view for view in views if view}
    if len(seen) > 1:
        others = [str(rank) for rank, view in enumerate(views) if view and view != views[0]]
        raise CheckpointError(
            _ASKED,
            f"The files that process {', '.join(others[:10])} sees differ from those of process 0.",
            "Give all processes the same checkpoint, or pass broadcast_from_rank0=True.",
        )
    return json.dumps({**json.loads(views[0]), "all": all(views)})


def _from_each(views: Sequence[str]) -> str:
    """The view of the first process; each loads its own files, and none reads ranges of whole weights."""
    return json.dumps({**json.loads(views[0]), "all": False})


def _with_file_names(layout: WeightLayout) -> WeightLayout:
    """The layout under the names that files have, without those of wrappers of torch."""
    named = {_file_name(name): replace(spec, name=_file_name(name)) for name, spec in layout.weights.items()}
    return replace(layout, weights=named, tied=tuple(tuple(map(_file_name, names)) for names in layout.tied))


def _file_name(name: str) -> str:
    return ".".join(part for part in name.split(".") if part not in _WRAPPERS)


def _read_shards(model: nn.Module, view: _View, report: LoadReport) -> LoadReport:
    """Read the parts of weights that this process holds."""
    reader, fresh, filled = RangeReader(), dict[str, Tensor](), set[int]()
    for name, own in tensors_of(model).items():
        weight = view.found.get(_file_name(name))
        if weight is None or id(own) in filled:
            continue
        filled.add(id(own))
        if own.is_meta:
            memory = torch.empty_like(own, device=_device_of(own))
            is_parameter = isinstance(own, nn.Parameter)
            own = fresh[name] = nn.Parameter(memory, own.requires_grad) if is_parameter else memory
        local, starts = _local_part(own)
        weight.read_into(reader, local, starts)
    with load_progress(model, reader.size) as advance:
        reader.run(advance)
    if fresh:
        # Parameters that are tied stay so: each name gets the tensor of its group.
        for names in layout_of(model).tied:
            first = next((fresh[name] for name in names if name in fresh), None)
            fresh.update({name: first for name in names if first is not None})
        model.load_state_dict(fresh, strict=False, assign=True)
    return replace(report, bytes_read=reader.bytes_read)


def _device_of(own: Any) -> torch.device:
    """Where a tensor without data gets memory: on the device of its mesh, or on that of the process."""
    mesh = getattr(own, "device_mesh", None)
    return current.process_or_start().device if mesh is None else torch.device(mesh.device_type)


def _local_part(own: Any) -> tuple[Tensor, tuple[int, ...] | None]:
    """What this process holds of a tensor, and where that begins in the whole."""
    if not hasattr(own, "to_local"):
        return own, None
    # The interface by which torch's own checkpoints ask for shards.
    (chunk,) = own.__create_chunk_list__()
    with torch.no_grad():
        return own.to_local(), tuple(chunk.offsets)


def _distribute(model: nn.Module, view: _View, full: bool) -> None:
    """Let torch give each process its shards: of the weights of the first one, or of those in its own files."""
    from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict

    own = {_file_name(name): tensor.dtype for name, tensor in tensors_of(model).items()}
    given: dict[str, Any] = {
        name: weight.mapped().to(own[name] if own[name].is_floating_point else weight.dtype)
        for name, weight in view.found.items()
    }
    options = StateDictOptions(full_state_dict=full, broadcast_from_rank0=full, strict=False)
    set_model_state_dict(model, given, options=options)


class _AwaitedWeight(FileWeight):
    """A weight that the first process reads, on another one: memory of the same form."""

    def __init__(self, name: str, shape: tuple[int, ...], dtype: str) -> None:
        self.name, self.shape, self.dtype, self.entry = name, shape, getattr(torch, dtype), None

    def mapped(self) -> Tensor:
        return torch.empty(self.shape, dtype=self.dtype)

    def read_into(self, reader: RangeReader, target: Tensor, starts: Any = None) -> None:
        """Nothing is read here."""


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
        loading = Loading(model, dtype_of=lambda name: dtype)
        shapes = {name: spec.shape for name, spec in view.layout.weights.items()}
        awaited = {name: _AwaitedWeight(name, shapes[name], dtypes[name]) for name in dtypes}
        read = loading.bring(view.found or awaited)
    barrier.wait("read", last=True)
    tensors = {id(tensor): tensor for name, tensor in tensors_of(model).items() if name in dtypes}
    for tensor in tensors.values():
        _send(tensor.detach(), process)
    return replace(report, bytes_read=read)


def _send(tensor: Tensor, process: Process) -> None:
    """Give all processes the values of the first, by way of the device that the transport works on."""
    sent = tensor.to(process.device).contiguous()
    broadcast(sent)
    if process.rank > 0 and sent is not tensor:
        with torch.no_grad():
            tensor.copy_(sent)
