"""Devices that torch_xla drives: TPUs, and whatever else its runtime is told to use by PJRT_DEVICE.

The runtime decides at the first use of a device whether one process drives one device or, by SPMD, all that it has.
Nothing here uses a device before it must, so that a backend can still decide.
"""

from __future__ import annotations

import functools
import os
from typing import Any, Final

import torch

from accel_state.devices.specs import SPECS
from accel_state.devices.torch_family import TorchFamily
from accel_state.errors import NotOffered
from accel_state.settings.environ import from_environment, publish, read
from accel_state.settings.installed import importable
from accel_state.settings.run import XLASettings
from accel_state.settings.schema import BOOLEAN, TEXT, Setting
from accel_state.topology import Topology

__all__ = ("XLA",)

_WANTED: Final = Setting("use_torch_xla", BOOLEAN, True, variable="USE_TORCH_XLA")
_RUNTIME: Final = Setting("pjrt_device", TEXT, None, variable="PJRT_DEVICE")
_PORT: Final = 12355
"""Where processes meet when nobody said so; that of torch_xla."""


class XLA(TorchFamily):
    """The devices of torch_xla's runtime."""

    transport = "accel_state.transport.xla:XLATransport"

    def __init__(self) -> None:
        super().__init__(SPECS["xla"])

    def present(self) -> bool:
        """Whether torch_xla is there, not switched off by USE_TORCH_XLA, and has more to offer than the CPU.

        The CPU counts where PJRT_DEVICE asks for it.
        """
        wanted = read(_WANTED)
        if (wanted is not None and not wanted.value) or not importable("torch_xla"):
            return False
        return _runtime_device() is not None

    def kind(self) -> str | None:
        """The kind of device that the runtime uses, such as "TPU"."""
        return _runtime_device()

    def distributed_backend(self) -> str:
        """gloo, over which the processes agree; what lies on devices travels by the runtime."""
        if self.kind() == "CPU":
            raise _not_connected()
        return "gloo"

    def placed(self, topology: Topology) -> Topology:
        """The place that the runtime gave this process; it deals them out itself.

        Raises:
            NotOffered: another launcher started several processes, or one process runs several replicas in threads.
        """
        import torch_xla.runtime as runtime

        processes, replicas = runtime.process_count(), runtime.world_size()
        if replicas > 1 and runtime.addressable_runtime_device_count() > 1:
            raise NotOffered(
                f"{replicas} replicas on XLA devices were asked for.",
                "The runtime runs several of them in threads of one process, which share the state of that process.",
                "Start one process that drives all its devices: Accelerator(kwargs_handlers=[XLAPlugin(fsdp=True)]).",
            )
        if max(processes, replicas) == 1:
            if topology.world_size > 1:
                raise _not_connected()
            return topology._replace(master_addr=None, master_port=None)
        return _place(runtime, processes, replicas)

    @property
    def module(self) -> Any:
        import torch_xla.core.xla_model as xla_model

        return xla_model

    def count(self) -> int:
        import torch_xla.runtime as runtime

        return int(runtime.addressable_device_count())

    def device(self, local_rank: int) -> torch.device:
        """The device that the runtime gave this process, which it counts as its first one."""
        return torch.device(self.name, 0)

    def opened(self) -> bool:
        """Whether a device was used already, so that the runtime cannot be told any more how to use them."""
        import torch_xla

        return bool(torch_xla._XLAC._xla_get_spmd_config_is_locked())

    def use_all_devices(self) -> None:
        """Let this process drive all devices that it has as one (SPMD)."""
        import torch_xla.runtime as runtime

        if not runtime.is_spmd():
            runtime.use_spmd()

    def _open(self) -> Any:
        """torch_xla's module, for what uses a device."""
        if not self.opened() and from_environment(XLASettings).fsdp:
            self.use_all_devices()
        return self.module

    def seed(self, seed: int) -> None:
        self._open().set_rng_state(seed)

    def rng_state(self) -> Any:
        """The state of the device's generator, or None where nothing was drawn because it was not used yet."""
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
        """The runtime keeps no cache that could be given back."""

    def free_memory(self, index: int | None = None) -> int:
        facts = self._facts(index)
        return int(facts["bytes_limit"] - facts["bytes_used"])

    def total_memory(self, index: int | None = None) -> int:
        return int(self._facts(index)["bytes_limit"])

    def used_memory(self, index: int | None = None) -> int:
        return int(self._facts(index)["bytes_used"])

    def _facts(self, index: int | None) -> Any:
        device = self.device(0) if index is None else torch.device(self.name, index)
        try:
            return self._open().get_memory_info(str(device))
        except RuntimeError as error:
            raise NotOffered(
                f"The memory of {device} was asked for.",
                f"Its runtime does not count it: {str(error).splitlines()[0]}",
                "Ask the vendor's own tool.",
            ) from error

    def supports(self, dtype: torch.dtype) -> bool:
        return dtype is torch.bfloat16

    def check_fork(self) -> None:
        """torch_xla says itself when its runtime was opened before a fork."""


@functools.cache
def _runtime_device() -> str | None:
    """The kind of device that the runtime finds, such as "TPU"; None when that is the CPU and nobody asked for it."""
    asked = read(_RUNTIME)
    if asked is not None:
        return str(asked.value)
    import torch_xla.runtime as runtime

    found: str | None = runtime.device_type()
    if found not in (None, "CPU"):
        return found
    # torch_xla writes its choice into the environment, where child processes would take it for ours.
    publish({}, remove=_RUNTIME.variables)
    return None


def _place(runtime: Any, processes: int, replicas: int) -> Topology:
    """The place of one of several processes; those that drive several devices each are counted, else the replicas."""
    alike = replicas == 1
    return Topology(
        rank=runtime.process_index() if alike else runtime.global_ordinal(),
        world_size=processes if alike else replicas,
        local_rank=0 if alike else runtime.local_ordinal(),
        local_world_size=1 if alike else runtime.local_process_count(),
        node_rank=runtime.host_index(),
        master_addr=os.environ.get("MASTER_ADDR") or runtime.get_master_ip(),
        master_port=int(os.environ.get("MASTER_PORT") or _PORT),
        scheme="torch_xla",
    )


def _not_connected() -> NotOffered:
    return NotOffered(
        "Several processes on XLA devices were asked for.",
        "The runtime of torch_xla connects those that it starts itself, on TPUs, and none that it runs on CPUs.",
        "Start one process (XLAPlugin(fsdp=True) lets it drive several devices), use `accel launch --tpu` on a TPU, or "
        "work on the CPU without torch_xla with --cpu.",
    )
