"""Keeping whole models on the CPU and bringing each to a device when it is called, for pipelines of several models."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from accel_bigmodel.device_map import Device, resolve_device
from accel_bigmodel.hooks import ModelHook, add_hook_to_module, remove_hook_from_module
from accel_ops.conversion import send_to_device
from accel_state.devices.select import best_family

__all__ = ("CpuOffload", "UserCpuOffloadHook", "cpu_offload_with_hook")


class CpuOffload(ModelHook):
    """Keeps a model on the CPU until its forward, and lets it stay on the execution device afterwards.

    Args:
        execution_device: where it computes; the first device of the best family here when None.
        prev_module_hook: the handle of the model called before this one, which is sent back to the CPU first.
    """

    def __init__(
        self, execution_device: Device | None = None, prev_module_hook: UserCpuOffloadHook | None = None
    ) -> None:
        self.prev_module_hook = prev_module_hook
        self.execution_device = resolve_device(_default() if execution_device is None else execution_device)

    def init_hook(self, module: nn.Module) -> nn.Module:
        return module.to("cpu")

    def pre_forward(self, module: nn.Module, *args: Any, **kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        if self.prev_module_hook is not None:
            self.prev_module_hook.offload()
        module.to(self.execution_device)
        return send_to_device(args, self.execution_device), send_to_device(kwargs, self.execution_device)


def _default() -> torch.device:
    family = best_family()
    return torch.device(family.name)


class UserCpuOffloadHook:
    """The handle that `cpu_offload_with_hook` gives: sends the model back to the CPU, or takes the hook off."""

    def __init__(self, model: nn.Module, hook: ModelHook) -> None:
        self.model = model
        self.hook = hook

    def offload(self) -> None:
        """Send the model back to the CPU."""
        self.hook.init_hook(self.model)

    def remove(self) -> None:
        """Take the hook off; the model stays where it is."""
        remove_hook_from_module(self.model)


def cpu_offload_with_hook(
    model: nn.Module,
    execution_device: Device | None = None,
    prev_module_hook: UserCpuOffloadHook | None = None,
) -> tuple[nn.Module, UserCpuOffloadHook]:
    """Keep a model on the CPU between phases of use, moved as a whole.

    Args:
        execution_device: where it computes; the first device of the best family here when None.
        prev_module_hook: handle of the model before it, sent back when this one is called.

    Example:
        encoder, first = cpu_offload_with_hook(encoder, 0)
        decoder, second = cpu_offload_with_hook(decoder, 0, prev_module_hook=first)
        decoder(encoder(x))
        second.offload()
    """
    hook = CpuOffload(execution_device, prev_module_hook)
    add_hook_to_module(model, hook, append=True)
    return model, UserCpuOffloadHook(model, hook)
