"""Loads the weights of a checkpoint into a model, in one process.

A long load draws a progress bar. A load that fails after its first write leaves a model that cannot be used: calling,
saving or copying it raises, until a load succeeds.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final, NoReturn, TypeAlias

import torch
from torch import Tensor, nn

from accel_bigmodel.device_map import DISK, HOST, Device, check_device_same, resolve_device
from accel_bigmodel.offload import offload_entry, offload_weight, save_offload_index
from accel_bigmodel.placeholder import Placeholder
from accel_bigmodel.placement import check_room
from accel_bigmodel.tensors import (
    get_non_persistent_buffers,
    retie_parameters,
    set_module_tensor_to_device,
    tensors_of,
)
from accel_bigmodel.weight_files.reading import (
    Copy,
    StoredWeight,
    copy_all,
    find_weights,
    local_checkpoint,
    open_weights,
)
from accel_bigmodel.weight_layout import WeightLayout
from accel_state.console import tqdm
from accel_state.errors import CheckpointError, SettingError, ShapeMismatch
from accel_state.settings.installed import importable

__all__ = (
    "PATIENCE",
    "LoadGuard",
    "LoadReport",
    "Loading",
    "compare_names",
    "load_guard",
    "load_progress",
    "refuse_empty",
)

_log: Final = logging.getLogger(__name__)
_MARK: Final = "_accel_failed_load"

PATIENCE: Final = 2.0
"""Seconds that a load may take before a bar is drawn."""


PlaceWeight: TypeAlias = "Callable[[nn.Module, str, Device, Tensor, torch.dtype | None], None]"
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
        place: PlaceWeight | None = None,
    ) -> None:
        self.layout = layout
        if offload_folder is None and layout.names_on(DISK):
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
            stored = open_weights(find_weights(local_checkpoint(checkpoint)))
            report = compare_names(self.model, self.layout, stored, strict)
            own = {name: weight for name, weight in stored.items() if name in self.layout.weights}
            self._check_room(own)
            self.layout = self.layout.with_files(own)
            guard.writes = True
            return replace(report, bytes_read=self.bring(own))

    def _check_room(self, stored: Mapping[str, StoredWeight]) -> None:
        """Check that each device has memory for its weights; weights that are quantised become smaller."""
        if self.layout.device_map is None or self._place is not None:
            return
        needed: dict[torch.device, int] = {}
        counted = set[tuple[int, torch.device]]()
        for name, weight in stored.items():
            own = self._tensors[name]
            if self._stays_on_disk(name) or self._is_mapped(name, weight):
                continue
            device = resolve_device(self._device(name))
            if device.type != "meta" and (id(own), device) not in counted:
                counted.add((id(own), device))
                size = own.numel() * self._dtype(name, weight).itemsize
                # The current memory of the weight on this device becomes free.
                held = own.nbytes if check_device_same(own.device, device) else 0
                needed[device] = needed.get(device, 0) + size - held
        check_room(self.model, self.layout.device_map, needed, self._dtype_of(""))

    def bring(self, stored: Mapping[str, StoredWeight]) -> int:
        """Load weights of the model, whose shapes were compared, to their devices; return the number of bytes read."""
        here = {name: weight for name, weight in stored.items() if not self._stays_on_disk(name)}
        self._leave_on_disk({name: weight for name, weight in stored.items() if name not in here})
        read = self._set_all(here) if self._place is None else self._place_each(here, self._place)
        retie_parameters(self.model, self.layout.tied)
        return read

    def _device(self, name: str) -> Device:
        """The target device of a weight; without a device map, a weight without data goes to the CPU."""
        weight = self.layout.weights[name]
        if self.layout.device_map is None:
            return HOST if self._tensors[name].is_meta else weight.device
        kept = weight.is_buffer and not self._offload_buffers and str(weight.device) == DISK
        return HOST if kept else weight.device

    def _dtype(self, name: str, weight: StoredWeight) -> torch.dtype:
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
        return str(self._device(name)) == DISK

    def _is_mapped(self, name: str, weight: StoredWeight) -> bool:
        """Whether a weight stays mapped from its file: its target is the CPU, with the dtype of the file."""
        if self._is_filled(name) or self._dtype(name, weight) != weight.dtype:
            return False
        return resolve_device(self._device(name)).type == HOST

    def _set_all(self, stored: Mapping[str, StoredWeight]) -> int:
        """Give every weight its memory, then fill it from the files."""
        copies: list[Copy] = []
        last_names = {id(self._tensors[name]): name for name in stored}
        for name, weight in stored.items():
            own = self._tensors[name]
            if self._is_filled(name):
                # A tied tensor is filled once, with the same weight as by `load_state_dict`.
                if last_names[id(own)] == name:
                    copies.append(Copy(own, weight))
                continue
            device = self._device(name)
            if self._is_mapped(name, weight):
                value = weight.mapped()
            else:
                value = torch.empty(weight.shape, dtype=self._dtype(name, weight), device=resolve_device(device))
                if not value.is_meta:
                    copies.append(Copy(value, weight))
            set_module_tensor_to_device(self.model, name, device, value=value, dtype=value.dtype, clear_cache=False)
            # The memory of the previous weight is free for the next one.
            self._tensors[name] = value
        with load_progress(self.model, sum(copy.size for copy in copies)) as advance:
            return copy_all(copies, advance)

    def _place_each(self, stored: Mapping[str, StoredWeight], place: PlaceWeight) -> int:
        """Read one weight after the other, so that only one is in memory in the form of the file."""
        size = sum(weight.nbytes for weight in stored.values())
        with load_progress(self.model, size) as advance:
            for name, weight in stored.items():
                place(self.model, name, self._device(name), weight.mapped(), self._dtype_of(name))
                advance(weight.nbytes)
        return size

    def _leave_on_disk(self, stored: Mapping[str, StoredWeight]) -> None:
        """List the weights of safetensors files in the index of the folder, and write the others there."""
        # The layout also has the names of tied weights that the files lack.
        in_place = self.layout.in_safetensors(DISK)
        index = {name: offload_entry(weight) for name, weight in in_place.items()}
        for name, weight in stored.items():
            if name not in in_place and self._folder is not None:
                offload_weight(weight.mapped().to(self._dtype(name, weight)), name, self._folder, index)
            set_module_tensor_to_device(self.model, name, "meta", dtype=self._dtype_of(name))
        if self._folder is not None and index:
            Path(self._folder).mkdir(parents=True, exist_ok=True)
            save_offload_index(index, self._folder)


@contextmanager
def load_progress(model: nn.Module, size: int) -> Iterator[Callable[[int], None]]:
    """Return a function, callable from any thread, that adds finished bytes and draws a bar if tqdm is installed.

    The bar is created, and its library imported, only after a long wait.

    Args:
        model: the model, which the bar names.
        size: total number of bytes.
    """
    start, lock = time.monotonic() + PATIENCE, threading.Lock()
    done, bar = 0, None

    def advance(count: int) -> None:
        nonlocal done, bar
        with lock:
            done += count
            if bar is not None:
                bar.update(count)
            elif time.monotonic() >= start and importable("tqdm"):
                name = f"Loading {type(model).__name__}"
                bar = tqdm(desc=name, total=size, initial=done, unit="B", unit_scale=True, mininterval=0.5)

    try:
        yield advance
    finally:
        if bar is not None:
            bar.close()


def compare_names(
    model: nn.Module, layout: WeightLayout, stored: Mapping[str, StoredWeight], strict: bool
) -> LoadReport:
    """Compare the weights in files with those of a model, without changing it.

    A tied weight is missing only if the files contain no name of its group.

    Raises:
        ShapeMismatch: shapes differ.
        CheckpointError: names differ and `strict` is set.
    """
    for name, weight in stored.items():
        own = layout.weights.get(name)
        if own is not None and own.shape != weight.shape:
            raise ShapeMismatch(
                f"Cannot load {name!r} from {str(weight.path)!r} into {type(model).__name__}.",
                f"The file has shape {weight.shape}, the model {own.shape}. Nothing was loaded.",
                "Load weights of the same architecture.",
            )
    tied = {name for names in layout.tied if any(one in stored for one in names) for name in names}
    report = LoadReport(
        missing=[name for name in layout.weights if name not in stored and name not in tied],
        unexpected=[name for name in stored if name not in layout.weights],
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
    # A placeholder stands for an offloaded weight, which the model has.
    lost = [name for name in report.missing if tensors[name].is_meta and type(tensors[name]) is not Placeholder]
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


class LoadGuard:
    """Shared state of a load under `load_guard`: whether it has changed the model.

    Attributes:
        writes: set to True before the first weight is written.
    """

    def __init__(self) -> None:
        self.writes = False


@contextmanager
def load_guard(model: nn.Module, checkpoint: object) -> Iterator[LoadGuard]:
    """Run a load; if it fails after the first write, the model is marked as unusable.

    A marked model raises CheckpointError with the name of the checkpoint and the first error when it, or a module in
    it, is called, and when its weights are saved or copied. A load that succeeds removes the mark, and so does
    `model.load_state_dict` with all names.

    Args:
        checkpoint: name of the checkpoint, for the error.
    """
    earlier: _FailedLoad | None = vars(model).get(_MARK)
    if earlier is not None:
        earlier.remove()
    guard = LoadGuard()
    try:
        yield guard
    except BaseException as error:
        if guard.writes:
            _FailedLoad(model, checkpoint, error).add()
        elif earlier is not None:
            earlier.add()
        raise


class _FailedLoad:
    """The hooks of a marked model."""

    def __init__(self, model: nn.Module, checkpoint: object, error: BaseException) -> None:
        self._model = model
        self._checkpoint = str(checkpoint)
        self._error = f"{type(error).__name__}: {error}".replace("\n ", "")
        self._handles: list[Any] = []

    def add(self) -> None:
        """Mark the model."""
        module: Any
        for module in self._model.modules():
            self._handles.append(module.register_forward_pre_hook(self._refuse, prepend=True))
            self._handles.append(module.register_state_dict_pre_hook(self._refuse))
        whole: Any = self._model
        self._handles.append(whole.register_load_state_dict_post_hook(self._loaded))
        setattr(self._model, _MARK, self)

    def remove(self) -> None:
        """Remove the mark."""
        while self._handles:
            self._handles.pop().remove()
        delattr(self._model, _MARK)

    def _refuse(self, *_: object) -> NoReturn:
        raise CheckpointError(
            f"Cannot use {type(self._model).__name__}: its weights are partly loaded.",
            f"The load from {self._checkpoint!r} failed: {self._error}",
            "Load it again, or load another checkpoint.",
        )

    def _loaded(self, _: nn.Module, incompatible: Any) -> None:
        if not incompatible.missing_keys:
            self.remove()

    def __reduce__(self) -> NoReturn:
        # Copying and pickling the model call this.
        self._refuse()
