"""Facts about the device families that torch knows by a name: one row each. Never imports torch.

The launcher reads which variable hides devices and what the processes of a family need in their environment; the family
objects in this folder read the rest.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import timedelta
from types import MappingProxyType
from typing import Final, NamedTuple

from accel_state.labels import DistributedType

__all__ = ("SPECS", "DeviceSpec", "unlisted_spec")


_NONE: Final[Mapping[str, str]] = MappingProxyType({})


class DeviceSpec(NamedTuple):
    """What is known about one family.

    Args:
        name: type of its torch devices, and the name by which `rng_types` asks for its generators.
        label: what users read as `distributed_type`.
        backend: name of the torch.distributed backend that moves its tensors, or empty when none does.
        rng_key: key of its generators in a checkpoint's random states; None for that of the CPU itself.
        visible_variable: variable that limits which of its devices a process sees.
        vendor: module that has to be imported before torch knows the family.
        collectives: module that has to be imported before torch.distributed knows the backend.
        priority: the present family with the highest one is taken.
        timeout: how long a collective may take when nothing else was asked for.
        pins_memory: whether copies from pinned host memory are quicker.
        launching: variables that the processes need when they start; they mean nothing on other devices.
        sharing: variables that several processes need when they start and share its device.
        probing: variables that keep the question whether a device is there from opening it.
    """

    name: str
    label: DistributedType
    backend: str
    rng_key: str | None
    visible_variable: str | None = None
    vendor: str | None = None
    collectives: str | None = None
    priority: int = 80
    timeout: timedelta = timedelta(minutes=30)
    pins_memory: bool = True
    launching: Mapping[str, str] = _NONE
    sharing: Mapping[str, str] = _NONE
    probing: Mapping[str, str] = _NONE


_ALL: Final = (
    DeviceSpec(
        "cpu",
        DistributedType.MULTI_CPU,
        "gloo",
        None,
        priority=0,
        pins_memory=False,
        sharing={"KMP_AFFINITY": "granularity=fine,compact,1,0", "KMP_BLOCKTIME": "1"},
    ),
    DeviceSpec(
        "cuda",
        DistributedType.MULTI_GPU,
        "nccl",
        "torch_cuda_manual_seed",
        "CUDA_VISIBLE_DEVICES",
        priority=100,
        timeout=timedelta(minutes=10),
        probing={"PYTORCH_NVML_BASED_CUDA_CHECK": "1"},
    ),
    DeviceSpec("xpu", DistributedType.MULTI_XPU, "xccl", "torch_xpu_manual_seed", "ZE_AFFINITY_MASK"),
    DeviceSpec(
        "npu", DistributedType.MULTI_NPU, "hccl", "torch_npu_manual_seed", "ASCEND_RT_VISIBLE_DEVICES", "torch_npu"
    ),
    DeviceSpec(
        "mlu",
        DistributedType.MULTI_MLU,
        "cncl",
        "torch_mlu_manual_seed",
        "MLU_VISIBLE_DEVICES",
        "torch_mlu",
        probing={"PYTORCH_CNDEV_BASED_MLU_CHECK": "1"},
    ),
    DeviceSpec(
        "musa", DistributedType.MULTI_MUSA, "mccl", "torch_musa_manual_seed", "MUSA_VISIBLE_DEVICES", "torch_musa"
    ),
    DeviceSpec(
        "sdaa", DistributedType.MULTI_SDAA, "tccl", "torch_sdaa_manual_seed", "SDAA_VISIBLE_DEVICES", "torch_sdaa"
    ),
    DeviceSpec(
        "hpu",
        DistributedType.MULTI_HPU,
        "hccl",
        "torch_hpu_manual_seed",
        "HABANA_VISIBLE_MODULES",
        "habana_frameworks.torch",
        "habana_frameworks.torch.distributed.hccl",
    ),
    DeviceSpec(
        "neuron",
        DistributedType.MULTI_NEURON,
        "neuron",
        "torch_neuron_manual_seed",
        "NEURON_RT_VISIBLE_CORES",
        "torch_neuronx",
    ),
    DeviceSpec(
        "mps",
        DistributedType.MULTI_GPU,
        "",
        "torch_mps_manual_seed",
        priority=90,
        pins_memory=False,
        launching={"PYTORCH_ENABLE_MPS_FALLBACK": "1"},
    ),
    DeviceSpec("xla", DistributedType.XLA, "xla", "xm_seed", vendor="torch_xla", priority=110, pins_memory=False),
)

SPECS: Final[Mapping[str, DeviceSpec]] = {row.name: row for row in _ALL}
"""Facts by the type of the torch device."""


def unlisted_spec(name: str) -> DeviceSpec:
    """The row of a device that registered itself with torch and that nobody wrote a row for."""
    return DeviceSpec(name, DistributedType.MULTI_GPU, "", f"torch_{name}_manual_seed", priority=70, pins_memory=False)
