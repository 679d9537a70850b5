"""Linear layers of bitsandbytes in place of those of torch; the one module that imports bitsandbytes.

A layer holds weights in floating point until they are put on the device where they shall compute: that quantises them.
Accelerators and, since bitsandbytes 0.46, the CPU can do it.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, MutableMapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from accel_bigmodel.device_map import Device, resolve_device
from accel_bigmodel.offload import offload_weight
from accel_bigmodel.place import set_module_tensor_to_device, submodule_and_leaf
from accel_bigmodel.quantize_config import BnbQuantizationConfig
from accel_bigmodel.tied import find_tied_parameters
from accel_state.settings.installed import Requirement

__all__ = (
    "get_keys_to_not_convert",
    "get_parameter_device",
    "has_4bit_bnb_layers",
    "is_named",
    "layers_of_bitsandbytes",
    "linear_layers",
    "put_quantized",
    "quantize_and_offload_8bit",
    "replace_layers",
    "replace_with_bnb_layers",
)

_BITSANDBYTES = Requirement("bitsandbytes", versions=">=0.46", extra="accel-bigmodel[bnb]")


def layers_of_bitsandbytes(asked: str) -> Any:
    """The module `bitsandbytes.nn`.

    Raises:
        Missing: bitsandbytes is not installed, or too old to compute on a CPU.
    """
    _BITSANDBYTES.demand(asked)
    import bitsandbytes

    return bitsandbytes.nn


def get_keys_to_not_convert(model: nn.Module) -> list[str]:
    """Names of the modules that are better not quantised: the last one, which gives the output, and tied ones.

    A model whose output embeddings are none of its own modules (one without a head) gives none.
    """
    children = [name for name, _ in model.named_children()]
    tied = [name.rpartition(".")[0] for names in find_tied_parameters(model) for name in names]
    base = getattr(model, "base_model_prefix", None)
    headless = isinstance(base, str) and not hasattr(model, base)
    if headless and not tied:
        return []
    return list(dict.fromkeys([*tied, *children[-1:]]))


def is_named(name: str, parts: Iterable[str]) -> bool:
    """Whether a full name has one of the parts in it, between dots."""
    return any(f".{part}." in f".{name}." for part in parts)


def replace_with_bnb_layers(
    model: nn.Module,
    bnb_quantization_config: BnbQuantizationConfig,
    modules_to_not_convert: Sequence[str] | None = None,
    current_key_name: Sequence[str] | None = None,
) -> nn.Module:
    """Put a layer of bitsandbytes in the place of every linear layer, with the same weights, not quantised yet.

    Args:
        modules_to_not_convert: names, or parts of them between dots, of modules that stay as they are.
        current_key_name: names of the modules that `model` lies in.

    Returns:
        The model.

    Raises:
        Missing: bitsandbytes is not installed.
    """
    prefix = "".join(f"{name}." for name in current_key_name or ())
    return replace_layers(model, linear_layers(model, modules_to_not_convert or (), prefix), bnb_quantization_config)


def linear_layers(model: nn.Module, skipped: Iterable[str], prefix: str = "") -> list[str]:
    """Names of the layers that can be replaced: torch's own class alone, for a subclass may do more than multiply."""
    named = model.named_modules(remove_duplicate=False)
    found = [name for name, module in named if name and type(module) is nn.Linear]
    return [name for name in found if not is_named(prefix + name, skipped)]


def replace_layers(model: nn.Module, names: Iterable[str], config: BnbQuantizationConfig) -> nn.Module:
    """Put layers of bitsandbytes in the place of the linear ones of these names."""
    layers = layers_of_bitsandbytes(f"Quantise {type(model).__name__}.")
    replaced: dict[int, nn.Module] = {}
    for name in names:
        owner, leaf = submodule_and_leaf(model, name)
        linear: Any = owner._modules[leaf]
        if id(linear) not in replaced:
            replaced[id(linear)] = _layer(layers, linear, config)
        owner._modules[leaf] = replaced[id(linear)]
    return model


def _layer(layers: Any, linear: nn.Linear, config: BnbQuantizationConfig) -> nn.Module:
    """The layer of bitsandbytes with the weights of a linear one."""
    shape, biased = (linear.in_features, linear.out_features), linear.bias is not None
    if config.load_in_8bit:
        kept = config.llm_int8_has_fp16_weight
        layer = layers.Linear8bitLt(
            *shape, biased, has_fp16_weights=kept, threshold=config.llm_int8_threshold, device="meta"
        )
        layer.weight = layers.Int8Params(linear.weight.data, requires_grad=kept, has_fp16_weights=kept)
    else:
        layer = layers.Linear4bit(
            *shape,
            biased,
            config.bnb_4bit_compute_dtype,
            compress_statistics=config.bnb_4bit_use_double_quant,
            quant_type=config.bnb_4bit_quant_type,
            quant_storage=config.bnb_4bit_quant_storage,
            device="meta",
        )
        layer.weight = layers.Params4bit(linear.weight.data, **{**vars(layer.weight), "requires_grad": False})
    layer.bias = linear.bias
    layer.requires_grad_(config.load_in_8bit and config.llm_int8_has_fp16_weight)
    return layer.train(linear.training)  # type: ignore[no-any-return]


def put_quantized(model: nn.Module, name: str, device: Device, weight: Tensor, dtype: torch.dtype | None) -> None:
    """Give the weight of a layer of bitsandbytes its value and quantise it on a device."""
    owner, leaf = submodule_and_leaf(model, name)
    old: Any = owner._parameters[leaf]
    parameter = type(old)(weight.to("cpu", dtype or weight.dtype), requires_grad=old.requires_grad, **vars(old))
    owner._parameters[leaf] = parameter.to(resolve_device(device))


def has_4bit_bnb_layers(model: nn.Module) -> bool:
    """Whether a model has layers of bitsandbytes with 4-bit weights.

    Raises:
        Missing: bitsandbytes is not installed.
    """
    kind = layers_of_bitsandbytes(f"Look for 4-bit layers in {type(model).__name__}.").Linear4bit
    return any(isinstance(module, kind) for module in model.modules())


def get_parameter_device(parameter: nn.Module) -> torch.device:
    """The device of the first parameter of a module; the CPU when it has none."""
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
        param_name: its full name in the model, where it becomes empty, on the meta device.
        new_dtype: dtype from which it is quantised.
        offload_folder: where the files are written.
        offload_index: is told of the files.
        fp16_statistics: scales of a weight that is in 8 bits already; None quantises it here.

    Raises:
        Missing: bitsandbytes is not installed.
    """
    layers = layers_of_bitsandbytes(f"Quantise {param_name!r}.")
    scales = fp16_statistics
    if scales is None:
        quantised = layers.Int8Params(param.detach().to("cpu", new_dtype), requires_grad=False).to(_able(param.device))
        param, scales = quantised.CB, quantised.SCB
    offload_weight(param, param_name, offload_folder, offload_index)
    offload_weight(scales, f"{param_name.removesuffix('.weight')}.SCB", offload_folder, offload_index)
    set_module_tensor_to_device(model, param_name, "meta", dtype=new_dtype)


def _able(device: torch.device) -> torch.device:
    """Where to quantise a weight: where it lies, if that is a place where something is computed."""
    return torch.device("cpu") if device.type == "meta" else device
