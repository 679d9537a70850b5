"""The registry of device families, and the choice of the family that a process uses.

Families are registered in the entry-point group `accel.devices`; those of other packages replace a built-in family of
the same name. A family that cannot be loaded never breaks an import. The registry records its error, and warns when a
run may use another device because of it.
"""

from __future__ import annotations

import warnings
from functools import lru_cache
from typing import Final

import torch

from accel_state.devices.base import DeviceFamily
from accel_state.devices.torch_family import unlisted_family
from accel_state.library import stack_level
from accel_state.plugins import Interface, LoadedPlugin, PluginGroup
from accel_state.settings.run import ProcessSettings

__all__ = (
    "FAMILIES",
    "best_family",
    "failed_families",
    "families",
    "family_of",
    "register_family",
    "wanted_family",
)

FAMILIES: Final[PluginGroup[DeviceFamily]] = PluginGroup(
    "accel.devices",
    "device family",
    "device families",
    Interface(instance_of=DeviceFamily, called=True, named=True),
    own="last",
)
"""The families of installed packages; `register_family` adds more at run time."""


@lru_cache(maxsize=1)
def _load() -> tuple[dict[str, DeviceFamily], tuple[LoadedPlugin[DeviceFamily], ...]]:
    families = FAMILIES.loaded()
    loaded = {family.name: family.value for family in families if family.value is not None}
    return loaded, tuple(family for family in families if family.failure)


def _registered() -> str | None:
    """Device type of the accelerator for which torch was built, or which registered itself with torch."""
    accelerator = torch.accelerator.current_accelerator()
    return None if accelerator is None else accelerator.type


def families() -> tuple[DeviceFamily, ...]:
    """All loaded families, highest priority first."""
    by_name = dict(_load()[0])
    registered = _registered()
    if registered is not None and registered not in by_name:
        by_name[registered] = unlisted_family(registered)
    return tuple(sorted(by_name.values(), key=lambda family: -family.spec.priority))


def failed_families() -> tuple[LoadedPlugin[DeviceFamily], ...]:
    """Families that could not be loaded."""
    return _load()[1]


def register_family(family: DeviceFamily) -> None:
    """Add a family at run time; it replaces a family of the same name."""
    _load()[0][family.name] = family


def family_of(device: torch.device | str) -> DeviceFamily:
    """The family of a torch device, or of a string such as "cuda:0".

    Raises:
        PluginError: the family could not be loaded.
        SettingError: no family has this name.
    """
    name = device.type if isinstance(device, torch.device) else device.partition(":")[0]
    loaded, broken = _load()
    if name in loaded:
        return loaded[name]
    failure = f"Cannot use the device {device}."
    for family in broken:
        if family.name == name:
            return family.get(failure)
    if name == _registered():
        return unlisted_family(name)
    raise FAMILIES.unknown(name, failure, loaded)


def best_family() -> DeviceFamily:
    """The present family with the highest priority; warns about families that could not be loaded."""
    for family in failed_families():
        warnings.warn(family.warning, stacklevel=stack_level())
    return next((family for family in families() if family.present()), None) or family_of("cpu")


def wanted_family(settings: ProcessSettings) -> DeviceFamily:
    """The family that the settings of the process name, else the best one.

    Raises:
        PluginError: the family could not be loaded.
        SettingError: there is no such family.
    """
    if settings.cpu:
        return family_of("cpu")
    return best_family() if settings.device is None else family_of(settings.device)
