"""Which device families there are, and which one a process works on.

Built-in families enter through the same entry-point group as a stranger's, `accel.devices`. A family that cannot be
loaded never breaks an import; it is kept with its error, and told when a worse device would be taken because of it.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from functools import lru_cache

import torch

from accel_state.devices.base import DeviceFamily
from accel_state.devices.cpu import CPU
from accel_state.devices.cuda import CUDA
from accel_state.errors import NotOffered, PluginError
from accel_state.settings.extension import extensions

__all__ = ("FailedFamily", "best_family", "failed_families", "families", "family_of", "register_family")

_BUILT_IN: tuple[type[DeviceFamily], ...] = (CPU, CUDA)


@dataclass(frozen=True)
class FailedFamily:
    """A family whose entry point could not be loaded, with the reason."""

    name: str
    origin: str
    error: BaseException


@lru_cache(maxsize=1)
def _load() -> tuple[dict[str, DeviceFamily], tuple[FailedFamily, ...]]:
    found: dict[str, DeviceFamily] = {family.name: family() for family in _BUILT_IN}
    failed = []
    for extension in extensions("accel.devices"):
        if extension.name in found:
            continue
        try:
            found[extension.name] = extension.load()()
        except Exception as error:
            failed.append(FailedFamily(extension.name, extension.origin, error))
    return found, tuple(failed)


def families() -> tuple[DeviceFamily, ...]:
    """All families that could be loaded, the one with the highest priority first."""
    return tuple(sorted(_load()[0].values(), key=lambda family: -family.priority))


def failed_families() -> tuple[FailedFamily, ...]:
    """Families that could not be loaded."""
    return _load()[1]


def register_family(family: DeviceFamily) -> None:
    """Add a family at run time, in place of one of the same name."""
    _load()[0][family.name] = family


def family_of(device: torch.device | str) -> DeviceFamily:
    """The family of a torch device or of a device's text form.

    Raises:
        PluginError: the family is known but could not be loaded.
        NotOffered: no family of that name is known.
    """
    name = device.type if isinstance(device, torch.device) else device.partition(":")[0]
    found, failed = _load()
    if name in found:
        return found[name]
    for failure in failed:
        if failure.name == name:
            raise PluginError(
                f"Work on the device {device} was asked for.",
                f"The device family {name!r} of {failure.origin} could not be loaded: {failure.error!r}.",
                "Repair or remove that package.",
            ) from failure.error
    raise NotOffered(
        f"Work on the device {device} was asked for.",
        f"Known device families: {', '.join(sorted(found))}.",
        "Install a package that offers it through the entry-point group 'accel.devices'.",
    )


def best_family() -> DeviceFamily:
    """The present family with the highest priority."""
    for failure in failed_families():
        warnings.warn(
            f"The device family {failure.name!r} of {failure.origin} could not be loaded ({failure.error!r}), so its "
            "devices are not considered.",
            stacklevel=2,
        )
    return next(family for family in families() if family.present())
