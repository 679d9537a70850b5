"""Quantises the linear layers of a model to 8 or 4 bits with bitsandbytes; no other module imports bitsandbytes.

A layer has floating-point weights until they move to their execution device, which quantises them. Accelerators and,
since bitsandbytes 0.46, the CPU support this.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from accel_bigmodel.device_map import (
    OFFLOADED,
    Device,
    DeviceMap,
    check_device_map,
    device_of_name,
    is_offloaded,
    main_device_of,
    resolve_device,
)
from accel_bigmodel.dispatch import dispatch_layout
from accel_bigmodel.loading import Loading, refuse_empty
from accel_bigmodel.placement import MaxMemory, device_map_by_policy
from accel_bigmodel.tensors import (
    find_tied_parameters,
    retie_parameters,
    set_module_tensor_to_device,
    submodule_and_leaf,
)
from accel_bigmodel.trainable import BITSANDBYTES
from accel_bigmodel.weight_layout import layout_of
from accel_state.choices import CustomDtype
from accel_state.devices.select import best_family
from accel_state.errors import SettingError

__all__ = (
    "BnbQuantizationConfig",
    "get_keys_to_not_convert",
    "get_quantized_model_device_map",
    "is_named",
    "layers_of_bitsandbytes",
    "linear_layers",
    "load_and_quantize_model",
    "put_quantized",
    "replace_layers",
)

_DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
_QUANT_TYPES = ("fp4", "nf4")


@dataclass
class BnbQuantizationConfig:
    """Settings of `load_and_quantize_model` for the linear layers of a model.

    Args:
        load_in_8bit: quantise by LLM.int8() (Dettmers et al. 2022); a bool as second argument counts as `load_in_4bit`.
        llm_int8_threshold: input columns with a larger value are computed in half precision; with 0, no columns.
        load_in_4bit: quantise blocks of weights to 4 bits, as QLoRA does (Dettmers et al. 2023).
        bnb_4bit_quant_type: "fp4" or "nf4".
        bnb_4bit_use_double_quant: quantise the scales of the blocks too.
        bnb_4bit_compute_dtype: dtype in which 4-bit layers compute, or "fp32", "fp16", "bf16"; None means "fp16".
        torch_dtype: dtype of weights that are not quantised; if None, float16, or the compute dtype with 4 bits.
        skip_modules: names, or parts of them between dots, of modules that are not quantised; if None, the head.
        keep_in_fp32_modules: names, in the same form, of modules that keep float32.
        llm_int8_skip_modules: another name of `skip_modules`.
        llm_int8_enable_fp32_cpu_offload: allow an automatic device map with parts on the CPU or the disk; these are not
            quantised and keep float32.
        llm_int8_has_fp16_weight: keep half-precision weights and quantise them in every forward, to train them.
        bnb_4bit_quant_storage: dtype of the tensors that store 4-bit weights; if None, uint8.

    Raises:
        SettingError: not exactly one of 8 and 4 bits is selected, or a value is not one of those above.

    Example:
        >>> BnbQuantizationConfig(load_in_4bit=True, bnb_4bit_compute_dtype="bf16").torch_dtype
        torch.bfloat16
    """

    load_in_8bit: bool = False
    llm_int8_threshold: float = 6.0
    load_in_4bit: bool = False
    bnb_4bit_quant_type: str = "fp4"
    bnb_4bit_use_double_quant: bool = False
    bnb_4bit_compute_dtype: Any = "fp16"
    torch_dtype: Any = None
    skip_modules: list[str] | None = None
    keep_in_fp32_modules: list[str] | None = None
    llm_int8_skip_modules: list[str] | None = field(default=None, kw_only=True)
    llm_int8_enable_fp32_cpu_offload: bool = field(default=False, kw_only=True)
    llm_int8_has_fp16_weight: bool = field(default=False, kw_only=True)
    bnb_4bit_quant_storage: Any = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        if isinstance(self.llm_int8_threshold, bool):
            self.load_in_4bit, self.llm_int8_threshold = self.llm_int8_threshold, 6.0
        self._check_flags()
        if self.bnb_4bit_quant_type not in _QUANT_TYPES:
            raise _wrong("bnb_4bit_quant_type", self.bnb_4bit_quant_type, f"Use one of {', '.join(_QUANT_TYPES)}.")
        self.bnb_4bit_compute_dtype = _dtype("bnb_4bit_compute_dtype", self.bnb_4bit_compute_dtype or "fp16")
        own = self.bnb_4bit_compute_dtype if self.load_in_4bit else torch.float16
        self.torch_dtype = own if self.torch_dtype is None else _dtype("torch_dtype", self.torch_dtype)
        if self.bnb_4bit_quant_storage is None:
            self.bnb_4bit_quant_storage = torch.uint8
        elif not isinstance(self.bnb_4bit_quant_storage, torch.dtype):
            raise _wrong("bnb_4bit_quant_storage", self.bnb_4bit_quant_storage, "Give a torch dtype.")
        self._take_skipped()
        self.target_dtype: torch.dtype | CustomDtype = torch.int8 if self.load_in_8bit else CustomDtype.INT4

    def _check_flags(self) -> None:
        for name in ("load_in_8bit", "load_in_4bit", "bnb_4bit_use_double_quant", "llm_int8_has_fp16_weight"):
            if not isinstance(getattr(self, name), bool):
                raise _wrong(name, getattr(self, name), "Give True or False.")
        if self.load_in_8bit == self.load_in_4bit:
            both = "Both" if self.load_in_8bit else "Neither"
            raise SettingError(
                "Cannot quantise a model with bitsandbytes.",
                f"{both} of load_in_8bit and load_in_4bit is True.",
                "Set exactly one of them.",
            )
        if not isinstance(self.llm_int8_threshold, (int, float)) or self.llm_int8_threshold < 0:
            raise _wrong("llm_int8_threshold", self.llm_int8_threshold, "Give a number of 0 or more.")

    def _take_skipped(self) -> None:
        if self.llm_int8_skip_modules is not None:
            if self.skip_modules not in (None, self.llm_int8_skip_modules):
                raise _wrong("llm_int8_skip_modules", self.llm_int8_skip_modules, "Use only skip_modules.")
            self.skip_modules = self.llm_int8_skip_modules
        for name in ("skip_modules", "keep_in_fp32_modules"):
            value = getattr(self, name)
            if value is not None and not (isinstance(value, list) and all(isinstance(one, str) for one in value)):
                raise _wrong(name, value, "Give a list of names.")


def _dtype(name: str, value: Any) -> torch.dtype:
    resolved = _DTYPES.get(value) if isinstance(value, str) else value
    if not isinstance(resolved, torch.dtype) or not resolved.is_floating_point:
        raise _wrong(name, value, f"Use one of {', '.join(_DTYPES)}, or a floating-point dtype of torch.")
    return resolved


def _wrong(name: str, value: Any, remedy: str) -> SettingError:
    return SettingError(
        f"Cannot quantise a model with {name}={value!r}.", f"{name} does not accept that value.", remedy
    )


def layers_of_bitsandbytes(failure: str) -> Any:
    """The module `bitsandbytes.nn`.

    Raises:
        Missing: bitsandbytes is not installed, or too old to compute on a CPU.
    """
    BITSANDBYTES.demand(failure)
    import bitsandbytes

    return bitsandbytes.nn


def get_keys_to_not_convert(model: nn.Module) -> list[str]:
    """Names of the modules that should not be quantised: the output layer, and tied ones.

    Empty for a model with output embeddings outside its own modules (a model without a head).
    """
    children = [name for name, _ in model.named_children()]
    tied = [name.rpartition(".")[0] for names in find_tied_parameters(model) for name in names]
    base = getattr(model, "base_model_prefix", None)
    headless = isinstance(base, str) and not hasattr(model, base)
    if headless and not tied:
        return []
    return list(dict.fromkeys([*tied, *children[-1:]]))


def is_named(name: str, parts: Iterable[str]) -> bool:
    """Whether a full name contains one of the parts, between dots."""
    return any(f".{part}." in f".{name}." for part in parts)


def linear_layers(model: nn.Module, skipped: Iterable[str], prefix: str = "") -> list[str]:
    """Names of the layers that can be replaced: only torch's own class; a subclass may do more than multiply."""
    named = model.named_modules(remove_duplicate=False)
    names = [name for name, module in named if name and type(module) is nn.Linear]
    return [name for name in names if not is_named(prefix + name, skipped)]


def replace_layers(model: nn.Module, names: Iterable[str], config: BnbQuantizationConfig) -> nn.Module:
    """Replace the linear layers with these names by layers of bitsandbytes."""
    layers = layers_of_bitsandbytes(f"Cannot quantise {type(model).__name__}.")
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
    """Set the weight of a bitsandbytes layer, and quantise it on a device."""
    owner, leaf = submodule_and_leaf(model, name)
    old: Any = owner._parameters[leaf]
    parameter = type(old)(weight.to("cpu", dtype or weight.dtype), requires_grad=old.requires_grad, **vars(old))
    owner._parameters[leaf] = parameter.to(resolve_device(device))


def load_and_quantize_model(
    model: nn.Module,
    bnb_quantization_config: BnbQuantizationConfig,
    weights_location: str | os.PathLike[str] | None = None,
    device_map: str | DeviceMap | None = None,
    no_split_module_classes: Sequence[str] | None = None,
    max_memory: MaxMemory | None = None,
    offload_folder: str | os.PathLike[str] | None = None,
    offload_state_dict: bool = False,
) -> nn.Module:
    """Load a checkpoint into a model whose linear layers become layers of bitsandbytes, and spread it over devices.

    Each weight is quantised as soon as it is read, so that only one is in memory in floating point. Parts on the disk,
    or on the CPU beside an accelerator, are not quantised.

    Args:
        model: the model, ideally built under `init_empty_weights`; a model with weights is quantised in place.
        bnb_quantization_config: settings of the quantisation.
        weights_location: a checkpoint, as for `load_checkpoint_in_model`; if None, the weights of the model.
        device_map: name to device, or a policy of `load_checkpoint_and_dispatch`; if None, the current device.
        no_split_module_classes: names of classes whose modules stay on one device.
        max_memory: bytes, or text such as "10GB", by device, for a device map that is created here.
        offload_folder: folder in which parts on the disk are listed or written.
        offload_state_dict: accepted without effect; mapping the files already saves this memory.

    Returns:
        The model, with `is_loaded_in_8bit` or `is_loaded_in_4bit` set, for inference or to train adapters.

    Raises:
        Missing: bitsandbytes is not installed, or too old to compute on a CPU.
        SettingError: the model is empty without a checkpoint, or the device map does not fit.
        CheckpointError: files are missing, damaged, or lack weights of the model.

    Example:
        with init_empty_weights():
            model = Model(config)
        config = BnbQuantizationConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4")
        model = load_and_quantize_model(model, config, "checkpoint", device_map="auto")
    """
    name = type(model).__name__
    layers_of_bitsandbytes(f"Cannot quantise {name}.")
    config = bnb_quantization_config
    if weights_location is None and any(parameter.is_meta for parameter in model.parameters()):
        raise SettingError(
            f"Cannot quantise {name}.",
            "It is on the meta device, and weights_location= is missing.",
            "Pass the path of its checkpoint.",
        )
    chosen = _chosen_map(model, config, device_map, max_memory, no_split_module_classes)
    layout = layout_of(model, chosen)
    quantising = _Quantising(model, config, layout.device_map or {})
    if weights_location is None:
        quantising.convert(layout.tied)
    else:
        loading = Loading(model, layout, offload_folder, dtype_of=quantising.dtype_of, place=quantising.place)
        report = loading.run(weights_location, strict=False)
        refuse_empty(model, report, weights_location)
        layout = loading.layout
    setattr(model, f"is_loaded_in_{8 if config.load_in_8bit else 4}bit", True)
    return dispatch_layout(model, layout, offload_dir=offload_folder)


def get_quantized_model_device_map(
    model: nn.Module,
    bnb_quantization_config: BnbQuantizationConfig,
    device_map: str | DeviceMap | None = None,
    max_memory: MaxMemory | None = None,
    no_split_module_classes: Sequence[str] | None = None,
) -> DeviceMap:
    """The device map of a model that will be quantised, from the sizes after quantisation.

    The arguments are those of `load_and_quantize_model`.

    Raises:
        SettingError: it does not fit the model; or an automatic map needs the CPU or the disk besides the accelerators,
            and the configuration does not allow this.
    """
    chosen = _chosen_map(model, bnb_quantization_config, device_map, max_memory, no_split_module_classes)
    if chosen is device_map:
        check_device_map(model, chosen)
    return chosen


def _chosen_map(
    model: nn.Module,
    config: BnbQuantizationConfig,
    device_map: str | DeviceMap | None,
    max_memory: MaxMemory | None,
    no_split_module_classes: Sequence[str] | None,
) -> DeviceMap:
    """The given device map, unchecked, or the one that a policy creates."""
    if device_map is None:
        family = best_family()
        host = family.name in OFFLOADED
        return {"": family.name if host else f"{family.name}:{torch.get_device_module(family.name).current_device()}"}
    if not isinstance(device_map, str):
        return device_map
    quantised = {f"{name}.weight" for name in linear_layers(model, _skipped(model, config))}
    others = {
        n: _plain_dtype(n, config) for n, p in model.named_parameters(remove_duplicate=False) if n not in quantised
    }
    created: Any = device_map_by_policy(
        model, device_map, max_memory, no_split_module_classes, config.target_dtype, False, others
    )
    main = main_device_of(created)
    offloaded = [name for name, device in created.items() if is_offloaded(device, main)]
    if offloaded and not config.llm_int8_enable_fp32_cpu_offload:
        raise SettingError(
            f"Cannot quantise {type(model).__name__} with device_map={device_map!r}.",
            f"The model does not fit on {main}. Parts for the CPU or the disk: {', '.join(map(repr, offloaded[:3]))}.",
            "Pass a device map, or llm_int8_enable_fp32_cpu_offload=True; offloaded weights are not quantised.",
        )
    return created  # type: ignore[no-any-return]


def _skipped(model: nn.Module, config: BnbQuantizationConfig) -> list[str]:
    own = get_keys_to_not_convert(model) if config.skip_modules is None else config.skip_modules
    return [*own, *(config.keep_in_fp32_modules or ())]


def _plain_dtype(name: str, config: BnbQuantizationConfig) -> torch.dtype:
    """The dtype of a weight that is not quantised."""
    kept: torch.dtype = torch.float32 if is_named(name, config.keep_in_fp32_modules or ()) else config.torch_dtype
    return kept


class _Quantising:
    """The plan of a quantised load: the quantised layers, the dtypes of other weights, and the devices."""

    def __init__(self, model: nn.Module, config: BnbQuantizationConfig, device_map: DeviceMap) -> None:
        self.model, self.config, self.device_map = model, config, device_map
        self.main = main_device_of(device_map)
        names = [name for name in linear_layers(model, _skipped(model, config)) if not self._is_offloaded(name)]
        replace_layers(model, names, config)
        self.quantised = {f"{name}.weight" for name in names}

    def _is_offloaded(self, name: str) -> bool:
        return is_offloaded(device_of_name(name, self.device_map), self.main)

    def dtype_of(self, name: str) -> torch.dtype:
        """The dtype of a weight that is not quantised, or of a weight before quantisation."""
        if self.config.llm_int8_enable_fp32_cpu_offload and self._is_offloaded(name):
            return torch.float32
        return _plain_dtype(name, self.config)

    def place(self, model: nn.Module, name: str, device: Device, weight: Tensor, dtype: torch.dtype | None) -> None:
        """Load a weight to its device; quantise it if its layer is quantised."""
        if name in self.quantised:
            put_quantized(model, name, device, weight, dtype)
        else:
            set_module_tensor_to_device(model, name, device, value=weight, dtype=dtype, clear_cache=False)

    def convert(self, tied: Sequence[Sequence[str]]) -> None:
        """Quantise a model that has its weights, one after the other; names in one group of `tied` share one."""
        for name, parameter in list(self.model.named_parameters()):
            device = "cpu" if self._is_offloaded(name) else device_of_name(name, self.device_map)
            self.place(self.model, name, device, parameter.detach(), self.dtype_of(name))
        retie_parameters(self.model, tied)
