"""Devices that torch_xla drives: TPUs, and whatever else its runtime is told to use by PJRT_DEVICE."""

from __future__ import annotations

import functools
from typing import Any, Final

import torch

from accel_state.devices.rows import ROWS
from accel_state.devices.torch_family import TorchFamily
from accel_state.errors import NotOffered
from accel_state.settings.environ import publish, read
from accel_state.settings.probe import importable
from accel_state.settings.schema import BOOLEAN, TEXT, Setting

__all__ = ("XLA",)

_WANTED: Final = Setting("use_torch_xla", BOOLEAN, True, variable="USE_TORCH_XLA")
_RUNTIME: Final = Setting("pjrt_device", TEXT, None, variable="PJRT_DEVICE")


class XLA(TorchFamily):
    """The devices of torch_xla's runtime."""

    def __init__(self) -> None:
        super().__init__(ROWS["xla"])

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
        if self.kind() == "CPU":
            raise NotOffered(
                "Several processes on XLA devices were asked for.",
                "The runtime of torch_xla does not connect processes that it runs on CPUs.",
                "Start one process, or work on the CPU without torch_xla with --cpu.",
            )
        return super().distributed_backend()

    @property
    def module(self) -> Any:
        import torch_xla.core.xla_model as xla_model

        return xla_model

    def count(self) -> int:
        import torch_xla.runtime as runtime

        return int(runtime.addressable_device_count())

    def device(self, local_rank: int) -> torch.device:
        """The device that the runtime gave this process; torch_xla deals them out itself."""
        import torch_xla

        chosen: torch.device = torch_xla.device()
        return chosen

    def seed(self, seed: int) -> None:
        self.module.set_rng_state(seed)

    def rng_state(self) -> Any:
        return self.module.get_rng_state()

    def set_rng_state(self, state: Any) -> None:
        self.module.set_rng_state(state)

    def current_rng_state(self) -> torch.Tensor:
        return torch.tensor(self.module.get_rng_state(), dtype=torch.int64)

    def set_current_rng_state(self, state: torch.Tensor) -> None:
        self.module.set_rng_state(int(state))

    def synchronize(self) -> None:
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
            return self.module.get_memory_info(str(device))
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
