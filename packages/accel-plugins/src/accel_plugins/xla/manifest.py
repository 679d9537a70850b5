"""The manifest of the XLA backend."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from accel_plugins.manifest import PROTOCOL, Capabilities, Manifest
from accel_state.labels import DistributedType
from accel_state.settings.installed import Requirement
from accel_state.settings.schema import BOOLEAN, Setting

if TYPE_CHECKING:
    from accel_state.current import Process

__all__ = ("MANIFEST", "present")

_DEVICE_FAMILY: Final = "xla"


def present(process: Process) -> bool:
    """Whether this process uses a device of torch_xla."""
    return process.family.name == _DEVICE_FAMILY


MANIFEST: Final = Manifest(
    name="xla",
    config="accel_plugins.xla.config:XLAPlugin",
    strategy="accel_plugins.xla.strategy:XLAStrategy",
    label=DistributedType.XLA,
    present="accel_plugins.xla.manifest:present",
    requires=(Requirement("torch_xla", "torch-xla"),),
    families=frozenset({_DEVICE_FAMILY}),
    switch=Setting("tpu", BOOLEAN, False, flag="--tpu", help="Train on TPUs."),
    capabilities=Capabilities(join=False, unused_parameters=False, fp16=False, local_passes=False),
    priority=40,
    tier=3,
    protocol=PROTOCOL,
)
