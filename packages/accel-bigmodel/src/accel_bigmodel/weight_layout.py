"""The location of each weight of a model: its device, and the file with its data.

A load creates one layout, fills in the files and passes it to the hooks. Names, ties and the device map are checked
once, when the layout is created.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from accel_bigmodel.device_map import DISK, check_device_map, device_of_name, matching_entries
from accel_bigmodel.tied import find_tied_parameters
from accel_bigmodel.weight_files.names import is_safetensors

if TYPE_CHECKING:
    import torch
    from torch import nn

    from accel_bigmodel.device_map import Device, DeviceMap
    from accel_bigmodel.weight_files.reading import StoredWeight

__all__ = ("WeightLayout", "WeightSpec", "index_entry", "layout_of")


@dataclass(frozen=True)
class WeightSpec:
    """One parameter or persistent buffer of a model.

    Args:
        name: full name, such as "blocks.0.weight".
        shape: its shape in the model.
        dtype: its dtype in the model.
        device: its device in the device map; without a map, the device of the tensor.
        is_buffer: a buffer, not a parameter.
        stored: the location of its data, after a load has found it.
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
        weights: full name to weight, in the order of the model: parameters, then persistent buffers, with every name of
            a tied weight.
        tied: groups of names of the same parameter.
        device_map: the device map of the devices, without entries that match nothing in the model; or None.
    """

    weights: Mapping[str, WeightSpec]
    tied: tuple[tuple[str, ...], ...]
    device_map: DeviceMap | None = None

    def names_on(self, device: str) -> list[str]:
        """Names of the weights on a device, such as "disk"."""
        return [name for name, weight in self.weights.items() if str(weight.device) == device]

    def offload_index(self) -> dict[str, dict[str, Any]]:
        """The offload index of the weights on the disk; empty unless each one is in a safetensors file."""
        stored = {name: self.weights[name].stored for name in self.names_on(DISK)}
        entries = {name: index_entry(weight) for name, weight in stored.items() if weight is not None}
        return entries if all(entries.values()) and len(entries) == len(stored) else {}

    def with_files(self, stored: Mapping[str, StoredWeight]) -> WeightLayout:
        """The same layout, with the files of some weights filled in; names that the model lacks are ignored.

        If a file contains one name of a tied weight, the other names get the same weight.
        """
        shared = {n: stored[one] for names in self.tied for one in names if one in stored for n in names}
        filled = {
            name: replace(self.weights[name], stored=weight)
            for name, weight in {**shared, **stored}.items()
            if name in self.weights
        }
        return replace(self, weights={**self.weights, **filled})


def index_entry(weight: StoredWeight) -> dict[str, Any]:
    """The entry of an offload index for a weight that stays in its file; empty if it is not a safetensors file."""
    if not is_safetensors(weight.path):
        return {}
    return {"safetensors_file": str(weight.path.absolute()), "weight_name": weight.name}


def layout_of(model: nn.Module, device_map: DeviceMap | None = None) -> WeightLayout:
    """Create the layout of a model, which may be on the meta device, and check its device map.

    Raises:
        SettingError: the device map names a device that does not exist, or leaves weights without a device.
    """
    if device_map is not None:
        check_device_map(model, device_map)
        device_map = matching_entries(model, device_map)
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
