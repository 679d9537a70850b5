"""Dispatch: spreads a model over accelerators, memory and disk, so that it can be larger than any device."""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn

from accel_bigmodel.align import (
    AlignDevicesHook,
    OutermostHook,
    align_module_device,
    has_offloaded_params,
    refuse_second_offload,
)
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
from accel_bigmodel.offload import (
    INDEX_NAME,
    OffloadedWeightsLoader,
    PrefixedDataset,
    offload_state_dict,
    read_offload_index,
)
from accel_bigmodel.placement import check_room
from accel_bigmodel.prefetch import BlockReader
from accel_bigmodel.tensors import (
    TiedParameters,
    named_module_tensors,
    preserved_ties,
    retie_parameters,
    set_module_tensor_to_device,
    submodule_and_leaf,
    tensors_of,
)
from accel_bigmodel.weight_layout import WeightLayout, layout_of
from accel_ops.conversion import send_to_device
from accel_ops.tree import find_device
from accel_state.devices.select import best_family
from accel_state.errors import SettingError
from accel_state.labels import DEVICE_MAP, HOOK

__all__ = (
    "CpuOffload",
    "Place",
    "UserCpuOffloadHook",
    "attach_align_device_hook",
    "attach_to_blocks",
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

    The hooks read weights on the disk from the safetensors files in the layout; no index lists them.
    """
    device_map = layout.device_map or {}
    kinds = set(map(str, device_map.values()))
    if len(kinds) == 1 and DISK not in kinds and not force_hooks:
        model.to(resolve_device(next(iter(device_map.values()))))
        setattr(model, DEVICE_MAP, dict(device_map))
        return model
    main = main_device_of(device_map) if main_device is None else main_device
    places = {
        name: Place(main, True) if is_offloaded(device, main) else Place(device, False)
        for name, device in device_map.items()
    }
    offloads = any(place.offloaded for place in places.values())
    attach_to_blocks(
        model,
        places,
        weights=_offloaded_weights(model, layout, main, state_dict, offload_dir, offload_index) if offloads else None,
        offload_buffers=offload_buffers,
        preload_classes=preload_module_classes or (),
        options={"skip_keys": skip_keys, "reader": BlockReader(max_prefetch_bytes)},
    )
    devices = {name: str(weight.device) for name, weight in layout.weights.items()}
    retie_parameters(model, [names for names in layout.tied if len({devices[name] for name in names}) == 1])
    setattr(model, DEVICE_MAP, dict(device_map))
    if offloads:
        refuse_to_move(model)
    return model


def _moved(model: nn.Module, device_map: DeviceMap, own_host: bool) -> dict[torch.device, int]:
    """Additional bytes on each device that a model's weights need, minus those that they free.

    Args:
        own_host: parts on the CPU keep the model's weights; otherwise other weights replace them.
    """
    places: dict[int, tuple[Tensor, set[torch.device]]] = {}
    for name, tensor in tensors_of(model).items():
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
    """The weights that hooks load; those for the disk are written unless a file already contains them."""
    stored = layout.in_safetensors(DISK)
    others = [name for name in layout.names_on(DISK) if name not in stored]
    if others and offload_dir is None and not offload_index:
        raise SettingError(
            f"Cannot place {', '.join(map(repr, others[:3]))} of {type(model).__name__} on the disk.",
            "The call does not set a folder for these weights.",
            "Pass offload_dir=, or the offload_index= of weights that are already on the disk.",
        )
    own = tensors_of(model)
    if others and not offload_index and offload_dir is not None:
        listed = read_offload_index(offload_dir) if (Path(offload_dir) / INDEX_NAME).is_file() else {}
        # A checkpoint may lack some weights of a model that has them.
        if lacking := {name: own[name] for name in others if name not in listed}:
            offload_state_dict(offload_dir, lacking)
    in_memory = state_dict
    if in_memory is None:
        hosted = layout.names_on(HOST) if is_offloaded(HOST, main) else []
        in_memory = {name: own[name].detach().to(HOST) for name in hosted}
    return OffloadedWeightsLoader(in_memory, offload_dir if others else None, offload_index or None, stored=stored)


class Place(NamedTuple):
    """Where a part of a model computes, and whether its weights are removed from it between forwards.

    Args:
        device: the device; None leaves weights and inputs where they are.
        offloaded: whether a hook loads its weights for each forward.
    """

    device: Device | None
    offloaded: bool


def attach_align_device_hook(
    module: nn.Module,
    execution_device: Device | None = None,
    offload: bool = False,
    weights_map: Mapping[str, Tensor] | None = None,
    offload_buffers: bool = False,
    module_name: str = "",
    skip_keys: str | list[str] | None = None,
    preload_module_classes: Collection[str] | None = None,
    tied_params_map: TiedParameters | None = None,
    reader: BlockReader | None = None,
) -> None:
    """Attach an align hook to `module` and every module in it with direct weights.

    Args:
        execution_device: device on which they compute.
        offload: remove their weights from the modules between forwards.
        weights_map: full name to weight.
        offload_buffers: offload buffers too.
        module_name: full name of `module`, the prefix of its weights in `weights_map`.
        skip_keys: keyword arguments with values that are not moved.
        preload_module_classes: names of classes whose modules load the weights of all submodules at once.
        tied_params_map: copies of tied weights by device.
        reader: reads weights ahead for all these modules; a new one when None.
    """
    place = Place(execution_device, offload)
    _Attachment(
        {},
        {},
        weights_map,
        offload_buffers,
        preload_module_classes or (),
        {"skip_keys": skip_keys, "tied_params_map": tied_params_map, "reader": reader or BlockReader()},
    ).visit(module_name, module, place)


def attach_to_blocks(
    model: nn.Module,
    places: Mapping[str, Place],
    weights: Mapping[str, Tensor] | None,
    offload_buffers: bool,
    preload_classes: Collection[str],
    options: dict[str, Any],
    model_name: str = "",
) -> None:
    """Put each part of a model on its place, and attach a hook to every module that somebody may call.

    Args:
        places: the place of a module or tensor by its name; a name covers all below it that have no place of their own.
        weights: full name to offloaded weight.
        offload_buffers: offload buffers too.
        preload_classes: names of classes whose modules load the weights of all submodules at once.
        options: `skip_keys`, `tied_params_map` and `reader` of all hooks.
        model_name: full name of `model`, the prefix of its weights in `weights`.
    """
    outermost = next((place.device for place in places.values()), None)
    add_hook_to_module(model, OutermostHook(outermost, **options), append=True)
    modules = dict(model.named_modules(remove_duplicate=False))
    of_modules: dict[int, Place] = {}
    of_tensors: dict[int, dict[str, Place]] = {}
    for name, place in places.items():
        if name in modules:
            of_modules[id(modules[name])] = place
        else:
            owner, leaf = submodule_and_leaf(model, name)
            of_tensors.setdefault(id(owner), {})[leaf] = place
    _Attachment(of_modules, of_tensors, weights, offload_buffers, preload_classes, options, every_module=True).visit(
        model_name, model
    )


@dataclass
class _Attachment:
    """Attaches align hooks to the modules of one model, each once.

    Args:
        of_modules: the places of modules that do not have that of the module around them, by the id of the module.
        of_tensors: the places of tensors that do not have that of their module, by the id of the module and their name.
        weights: full name to offloaded weight.
        offload_buffers: offload buffers too.
        preload_classes: names of classes whose modules load the weights of all submodules at once.
        options: `skip_keys`, `tied_params_map` and `reader` of all hooks.
        every_module: modules without direct tensors get a hook too, which moves their inputs.
    """

    of_modules: Mapping[int, Place]
    of_tensors: Mapping[int, Mapping[str, Place]]
    weights: Mapping[str, Tensor] | None
    offload_buffers: bool
    preload_classes: Collection[str]
    options: dict[str, Any]
    every_module: bool = False
    visited: set[int] = field(default_factory=set)

    def visit(self, name: str, module: nn.Module, around: Place | None = None) -> None:
        """Attach hooks to a module with this full name, and to those in it; `around` is the place of its parent."""
        if id(module) in self.visited:
            return
        self.visited.add(id(module))
        place = self.of_modules.get(id(module), around)
        if place is not None and self._preloads(module, place):
            self._add(module, name, place, place_submodules=True)
            return
        separate = self.of_tensors.get(id(module), {})
        others = [leaf for leaf, _ in named_module_tensors(module) if leaf not in separate] if separate else None
        if place is not None and (others or (not separate and (module._parameters or module._buffers))):
            self._add(module, name, place, names=others)
        elif place is not None and place.device is not None and self.every_module and _is_called(module):
            add_hook_to_module(module, AlignDevicesHook(place.device, names=(), **self.options))
        for leaf, own in separate.items():
            if own.offloaded:
                self._add(module, name, own, names=(leaf,))
            elif own.device is not None:
                set_module_tensor_to_device(module, leaf, own.device, clear_cache=False)
        for child, inner in module._modules.items():
            if inner is not None:
                self.visit(f"{name}.{child}" if name else child, inner, place)

    def _preloads(self, module: nn.Module, place: Place) -> bool:
        """Whether the hook of a module loads the weights of all its submodules, which have no other place."""
        if type(module).__name__ not in self.preload_classes or not (place.offloaded or not self.every_module):
            return False
        inside = list(module.modules())[1:]
        return bool(inside) and all(self.of_modules.get(id(part), place) == place for part in inside)

    def _add(self, module: nn.Module, name: str, place: Place, **options: Any) -> None:
        """Add a hook to a module, after the hooks that it has."""
        weights = None if self.weights is None else PrefixedDataset(self.weights, f"{name}." if name else "")
        hook = AlignDevicesHook(
            place.device,
            offload=place.offloaded,
            weights_map=weights,
            offload_buffers=self.offload_buffers,
            **self.options,
            **options,
        )
        add_hook_to_module(module, hook, append=True)


def _is_called(module: nn.Module) -> bool:
    """Whether somebody may call a module with tensors in it that has no hook; a container such as ModuleList cannot."""
    has_tensors = next(chain(module.parameters(), module.buffers()), None) is not None
    computes = getattr(module.forward, "__func__", None) is not nn.Module.forward
    return has_tensors and computes and not hasattr(module, HOOK)


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
        own = {name: tensor.detach().to(HOST) for name, tensor in tensors_of(model).items()}
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
