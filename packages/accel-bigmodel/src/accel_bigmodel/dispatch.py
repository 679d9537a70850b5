"""Spreading a model over devices, memory and disk, so that it computes although no device holds all of it."""

from __future__ import annotations

import os
from collections.abc import Mapping, MutableMapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from accel_bigmodel.align import (
    AlignDevicesHook,
    align_module_device,
    attach_align_device_hook,
    attach_align_device_hook_on_blocks,
    has_offloaded_params,
)
from accel_bigmodel.device_map import Device, DeviceMap, check_device_map, resolve_device
from accel_bigmodel.hooks import ModelHook, add_hook_to_module, refuse_to_move, remove_hook_from_module
from accel_bigmodel.offload import INDEX_NAME, OffloadedWeightsLoader, extract_submodules_state_dict, offload_state_dict
from accel_bigmodel.placement import HOST, OFFLOADED
from accel_bigmodel.prefetch import BlockReader
from accel_bigmodel.tied import device_of_name, find_tied_parameters, retie_parameters
from accel_ops.conversion import send_to_device
from accel_ops.tree import find_device
from accel_state.devices.select import best_family
from accel_state.errors import SettingError
from accel_state.marks import DEVICE_MAP

__all__ = (
    "CpuOffload",
    "UserCpuOffloadHook",
    "cpu_offload",
    "cpu_offload_with_hook",
    "disk_offload",
    "dispatch_model",
    "get_state_dict_from_offload",
    "get_state_dict_offloaded_model",
)

M = TypeVar("M", bound=nn.Module)

DISK = "disk"


def dispatch_model(
    model: M,
    device_map: DeviceMap,
    main_device: Device | None = None,
    state_dict: Mapping[str, Tensor] | None = None,
    offload_dir: str | os.PathLike[str] | None = None,
    offload_index: Mapping[str, Mapping[str, Any]] | None = None,
    offload_buffers: bool = False,
    skip_keys: str | list[str] | None = None,
    preload_module_classes: Sequence[str] | None = None,
    force_hooks: bool = False,
    *,
    max_prefetch_bytes: int | None = None,
) -> M:
    """Put each part of a model where `device_map` says, with hooks that bring weights and inputs together.

    Parts on "cpu" and "disk" are computed on the main device, unless that is the CPU itself. Their weights are read
    ahead in the order that the first pass showed.

    Args:
        device_map: name of a module or tensor to device, as `infer_auto_device_map` makes it.
        main_device: where offloaded parts compute; the first accelerator in the map, else the CPU.
        state_dict: weights of the parts on the CPU; the model's own when None.
        offload_dir: folder of the parts on the disk; written unless it holds an index already.
        offload_index: where weights on the disk are, in place of the folder's own index.
        offload_buffers: buffers of offloaded parts are offloaded too.
        skip_keys: keyword arguments whose values stay where they are.
        preload_module_classes: names of classes whose modules are brought as a whole.
        force_hooks: put hooks on even if everything is on one device.
        max_prefetch_bytes: most that is read ahead; twice the largest part when None, 0 for none.

    Returns:
        The model, with the map in its attribute `hf_device_map`.

    Raises:
        SettingError: the map does not fit the model, or names the disk and there is no folder.
    """
    check_device_map(model, device_map)
    kinds = set(map(str, device_map.values()))
    if len(kinds) == 1 and DISK not in kinds and not force_hooks:
        model.to(resolve_device(next(iter(device_map.values()))))
        setattr(model, DEVICE_MAP, dict(device_map))
        return model
    main = main_device_of(device_map) if main_device is None else main_device
    away = {name: is_away(device, main) for name, device in device_map.items()}
    weights = _weights_away(model, device_map, away, state_dict, offload_dir, offload_index)
    tied = [
        names for names in find_tied_parameters(model) if len({str(device_of_name(n, device_map)) for n in names}) == 1
    ]
    attach_align_device_hook_on_blocks(
        model,
        execution_device={name: main if away[name] else device for name, device in device_map.items()},
        offload=away,
        weights_map=weights,
        offload_buffers=offload_buffers,
        skip_keys=skip_keys,
        preload_module_classes=preload_module_classes,
        reader=BlockReader(max_prefetch_bytes),
    )
    retie_parameters(model, tied)
    setattr(model, DEVICE_MAP, dict(device_map))
    if any(away.values()):
        refuse_to_move(model)
    return model


def main_device_of(device_map: DeviceMap) -> Device:
    return next((device for device in device_map.values() if str(device) not in OFFLOADED), HOST)


def is_away(device: Device, main: Device) -> bool:
    """Whether weights are kept elsewhere than where they are computed with."""
    return str(device) == DISK or (str(device) == HOST and str(main) != HOST)


def _weights_away(
    model: nn.Module,
    device_map: DeviceMap,
    away: Mapping[str, bool],
    state_dict: Mapping[str, Tensor] | None,
    offload_dir: str | os.PathLike[str] | None,
    offload_index: Mapping[str, Mapping[str, Any]] | None,
) -> OffloadedWeightsLoader | None:
    """Where the hooks find the weights that are away; writes those for the disk if they are not there yet."""
    if not any(away.values()):
        return None
    on_disk = [name for name, device in device_map.items() if str(device) == DISK]
    if on_disk and offload_dir is None and offload_index is None:
        raise SettingError(
            f"Place {', '.join(repr(name) for name in on_disk[:3])} of {type(model).__name__} on the disk.",
            "No folder was named.",
            "Give offload_dir=, or an offload_index= of weights that are on the disk already.",
        )
    own = model.state_dict(keep_vars=True)
    indexed = offload_index is not None or (offload_dir is not None and (Path(offload_dir) / INDEX_NAME).is_file())
    if on_disk and offload_dir is not None and not indexed:
        offload_state_dict(offload_dir, {n: w for n, w in own.items() if str(device_of_name(n, device_map)) == DISK})
    in_memory = state_dict
    if in_memory is None:
        hosted = [name for name, is_away in away.items() if is_away and str(device_map[name]) == HOST]
        found = extract_submodules_state_dict(own, hosted)
        in_memory = {n: w.detach().to(HOST) for n, w in found.items() if str(device_of_name(n, device_map)) == HOST}
    return OffloadedWeightsLoader(in_memory, offload_dir if on_disk else None, offload_index)


def cpu_offload(
    model: M,
    execution_device: Device | None = None,
    offload_buffers: bool = False,
    state_dict: Mapping[str, Tensor] | None = None,
    preload_module_classes: Sequence[str] | None = None,
    *,
    max_prefetch_bytes: int | None = None,
) -> M:
    """Keep all weights in the CPU's memory and bring those of each layer to `execution_device` for its forward.

    Args:
        execution_device: where layers compute; where the model is now when None.
        offload_buffers: buffers are offloaded too.
        state_dict: the weights to use; the model's own when None.
        preload_module_classes: names of classes whose modules are brought as a whole.
        max_prefetch_bytes: most that is read ahead; twice the largest layer when None, 0 for none.
    """
    own = state_dict if state_dict is not None else {n: w.detach().to(HOST) for n, w in model.state_dict().items()}
    return _offload(
        model,
        execution_device,
        OffloadedWeightsLoader(own),
        offload_buffers,
        preload_module_classes,
        max_prefetch_bytes,
    )


def disk_offload(
    model: M,
    offload_dir: str | os.PathLike[str],
    execution_device: Device | None = None,
    offload_buffers: bool = False,
    preload_module_classes: Sequence[str] | None = None,
    *,
    max_prefetch_bytes: int | None = None,
) -> M:
    """Keep all weights in a folder and bring those of each layer to `execution_device` for its forward.

    Args:
        offload_dir: the folder; the weights are written there unless it holds an index already.

    The other arguments are those of `cpu_offload`.
    """
    device = execution_device if execution_device is not None else _device_of(model)
    if not (Path(offload_dir) / INDEX_NAME).is_file():
        offload_state_dict(offload_dir, model.state_dict())
    weights = OffloadedWeightsLoader(save_folder=offload_dir)
    return _offload(model, device, weights, offload_buffers, preload_module_classes, max_prefetch_bytes)


def _offload(
    model: M,
    device: Device | None,
    weights: OffloadedWeightsLoader,
    offload_buffers: bool,
    whole: Sequence[str] | None,
    max_prefetch_bytes: int | None,
) -> M:
    execution_device = resolve_device(device if device is not None else _device_of(model))
    tied = find_tied_parameters(model)
    add_hook_to_module(model, AlignDevicesHook(execution_device, io_same_device=True, names=()), append=True)
    attach_align_device_hook(
        model,
        execution_device=execution_device,
        offload=True,
        weights_map=weights,
        offload_buffers=offload_buffers,
        preload_module_classes=whole,
        reader=BlockReader(max_prefetch_bytes),
    )
    retie_parameters(model, tied)
    return model


def _device_of(model: nn.Module) -> torch.device:
    found = find_device(dict(model.named_parameters()))
    return torch.device(HOST) if found is None or found.type == "meta" else found


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


def get_state_dict_offloaded_model(model: nn.Module) -> dict[str, Any]:
    """The state dict of a dispatched model: offloaded weights brought to the CPU, all others where they are.

    Weights that are mapped from a file stay mapped, so that memory is used when they are.
    """
    state_dict: dict[str, Any] = dict(model.state_dict())
    for name, module in model.named_modules(remove_duplicate=False):
        if has_offloaded_params(module):
            prefix = f"{name}." if name else ""
            with align_module_device(module, "cpu"):
                state_dict.update(_own(module, prefix, state_dict))
    return state_dict


def get_state_dict_from_offload(
    module: nn.Module,
    module_name: str,
    state_dict: MutableMapping[str, Any],
    device_to_put_offload: Device = "cpu",
) -> MutableMapping[str, Any]:
    """Put the offloaded weights of one module into a state dict.

    Args:
        module_name: full name of one of its weights, such as "blocks.0.weight".
        state_dict: changed and returned.
        device_to_put_offload: where the weights are put.
    """
    if has_offloaded_params(module):
        prefix = module_name[: module_name.rfind(".") + 1]
        with align_module_device(module, device_to_put_offload):
            state_dict.update(_own(module, prefix, None))
    return state_dict


def _own(module: nn.Module, prefix: str, wanted: MutableMapping[str, Any] | None) -> dict[str, Any]:
    """The state of a module that is at hand now, under full names; of `wanted` only, when given."""
    own = {prefix + name: value for name, value in module.state_dict().items()}
    at_hand = {name: value for name, value in own.items() if not getattr(value, "is_meta", False)}
    return {name: value for name, value in at_hand.items() if wanted is None or name in wanted}
