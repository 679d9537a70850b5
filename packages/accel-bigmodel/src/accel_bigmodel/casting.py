"""Layer-wise casting: stores weights in a small dtype, and casts them to the compute dtype for each layer's forward."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from accel_bigmodel.hooks import ModelHook, add_hook_to_module
from accel_state.errors import SettingError

__all__ = ("SUPPORTED_PYTORCH_LAYERS_FOR_UPCASTING", "LayerwiseCastingHook", "attach_layerwise_casting_hooks")

SUPPORTED_PYTORCH_LAYERS_FOR_UPCASTING = (
    nn.Conv1d,
    nn.Conv2d,
    nn.Conv3d,
    nn.ConvTranspose1d,
    nn.ConvTranspose2d,
    nn.ConvTranspose3d,
    nn.Linear,
)
"""Layers whose weights are cast."""


class LayerwiseCastingHook(ModelHook):
    """Keeps a module's weights in `storage_dtype` between forwards.

    The stored weights never change: each forward computes with a cast copy, so that repeated casts lose no precision.

    Args:
        storage_dtype: dtype of the stored weights, such as `torch.float8_e4m3fn`.
        compute_dtype: dtype of the forward, such as `torch.bfloat16`; floating-point inputs are cast to it too.
        non_blocking: do not wait for the casts.
    """

    def __init__(self, storage_dtype: torch.dtype, compute_dtype: torch.dtype, non_blocking: bool) -> None:
        self.storage_dtype = storage_dtype
        self.compute_dtype = compute_dtype
        self.non_blocking = non_blocking
        self._stored: dict[str, nn.Parameter] = {}

    def init_hook(self, module: nn.Module) -> nn.Module:
        return module.to(dtype=self.storage_dtype, non_blocking=self.non_blocking)

    def pre_forward(self, module: nn.Module, *args: Any, **kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        if not self._stored:
            self._stored = {name: p for name, p in module._parameters.items() if p is not None}
        for name, parameter in self._stored.items():
            cast = parameter.detach().to(self.compute_dtype, non_blocking=self.non_blocking)
            module._parameters[name] = nn.Parameter(cast, requires_grad=False)
        return tuple(map(self._cast, args)), {name: self._cast(value) for name, value in kwargs.items()}

    def _cast(self, value: Any) -> Any:
        is_float = isinstance(value, Tensor) and value.is_floating_point()
        return value.to(self.compute_dtype, non_blocking=self.non_blocking) if is_float else value

    def post_forward(self, module: nn.Module, output: Any) -> Any:
        self.forward_failed(module)
        return output

    def forward_failed(self, module: nn.Module) -> None:
        stored, self._stored = self._stored, {}
        module._parameters.update(stored)


def attach_layerwise_casting_hooks(
    module: nn.Module,
    storage_dtype: torch.dtype,
    compute_dtype: torch.dtype,
    skip_modules_pattern: str | Iterable[str] | None = None,
    skip_modules_classes: tuple[type[nn.Module], ...] | None = None,
    non_blocking: bool = False,
) -> None:
    """Store the weights of the layers in a module in a small dtype, for inference.

    Args:
        storage_dtype: dtype between forwards.
        compute_dtype: dtype during the forward of each layer.
        skip_modules_pattern: regular expressions, or one, for the names of modules that are not cast.
        skip_modules_classes: classes of modules that are not cast, with all their submodules.
        non_blocking: do not wait for the casts.

    Raises:
        SettingError: a dtype is not a floating-point dtype.

    Example:
        attach_layerwise_casting_hooks(model, torch.float8_e4m3fn, torch.bfloat16, skip_modules_pattern="norm")
    """
    for dtype in (storage_dtype, compute_dtype):
        if not dtype.is_floating_point:
            raise SettingError(
                f"Cannot cast the layers of {type(module).__name__} between {storage_dtype} and {compute_dtype}.",
                f"{dtype} is not a floating-point dtype.",
                "Use one such as torch.float8_e4m3fn or torch.bfloat16.",
            )
    patterns = [skip_modules_pattern] if isinstance(skip_modules_pattern, str) else list(skip_modules_pattern or ())
    _attach(module, "", patterns, skip_modules_classes or (), (storage_dtype, compute_dtype, non_blocking))


def _attach(
    module: nn.Module, name: str, patterns: list[str], classes: tuple[type[nn.Module], ...], how: tuple[Any, Any, bool]
) -> None:
    if isinstance(module, classes) or any(re.search(pattern, name) for pattern in patterns):
        return
    if isinstance(module, SUPPORTED_PYTORCH_LAYERS_FOR_UPCASTING):
        add_hook_to_module(module, LayerwiseCastingHook(*how), append=True)
        return
    for child, inner in module.named_children():
        _attach(inner, f"{name}.{child}" if name else child, patterns, classes, how)
