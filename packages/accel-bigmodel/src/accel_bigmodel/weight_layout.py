"""The location of each weight of a model: its device, and the file with its data.

A load creates one layout and fills in the files. Dispatch puts each weight on its device by the same layout, and the
hooks of offloaded weights read them from its files. Names, ties and the device map are checked once, when the layout
is created.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from accel_bigmodel.device_map import checked_entries, device_of_name
from accel_bigmodel.tensors import find_tied_parameters, get_non_persistent_buffers
from accel_bigmodel.weight_files.names import is_safetensors

if TYPE_CHECKING:
    import torch
    from torch import nn

    from accel_bigmodel.device_map import Device, DeviceMap
    from accel_bigmodel.weight_files.reading import StoredWeight

__all__ = ("WeightLayout", "WeightSpec", "layout_of")


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

    def in_safetensors(self, device: str) -> dict[str, StoredWeight]:
        """The weights on a device that a safetensors file holds, from which hooks can read them."""
        stored = {name: self.weights[name].stored for name in self.names_on(device)}
        return {name: weight for name, weight in stored.items() if weight is not None and is_safetensors(weight.path)}

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


def layout_of(model: nn.Module, device_map: DeviceMap | None = None) -> WeightLayout:
    """Create the layout of a model, which may be on the meta device, and check its device map.

    Raises:
        SettingError: the device map names a device that does not exist, or leaves weights without a device.
    """
    if device_map is not None:
        device_map = checked_entries(model, device_map)
    skipped = get_non_persistent_buffers(model, recurse=True, fqns=True)
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
