"""The registry of device families, and the choice of the family that a process uses.

Families of other packages are registered in the entry-point group `accel.devices`, like the built-in ones, and replace
a built-in family of the same name. A family that cannot be loaded never breaks an import. The registry records its
error, and warns when a run may use another device because of it.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from typing import Final, NamedTuple

import torch

from accel_state.devices.base import DeviceFamily
from accel_state.devices.cpu import CPU
from accel_state.devices.torch_family import CUDA, HPU, MLU, MPS, MUSA, NEURON, NPU, SDAA, XPU, unlisted_family
from accel_state.devices.xla import XLA
from accel_state.errors import NotOffered, PluginError
from accel_state.library import stack_level
from accel_state.plugins import Plugin, contained, plugins_of
from accel_state.settings.run import ProcessSettings

__all__ = (
    "FailedFamily",
    "best_family",
    "failed_families",
    "families",
    "family_of",
    "register_family",
    "wanted_family",
)

_BUILT_IN: Final[tuple[Callable[[], DeviceFamily], ...]] = (
    CPU,
    CUDA,
    MPS,
    XLA,
    XPU,
    NPU,
    MLU,
    MUSA,
    SDAA,
    HPU,
    NEURON,
)
"""Listed here as well, for a source tree without package metadata."""

_GROUP: Final = "accel.devices"
_OURS: Final = "accel_state."


class FailedFamily(NamedTuple):
    """A family whose entry point could not be loaded, and the error."""

    name: str
    origin: str
    error: BaseException


@lru_cache(maxsize=1)
def _load() -> tuple[dict[str, DeviceFamily], tuple[FailedFamily, ...]]:
    found = {family.name: family for family in (make() for make in _BUILT_IN)}
    failed = []
    for offers in _of_other_packages():
        name, origin = offers[0].name, " and ".join(offer.origin for offer in offers)
        try:
            make = _only(offers).load()
            with contained():
                found[name] = make()
        except Exception as error:
            failed.append(FailedFamily(name, origin, error))
    return found, tuple(failed)


def _of_other_packages() -> Iterator[Sequence[Plugin]]:
    """Entry points of other packages, grouped by name."""
    by_name: dict[str, list[Plugin]] = {}
    for extension in plugins_of(_GROUP):
        if not extension.target.startswith(_OURS):
            by_name.setdefault(extension.name, []).append(extension)
    yield from by_name.values()


def _only(offers: Sequence[Plugin]) -> Plugin:
    if len(offers) == 1:
        return offers[0]
    raise PluginError(
        f"Cannot load the device family {offers[0].name!r}.",
        f"Several packages provide it: {', '.join(offer.origin for offer in offers)}.",
        "Uninstall all but one of them.",
    )


def _registered() -> str | None:
    """Device type of the accelerator for which torch was built, or which registered itself with torch."""
    accelerator = torch.accelerator.current_accelerator()
    return None if accelerator is None else accelerator.type


def families() -> tuple[DeviceFamily, ...]:
    """All loaded families, highest priority first."""
    found = dict(_load()[0])
    registered = _registered()
    if registered is not None and registered not in found:
        found[registered] = unlisted_family(registered)
    return tuple(sorted(found.values(), key=lambda family: -family.spec.priority))


def failed_families() -> tuple[FailedFamily, ...]:
    """Families that could not be loaded."""
    return _load()[1]


def register_family(family: DeviceFamily) -> None:
    """Add a family at run time; it replaces a family of the same name."""
    _load()[0][family.name] = family


def family_of(device: torch.device | str) -> DeviceFamily:
    """The family of a torch device, or of a string such as "cuda:0".

    Raises:
        PluginError: the family could not be loaded.
        NotOffered: no family has this name.
    """
    name = device.type if isinstance(device, torch.device) else device.partition(":")[0]
    found, failed = _load()
    for failure in failed:
        if failure.name == name:
            raise PluginError(
                f"Cannot use the device {device}.",
                f"The device family {name!r} of {failure.origin} could not be loaded: {failure.error!r}.",
                "Repair or remove that package.",
            ) from failure.error
    if name in found:
        return found[name]
    if name == _registered():
        return unlisted_family(name)
    raise NotOffered(
        f"Cannot use the device {device}.",
        f"There is no device family {name!r}, only {', '.join(sorted(found))}.",
        "Install a package that provides it through the entry-point group 'accel.devices'.",
    )


def best_family() -> DeviceFamily:
    """The present family with the highest priority; warns about families that could not be loaded."""
    for failure in failed_families():
        warnings.warn(
            f"The device family {failure.name!r} of {failure.origin} could not be loaded ({failure.error!r}). This run "
            "ignores its devices.",
            stacklevel=stack_level(),
        )
    return next(family for family in families() if family.present())


def wanted_family(settings: ProcessSettings) -> DeviceFamily:
    """The family that the settings of the process name, else the best one.

    Raises:
        PluginError: the family could not be loaded.
        NotOffered: there is no such family.
    """
    if settings.cpu:
        return family_of("cpu")
    return best_family() if settings.device is None else family_of(settings.device)
