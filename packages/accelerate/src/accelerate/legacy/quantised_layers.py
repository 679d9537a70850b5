"""Functions for layers of bitsandbytes that only scripts for the original call."""

from __future__ import annotations

import os
from collections.abc import MutableMapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from accel_bigmodel.offload import offload_weight
from accel_bigmodel.quantize import BnbQuantizationConfig, layers_of_bitsandbytes, linear_layers, replace_layers
from accel_bigmodel.tensors import set_module_tensor_to_device

__all__ = (
    "get_parameter_device",
    "has_4bit_bnb_layers",
    "quantize_and_offload_8bit",
    "replace_with_bnb_layers",
)


def replace_with_bnb_layers(
    model: nn.Module,
    bnb_quantization_config: BnbQuantizationConfig,
    modules_to_not_convert: Sequence[str] | None = None,
    current_key_name: Sequence[str] | None = None,
) -> nn.Module:
    """Replace every linear layer by a layer of bitsandbytes with the same weights, which are not quantised yet.

    Args:
        modules_to_not_convert: names, or parts of them between dots, of modules that are not replaced.
        current_key_name: names of the modules around `model`.

    Returns:
        The model.

    Raises:
        Missing: bitsandbytes is not installed.
    """
    prefix = "".join(f"{name}." for name in current_key_name or ())
    return replace_layers(model, linear_layers(model, modules_to_not_convert or (), prefix), bnb_quantization_config)


def has_4bit_bnb_layers(model: nn.Module) -> bool:
    """Whether a model has layers of bitsandbytes with 4-bit weights.

    Raises:
        Missing: bitsandbytes is not installed.
    """
    kind = layers_of_bitsandbytes(f"Cannot look for 4-bit layers in {type(model).__name__}.").Linear4bit
    return any(isinstance(module, kind) for module in model.modules())


def get_parameter_device(parameter: nn.Module) -> torch.device:
    """The device of the first parameter of a module; the CPU if it has none."""
    first = next(parameter.parameters(), None)
    return torch.device("cpu") if first is None else first.device


def quantize_and_offload_8bit(
    model: nn.Module,
    param: Tensor,
    param_name: str,
    new_dtype: torch.dtype,
    offload_folder: str | os.PathLike[str],
    offload_index: MutableMapping[str, dict[str, Any]],
    fp16_statistics: Tensor | None,
) -> None:
    """Write a weight of a model to an offload folder in 8 bits, with its scales as `<name without .weight>.SCB`.

    Args:
        param: the weight.
        param_name: its full name in the model; the model's weight moves to the meta device.
        new_dtype: dtype from which it is quantised.
        offload_folder: folder of the files.
        offload_index: receives the entries of the files.
        fp16_statistics: scales of a weight that is already in 8 bits; None quantises it here.

    Raises:
        Missing: bitsandbytes is not installed.
    """
    layers = layers_of_bitsandbytes(f"Cannot quantise {param_name!r}.")
    scales = fp16_statistics
    if scales is None:
        quantised = layers.Int8Params(param.detach().to("cpu", new_dtype), requires_grad=False).to(
            _quantize_device(param.device)
        )
        param, scales = quantised.CB, quantised.SCB
    offload_weight(param, param_name, offload_folder, offload_index)
    offload_weight(scales, f"{param_name.removesuffix('.weight')}.SCB", offload_folder, offload_index)
    set_module_tensor_to_device(model, param_name, "meta", dtype=new_dtype)


def _quantize_device(device: torch.device) -> torch.device:
    """The device that quantises a weight: its own device, if that can compute."""
    return torch.device("cpu") if device.type == "meta" else device
