"""A device made of CPU memory, for tests of what happens on a device of which there is none here.

It registers itself with torch under torch's name for foreign devices (PrivateUse1), so tensors really say
`device='simulated:0'`, and nothing else of this project knows it. It has its own memory, generators, autocast and
collectives. It needs torch 2.10 or newer and a machine without a GPU, and has to be imported before the first backward
pass of a process.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final

import torch
import torch.distributed as dist
from torch.utils import _pytree as pytree
from torch.utils import backend_registration

from accel_state.errors import NotOffered
from accel_state.testing.simulated_group import BACKEND, SimulatedGroup
from accel_state.testing.simulated_tensor import MODULE, NAME, SimulatedTensor, run

__all__ = ("BACKEND", "NAME", "POSSIBLE", "SimulatedTensor", "simulated_device")

_FACTORIES: Final = (
    "empty.memory_format",
    "empty_strided",
    "arange",
    "arange.start",
    "arange.start_step",
    "randperm",
    "randperm.generator",
    "linspace",
    "eye",
    "eye.m",
)
"""Operations that make a tensor and that torch does not build from others without resizing."""

_AUTOCAST: Final = ("linear", "matmul", "mm", "addmm", "bmm", "baddbmm", "conv1d", "conv2d", "conv3d")
"""Operations that run in the lower precision under autocast."""


def _make(operation: Any) -> Callable[..., Any]:
    """The kernel of an operation that makes a tensor on the device."""

    def make(*args: Any, **kwargs: Any) -> Any:
        return run(operation, args, {**kwargs, "device": kwargs.get("device") or torch.device(NAME, MODULE.index)})

    return make


def _copy_from(source: torch.Tensor, destination: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
    return run(torch.ops.aten.copy_.default, (destination, source), {})  # type: ignore[no-any-return]


def _cast(operation: Any) -> Callable[..., Any]:
    """The autocasting kernel of an operation."""
    keys: Any = torch._C.DispatchKey
    autocasting = torch._C.DispatchKeySet(keys.AutocastPrivateUse1)

    def lower(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(torch.get_autocast_dtype(NAME)) if tensor.is_floating_point() else tensor

    def cast(*args: Any, **kwargs: Any) -> Any:
        with torch._C._ExcludeDispatchKeyGuard(autocasting):
            args, kwargs = pytree.tree_map_only(torch.Tensor, lower, (args, kwargs))
            return operation(*args, **kwargs)

    return cast


def _register() -> tuple[Any, ...]:
    """Register the device with torch; what is returned has to be kept, because torch forgets it with these objects."""
    library: Any = torch.library.Library
    backend_registration._setup_privateuseone_for_python_backend(NAME, MODULE)
    kernels, fallback = library("aten", "IMPL"), library("_", "IMPL")
    for name in _FACTORIES:
        packet, _, overload = name.partition(".")
        kernels.impl(name, _make(getattr(getattr(torch.ops.aten, packet), overload or "default")), "PrivateUse1")
    kernels.impl("_copy_from", _copy_from, "PrivateUse1")
    for name in _AUTOCAST:
        kernels.impl(name, _cast(getattr(torch.ops.aten, name)), "AutocastPrivateUse1")
    fallback.fallback(torch.library.fallthrough_kernel, "AutocastPrivateUse1")
    dist.Backend.register_backend(BACKEND, SimulatedGroup, devices=[NAME])
    return kernels, fallback


POSSIBLE: Final = (
    hasattr(backend_registration, "_setup_privateuseone_for_python_backend") and not torch.cuda.is_available()
)
"""Whether this torch can have a device that is written in Python, here.

Once there is one, torch takes it for the accelerator of the process, before a GPU: autograd would then order work on
its streams and not on CUDA's.
"""

_kept: Final = _register() if POSSIBLE else ()
"""Registered on import: torch's autograd counts the devices at the first backward pass of a process."""


@contextmanager
def simulated_device(devices: int = 1, memory: int = 64 * 2**20) -> Iterator[None]:
    """Make the device available inside the block; afterwards torch knows it still, but there is none.

    Args:
        devices: how many; torch's autograd works on the first only.
        memory: bytes that each has.

    Raises:
        NotOffered: this torch cannot have a device that is written in Python, or there is a GPU.

    Example:
        >>> with simulated_device():
        ...     print(torch.ones(2, device="simulated").add(1).device)
        simulated:0
    """
    if not POSSIBLE:
        raise NotOffered(
            "Cannot make the simulated device.",
            f"torch {torch.__version__} cannot have a device that is written in Python, or there is a GPU, whose "
            "streams autograd would leave out.",
            "Install torch 2.10 or newer, and hide GPUs with CUDA_VISIBLE_DEVICES=''.",
        )
    MODULE.plug_in(devices, memory)
    try:
        yield
    finally:
        MODULE.plug_in(0, 0)
