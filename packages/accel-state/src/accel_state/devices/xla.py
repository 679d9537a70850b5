"""Devices of torch_xla: TPUs, and other devices that PJRT_DEVICE selects.

At the first use of a device the runtime decides whether a process drives one device or, with SPMD, all of its devices.
This module does not use a device before it must, so that a backend can still decide.
"""

from __future__ import annotations

import functools
import os
from typing import Any, Final

import torch

from accel_state.devices.base import DeviceFamily
from accel_state.devices.specs import SPECS
from accel_state.errors import NotOffered
from accel_state.settings.environ import from_environment, publish, read_setting
from accel_state.settings.installed import importable
from accel_state.settings.run import XLASettings
from accel_state.settings.schema import TEXT, Setting, settings_of
from accel_state.topology import Topology

__all__ = ("XLA",)

_ENABLED_SETTING: Final = settings_of(XLASettings)["enabled"]
_RUNTIME_SETTING: Final = Setting("pjrt_device", TEXT, None, variable="PJRT_DEVICE")
_DEFAULT_STORE_PORT: Final = 12355
"""The port of the store when MASTER_PORT is not set; the default of torch_xla."""


class XLA(DeviceFamily):
    """The devices of the runtime of torch_xla."""

    spec = SPECS["xla"]

    def present(self) -> bool:
        """Whether torch_xla is installed, not disabled by USE_TORCH_XLA, and has other devices than the CPU.

        The CPU counts if PJRT_DEVICE selects it.
        """
        enabled = read_setting(_ENABLED_SETTING)
        if (enabled is not None and not enabled.value) or not importable("torch_xla"):
            return False
        return _runtime_device() is not None

    def device_type(self) -> str | None:
        """The device type that the runtime uses, such as "TPU"."""
        return _runtime_device()

    def distributed_backend(self) -> str:
        """gloo, for objects and agreements; the runtime itself moves tensors between devices."""
        if self.device_type() == "CPU":
            raise _not_connected()
        return "gloo"

    def runtime_topology(self, topology: Topology) -> Topology:
        """The topology that the runtime assigned to this process.

        Raises:
            NotOffered: another launcher started several processes, or one process runs several replicas as threads.
        """
        import torch_xla.runtime as runtime

        processes, replicas = runtime.process_count(), runtime.world_size()
        if replicas > 1 and runtime.addressable_runtime_device_count() > 1:
            raise NotOffered(
                f"Cannot run {replicas} replicas on XLA devices.",
                "The runtime runs several of them as threads of one process, and they would share its state.",
                "Start one process that drives all its devices: Accelerator(kwargs_handlers=[XLAPlugin(fsdp=True)]).",
            )
        if max(processes, replicas) == 1:
            if topology.world_size > 1:
                raise _not_connected()
            return topology._replace(master_addr=None, master_port=None)
        return _topology(runtime, processes, replicas)

    @property
    def module(self) -> Any:
        import torch_xla.core.xla_model as xla_model

        return xla_model

    def count(self) -> int:
        import torch_xla.runtime as runtime

        return int(runtime.addressable_device_count())

    def device(self, local_rank: int) -> torch.device:
        return self.device_at(0)

    def device_at(self, index: int) -> torch.device:
        """The device that the runtime assigned to this process; in this process it has index 0."""
        return torch.device(self.name, 0)

    def opened(self) -> bool:
        """Whether a device was used already, after which the runtime cannot change to SPMD."""
        import torch_xla

        return bool(torch_xla._XLAC._xla_get_spmd_config_is_locked())

    def use_all_devices(self) -> None:
        """Let this process drive all of its devices as one (SPMD)."""
        import torch_xla.runtime as runtime

        if not runtime.is_spmd():
            runtime.use_spmd()

    def _open(self) -> Any:
        """The module of torch_xla, for calls that use a device."""
        if not self.opened() and from_environment(XLASettings).fsdp:
            self.use_all_devices()
        return self.module

    def seed(self, seed: int) -> None:
        self._open().set_rng_state(seed)

    def rng_state(self) -> Any:
        """The state of the generator of the device, or None before the first use of the device."""
        return self.module.get_rng_state() if self.opened() else None

    def set_rng_state(self, state: Any) -> None:
        if state is not None:
            self._open().set_rng_state(state)

    def current_rng_state(self) -> torch.Tensor:
        return torch.tensor(self._open().get_rng_state(), dtype=torch.int64)

    def set_current_rng_state(self, state: torch.Tensor) -> None:
        self._open().set_rng_state(int(state))

    def synchronize(self) -> None:
        if self.opened():
            self.module.wait_device_ops()

    def empty_cache(self) -> None:
        """The runtime has no cache to free."""

    def free_memory(self, index: int | None = None) -> int:
        info = self._memory_info(index)
        return int(info["bytes_limit"] - info["bytes_used"])

    def total_memory(self, index: int | None = None) -> int:
        return int(self._memory_info(index)["bytes_limit"])

    def used_memory(self, index: int | None = None) -> int:
        return int(self._memory_info(index)["bytes_used"])

    def _memory_info(self, index: int | None) -> Any:
        device = self.device(0) if index is None else torch.device(self.name, index)
        try:
            return self._open().get_memory_info(str(device))
        except RuntimeError as error:
            raise NotOffered(
                f"Cannot read the memory of {device}.",
                f"Its runtime does not report it: {str(error).splitlines()[0]}",
                "Use the vendor's tool.",
            ) from error

    def supports(self, dtype: torch.dtype) -> bool:
        return dtype is torch.bfloat16

    def check_fork(self) -> None:
        """Does nothing: torch_xla itself raises when its runtime was used before a fork."""


@functools.cache
def _runtime_device() -> str | None:
    """The device type that the runtime finds, such as "TPU"; None for a CPU that PJRT_DEVICE does not select."""
    selected = read_setting(_RUNTIME_SETTING)
    if selected is not None:
        return str(selected.value)
    import torch_xla.runtime as runtime

    device_type: str | None = runtime.device_type()
    if device_type not in (None, "CPU"):
        return device_type
    # torch_xla writes its choice into the environment, where child processes would mistake it for the user's.
    publish({}, remove=_RUNTIME_SETTING.variables)
    return None


def _topology(runtime: Any, processes: int, replicas: int) -> Topology:
    """The topology of one of several processes: its process index with SPMD, else its replica."""
    by_process = replicas == 1
    return Topology(
        rank=runtime.process_index() if by_process else runtime.global_ordinal(),
        world_size=processes if by_process else replicas,
        local_rank=0 if by_process else runtime.local_ordinal(),
        local_world_size=1 if by_process else runtime.local_process_count(),
        node_rank=runtime.host_index(),
        master_addr=os.environ.get("MASTER_ADDR") or runtime.get_master_ip(),
        master_port=int(os.environ.get("MASTER_PORT") or _DEFAULT_STORE_PORT),
        scheme="torch_xla",
    )


def _not_connected() -> NotOffered:
    return NotOffered(
        "Cannot run several processes on XLA devices.",
        "The runtime of torch_xla connects only processes that it started itself on TPUs; on CPUs it connects none.",
        "Start one process (XLAPlugin(fsdp=True) lets it drive several devices), use `accel launch --tpu` on a TPU, or "
        "use the CPU without torch_xla with --cpu.",
    )
