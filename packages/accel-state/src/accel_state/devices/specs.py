"""The differences between the device families of torch as data: one `DeviceSpec` for each. Never imports torch.

The launcher reads which variable limits the visible devices and which variables the processes of a family need.
`DeviceFamily` and its callers read the rest.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import timedelta
from types import MappingProxyType
from typing import Final, NamedTuple

from accel_state.labels import DistributedType

__all__ = ("SPECS", "DeviceSpec", "unlisted_spec")


_NO_VARIABLES: Final[Mapping[str, str]] = MappingProxyType({})


class DeviceSpec(NamedTuple):
    """What `DeviceFamily` needs to know of one type of device.

    Args:
        name: type of its torch devices, such as "cuda", and name of its generators in `rng_types`.
        label: the `distributed_type` of several processes on these devices, unless the strategy has its own label.
        backend: name of the torch.distributed backend for its tensors; empty if there is none.
        rng_key: key of its generators in the random states of a checkpoint; None if it draws from the CPU generator.
        visible_variable: environment variable that limits the devices a process sees, such as "CUDA_VISIBLE_DEVICES".
        vendor: module that registers the family with torch when it is imported; None if torch itself drives it.
        collectives: module that registers the backend with torch.distributed when it is imported.
        priority: a run uses the present family with the highest priority.
        timeout: default timeout of a collective.
        pins_memory: whether copies from pinned host memory are faster.
        ring_attention: whether torch's context parallelism supports its attention kernels.
        launching: variables that its processes need at start; they have no effect on other devices.
        sharing: variables that processes need at start if they share a device.
        probing: variables that let `present` ask for devices without initialising them.
        exclusive_with: backend of torch.distributed under which only one process can use a device; empty if there is
            none.
        transport: the class of its transport between several processes, as "module:class"; imported when there are
            several.
        starter: the function that starts processes on all its devices, as "module:function", if its runtime connects
            only processes that it starts itself. It is called with a function that takes (process index, *args), with
            `args`, and with `start_method="fork"`.
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
    ring_attention: bool = False
    launching: Mapping[str, str] = _NO_VARIABLES
    sharing: Mapping[str, str] = _NO_VARIABLES
    probing: Mapping[str, str] = _NO_VARIABLES
    exclusive_with: str = ""
    transport: str = "accel_state.transport.torch_dist:TorchDistTransport"
    starter: str = ""


_ALL_SPECS: Final = (
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
        ring_attention=True,
        probing={"PYTORCH_NVML_BASED_CUDA_CHECK": "1"},
        exclusive_with="nccl",
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
    DeviceSpec(
        "xla",
        DistributedType.XLA,
        "xla",
        "xm_seed",
        vendor="torch_xla",
        priority=110,
        pins_memory=False,
        transport="accel_state.transport.xla:XLATransport",
        starter="torch_xla:launch",
    ),
)

SPECS: Final[Mapping[str, DeviceSpec]] = {spec.name: spec for spec in _ALL_SPECS}
"""The specs by device type."""


def unlisted_spec(name: str) -> DeviceSpec:
    """The spec of a device type that registered itself with torch and is not in `SPECS`."""
    return DeviceSpec(name, DistributedType.MULTI_GPU, "", f"torch_{name}_manual_seed", priority=70, pins_memory=False)
