"""Where each weight of a model is: its device, and the file and the bytes that hold its data.

A load makes one layout, fills in the files and passes it on to the hooks. Names, ties and the device map are checked
once, when the layout is made.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from accel_bigmodel.device_map import check_device_map
from accel_bigmodel.tied import device_of_name, find_tied_parameters

if TYPE_CHECKING:
    import torch
    from torch import nn

    from accel_bigmodel.device_map import Device, DeviceMap

__all__ = ("StoredWeight", "WeightLayout", "WeightSpec", "layout_of")


@dataclass(frozen=True)
class StoredWeight:
    """The bytes of a file that hold a weight.

    Args:
        path: absolute path of the file.
        name: name of the weight in the file; None in a raw file, which holds one weight and nothing else.
        dtype: dtype of the data; None where the file states it.
        offset: first byte of the data; None in a file of `torch.save`, where only torch finds it.
        size: length of the data in bytes; None where `offset` is None.
    """

    path: Path
    name: str | None = None
    dtype: torch.dtype | None = None
    offset: int | None = None
    size: int | None = None


@dataclass(frozen=True)
class WeightSpec:
    """One parameter or persistent buffer of a model.

    Args:
        name: full name, such as "blocks.0.weight".
        shape: its shape in the model.
        dtype: its dtype in the model.
        device: the device that the device map gives it; without a map the device of the tensor.
        is_buffer: a buffer, not a parameter.
        stored: the file that holds its data, once a load has found it.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    device: Device
    is_buffer: bool
    stored: StoredWeight | None = None


@dataclass(frozen=True)
class WeightLayout:
    """All weights of one model.

    Args:
        weights: full name to weight, in the order of the model: parameters, then persistent buffers, each name of a
            tied one.
        tied: groups of names of one and the same parameter.
        device_map: the device map that gave the devices, or None.
    """

    weights: Mapping[str, WeightSpec]
    tied: tuple[tuple[str, ...], ...]
    device_map: DeviceMap | None = None

    def names_on(self, device: str) -> list[str]:
        """Names of the weights on a device, such as "disk"."""
        return [name for name, weight in self.weights.items() if str(weight.device) == device]

    def offload_index(self) -> dict[str, dict[str, Any]]:
        """The offload index of the weights on the disk; empty unless the layout knows the bytes of each."""
        weights = [self.weights[name] for name in self.names_on("disk")]
        entries = {weight.name: _index_entry(weight) for weight in weights}
        return {name: entry for name, entry in entries.items() if entry is not None} if all(entries.values()) else {}

    def with_files(self, stored: Mapping[str, StoredWeight]) -> WeightLayout:
        """The same layout, with the files of some weights filled in; names that the model lacks are ignored.

        A file may hold one name of a tied weight: the other names get the same bytes.
        """
        shared = {n: stored[one] for names in self.tied for one in names if one in stored for n in names}
        found = {**shared, **stored}
        filled = {
            name: replace(self.weights[name], stored=file) for name, file in found.items() if name in self.weights
        }
        return replace(self, weights={**self.weights, **filled})


def _index_entry(weight: WeightSpec) -> dict[str, Any] | None:
    """The entry of an offload index for the bytes of a weight; None where they are not known."""
    stored = weight.stored
    if stored is None or stored.offset is None or stored.name is None:
        return None
    return {"safetensors_file": str(stored.path), "weight_name": stored.name}


def layout_of(model: nn.Module, device_map: DeviceMap | None = None) -> WeightLayout:
    """The layout of a model, which may be on the meta device; its device map is checked here.

    Raises:
        SettingError: the device map names a device that does not exist, or leaves weights without a device.
    """
    if device_map is not None:
        check_device_map(model, device_map)
    skipped = {
        f"{prefix}.{name}" if prefix else name
        for prefix, module in model.named_modules(remove_duplicate=False)
        for name in module._non_persistent_buffers_set
    }
    tensors: list[tuple[str, Any, bool]] = [(n, p, False) for n, p in model.named_parameters(remove_duplicate=False)]
    tensors += [(n, b, True) for n, b in model.named_buffers(remove_duplicate=False) if n not in skipped]
    weights = {
        name: WeightSpec(
            name,
            tuple(tensor.shape),
            tensor.dtype,
            tensor.device if device_map is None else device_of_name(name, device_map),
            is_buffer,
        )
        for name, tensor, is_buffer in tensors
    }
    return WeightLayout(weights, tuple(map(tuple, find_tied_parameters(model))), device_map)
