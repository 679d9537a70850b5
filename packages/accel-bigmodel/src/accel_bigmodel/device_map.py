"""The meaning of a device map, which maps names of modules or tensors to devices: its names, devices and checks."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any, Final, TypeAlias, TypeVar

import torch
from torch import nn

from accel_state.devices.select import best_family, family_of
from accel_state.errors import SettingError
from accel_state.library import stack_level
from accel_state.settings.integers import as_int

__all__ = (
    "DISK",
    "HOST",
    "OFFLOADED",
    "Device",
    "DeviceMap",
    "check_device_map",
    "check_device_same",
    "checked_entries",
    "clean_device_map",
    "device_of_name",
    "is_offloaded",
    "main_device_of",
    "matching_entries",
    "prefixes_of_names",
    "resolve_device",
)

Device: TypeAlias = "int | str | torch.device"
"""Index of an accelerator, "cpu", "disk", or any argument of `torch.device`."""

DeviceMap: TypeAlias = "Mapping[str, Device]"

HOST: Final = "cpu"
DISK: Final = "disk"
OFFLOADED: Final = (HOST, DISK)
"""Devices of a device map that are not accelerators, in the order in which they fill up."""


def resolve_device(device: Device) -> torch.device:
    """The torch device of an entry of a device map; an index means an accelerator of the best family here.

    Raises:
        SettingError: there is no such device here, or it is "disk".
    """
    failure = f"Cannot use the device {device!r}."
    family = None if as_int(device) is None else best_family()
    if device == DISK or (family is not None and family is family_of("cpu")):
        obstacle = "Modules cannot compute on the disk." if device == DISK else "This machine has no accelerator."
        raise SettingError(failure, obstacle, 'Use "cpu" or a device of this machine.')
    resolved = torch.device(family.name, int(device)) if family is not None else torch.device(device)  # type: ignore[arg-type]
    if resolved.type == "meta":
        return resolved
    family = family_of(resolved)
    if not family.present() or (resolved.index or 0) >= max(family.count(), 1):
        raise SettingError(
            failure,
            f"{family.count() if family.present() else 0} of its kind are in this machine.",
            "Use another index.",
        )
    return resolved


def check_device_same(first_device: torch.device, second_device: torch.device) -> bool:
    """Whether two devices are the same.

    Args:
        first_device: a device; without an index, number 0 of its kind.
        second_device: the other device, in the same form.
    """
    if first_device.type != second_device.type:
        return False
    if first_device.index is not None and second_device.index is not None:
        return first_device.index == second_device.index
    return (first_device.index or 0) == (second_device.index or 0)


def device_of_name(name: str, device_map: Mapping[str, Any]) -> Any:
    """The device of a full name in a device map: that of the longest matching entry, or None."""
    while name not in device_map:
        if not name:
            return None
        name = name.rpartition(".")[0]
    return device_map[name]


def main_device_of(device_map: DeviceMap) -> Device:
    """The device on which offloaded parts compute: the first accelerator of a device map, else the host."""
    return next((device for device in device_map.values() if str(device) not in OFFLOADED), HOST)


def is_offloaded(device: Device, main: Device) -> bool:
    """Whether weights on `device` are offloaded from the main device, where they are used."""
    return str(device) == DISK or (str(device) == HOST and str(main) != HOST)


def check_device_map(model: nn.Module, device_map: DeviceMap) -> None:
    """Check that a device map covers the model, and warn about entries that match nothing in it, which are ignored.

    Args:
        model: the model.
        device_map: devices by the names of modules and tensors; a name covers all below it.

    Raises:
        SettingError: it names a device that does not exist, or leaves tensors without a device.
    """
    checked_entries(model, device_map)


def checked_entries(model: nn.Module, device_map: DeviceMap) -> dict[str, Device]:
    """The entries of a device map that match something in the model, after the checks of `check_device_map`."""
    failure = f"Cannot place {type(model).__name__} by a device map with {len(device_map)} entries."
    entries = matching_entries(model, device_map)
    for device in set(entries.values()):
        _check_form(failure, device)
    parameters = [name for name, _ in model.named_parameters(remove_duplicate=False)]
    tensors = [*parameters, *(name for name, _ in model.named_buffers(remove_duplicate=False))]
    persistent = {*model.state_dict(keep_vars=True), *parameters}
    left = [name for name in tensors if name in persistent and device_of_name(name, entries) is None]
    if left:
        more = f", and {len(left) - 10} more" if len(left) > 10 else ""
        raise SettingError(
            failure, f"It has no device for: {', '.join(left[:10])}{more}.", 'Add them, or an entry "" for the rest.'
        )
    return entries


def _check_form(failure: str, device: Any) -> None:
    index = as_int(device)
    if device == DISK or (index is not None and index >= 0):
        return
    try:
        torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise SettingError(
            failure, f"{device!r} is not a device.", 'Use an index, "cpu", "disk" or a torch device.'
        ) from error


V = TypeVar("V")


def matching_entries(model: nn.Module, entries: Mapping[str, V]) -> dict[str, V]:
    """The entries whose keys are names of modules or tensors of a model; a warning lists the others."""
    names = {name for name, _ in model.named_modules(remove_duplicate=False)}
    names.update(name for name, _ in model.named_parameters(remove_duplicate=False))
    names.update(name for name, _ in model.named_buffers(remove_duplicate=False))
    unknown = [name for name in entries if name not in names]
    if unknown:
        warnings.warn(
            f"These device_map keys do not match any submodules or tensors of {type(model).__name__}: "
            f"{', '.join(unknown)}. They are ignored; correct or remove them.",
            UserWarning,
            stacklevel=stack_level(),
        )
    return {name: entry for name, entry in entries.items() if name in names}


def clean_device_map(device_map: Mapping[str, Any], module_name: str = "") -> dict[str, Any]:
    """Simplify a device map: one entry for each name with everything below it on one device.

    Args:
        module_name: simplify only entries below this name.

    Example:
        >>> clean_device_map({"a.b": 0, "a.c": 0, "d": "cpu"})
        {'a': 0, 'd': 'cpu'}
    """
    if not module_name:
        return _simplified(device_map)
    inside = {name: device for name, device in device_map.items() if f"{name}.".startswith(f"{module_name}.")}
    cut = len(module_name) + 1
    cleaned = _simplified({name[cut:]: device for name, device in inside.items()})
    merged = {f"{module_name}.{name}" if name else module_name: device for name, device in cleaned.items()}
    return {**{name: device for name, device in device_map.items() if name not in inside}, **merged}


def _simplified(device_map: Mapping[str, Any]) -> dict[str, Any]:
    """One pass: which devices each name has below it, then the highest names that put several entries on one."""
    first: dict[str, Any] = {}
    several, mixed = set[str](), set[str]()
    prefixes_of = prefixes_of_names()
    for name, device in device_map.items():
        for prefix in prefixes_of[name]:
            if prefix not in first:
                first[prefix] = device
                continue
            several.add(prefix)
            if first[prefix] != device:
                mixed.add(prefix)
    merged = several - mixed
    result: dict[str, Any] = {}
    for name, device in device_map.items():
        result.setdefault(next((prefix for prefix in prefixes_of[name] if prefix in merged), name), device)
    return result


def prefixes_of_names() -> Mapping[str, tuple[str, ...]]:
    """A mapping of any name to the names of all modules above it, from the root down, and the name itself."""
    return _Prefixes()


class _Prefixes(dict[str, tuple[str, ...]]):
    """Names of all modules above each name, from the root down, and the name itself."""

    def __missing__(self, name: str) -> tuple[str, ...]:
        prefixes = self[name] = (*self[name.rpartition(".")[0]], name) if name else ("",)
        return prefixes
