"""Loading a checkpoint into a model: each weight is mapped from its file, or read once, straight to where it goes."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final, TypeAlias, TypeVar

import torch
from torch import Tensor, nn
from torch.nn import Parameter

from accel_bigmodel.device_map import Device, DeviceMap, infer_auto_device_map, resolve_device
from accel_bigmodel.dispatch import DISK, dispatch_model
from accel_bigmodel.failed_load import load_guard
from accel_bigmodel.hub import local_checkpoint
from accel_bigmodel.offload import load_offloaded_weight, offload_weight, save_offload_index, weight_file
from accel_bigmodel.place import set_module_tensor_to_device
from accel_bigmodel.placement import Budget, get_balanced_memory
from accel_bigmodel.progress import progress
from accel_bigmodel.sizes import Dtype, torch_dtype
from accel_bigmodel.tied import device_of_name, retie_parameters
from accel_bigmodel.weight_files.range_reader import RangeReader
from accel_bigmodel.weight_files.reading import FileWeight, WeightSource, find_weights, open_weights
from accel_bigmodel.weight_layout import StoredWeight, WeightLayout, WeightSpec, layout_of
from accel_state.errors import CheckpointError, SettingError, ShapeMismatch

__all__ = (
    "LoadReport",
    "Loading",
    "chosen_map",
    "compare",
    "load_checkpoint_and_dispatch",
    "load_checkpoint_in_model",
    "load_offloaded_weights",
    "load_state_dict",
    "refuse_empty",
)

_log: Final = logging.getLogger(__name__)

M = TypeVar("M", bound=nn.Module)

Place: TypeAlias = "Callable[[nn.Module, str, Device, Tensor, torch.dtype | None], None]"
"""Puts one weight into a model: model, name, device, the weight in the dtype of its file, the dtype it is given."""


@dataclass
class LoadReport:
    """What a load found.

    Args:
        missing: names that the model has and the checkpoint does not.
        unexpected: names that the checkpoint has and the model does not.
        bytes_read: bytes that this process read from files; weights that are mapped, or stay on the disk, are not read.
    """

    missing: list[str] = field(default_factory=list)
    unexpected: list[str] = field(default_factory=list)
    bytes_read: int = 0


def load_checkpoint_in_model(
    model: nn.Module,
    checkpoint: str | os.PathLike[str],
    device_map: DeviceMap | None = None,
    offload_folder: str | os.PathLike[str] | None = None,
    dtype: Dtype | None = None,
    offload_state_dict: bool = False,
    offload_buffers: bool = False,
    keep_in_fp32_modules: Sequence[str] | None = None,
    offload_8bit_bnb: bool = False,
    strict: bool = False,
    full_state_dict: bool = True,
    broadcast_from_rank0: bool = False,
) -> LoadReport:
    """Load a checkpoint into a model, which may be on the meta device.

    Weights that go to the CPU in the dtype of their safetensors file are mapped from it. All others are read by several
    threads, straight into their final memory where the dtype agrees. Weights for the disk stay in their safetensors
    file; the index of `offload_folder` lists them. Every file is checked before the first weight is written.

    A model whose parameters are sharded over processes, as FSDP2 and tensor parallelism do, is loaded by all of them:
    each process reads its own ranges of the files. Where only the first process has the files, it sends the weights.

    Args:
        checkpoint: a weight file, an index, a folder, or "org/name" on the Hub when huggingface_hub is installed.
        device_map: name to device; without one each weight goes where the model's is now (from meta to the CPU).
        offload_folder: where weights for "disk" are listed or written.
        dtype: dtype that floating-point weights are given; that of the model when None.
        offload_state_dict: accepted; mapped files already save the memory that it would.
        offload_buffers: buffers for the disk are left there; otherwise they are loaded to the CPU.
        keep_in_fp32_modules: parts of names whose weights stay in float32 when `dtype` is float16.
        offload_8bit_bnb: accepted; weights for the disk are kept as they are in the checkpoint.
        strict: missing and unexpected names are an error.
        full_state_dict: for models with sharded weights: the checkpoint holds whole weights.
        broadcast_from_rank0: only the first process reads the files; the others get the weights from it.

    Raises:
        CheckpointError: files are missing or damaged, or names do not agree with `strict=True`. A file that cannot be
            read to its end leaves the model written in part: using it raises until a load succeeds.
        ShapeMismatch: a weight has another shape than the model's; nothing was loaded.
        SettingError: the device map does not fit the model, or names the disk and there is no folder.
    """
    wanted, kept = None if dtype is None else torch_dtype(dtype), frozenset(keep_in_fp32_modules or ())

    def dtype_of(name: str) -> torch.dtype | None:
        return torch.float32 if wanted == torch.float16 and any(part in name for part in kept) else wanted

    from accel_bigmodel.load_together import holds_sharded_weights, load_together

    if broadcast_from_rank0 or holds_sharded_weights(model):
        if device_map is not None:
            raise SettingError(
                "Cannot use a device map with broadcast_from_rank0 or with sharded weights.",
                "A device map places a model that one process holds alone.",
                "Leave one of them out.",
            )
        return load_together(model, checkpoint, wanted, strict, full_state_dict, broadcast_from_rank0)
    loading = Loading(model, device_map, offload_folder, offload_buffers, dtype_of)
    return loading.run(checkpoint, strict)


def load_checkpoint_and_dispatch(
    model: M,
    checkpoint: str | os.PathLike[str],
    device_map: str | DeviceMap | None = None,
    max_memory: Budget | None = None,
    no_split_module_classes: Sequence[str] | None = None,
    offload_folder: str | os.PathLike[str] | None = None,
    offload_buffers: bool = False,
    dtype: Dtype | None = None,
    offload_state_dict: bool | None = None,
    skip_keys: str | list[str] | None = None,
    preload_module_classes: Sequence[str] | None = None,
    force_hooks: bool = False,
    strict: bool = False,
    full_state_dict: bool = True,
    broadcast_from_rank0: bool = False,
    *,
    max_prefetch_bytes: int | None = None,
) -> M:
    """Load a checkpoint and spread the model over devices, memory and disk.

    Args:
        device_map: name to device; or "auto" or "balanced" (evenly over the accelerators), "balanced_low_0" (the first
            one as empty as possible), "sequential" (one after the other).
        max_memory: bytes, or text such as "10GB", by device, for a device map that is made here.
        no_split_module_classes: names of classes whose modules stay on one device.

    The other arguments are those of `load_checkpoint_in_model` and `dispatch_model`.

    Raises:
        CheckpointError: also when weights of the model are missing and it has none of its own, on the meta device.

    Example:
        with init_empty_weights():
            model = Model(config)
        model = load_checkpoint_and_dispatch(model, "checkpoint", device_map="auto", offload_folder="offload")
    """
    chosen = chosen_map(model, device_map, max_memory, no_split_module_classes, dtype, offload_buffers)
    report = load_checkpoint_in_model(
        model,
        checkpoint,
        device_map=chosen,
        offload_folder=offload_folder,
        dtype=dtype,
        offload_state_dict=bool(offload_state_dict),
        offload_buffers=offload_buffers,
        strict=strict,
        full_state_dict=full_state_dict,
        broadcast_from_rank0=broadcast_from_rank0,
    )
    if chosen is None:
        return model
    refuse_empty(model, report, checkpoint)
    return dispatch_model(
        model,
        chosen,
        offload_dir=offload_folder,
        offload_buffers=offload_buffers,
        skip_keys=skip_keys,
        preload_module_classes=preload_module_classes,
        force_hooks=force_hooks,
        max_prefetch_bytes=max_prefetch_bytes,
    )


_POLICIES = ("auto", "balanced", "balanced_low_0", "sequential")


def chosen_map(
    model: nn.Module,
    device_map: str | DeviceMap | None,
    max_memory: Budget | None,
    no_split_module_classes: Sequence[str] | None,
    dtype: Dtype | None,
    offload_buffers: bool,
    special_dtypes: Mapping[str, Any] | None = None,
) -> DeviceMap | None:
    """The device map that a policy makes, or the one that was given."""
    if not isinstance(device_map, str):
        return device_map
    if device_map not in _POLICIES:
        raise SettingError(
            f"Cannot make a device map by the policy {device_map!r}.",
            f"Known: {', '.join(_POLICIES)}.",
            "Use one, or give a mapping.",
        )
    if device_map != "sequential":
        low_zero = device_map == "balanced_low_0"
        max_memory = get_balanced_memory(model, max_memory, no_split_module_classes, dtype, special_dtypes, low_zero)
    return infer_auto_device_map(
        model, max_memory, no_split_module_classes, dtype, special_dtypes, offload_buffers=offload_buffers
    )


class Loading:
    """One load by one process; `run` does it.

    Args:
        dtype_of: dtype that the weight of a name is given; None for that of the model.
        place: puts each weight into the model, in place of setting it in the dtype and on the device that it is given.

    The other arguments are those of `load_checkpoint_in_model`.

    Attributes:
        layout: the weights of the model; `run` fills in their files.

    Raises:
        SettingError: the device map does not fit the model, or names the disk and there is no folder.
    """

    def __init__(
        self,
        model: nn.Module,
        device_map: DeviceMap | None = None,
        offload_folder: str | os.PathLike[str] | None = None,
        offload_buffers: bool = False,
        dtype_of: Callable[[str], torch.dtype | None] = lambda name: None,
        place: Place | None = None,
    ) -> None:
        self.layout = layout_of(model, device_map)
        if device_map is not None and offload_folder is None and DISK in map(str, device_map.values()):
            raise SettingError(
                f"Cannot load parts of {type(model).__name__} to the disk.",
                "No folder was named for them.",
                "Give offload_folder=.",
            )
        self.model = model
        self._folder = offload_folder
        self._offload_buffers = offload_buffers
        self._dtype_of = dtype_of
        self._place = place
        self._tensors = tensors_of(model)

    def run(self, checkpoint: str | os.PathLike[str], strict: bool) -> LoadReport:
        """Check all files, names and shapes, then bring every weight where it belongs."""
        with load_guard(self.model, checkpoint) as guard:
            found = open_weights(find_weights(local_checkpoint(checkpoint)))
            report = compare(self.model, self.layout, found, strict)
            own = {name: weight for name, weight in found.items() if name in self.layout.weights}
            # Opened before anything is written, as the last thing that can be wrong with a file.
            mapped = {name: weight.mapped() for name, weight in own.items() if self._is_mapped(name, weight)}
            guard.writes = True
            return replace(report, bytes_read=self.bring(own, mapped))

    def bring(self, found: Mapping[str, FileWeight], mapped: Mapping[str, Tensor] | None = None) -> int:
        """Bring weights where they belong, and return how many bytes were read.

        Args:
            found: weights of the model by name, whose shapes agree.
            mapped: those among them that are mapped already.
        """
        index: dict[str, dict[str, Any]] = {}
        self.layout = self.layout.with_files({name: _stored(weight) for name, weight in found.items()})
        here = {name: weight for name, weight in found.items() if not self._stays_on_disk(name)}
        for name in found.keys() - here.keys():
            self._leave_on_disk(name, found[name], index)
        read = self._set_all(here, mapped or {}) if self._place is None else self._place_each(here, self._place)
        if self._folder is not None and index:
            Path(self._folder).mkdir(parents=True, exist_ok=True)
            save_offload_index(index, self._folder)
        retie_parameters(self.model, self.layout.tied)
        return read

    def _device(self, spec: WeightSpec) -> Device:
        """Where a weight goes; without a device map, an empty one goes to the CPU."""
        if self.layout.device_map is None:
            return "cpu" if self._tensors[spec.name].is_meta else spec.device
        kept = spec.is_buffer and not self._offload_buffers and str(spec.device) == DISK
        return "cpu" if kept else spec.device

    def _dtype(self, name: str, weight: FileWeight) -> torch.dtype:
        """The dtype that a weight is given: integers and bools keep that of the file."""
        own = self.layout.weights[name].dtype
        if not weight.dtype.is_floating_point:
            return weight.dtype
        return self._dtype_of(name) or (own if own.is_floating_point else weight.dtype)

    def _is_filled(self, name: str) -> bool:
        """Whether a weight is read into the memory that the model has, which an optimizer may hold as well."""
        own, dtype = self._tensors[name], self._dtype_of(name)
        return self.layout.device_map is None and not own.is_meta and dtype in (None, own.dtype)

    def _stays_on_disk(self, name: str) -> bool:
        return str(self._device(self.layout.weights[name])) == DISK

    def _is_mapped(self, name: str, weight: FileWeight) -> bool:
        """Whether a weight stays mapped from its file: it goes to the CPU, in the dtype that it has there."""
        if self._place is not None or self._is_filled(name) or self._stays_on_disk(name):
            return False
        device = resolve_device(self._device(self.layout.weights[name]))
        return device.type == "cpu" and self._dtype(name, weight) == weight.dtype

    def _set_all(self, found: Mapping[str, FileWeight], mapped: Mapping[str, Tensor]) -> int:
        """Give every weight its memory, then fill all of it from the files."""
        reader = RangeReader()
        last_names = {id(self._tensors[name]): name for name in found}
        for name, weight in found.items():
            own = self._tensors[name]
            if self._is_filled(name):
                # A tied tensor is filled once, with what `load_state_dict` would leave in it.
                if last_names[id(own)] == name:
                    _fill(own, weight, reader)
                continue
            device = self._device(self.layout.weights[name])
            value = mapped.get(name)
            if value is None:
                value = torch.empty(weight.shape, dtype=self._dtype(name, weight), device=resolve_device(device))
                _fill(value, weight, reader)
            set_module_tensor_to_device(self.model, name, device, value=value, dtype=value.dtype, clear_cache=False)
        with load_progress(self.model, reader.size) as advance:
            reader.run(advance)
        return reader.bytes_read

    def _place_each(self, found: Mapping[str, FileWeight], place: Place) -> int:
        """Read one weight after the other, so that memory holds a single one as the file has it."""
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
    """Let a reader fill a tensor that has memory of its own; one of another class copies by itself."""
    if type(target) in (Tensor, Parameter):
        if not target.is_meta:
            weight.read_into(reader, target)
    else:
        with torch.no_grad():
            target.copy_(weight.mapped())


def load_progress(model: nn.Module, size: int) -> AbstractContextManager[Callable[[int], None]]:
    """The bar of a load of so many bytes."""
    return progress(f"Loading {type(model).__name__}", size)


def tensors_of(model: nn.Module) -> dict[str, Tensor]:
    """Parameters and buffers of a model by name; every name of a tied one."""
    named = (*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False))
    return dict(named)


def _stored(weight: FileWeight) -> StoredWeight:
    entry = weight.entry
    place = (None, None) if entry is None else (entry.begin, entry.end - entry.begin)
    return StoredWeight(weight.path.absolute(), weight.name, weight.dtype, *place)


def compare(model: nn.Module, layout: WeightLayout, found: Mapping[str, FileWeight], strict: bool) -> LoadReport:
    """Compare what files hold with what a model has; nothing is changed.

    A tied weight is missing only when no name of its group is there.

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
                "Load weights that were made for this architecture.",
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
    for what, names in (("does not have", report.missing), ("has and the model does not use", report.unexpected)):
        if names:
            _log.warning("Weights that the checkpoint %s: %s.", what, _listed(names))
    return report


def refuse_empty(model: nn.Module, report: LoadReport, checkpoint: object) -> None:
    """Refuse a model that cannot compute, because the checkpoint lacked weights and it has none of its own.

    Raises:
        CheckpointError: weights that were missing are on the meta device.
    """
    tensors = tensors_of(model)
    lost = [name for name in report.missing if tensors[name].is_meta]
    if lost:
        raise CheckpointError(
            f"Cannot dispatch {type(model).__name__} with the weights of {str(checkpoint)!r}.",
            f"{len(lost)} of its weights are not there and stayed empty: {_listed(lost)}.",
            "Name the checkpoint of this very model, or make these weights before it is loaded.",
        )


def _listed(names: Sequence[str]) -> str:
    more = f", and {len(names) - 10} more" if len(names) > 10 else ""
    return (", ".join(names[:10]) or "none") + more


def load_state_dict(checkpoint_file: str | os.PathLike[str], device_map: DeviceMap | None = None) -> dict[str, Any]:
    """The weights of one file by name, each on the device that a map gives it; on the CPU without one, or for "disk".

    Raises:
        CheckpointError: the file is missing, damaged, or holds Python objects other than weights.
        SettingError: the map names a device that is not there.
    """
    weights = WeightSource(Path(checkpoint_file)).load()
    if device_map is None:
        return weights
    devices = {name: device_of_name(name, device_map) for name in weights}
    away = {
        name: resolve_device(device) for name, device in devices.items() if device is not None and str(device) != DISK
    }
    return {name: weight.to(away[name]) if name in away else weight for name, weight in weights.items()}


def load_offloaded_weights(
    model: nn.Module, index: Mapping[str, Mapping[str, Any]], offload_folder: str | os.PathLike[str]
) -> None:
    """Put weights that `offload_weight` wrote back into a model, on the CPU."""
    for name, entry in index.items():
        weight = load_offloaded_weight(weight_file(offload_folder, name), entry)
        set_module_tensor_to_device(model, name, "cpu", value=weight)
