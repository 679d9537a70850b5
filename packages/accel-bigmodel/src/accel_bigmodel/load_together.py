"""Loads a checkpoint on several processes, which share the weights of a model or receive them from the first one.

The processes synchronise before the first write and after the last read: if one of them raises an error, all do.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from hashlib import blake2b
from typing import Any, Final

import torch
from torch import Tensor, nn

from accel_bigmodel.failed_load import LoadGuard, load_guard
from accel_bigmodel.hub import local_checkpoint
from accel_bigmodel.loading import Loading, LoadReport, compare_names, load_progress, tensors_of
from accel_bigmodel.tied import canonical_name
from accel_bigmodel.weight_files.reading import Copy, StoredWeight, copy_all, find_weights, open_weights
from accel_bigmodel.weight_layout import WeightLayout, layout_of
from accel_ops.agreement import StoreBarrier
from accel_ops.collectives import broadcast
from accel_ops.dtensors import local_chunks
from accel_state import current
from accel_state.errors import AccelError, CheckpointError
from accel_state.identity import Process

__all__ = ("holds_sharded_weights", "load_together")

_FAILURE: Final = "Cannot load a checkpoint on several processes."
_DEADLINE: Final = 7200.0
"""Seconds to wait for a process that reads; the first one may read a large checkpoint alone."""


def holds_sharded_weights(model: nn.Module) -> bool:
    """Whether weights of the model are sharded over processes by torch, as FSDP2 and tensor parallelism do."""
    # Code that shards weights has imported this module; importing it only for this check takes a third of a second.
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and any(isinstance(parameter, module.DTensor) for parameter in model.parameters())


@contextmanager
def _on_one_device(model: nn.Module) -> Iterator[None]:
    """Move what is not sharded to the host inside the block, if the shards are there.

    torch distributes full weights only to tensors on one device, and an offloaded model has its shards on the host, and
    its buffers on the device.
    """
    moved: dict[int, tuple[Tensor, Tensor]] = {}
    offloaded = any(hasattr(own, "to_local") and own.device.type == "cpu" for own in model.parameters())
    kept = [tensors for module in model.modules() for tensors in (module._parameters, module._buffers)]
    if offloaded:
        _exchange(kept, lambda own: moved.setdefault(id(own), (_on_host(own), own))[0] if _is_elsewhere(own) else own)
    try:
        yield
    finally:
        originals = {id(host): own for host, own in moved.values()}
        with torch.no_grad():
            for host, own in moved.values():
                own.copy_(host)
        _exchange(kept, lambda own: originals.get(id(own), own))


def _exchange(kept: Iterable[dict[str, Any]], exchanged: Callable[[Tensor], Tensor]) -> None:
    for tensors in kept:
        tensors.update({name: exchanged(own) for name, own in tensors.items() if own is not None})


def _is_elsewhere(own: Tensor) -> bool:
    return own.device.type not in ("cpu", "meta")


def _on_host(own: Tensor) -> Tensor:
    host = own.detach().cpu()
    return nn.Parameter(host, own.requires_grad) if isinstance(own, nn.Parameter) else host


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
        if not answer["all"]:
            _distribute(model, view, full_state_dict)
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


def _read_shards(model: nn.Module, view: _View, report: LoadReport) -> LoadReport:
    """Read the parts of weights that this process holds."""
    copies, fresh, filled = list[Copy](), dict[str, Tensor](), set[int]()
    for name, own in tensors_of(model).items():
        weight = view.stored.get(canonical_name(name))
        if weight is None or id(own) in filled:
            continue
        filled.add(id(own))
        if own.is_meta:
            memory = torch.empty_like(own, device=_device_of(own))
            is_parameter = isinstance(own, nn.Parameter)
            own = fresh[name] = nn.Parameter(memory, own.requires_grad) if is_parameter else memory
        if hasattr(own, "to_local"):
            copies += [Copy(chunk.local, weight, chunk.offsets) for chunk in local_chunks(own)]
        else:
            copies.append(Copy(own, weight, None))
    with load_progress(model, sum(copy.size for copy in copies)) as advance:
        read = copy_all(copies, advance)
    if fresh:
        # Tied parameters stay tied: each name gets the tensor of its group.
        for names in layout_of(model).tied:
            first = next((fresh[name] for name in names if name in fresh), None)
            fresh.update({name: first for name in names if first is not None})
        model.load_state_dict(fresh, strict=False, assign=True)
    return replace(report, bytes_read=read)


def _device_of(own: Any) -> torch.device:
    """The device for the memory of a tensor without data: that of its mesh, or that of the process."""
    mesh = getattr(own, "device_mesh", None)
    return current.process_or_start().device if mesh is None else torch.device(mesh.device_type)


def _distribute(model: nn.Module, view: _View, full: bool) -> None:
    """Let torch distribute the shards: from the weights of the first process, or from each process's own files."""
    from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict

    own = {canonical_name(name): tensor.dtype for name, tensor in tensors_of(model).items()}
    given: dict[str, Any] = {
        name: weight.mapped().to(own[name] if own[name].is_floating_point else weight.dtype)
        for name, weight in view.stored.items()
    }
    options = StateDictOptions(full_state_dict=full, broadcast_from_rank0=full, strict=False)
    with _on_one_device(model):
        set_model_state_dict(model, given, options=options)


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
