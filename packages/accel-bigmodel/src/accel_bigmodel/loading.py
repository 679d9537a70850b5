"""One load of a checkpoint into a model: what goes where, the files that are open, and what stays on the disk."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from accel_bigmodel.device_map import Device, DeviceMap, check_device_map
from accel_bigmodel.dispatch import DISK
from accel_bigmodel.load_names import LoadReport, compare_names, own_tensors
from accel_bigmodel.offload import offload_weight, save_offload_index
from accel_bigmodel.place import set_module_tensor_to_device, submodule_and_leaf
from accel_bigmodel.progress import progress
from accel_bigmodel.tied import device_of_name, find_tied_parameters, retie_parameters
from accel_bigmodel.weight_files.names import is_safetensors
from accel_bigmodel.weight_files.pages import give_back
from accel_bigmodel.weight_files.reading import WeightFile, WeightSource
from accel_state.errors import CheckpointError, SettingError

__all__ = ("Loading", "Place")

_THREADS = 4

Place: TypeAlias = "Callable[[nn.Module, str, Device, Tensor, torch.dtype | None], None]"
"""Puts one weight into a model: model, name, device, the weight as it lies in the file, the dtype it shall have."""


def _put(model: nn.Module, name: str, device: Device, weight: Tensor, dtype: torch.dtype | None) -> None:
    set_module_tensor_to_device(model, name, device, value=weight, dtype=dtype, clear_cache=False)


def _as_it_is(name: str) -> torch.dtype | None:
    return None


class Loading:
    """One load; `run` does it.

    Args:
        dtype_of: dtype that the weight of a name is given; None for that of the model.
        place: puts each weight where it belongs, in place of assigning it as it is.

    The other arguments are those of `load_checkpoint_in_model`.

    Raises:
        SettingError: the device map does not fit the model, or names the disk and there is no folder.
    """

    def __init__(
        self,
        model: nn.Module,
        device_map: DeviceMap | None,
        offload_folder: str | os.PathLike[str] | None,
        offload_buffers: bool = False,
        dtype_of: Callable[[str], torch.dtype | None] = _as_it_is,
        place: Place = _put,
    ) -> None:
        if device_map is not None:
            check_device_map(model, device_map)
            if offload_folder is None and DISK in map(str, device_map.values()):
                raise SettingError(
                    f"Load {type(model).__name__} with parts on the disk.",
                    "No folder was named for them.",
                    "Give offload_folder=.",
                )
        self.model = model
        self.device_map = device_map
        self.folder = offload_folder
        self.offload_buffers = offload_buffers
        self.dtype_of = dtype_of
        self.place = place
        self.tensors = own_tensors(model)
        self.buffers = {name for name, _ in model.named_buffers(remove_duplicate=False)}
        self.opened: dict[Path, WeightFile | dict[str, Any]] = {}
        self.index: dict[str, dict[str, Any]] = {}

    def run(self, sources: Sequence[WeightSource], strict: bool) -> LoadReport:
        """Compare names and shapes, then bring every weight where it belongs."""
        tied = find_tied_parameters(self.model)
        report = self._compare(sources, tied, strict)
        wanted = sum(tensor.nbytes for tensor in self.tensors.values())
        with (
            progress(f"Loading {type(self.model).__name__}", wanted) as advance,
            ThreadPoolExecutor(max(1, min(_THREADS, len(sources))), "accel-load") as pool,
        ):
            list(pool.map(lambda source: self._load(source, advance), sources))
        self._finish()
        retie_parameters(self.model, tied)
        return report

    def _compare(self, sources: Iterable[WeightSource], tied: Iterable[Sequence[str]], strict: bool) -> LoadReport:
        """Open every file and compare names and shapes before anything is changed."""
        shapes: dict[str, tuple[Path, tuple[int, ...]]] = {}
        for source in sources:
            opened = self._open(source.path)
            held = opened.header.entries if isinstance(opened, WeightFile) else opened
            for name in held if source.names is None else source.names:
                if name in held:
                    shapes[name] = source.path, tuple(getattr(held[name], "shape", ()))
                else:
                    raise CheckpointError(
                        f"Read {name!r} from {str(source.path)!r}.", "The file does not hold it.", "Fetch it again."
                    )
        return compare_names(self.model, self.tensors, shapes, tied, strict)

    def _open(self, path: Path) -> WeightFile | dict[str, Any]:
        if path not in self.opened:
            self.opened[path] = WeightFile(path) if is_safetensors(path) else WeightSource(path).load()
        return self.opened[path]

    def _load(self, source: WeightSource, advance: Callable[[int], None]) -> None:
        """Bring the weights of one file where they belong."""
        # Taken out, so that a file is unmapped as soon as no weight of it is in use.
        opened = self.opened.pop(source.path)
        held = opened.header.entries if isinstance(opened, WeightFile) else opened
        for name in held if source.names is None else source.names:
            if name not in self.tensors:
                continue
            device = self._device(name)
            if str(device) == DISK:
                self._leave_on_disk(name, source.path, opened)
            elif isinstance(opened, WeightFile):
                weight = opened.get(name)
                self._assign(name, device, weight)
                if self._tensor(name).data_ptr() != weight.data_ptr():
                    give_back(weight)
            else:
                self._assign(name, device, opened[name])
            advance(self.tensors[name].nbytes)

    def _tensor(self, name: str) -> Tensor:
        owner, leaf = submodule_and_leaf(self.model, name)
        tensor: Any = owner._parameters.get(leaf)
        return owner._buffers[leaf] if tensor is None else tensor  # type: ignore[return-value]

    def _device(self, name: str) -> Device:
        if self.device_map is None:
            device = self.tensors[name].device
            return torch.device("cpu") if device.type == "meta" else device
        device_or_none: Device = device_of_name(name, self.device_map)
        return (
            "cpu"
            if str(device_or_none) == DISK and name in self.buffers and not self.offload_buffers
            else device_or_none
        )

    def _assign(self, name: str, device: Device, weight: Tensor) -> None:
        own, dtype = self.tensors[name], self.dtype_of(name)
        if self.device_map is None and not own.is_meta and dtype in (None, own.dtype):
            # In place, so that whoever holds the parameter, such as an optimizer, sees the new values.
            with torch.no_grad():
                own.copy_(weight)
            return
        self.place(self.model, name, device, weight, dtype)

    def _leave_on_disk(self, name: str, path: Path, opened: WeightFile | dict[str, Any]) -> None:
        dtype = self.dtype_of(name)
        if isinstance(opened, WeightFile):
            self.index[name] = {"safetensors_file": str(path.absolute()), "weight_name": name}
        elif self.folder is not None:
            weight = opened[name]
            own = dtype or self.tensors[name].dtype
            offload_weight(weight.to(own) if weight.is_floating_point() else weight, name, self.folder, self.index)
        set_module_tensor_to_device(self.model, name, "meta", dtype=dtype)

    def _finish(self) -> None:
        """Write the index of what stays on the disk."""
        if self.folder is not None and self.index:
            Path(self.folder).mkdir(parents=True, exist_ok=True)
            save_offload_index(self.index, self.folder)
