"""Loads the weights of a checkpoint into a model, in one process or in several together.

Several processes synchronise before the first write and after the last read: if one of them raises an error, all do.
"""

from __future__ import annotations

import json
import logging
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from pathlib import Path
from typing import Any, Final, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn import Parameter

from accel_bigmodel.device_map import Device, check_device_same, check_room, resolve_device
from accel_bigmodel.dispatch import DISK
from accel_bigmodel.failed_load import LoadGuard, load_guard
from accel_bigmodel.hub import local_checkpoint
from accel_bigmodel.offload import offload_weight, save_offload_index
from accel_bigmodel.place import set_module_tensor_to_device
from accel_bigmodel.progress import progress
from accel_bigmodel.sizes import get_non_persistent_buffers
from accel_bigmodel.tied import canonical_name, retie_parameters
from accel_bigmodel.weight_files.range_reader import RangeReader
from accel_bigmodel.weight_files.reading import FileWeight, find_weights, open_weights
from accel_bigmodel.weight_layout import StoredWeight, WeightLayout, WeightSpec, layout_of
from accel_ops.agreement import StoreBarrier
from accel_ops.collectives import broadcast
from accel_ops.dtensors import pieces
from accel_state import current
from accel_state.errors import AccelError, CheckpointError, SettingError, ShapeMismatch
from accel_state.identity import Process

__all__ = ("LoadReport", "Loading", "holds_sharded_weights", "load_together", "refuse_empty")

_log: Final = logging.getLogger(__name__)

_ASKED: Final = "Cannot load a checkpoint on several processes."
_DEADLINE: Final = 7200.0
"""Seconds to wait for a process that reads; the first one may read a large checkpoint alone."""


Place: TypeAlias = "Callable[[nn.Module, str, Device, Tensor, torch.dtype | None], None]"
"""Sets one weight of a model: model, name, device, the weight in the dtype of its file, the target dtype."""


@dataclass
class LoadReport:
    """The result of a load.

    Args:
        missing: names in the model that the checkpoint lacks.
        unexpected: names in the checkpoint that the model lacks.
        bytes_read: bytes that this process read from files; weights that are mapped, or stay on the disk, are not read.
    """

    missing: list[str] = field(default_factory=list)
    unexpected: list[str] = field(default_factory=list)
    bytes_read: int = 0


class Loading:
    """One load in one process; `run` executes it.

    Args:
        layout: the model's layout, with its device map.
        dtype_of: returns the target dtype of a weight by name; None for that of the model.
        place: sets each weight of the model, in place of the default, which sets it with the target dtype and device.

    The other arguments are those of `load_checkpoint_in_model`.

    Attributes:
        layout: the weights of the model; `run` fills in their files.

    Raises:
        SettingError: the device map names the disk, and there is no folder; from `run`, a device has too little memory.
    """

    def __init__(
        self,
        model: nn.Module,
        layout: WeightLayout,
        offload_folder: str | os.PathLike[str] | None = None,
        offload_buffers: bool = False,
        dtype_of: Callable[[str], torch.dtype | None] = lambda name: None,
        place: Place | None = None,
    ) -> None:
        self.layout = layout
        if offload_folder is None and DISK in map(str, (layout.device_map or {}).values()):
            raise SettingError(
                f"Cannot load parts of {type(model).__name__} to the disk.",
                "The call does not set a folder for these weights.",
                "Pass offload_folder=.",
            )
        self.model = model
        self._folder = offload_folder
        self._offload_buffers = offload_buffers
        self._dtype_of = dtype_of
        self._place = place
        self._tensors = tensors_of(model)

    def run(self, checkpoint: str | os.PathLike[str], strict: bool) -> LoadReport:
        """Check all files, names and shapes, then load every weight to its device."""
        with load_guard(self.model, checkpoint) as guard:
            found = open_weights(find_weights(local_checkpoint(checkpoint)))
            report = compare(self.model, self.layout, found, strict)
            own = {name: weight for name, weight in found.items() if name in self.layout.weights}
            self._check_room(own)
            # Files are opened before the first write, because this is the last check that can fail.
            mapped = {name: weight.mapped() for name, weight in own.items() if self._is_mapped(name, weight)}
            self.layout = self.layout.with_files({name: _stored(weight) for name, weight in own.items()})
            guard.writes = True
            return replace(report, bytes_read=self.bring(own, mapped))

    def _check_room(self, found: Mapping[str, FileWeight]) -> None:
        """Check that each device has memory for its weights; weights that are quantised become smaller."""
        if self.layout.device_map is None or self._place is not None:
            return
        needed: dict[torch.device, int] = {}
        counted = set[tuple[int, torch.device]]()
        for name, weight in found.items():
            own = self._tensors[name]
            if self._stays_on_disk(name) or self._is_mapped(name, weight):
                continue
            device = resolve_device(self._device(self.layout.weights[name]))
            if device.type != "meta" and (id(own), device) not in counted:
                counted.add((id(own), device))
                size = own.numel() * self._dtype(name, weight).itemsize
                # The current memory of the weight on this device becomes free.
                held = own.nbytes if check_device_same(own.device, device) else 0
                needed[device] = needed.get(device, 0) + size - held
        check_room(self.model, self.layout.device_map, needed, self._dtype_of(""))

    def bring(self, found: Mapping[str, FileWeight], mapped: Mapping[str, Tensor] | None = None) -> int:
        """Load weights to their devices, and return the number of bytes read.

        Args:
            found: weights of the model by name, with checked shapes.
            mapped: those among them that are already mapped.
        """
        index: dict[str, dict[str, Any]] = {}
        here = {name: weight for name, weight in found.items() if not self._stays_on_disk(name)}
        for name in found.keys() - here.keys():
            self._leave_on_disk(name, found[name], index)
        read = self._set_all(here, mapped or {}) if self._place is None else self._place_each(here, self._place)
        if self._folder is not None and index:
            Path(self._folder).mkdir(parents=True, exist_ok=True)
            # The layout also has the names of tied weights that the files lack.
            save_offload_index({**index, **self.layout.offload_index()}, self._folder)
        retie_parameters(self.model, self.layout.tied)
        return read

    def _device(self, spec: WeightSpec) -> Device:
        """The target device of a weight; without a device map, a weight without data goes to the CPU."""
        if self.layout.device_map is None:
            return "cpu" if self._tensors[spec.name].is_meta else spec.device
        kept = spec.is_buffer and not self._offload_buffers and str(spec.device) == DISK
        return "cpu" if kept else spec.device

    def _dtype(self, name: str, weight: FileWeight) -> torch.dtype:
        """The target dtype of a weight: integers and bools keep that of the file."""
        own = self.layout.weights[name].dtype
        if not weight.dtype.is_floating_point:
            return weight.dtype
        return self._dtype_of(name) or (own if own.is_floating_point else weight.dtype)

    def _is_filled(self, name: str) -> bool:
        """Whether a weight is read into the model's existing memory, which an optimizer may refer to as well."""
        own, dtype = self._tensors[name], self._dtype_of(name)
        return self.layout.device_map is None and not own.is_meta and dtype in (None, own.dtype)

    def _stays_on_disk(self, name: str) -> bool:
        return str(self._device(self.layout.weights[name])) == DISK

    def _is_mapped(self, name: str, weight: FileWeight) -> bool:
        """Whether a weight stays mapped from its file: its target is the CPU, with the dtype of the file."""
        if self._place is not None or self._is_filled(name) or self._stays_on_disk(name):
            return False
        device = resolve_device(self._device(self.layout.weights[name]))
        return device.type == "cpu" and self._dtype(name, weight) == weight.dtype

    def _set_all(self, found: Mapping[str, FileWeight], mapped: Mapping[str, Tensor]) -> int:
        """Allocate memory for every weight, then fill it from the files."""
        reader = RangeReader()
        last_names = {id(self._tensors[name]): name for name in found}
        for name, weight in found.items():
            own = self._tensors[name]
            if self._is_filled(name):
                # A tied tensor is filled once, with the same weight as by `load_state_dict`.
                if last_names[id(own)] == name:
                    _fill(own, weight, reader)
                continue
            device = self._device(self.layout.weights[name])
            value = mapped.get(name)
            if value is None:
                value = torch.empty(weight.shape, dtype=self._dtype(name, weight), device=resolve_device(device))
                _fill(value, weight, reader)
            set_module_tensor_to_device(self.model, name, device, value=value, dtype=value.dtype, clear_cache=False)
            # The memory of the previous weight is free for the next one.
            self._tensors[name] = value
        with load_progress(self.model, reader.size) as advance:
            reader.run(advance)
        return reader.bytes_read

    def _place_each(self, found: Mapping[str, FileWeight], place: Place) -> int:
        """Read one weight after the other, so that only one is in memory in the form of the file."""
        read = 0
        with load_progress(self.model, sum(weight.nbytes for weight in found.values())) as advance:
            for name, weight in found.items():
                reader, value = RangeReader(), torch.empty(weight.shape, dtype=weight.dtype)
                _fill(value, weight, reader)
                reader.run(advance)
                read += reader.bytes_read
                place(self.model, name, self._device(self.layout.weights[name]), value, self._dtype_of(name))
        return read

    def _leave_on_disk(self, name: str, weight: FileWeight, index: dict[str, dict[str, Any]]) -> None:
        if weight.entry is not None:
            index[name] = {"safetensors_file": str(weight.path.absolute()), "weight_name": name}
        elif self._folder is not None:
            offload_weight(weight.mapped().to(self._dtype(name, weight)), name, self._folder, index)
        set_module_tensor_to_device(self.model, name, "meta", dtype=self._dtype_of(name))


def _fill(target: Tensor, weight: FileWeight, reader: RangeReader) -> None:
    """Let a reader fill a plain tensor with memory; a tensor of another class copies the data itself."""
    if type(target) in (Tensor, Parameter):
        if not target.is_meta:
            weight.read_into(reader, target)
    else:
        with torch.no_grad():
            target.copy_(weight.mapped())


def load_progress(model: nn.Module, size: int) -> AbstractContextManager[Callable[[int], None]]:
    """The progress bar for a load with this number of bytes."""
    return progress(f"Loading {type(model).__name__}", size)


def tensors_of(model: nn.Module) -> dict[str, Tensor]:
    """Parameters and buffers of a model by name, with every name of a tied tensor."""
    named = (*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False))
    return dict(named)


def _stored(weight: FileWeight) -> StoredWeight:
    entry = weight.entry
    place = (None, None) if entry is None else (entry.begin, entry.end - entry.begin)
    return StoredWeight(weight.path.absolute(), weight.name, weight.dtype, *place)


def compare(model: nn.Module, layout: WeightLayout, found: Mapping[str, FileWeight], strict: bool) -> LoadReport:
    """Compare the weights in files with those of a model, without changing it.

    A tied weight is missing only if the files contain no name of its group.

    Raises:
        ShapeMismatch: shapes differ.
        CheckpointError: names differ and `strict` is set.
    """
    for name, weight in found.items():
        own = layout.weights.get(name)
        if own is not None and own.shape != weight.shape:
            raise ShapeMismatch(
                f"Cannot load {name!r} from {str(weight.path)!r} into {type(model).__name__}.",
                f"The file has shape {weight.shape}, the model {own.shape}. Nothing was loaded.",
                "Load weights of the same architecture.",
            )
    known = {name for names in layout.tied if any(one in found for one in names) for name in names}
    report = LoadReport(
        missing=[name for name in layout.weights if name not in found and name not in known],
        unexpected=[name for name in found if name not in layout.weights],
    )
    if strict and (report.missing or report.unexpected):
        raise CheckpointError(
            f"Cannot load a checkpoint strictly into {type(model).__name__}.",
            f"Missing: {_listed(report.missing)}. Unexpected: {_listed(report.unexpected)}. Nothing was loaded.",
            "Load the checkpoint of this model, or pass strict=False.",
        )
    if report.missing:
        _log.warning("Weights that the checkpoint does not have: %s.", _listed(report.missing))
    if report.unexpected:
        # Programs search their logs for "were not used when".
        unused = _listed(report.unexpected)
        _log.warning("Weights of the checkpoint were not used when loading %s: %s.", type(model).__name__, unused)
    return report


def refuse_empty(model: nn.Module, report: LoadReport, checkpoint: object) -> None:
    """Check that the model has all weights: what the checkpoint lacks must not be on the meta device.

    Raises:
        CheckpointError: a weight that the checkpoint lacks, or a buffer that no checkpoint holds, is on the meta
            device.
    """
    tensors = tensors_of(model)
    lost = [name for name in report.missing if tensors[name].is_meta]
    if lost:
        raise CheckpointError(
            f"Cannot use {type(model).__name__} with the weights of {str(checkpoint)!r}.",
            f"{len(lost)} of its weights are missing there and stay on the meta device: {_listed(lost)}.",
            "Load the checkpoint of this model, or initialise these weights before you load it.",
        )
    buffers = [name for name in get_non_persistent_buffers(model, recurse=True, fqns=True) if tensors[name].is_meta]
    if buffers:
        raise CheckpointError(
            f"Cannot use {type(model).__name__}: its buffers {_listed(sorted(buffers))} are on the meta device.",
            f"They have persistent=False, so that no checkpoint holds them; {str(checkpoint)!r} was loaded.",
            "Create the model with init_empty_weights(include_buffers=False), or set these buffers before you load it.",
        )


def _listed(names: Sequence[str]) -> str:
    more = f", and {len(names) - 10} more" if len(names) > 10 else ""
    return (", ".join(names[:10]) or "none") + more


def holds_sharded_weights(model: nn.Module) -> bool:
    """Whether weights of the model are sharded over processes by torch, as FSDP2 and tensor parallelism do."""
    # Code that shards weights has imported this module; importing it only for this check takes a third of a second.
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and any(isinstance(parameter, module.DTensor) for parameter in model.parameters())


@contextmanager
def on_one_device(model: nn.Module) -> Iterator[None]:
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
    """One process's view of a checkpoint: empty until `open` finds the files."""

    def __init__(self, model: nn.Module, checkpoint: Any, strict: bool) -> None:
        self.model = model
        self.checkpoint = checkpoint
        self.strict = strict
        self.layout = _withcanonical_names(layout_of(model))
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
        """The view as text, equal on processes that see the same files; empty without files."""
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
    """Decide which processes read the same files: all if all see them, otherwise only the first one."""
    seen = {view for view in views if view}
    if len(seen) > 1:
        others = [str(rank) for rank, view in enumerate(views) if view and view != views[0]]
        raise CheckpointError(
            _ASKED,
            f"The files that process {', '.join(others[:10])} sees differ from those of process 0.",
            "Make the same files available to all processes, or pass broadcast_from_rank0=True.",
        )
    return json.dumps({**json.loads(views[0]), "all": all(views)})


def _from_each(views: Sequence[str]) -> str:
    """The first process's view; each process loads its own files, and no process reads ranges of whole weights."""
    return json.dumps({**json.loads(views[0]), "all": False})


def _withcanonical_names(layout: WeightLayout) -> WeightLayout:
    """The layout with the names in files, without the prefixes of torch's wrappers."""
    named = {canonical_name(name): replace(spec, name=canonical_name(name)) for name, spec in layout.weights.items()}
    return replace(layout, weights=named, tied=tuple(tuple(map(canonical_name, names)) for names in layout.tied))


def _read_shards(model: nn.Module, view: _View, report: LoadReport) -> LoadReport:
    """Read the parts of weights that this process holds."""
    reader, fresh, filled = RangeReader(), dict[str, Tensor](), set[int]()
    for name, own in tensors_of(model).items():
        weight = view.found.get(canonical_name(name))
        if weight is None or id(own) in filled:
            continue
        filled.add(id(own))
        if own.is_meta:
            memory = torch.empty_like(own, device=_device_of(own))
            is_parameter = isinstance(own, nn.Parameter)
            own = fresh[name] = nn.Parameter(memory, own.requires_grad) if is_parameter else memory
        if hasattr(own, "to_local"):
            for piece in pieces(own):
                weight.read_into(reader, piece.local, piece.offsets)
        else:
            weight.read_into(reader, own)
    with load_progress(model, reader.size) as advance:
        reader.run(advance)
    if fresh:
        # Tied parameters stay tied: each name gets the tensor of its group.
        for names in layout_of(model).tied:
            first = next((fresh[name] for name in names if name in fresh), None)
            fresh.update({name: first for name in names if first is not None})
        model.load_state_dict(fresh, strict=False, assign=True)
    return replace(report, bytes_read=reader.bytes_read)


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
        for name, weight in view.found.items()
    }
    options = StateDictOptions(full_state_dict=full, broadcast_from_rank0=full, strict=False)
    with on_one_device(model):
        set_model_state_dict(model, given, options=options)


class _AwaitedWeight(FileWeight):
    """A weight that the first process reads, on another process: memory of the same shape and dtype."""

    def __init__(self, name: str, shape: tuple[int, ...], dtype: str) -> None:
        self.name, self.shape, self.dtype, self.entry = name, shape, getattr(torch, dtype), None

    def mapped(self) -> Tensor:
        return torch.empty(self.shape, dtype=self.dtype)

    def read_into(self, reader: RangeReader, target: Tensor, starts: Any = None) -> None:
        """Read nothing on this process."""


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
        awaited = {name: _AwaitedWeight(name, shapes[name], dtypes[name]) for name in dtypes}
        read = loading.bring(view.found or awaited)
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
