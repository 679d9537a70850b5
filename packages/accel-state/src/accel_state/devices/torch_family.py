"""Device families that torch drives through a module of the same name, such as `torch.cuda`.

Most of them differ only in data. The families of NVIDIA and Apple add code where their torch modules and drivers behave
differently. A device that registered itself with torch (`torch.utils.rename_privateuse1_backend`) needs no spec;
`UnlistedFamily` supports it.
"""

from __future__ import annotations

import functools
import os
import shutil
import subprocess
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

import torch

from accel_state.devices.base import DeviceFamily
from accel_state.devices.specs import SPECS, unlisted_spec
from accel_state.errors import NotOffered
from accel_state.topology import Topology

__all__ = (
    "CUDA",
    "HPU",
    "MLU",
    "MPS",
    "MUSA",
    "NEURON",
    "NPU",
    "SDAA",
    "WITHOUT_P2P",
    "XPU",
    "UnlistedFamily",
    "check_cuda_p2p_ib_support",
    "get_driver_version",
    "get_gpu_info",
    "unlisted_family",
)


class XPU(DeviceFamily):
    """GPUs that `torch.xpu` drives."""

    spec = SPECS["xpu"]


class NPU(DeviceFamily):
    """Devices that `torch_npu` drives."""

    spec = SPECS["npu"]


class MLU(DeviceFamily):
    """Devices that `torch_mlu` drives."""

    spec = SPECS["mlu"]


class MUSA(DeviceFamily):
    """Devices that `torch_musa` drives."""

    spec = SPECS["musa"]


class SDAA(DeviceFamily):
    """Devices that `torch_sdaa` drives."""

    spec = SPECS["sdaa"]


class HPU(DeviceFamily):
    """Devices that `habana_frameworks.torch` drives."""

    spec = SPECS["hpu"]


class NEURON(DeviceFamily):
    """Devices that `torch_neuronx` drives."""

    spec = SPECS["neuron"]


class UnlistedFamily(DeviceFamily):
    """A device that registered itself with torch; its backend is the one that it registered with torch.distributed.

    Args:
        name: type of its torch devices.
    """

    def __init__(self, name: str) -> None:
        self.spec = unlisted_spec(name)

    def distributed_backend(self) -> str:
        try:
            return torch.distributed.get_default_backend_for_device(self.name)
        except ValueError:
            return super().distributed_backend()


@functools.cache
def unlisted_family(name: str) -> UnlistedFamily:
    """The family of a device type that is registered with torch and has no spec."""
    return UnlistedFamily(name)


_FIRST_MACOS_WITH_BFLOAT16 = (14, 0)
"""First release of macOS on which Metal supports bfloat16."""


class MPS(DeviceFamily):
    """The GPU that `torch.mps` drives; it shares the memory of the host."""

    spec = SPECS["mps"]

    def present(self) -> bool:
        return torch.backends.mps.is_available()

    def count(self) -> int:
        return 1

    def device(self, local_rank: int) -> torch.device:
        return self.device_at(0)

    def device_at(self, index: int) -> torch.device:
        return torch.device(self.name)

    def seed(self, seed: int) -> None:
        torch.mps.manual_seed(seed)

    def rng_state(self) -> Any:
        return [torch.mps.get_rng_state()]

    def set_rng_state(self, state: Any) -> None:
        torch.mps.set_rng_state(state[0])

    def supports(self, dtype: torch.dtype) -> bool:
        new_enough = torch.backends.mps.is_macos_or_newer(*_FIRST_MACOS_WITH_BFLOAT16)
        return dtype is torch.float16 or (dtype is torch.bfloat16 and new_enough)

    def total_memory(self, index: int | None = None) -> int:
        """The maximum number of bytes that Metal recommends."""
        return torch.mps.recommended_max_memory()

    def free_memory(self, index: int | None = None) -> int:
        return max(0, self.total_memory() - torch.mps.driver_allocated_memory())

    def used_memory(self, index: int | None = None) -> int:
        return torch.mps.current_allocated_memory()


_OUT_OF_MEMORY_TEXTS = ("cuDNN error: CUDNN_STATUS_NOT_SUPPORTED.", "CUBLAS_STATUS_ALLOC_FAILED")

_MXFP8_CAPABILITY = (10, 0)
"""Compute capability of the Blackwell generation."""


class CUDA(DeviceFamily):
    """GPUs that `torch.cuda` drives."""

    spec = SPECS["cuda"]

    @property
    def is_rocm(self) -> bool:
        """Whether the GPUs are AMD's."""
        return torch.version.hip is not None

    def configure(self, topology: Topology) -> None:
        """Refuse GPUs on which NCCL would wait forever.

        Raises:
            NotOffered: the GPUs cannot access each other's memory, the driver does not report it, and `WITHOUT_P2P` is
                not set.
        """
        disabled = all(variable in os.environ for variable in WITHOUT_P2P)
        if topology.world_size == 1 or disabled or not _lacks_p2p(torch.cuda.get_device_name()):
            return
        if not check_cuda_p2p_ib_support():
            raise NotOffered(
                f"Cannot run {topology.world_size} processes on {torch.cuda.get_device_name()} GPUs.",
                "These GPUs cannot access each other's memory, and this driver does not report that to NCCL.",
                f"Set {' and '.join(f'{name}=1' for name in WITHOUT_P2P)}, or update the driver.",
            )

    def description(self, index: int) -> str:
        major, minor = torch.cuda.get_device_capability(index)
        return f"{super().description(index)}, capability {major}.{minor}"

    def software(self) -> Mapping[str, str]:
        versions = {"CUDA": torch.version.cuda, "ROCm": torch.version.hip}
        with suppress(NotOffered, subprocess.TimeoutExpired):
            versions["driver"] = get_driver_version()
        if torch.distributed.is_nccl_available():
            nccl: Any = torch.cuda.nccl
            versions["NCCL"] = ".".join(map(str, nccl.version()))
        return {name: version for name, version in versions.items() if version is not None}

    def scales_fp8_by_blocks(self) -> bool:
        """Whether the current GPU computes with 8-bit numbers that share a scale in blocks."""
        return torch.cuda.get_device_capability() >= _MXFP8_CAPABILITY

    def supports(self, dtype: torch.dtype) -> bool:
        return dtype is torch.float16 or (dtype is torch.bfloat16 and torch.cuda.is_bf16_supported())

    def out_of_memory(self, error: BaseException) -> bool:
        is_named = isinstance(error, RuntimeError) and any(text in str(error) for text in _OUT_OF_MEMORY_TEXTS)
        return super().out_of_memory(error) or is_named

    def numa_node(self, index: int) -> int | None:
        # Several processes may share a device, so the index of a process may exceed the last device index.
        properties: Any = torch.cuda.get_device_properties(index % max(self.count(), 1))
        address = f"{properties.pci_domain_id:04x}:{properties.pci_bus_id:02x}:{properties.pci_device_id:02x}.0"
        try:
            node = int(Path(f"/sys/bus/pci/devices/{address}/numa_node").read_text())
        except OSError:
            return None
        return node if node >= 0 else None


WITHOUT_P2P: Final = ("NCCL_P2P_DISABLE", "NCCL_IB_DISABLE")
"""Variables that keep NCCL from peer-to-peer and InfiniBand transfers."""

_SERIES_WITHOUT_P2P: Final = "RTX 40"
"""GPUs of this series cannot access each other's memory."""

_FIRST_DRIVER_WITH_P2P_REPORT: Final = (550, 40, 7)
"""First driver that reports it; with an older one NCCL tries peer-to-peer transfers and waits forever."""

_NVIDIA_SMI_TIMEOUT_S: Final = 30.0


def _query_driver(question: str) -> list[str] | None:
    """What nvidia-smi prints, one line for each GPU; None when there is no driver."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return None
    command = [program, f"--query-gpu={question}", "--format=csv,noheader"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=_NVIDIA_SMI_TIMEOUT_S, check=False)
    return done.stdout.splitlines() if done.returncode == 0 else None


def get_gpu_info() -> tuple[list[str], int]:
    """Names and number of the NVIDIA GPUs of this machine."""
    names = [name.strip() for name in _query_driver("name") or []]
    return names, len(names)


def get_driver_version() -> str:
    """Version of NVIDIA's driver.

    Raises:
        NotOffered: there is no driver.
    """
    versions = _query_driver("driver_version")
    if not versions:
        raise NotOffered(
            "Cannot read the version of NVIDIA's driver.",
            "The program nvidia-smi is not installed, or it found no GPU.",
            "Install the driver.",
        )
    return versions[0].strip()


def _lacks_p2p(name: str) -> bool:
    """Whether GPUs of this name cannot access each other's memory."""
    return _SERIES_WITHOUT_P2P in name


def check_cuda_p2p_ib_support() -> bool:
    """Whether NCCL may use peer-to-peer and InfiniBand transfers between the GPUs; if False, set `WITHOUT_P2P`."""
    names, count = get_gpu_info()
    if count < 2 or not any(map(_lacks_p2p, names)):
        return True
    return tuple(int(part) for part in get_driver_version().split(".")) >= _FIRST_DRIVER_WITH_P2P_REPORT
