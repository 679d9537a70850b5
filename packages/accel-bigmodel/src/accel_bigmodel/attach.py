"""Putting align hooks on the blocks of a model, as a device map or one device for all says."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

from torch import Tensor, nn

from accel_bigmodel.align import AlignDevicesHook
from accel_bigmodel.device_map import Device
from accel_bigmodel.hooks import add_hook_to_module
from accel_bigmodel.offload import PrefixedDataset
from accel_bigmodel.place import TiedParameters, set_module_tensor_to_device, submodule_and_leaf
from accel_bigmodel.prefetch import BlockReader
from accel_bigmodel.sizes import named_module_tensors
from accel_state.marks import HOOK

__all__ = ("attach_align_device_hook", "attach_align_device_hook_on_blocks", "attach_execution_device_hook")


def attach_execution_device_hook(
    module: nn.Module,
    execution_device: Device,
    skip_keys: str | list[str] | None = None,
    preload_module_classes: Collection[str] | None = None,
    tied_params_map: TiedParameters | None = None,
) -> None:
    """Have every module with weights that has no hook yet compute on `execution_device`.

    Modules of the classes in `preload_module_classes` stand for all inside them.
    """
    for _, inner, whole in _units("", module, preload_module_classes):
        if not hasattr(inner, HOOK):
            hook = AlignDevicesHook(
                execution_device, skip_keys=skip_keys, tied_params_map=tied_params_map, place_submodules=whole
            )
            add_hook_to_module(inner, hook)


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
    """Put an align hook on every module inside (and on `module` itself) that has weights of its own.

    Args:
        execution_device: where they compute.
        offload: keep their weights away between forwards.
        weights_map: full name to weight.
        offload_buffers: buffers are offloaded too.
        module_name: full name of `module`, by which its weights are found in `weights_map`.
        skip_keys: keyword arguments whose values stay where they are.
        preload_module_classes: names of classes whose modules bring everything inside them at once.
        tied_params_map: copies of tied weights by device.
        reader: reads ahead over all these modules; a new one when None.
    """
    reader = reader or BlockReader()
    for name, inner, whole in _units(module_name, module, preload_module_classes):
        prefixed = None if weights_map is None else PrefixedDataset(weights_map, f"{name}." if name else "")
        hook = AlignDevicesHook(
            execution_device,
            offload=offload,
            weights_map=prefixed,
            offload_buffers=offload_buffers,
            place_submodules=whole,
            skip_keys=skip_keys,
            tied_params_map=tied_params_map,
            reader=reader,
        )
        add_hook_to_module(inner, hook, append=True)


def _units(
    name: str, module: nn.Module, whole_classes: Collection[str] | None, seen: set[int] | None = None
) -> Iterator[tuple[str, nn.Module, bool]]:
    """Each module with tensors of its own, once and by full name, and whether it stands for all inside it.

    Modules in `seen` are left out with all inside them.
    """
    seen = set() if seen is None else seen
    if id(module) in seen:
        return
    seen.add(id(module))
    whole = type(module).__name__ in (whole_classes or ()) and any(True for _ in module.children())
    if whole or module._parameters or module._buffers:
        yield name, module, whole
    if not whole:
        for child, inner in module.named_children():
            yield from _units(f"{name}.{child}" if name else child, inner, whole_classes, seen)


def attach_align_device_hook_on_blocks(
    module: nn.Module,
    execution_device: Device | Mapping[str, Device] | None = None,
    offload: bool | Mapping[str, bool] = False,
    weights_map: Mapping[str, Tensor] | None = None,
    offload_buffers: bool = False,
    module_name: str = "",
    skip_keys: str | list[str] | None = None,
    preload_module_classes: Sequence[str] | None = None,
    tied_params_map: TiedParameters | None = None,
    reader: BlockReader | None = None,
) -> None:
    """Put align hooks on the blocks that `execution_device` and `offload` name.

    Args:
        execution_device: a device for all, or name of a module or tensor (relative to `module`) to its device.
        offload: for all, or by name; what is not named is not offloaded.
        module_name: full name of `module`.

    The other arguments are those of `attach_align_device_hook`. The outermost module brings outputs back to where the
    inputs were.
    """
    devices = execution_device if isinstance(execution_device, Mapping) else {"": execution_device}
    offloads = offload if isinstance(offload, Mapping) else dict.fromkeys(devices, offload)
    modules = dict(module.named_modules(remove_duplicate=False))
    blocks = _Blocks(
        module=module,
        module_name=module_name,
        weights_map=weights_map,
        offload_buffers=offload_buffers,
        preload_module_classes=preload_module_classes,
        reader=reader or BlockReader(),
        options={"skip_keys": skip_keys, "tied_params_map": tied_params_map},
        entries={id(modules[name]) for name in devices if name in modules},
    )
    outermost = AlignDevicesHook(next(iter(devices.values()), None), io_same_device=True, names=(), **blocks.options)
    add_hook_to_module(module, outermost, append=True)
    for name, device in devices.items():
        away = offloads.get(name, False)
        if name not in modules:
            blocks.attach_tensor(name, device, away)
        elif away:
            blocks.attach_offloaded(name, modules[name], device)
        else:
            blocks.attach_placed(modules[name], device)


@dataclass
class _Blocks:
    """What the blocks of one model share while hooks are put on them."""

    module: nn.Module
    module_name: str
    weights_map: Mapping[str, Tensor] | None
    offload_buffers: bool
    preload_module_classes: Collection[str] | None
    reader: BlockReader
    options: dict[str, Any]
    entries: set[int]

    def attach_offloaded(self, name: str, block: nn.Module, device: Any) -> None:
        """Hooks on every part of a block that keep its weights away between forwards."""
        whole_ones = set[int]()
        for full, part, whole in _units(self._full(name), block, self.preload_module_classes, self._others(block)):
            self._add(part, full, device, place_submodules=whole)
            if whole:
                whole_ones.add(id(part))
        self._bring_inputs(block, device, whole_ones)

    def attach_placed(self, block: nn.Module, device: Any) -> None:
        """Weights moved to the device for good, and a hook on the block that brings its inputs there."""
        if device is not None:
            for _, part, _ in _units("", block, None, self._others(block)):
                for leaf, _ in list(named_module_tensors(part)):
                    tied = self.options["tied_params_map"]
                    set_module_tensor_to_device(part, leaf, device, tied_params_map=tied, clear_cache=False)
            self._bring_inputs(block, device)

    def _bring_inputs(self, block: nn.Module, device: Any, whole: Collection[int] = ()) -> None:
        """A hook on every module with tensors that brings inputs to the device, for any may be called by itself."""
        waiting, others = [block], self._others(block)
        while waiting:
            module = waiting.pop()
            if id(module) in others or next(chain(module.parameters(), module.buffers()), None) is None:
                continue
            # A container such as ModuleList cannot be called.
            if not hasattr(module, HOOK) and getattr(module.forward, "__func__", None) is not nn.Module.forward:
                add_hook_to_module(module, AlignDevicesHook(device, names=(), **self.options))
            if id(module) not in whole:
                waiting += module.children()

    def attach_tensor(self, name: str, device: Any, away: bool) -> None:
        """A lone tensor: moved for good, or brought with the module that owns it."""
        if not away:
            set_module_tensor_to_device(self.module, name, device, clear_cache=False)
            return
        owner, leaf = submodule_and_leaf(self.module, name)
        self._add(owner, self._full(name.rpartition(".")[0]), device, names=(leaf,))

    def _add(self, part: nn.Module, full: str, device: Any, **kwargs: Any) -> None:
        weights = None if self.weights_map is None else PrefixedDataset(self.weights_map, f"{full}." if full else "")
        hook = AlignDevicesHook(
            device,
            offload=True,
            weights_map=weights,
            offload_buffers=self.offload_buffers,
            reader=self.reader,
            **self.options,
            **kwargs,
        )
        add_hook_to_module(part, hook, append=True)

    def _full(self, name: str) -> str:
        return ".".join(part for part in (self.module_name, name) if part)

    def _others(self, block: nn.Module) -> set[int]:
        """Modules inside that have an entry of their own."""
        return self.entries - {id(block)}
