"""Dispatch: spreads a model over accelerators, memory and disk, so that it can be larger than any device."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from accel_bigmodel.align import (
    OutermostHook,
    align_module_device,
    has_offloaded_params,
    refuse_second_offload,
)
from accel_bigmodel.attach import attach_align_device_hook, attach_align_device_hook_on_blocks
from accel_bigmodel.device_map import (
    DISK,
    HOST,
    Device,
    DeviceMap,
    check_device_same,
    device_of_name,
    is_offloaded,
    main_device_of,
    resolve_device,
)
from accel_bigmodel.hooks import ModelHook, add_hook_to_module, refuse_to_move, remove_hook_from_module
from accel_bigmodel.offload import INDEX_NAME, OffloadedWeightsLoader, offload_state_dict
from accel_bigmodel.placement import check_room
from accel_bigmodel.prefetch import BlockReader
from accel_bigmodel.tied import preserved_ties, retie_parameters
from accel_bigmodel.weight_layout import WeightLayout, layout_of
from accel_ops.conversion import send_to_device
from accel_ops.tree import find_device
from accel_state.devices.select import best_family
from accel_state.errors import SettingError
from accel_state.labels import DEVICE_MAP

__all__ = (
    "CpuOffload",
    "UserCpuOffloadHook",
    "cpu_offload",
    "cpu_offload_with_hook",
    "disk_offload",
    "dispatch_layout",
    "dispatch_model",
    "get_state_dict_offloaded_model",
    "own_state",
)

M = TypeVar("M", bound=nn.Module)


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
    """Put each part of a model on the device that `device_map` gives it, with hooks that move weights and inputs.

    Parts on "cpu" and "disk" are computed on the main device, unless that is the CPU itself. Their weights are read
    ahead in the order of the first forward.

    Args:
        device_map: name of a module or tensor to device, as from `infer_auto_device_map`; names that the model lacks
            are ignored, with a warning.
        main_device: device on which offloaded parts compute; the first accelerator in the map, else the CPU.
        state_dict: weights of the parts on the CPU; the model's own when None.
        offload_dir: folder of the parts on the disk; written unless it already contains an index.
        offload_index: index of the weights on the disk, in place of the folder's index.
        offload_buffers: buffers of offloaded parts are offloaded too.
        skip_keys: keyword arguments whose values stay where they are.
        preload_module_classes: names of classes whose modules load the weights of all submodules at once.
        force_hooks: attach hooks even if everything is on one device.
        max_prefetch_bytes: most that is read ahead; twice the largest part when None, 0 for none.

    Returns:
        The model, with the entries of the map that it has in its attribute `hf_device_map`.

    Raises:
        SettingError: the map does not fit the model, or names the disk without an offload folder; or a device has too
            little memory for its weights; the error states the missing bytes and the nearest map that fits. Nothing was
            moved.
        NotOffered: weights of the model are offloaded already.

    Example:
        dispatch_model(model, {"embed": 0, "blocks": 0, "head": "cpu"})
    """
    refuse_second_offload(model)
    layout = layout_of(model, device_map)
    placed = layout.device_map or {}
    check_room(model, placed, _moved(model, placed, own_host=state_dict is None))
    return dispatch_layout(
        model,
        layout,
        main_device=main_device,
        state_dict=state_dict,
        offload_dir=offload_dir,
        offload_index=offload_index,
        offload_buffers=offload_buffers,
        skip_keys=skip_keys,
        preload_module_classes=preload_module_classes,
        force_hooks=force_hooks,
        max_prefetch_bytes=max_prefetch_bytes,
    )


def dispatch_layout(
    model: M,
    layout: WeightLayout,
    *,
    main_device: Device | None = None,
    state_dict: Mapping[str, Tensor] | None = None,
    offload_dir: str | os.PathLike[str] | None = None,
    offload_index: Mapping[str, Mapping[str, Any]] | None = None,
    offload_buffers: bool = False,
    skip_keys: str | list[str] | None = None,
    preload_module_classes: Sequence[str] | None = None,
    force_hooks: bool = False,
    max_prefetch_bytes: int | None = None,
) -> M:
    """`dispatch_model` with the layout of the model, which has checked the device map and ties already.

    Weights on the disk with files in the layout are used from these files; no index is read for them.
    """
    device_map = layout.device_map or {}
    kinds = set(map(str, device_map.values()))
    if len(kinds) == 1 and DISK not in kinds and not force_hooks:
        model.to(resolve_device(next(iter(device_map.values()))))
        setattr(model, DEVICE_MAP, dict(device_map))
        return model
    main = main_device_of(device_map) if main_device is None else main_device
    offloaded = {name: is_offloaded(device, main) for name, device in device_map.items()}
    weights = (
        _offloaded_weights(model, layout, main, state_dict, offload_dir, offload_index)
        if any(offloaded.values())
        else None
    )
    attach_align_device_hook_on_blocks(
        model,
        execution_device={name: main if offloaded[name] else device for name, device in device_map.items()},
        offload=offloaded,
        weights_map=weights,
        offload_buffers=offload_buffers,
        skip_keys=skip_keys,
        preload_module_classes=preload_module_classes,
        reader=BlockReader(max_prefetch_bytes),
    )
    devices = {name: str(weight.device) for name, weight in layout.weights.items()}
    retie_parameters(model, [names for names in layout.tied if len({devices[name] for name in names}) == 1])
    setattr(model, DEVICE_MAP, dict(device_map))
    if any(offloaded.values()):
        refuse_to_move(model)
    return model


def _moved(model: nn.Module, device_map: DeviceMap, own_host: bool) -> dict[torch.device, int]:
    """Additional bytes on each device that a model's weights need, minus those that they free.

    Args:
        own_host: parts on the CPU keep the model's weights; otherwise other weights replace them.
    """
    places: dict[int, tuple[Tensor, set[torch.device]]] = {}
    for name, tensor in _tensors_by_name(model).items():
        entry = device_of_name(name, device_map)
        _, targets = places.setdefault(id(tensor), (tensor, set()))
        if entry is not None and str(entry) != DISK and (own_host or str(entry) != HOST):
            targets.add(resolve_device(entry))
    moved: dict[torch.device, int] = {}
    for tensor, targets in places.values():
        coming = [device for device in targets if not check_device_same(device, tensor.device)]
        if tensor.is_meta:
            continue
        for device in coming:
            moved[device] = moved.get(device, 0) + tensor.nbytes
        if len(coming) == len(targets):
            moved[tensor.device] = moved.get(tensor.device, 0) - tensor.nbytes
    return moved


def _offloaded_weights(
    model: nn.Module,
    layout: WeightLayout,
    main: Device,
    state_dict: Mapping[str, Tensor] | None,
    offload_dir: str | os.PathLike[str] | None,
    offload_index: Mapping[str, Mapping[str, Any]] | None,
) -> OffloadedWeightsLoader:
    """The weights that hooks load; those for the disk are written unless the folder already contains them."""
    on_disk = layout.names_on(DISK)
    index = layout.offload_index() if offload_index is None else offload_index
    if on_disk and offload_dir is None and not index:
        raise SettingError(
            f"Cannot place {', '.join(map(repr, on_disk[:3]))} of {type(model).__name__} on the disk.",
            "The call does not set a folder for these weights.",
            "Pass offload_dir=, or the offload_index= of weights that are already on the disk.",
        )
    own = _tensors_by_name(model)
    if on_disk and not index and offload_dir is not None and not (Path(offload_dir) / INDEX_NAME).is_file():
        offload_state_dict(offload_dir, {name: own[name] for name in on_disk})
    in_memory = state_dict
    if in_memory is None:
        hosted = layout.names_on(HOST) if is_offloaded(HOST, main) else []
        in_memory = {name: own[name].detach().to(HOST) for name in hosted}
    return OffloadedWeightsLoader(in_memory, offload_dir if on_disk else None, index or None)


def _tensors_by_name(model: nn.Module) -> dict[str, Tensor]:
    """Parameters and buffers by full name; a tied tensor has an entry for each name."""
    return {
        f"{prefix}.{name}" if prefix else name: tensor
        for prefix, module in model.named_modules(remove_duplicate=False)
        for name, tensor in (*module._parameters.items(), *module._buffers.items())
        if tensor is not None
    }


def cpu_offload(
    model: M,
    execution_device: Device | None = None,
    offload_buffers: bool = False,
    state_dict: Mapping[str, Tensor] | None = None,
    preload_module_classes: Sequence[str] | None = None,
    *,
    max_prefetch_bytes: int | None = None,
) -> M:
    """Keep all weights in the CPU's memory and load those of each layer on `execution_device` for its forward.

    Args:
        execution_device: device on which layers compute; if None, the model's current device.
        offload_buffers: buffers are offloaded too.
        state_dict: the weights to use; the model's own when None.
        preload_module_classes: names of classes whose modules load the weights of all submodules at once.
        max_prefetch_bytes: most that is read ahead; twice the largest layer when None, 0 for none.

    Raises:
        NotOffered: weights of the model are offloaded already.

    An offloaded model is for inference: to train it, or to give it other weights, remove the hooks first.
    """
    refuse_second_offload(model)
    own = state_dict
    if own is None:
        own = {name: tensor.detach().to(HOST) for name, tensor in _tensors_by_name(model).items()}
    weights = OffloadedWeightsLoader(own)
    return _offload(model, execution_device, weights, offload_buffers, preload_module_classes, max_prefetch_bytes)


def disk_offload(
    model: M,
    offload_dir: str | os.PathLike[str],
    execution_device: Device | None = None,
    offload_buffers: bool = False,
    preload_module_classes: Sequence[str] | None = None,
    *,
    max_prefetch_bytes: int | None = None,
) -> M:
    """Keep all weights in a folder and load those of each layer on `execution_device` for its forward.

    Args:
        offload_dir: the folder; the weights are written there unless it already contains an index.

    The other arguments are those of `cpu_offload`, and so are the errors.
    """
    refuse_second_offload(model)
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
    preload_module_classes: Sequence[str] | None,
    max_prefetch_bytes: int | None,
) -> M:
    execution_device = resolve_device(device if device is not None else _device_of(model))
    reader = BlockReader(max_prefetch_bytes)
    with preserved_ties(model):
        add_hook_to_module(model, OutermostHook(execution_device, reader), append=True)
        attach_align_device_hook(
            model,
            execution_device=execution_device,
            offload=True,
            weights_map=weights,
            offload_buffers=offload_buffers,
            preload_module_classes=preload_module_classes,
            reader=reader,
        )
    refuse_to_move(model)
    return model


def _device_of(model: nn.Module) -> torch.device:
    device = find_device(dict(model.named_parameters()))
    return torch.device(HOST) if device is None or device.type == "meta" else device


class CpuOffload(ModelHook):
    """Keeps a model on the CPU until its forward; afterwards it stays on the execution device.

    Args:
        execution_device: device on which it computes; if None, the first device of the best family here.
        prev_module_hook: the handle of the model called before this one, which is moved back to the CPU first.
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
    """The handle that `cpu_offload_with_hook` returns: moves the model back to the CPU, or removes the hook."""

    def __init__(self, model: nn.Module, hook: ModelHook) -> None:
        self.model = model
        self.hook = hook

    def offload(self) -> None:
        """Move the model back to the CPU."""
        self.hook.init_hook(self.model)

    def remove(self) -> None:
        """Remove the hook; the model stays on its device."""
        remove_hook_from_module(self.model)


def cpu_offload_with_hook(
    model: nn.Module,
    execution_device: Device | None = None,
    prev_module_hook: UserCpuOffloadHook | None = None,
) -> tuple[nn.Module, UserCpuOffloadHook]:
    """Keep a model on the CPU between phases of use, and move it as a whole.

    Args:
        execution_device: device on which it computes; if None, the first device of the best family here.
        prev_module_hook: handle of the previous model, which is moved back when this model is called.

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
    """The state dict of a dispatched model: offloaded weights are loaded to the CPU, all others are not moved.

    Weights that are mapped from a file stay mapped, so that they use memory only when they are read.
    """
    state_dict: dict[str, Any] = dict(model.state_dict())
    for name, module in model.named_modules(remove_duplicate=False):
        if has_offloaded_params(module):
            prefix = f"{name}." if name else ""
            with align_module_device(module, "cpu"):
                state_dict.update(own_state(module, prefix, state_dict))
    return state_dict


def own_state(module: nn.Module, prefix: str, wanted: Mapping[str, Any] | None) -> dict[str, Any]:
    """The state of a module that is in memory, by full name; only of `wanted` if given."""
    own = {prefix + name: value for name, value in module.state_dict().items()}
    at_hand = {name: value for name, value in own.items() if not getattr(value, "is_meta", False)}
    return {name: value for name, value in at_hand.items() if wanted is None or name in wanted}
