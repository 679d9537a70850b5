"""Loading a model with its linear layers quantised by bitsandbytes, weight by weight as the files are read."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from accel_bigmodel.budget import OFFLOADED, Budget
from accel_bigmodel.device_map import Device, DeviceMap, check_device_map
from accel_bigmodel.dispatch import dispatch_model, is_away, main_device_of
from accel_bigmodel.hub import local_checkpoint
from accel_bigmodel.load import chosen_map
from accel_bigmodel.load_names import refuse_empty
from accel_bigmodel.loading import Loading
from accel_bigmodel.place import set_module_tensor_to_device
from accel_bigmodel.quantize import (
    get_keys_to_not_convert,
    is_named,
    layers_of_bitsandbytes,
    linear_layers,
    put_quantized,
    replace_layers,
)
from accel_bigmodel.quantize_config import BnbQuantizationConfig
from accel_bigmodel.tied import device_of_name, find_tied_parameters, retie_parameters
from accel_bigmodel.weight_files.reading import find_weights
from accel_state.devices.select import best_family
from accel_state.errors import SettingError

__all__ = ("get_quantized_model_device_map", "load_and_quantize_model")


def load_and_quantize_model(
    model: nn.Module,
    bnb_quantization_config: BnbQuantizationConfig,
    weights_location: str | os.PathLike[str] | None = None,
    device_map: str | DeviceMap | None = None,
    no_split_module_classes: Sequence[str] | None = None,
    max_memory: Budget | None = None,
    offload_folder: str | os.PathLike[str] | None = None,
    offload_state_dict: bool = False,
) -> nn.Module:
    """Load a checkpoint into a model whose linear layers become layers of bitsandbytes, and spread it over devices.

    Each weight is quantised as soon as it is read, so that memory holds one at a time in floating point. Parts that a
    device map leaves to the disk, or to the CPU beside an accelerator, are not quantised.

    Args:
        model: best made under `init_empty_weights`; one with weights is quantised where it is.
        bnb_quantization_config: how.
        weights_location: a checkpoint, as `load_checkpoint_in_model` takes it; the weights of the model when None.
        device_map: name to device, or a policy of `load_checkpoint_and_dispatch`; the current device when None.
        no_split_module_classes: names of classes whose modules stay on one device.
        max_memory: bytes, or text such as "10GB", by device, for a device map that is made here.
        offload_folder: where parts on the disk are noted or written.
        offload_state_dict: accepted; mapped files already save the memory that it would.

    Returns:
        The model, with `is_loaded_in_8bit` or `is_loaded_in_4bit` set, for inference or to train adapters.

    Raises:
        Missing: bitsandbytes is not installed, or too old to compute on a CPU.
        SettingError: an empty model and no checkpoint, or a device map that does not fit.
        CheckpointError: files are missing, damaged, or lack weights of the model.

    Example:
        with init_empty_weights():
            model = Model(config)
        config = BnbQuantizationConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4")
        model = load_and_quantize_model(model, config, "checkpoint", device_map="auto")
    """
    name = type(model).__name__
    layers_of_bitsandbytes(f"Quantise {name}.")
    config = bnb_quantization_config
    if weights_location is None and any(parameter.is_meta for parameter in model.parameters()):
        raise SettingError(
            f"Quantise {name}.", "It is empty and no weights_location= was given.", "Name its checkpoint."
        )
    chosen = get_quantized_model_device_map(model, config, device_map, max_memory, no_split_module_classes)
    quantising = _Quantising(model, config, chosen)
    if weights_location is None:
        quantising.convert()
    else:
        loading = Loading(model, chosen, offload_folder, dtype_of=quantising.dtype_of, place=quantising.place)
        report = loading.run(find_weights(local_checkpoint(weights_location)), strict=False)
        refuse_empty(model, report, weights_location)
    setattr(model, f"is_loaded_in_{8 if config.load_in_8bit else 4}bit", True)
    return dispatch_model(model, chosen, offload_dir=offload_folder)


def get_quantized_model_device_map(
    model: nn.Module,
    bnb_quantization_config: BnbQuantizationConfig,
    device_map: str | DeviceMap | None = None,
    max_memory: Budget | None = None,
    no_split_module_classes: Sequence[str] | None = None,
) -> DeviceMap:
    """The device map of a model that is going to be quantised; sizes count as they will be.

    The arguments are those of `load_and_quantize_model`.

    Raises:
        SettingError: it does not fit the model; or one that was made here needs the CPU or the disk besides the
            accelerators, and the configuration does not allow that.
    """
    if device_map is None:
        family = best_family()
        host = family.name in OFFLOADED
        return {"": family.name if host else f"{family.name}:{torch.get_device_module(family.name).current_device()}"}
    if not isinstance(device_map, str):
        check_device_map(model, device_map)
        return device_map
    config = bnb_quantization_config
    quantised = {f"{name}.weight" for name in linear_layers(model, _skipped(model, config))}
    others = {
        n: _plain_dtype(n, config) for n, p in model.named_parameters(remove_duplicate=False) if n not in quantised
    }
    found: Any = chosen_map(model, device_map, max_memory, no_split_module_classes, config.target_dtype, False, others)
    main = main_device_of(found)
    left = [name for name, device in found.items() if is_away(device, main)]
    if left and not config.llm_int8_enable_fp32_cpu_offload:
        raise SettingError(
            f"Quantise {type(model).__name__} with device_map={device_map!r}.",
            f"It does not fit on {main}; left for the CPU or the disk: {', '.join(map(repr, left[:3]))}.",
            "Give a device map, or llm_int8_enable_fp32_cpu_offload=True: what is offloaded is not quantised.",
        )
    return found  # type: ignore[no-any-return]


def _skipped(model: nn.Module, config: BnbQuantizationConfig) -> list[str]:
    own = get_keys_to_not_convert(model) if config.skip_modules is None else config.skip_modules
    return [*own, *(config.keep_in_fp32_modules or ())]


def _plain_dtype(name: str, config: BnbQuantizationConfig) -> torch.dtype:
    """The dtype of a weight that is not quantised."""
    kept: torch.dtype = torch.float32 if is_named(name, config.keep_in_fp32_modules or ()) else config.torch_dtype
    return kept


class _Quantising:
    """What is quantised, what keeps which dtype, and where each weight goes."""

    def __init__(self, model: nn.Module, config: BnbQuantizationConfig, device_map: DeviceMap) -> None:
        self.model, self.config, self.device_map = model, config, device_map
        self.main = main_device_of(device_map)
        names = [name for name in linear_layers(model, _skipped(model, config)) if not self._is_away(name)]
        self.tied = find_tied_parameters(model)
        replace_layers(model, names, config)
        self.quantised = {f"{name}.weight" for name in names}

    def _is_away(self, name: str) -> bool:
        return is_away(device_of_name(name, self.device_map), self.main)

    def dtype_of(self, name: str) -> torch.dtype:
        """The dtype of a weight that is not quantised, or of one before it is."""
        if self.config.llm_int8_enable_fp32_cpu_offload and self._is_away(name):
            return torch.float32
        return _plain_dtype(name, self.config)

    def place(self, model: nn.Module, name: str, device: Device, weight: Tensor, dtype: torch.dtype | None) -> None:
        """Put a weight where it belongs; one of a quantised layer in few bits."""
        if name in self.quantised:
            put_quantized(model, name, device, weight, dtype)
        else:
            set_module_tensor_to_device(model, name, device, value=weight, dtype=dtype, clear_cache=False)

    def convert(self) -> None:
        """Quantise a model that has its weights, one after the other."""
        for name, parameter in list(self.model.named_parameters()):
            device = "cpu" if self._is_away(name) else device_of_name(name, self.device_map)
            self.place(self.model, name, device, parameter.detach(), self.dtype_of(name))
        retie_parameters(self.model, self.tied)
