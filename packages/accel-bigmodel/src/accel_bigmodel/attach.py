"""Attaches align hooks to the modules of a model, by the devices on which they compute."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

from torch import Tensor, nn

from accel_bigmodel.align import AlignDevicesHook, OutermostHook
from accel_bigmodel.device_map import Device, matching_entries, warn_of_unknown_names
from accel_bigmodel.hooks import add_hook_to_module
from accel_bigmodel.offload import PrefixedDataset
from accel_bigmodel.place import TiedParameters, set_module_tensor_to_device, submodule_and_leaf
from accel_bigmodel.prefetch import BlockReader
from accel_bigmodel.sizes import named_module_tensors
from accel_state.labels import HOOK

__all__ = (
    "attach_align_device_hook",
    "attach_align_device_hook_on_blocks",
    "attach_execution_device_hook",
)


def attach_execution_device_hook(
    module: nn.Module,
    execution_device: Device,
    skip_keys: str | list[str] | None = None,
    preload_module_classes: Collection[str] | None = None,
    tied_params_map: TiedParameters | None = None,
) -> None:
    """Compute every module with weights on `execution_device`, except modules that already have a hook.

    Args:
        module: the model, or the part of it, that gets hooks.
        execution_device: device on which its modules compute.
        skip_keys: keyword arguments with values that are not moved.
        preload_module_classes: names of classes whose instances get one hook for all their submodules.
        tied_params_map: copies of tied weights by device.
    """
    for _, inner, preload in _modules_with_tensors("", module, preload_module_classes):
        if not hasattr(inner, HOOK):
            hook = AlignDevicesHook(
                execution_device, skip_keys=skip_keys, tied_params_map=tied_params_map, place_submodules=preload
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
    blocks = _Blocks(
        module=module,
        module_name=module_name,
        weights_map=weights_map,
        offload_buffers=offload_buffers,
        preload_module_classes=preload_module_classes,
        options={"skip_keys": skip_keys, "tied_params_map": tied_params_map, "reader": reader or BlockReader()},
    )
    for full, inner, preload in _modules_with_tensors(module_name, module, preload_module_classes):
        blocks.add(inner, full, execution_device, offload=offload, place_submodules=preload)


def _modules_with_tensors(
    name: str, module: nn.Module, preload_classes: Collection[str] | None, seen: set[int] | None = None
) -> Iterator[tuple[str, nn.Module, bool]]:
    """Each module with direct tensors, once, by full name, and whether it loads the weights of its submodules.

    Modules in `seen` are omitted, with their submodules.
    """
    seen = set() if seen is None else seen
    if id(module) in seen:
        return
    seen.add(id(module))
    preload = type(module).__name__ in (preload_classes or ()) and any(True for _ in module.children())
    if preload or module._parameters or module._buffers:
        yield name, module, preload
    if not preload:
        for child, inner in module.named_children():
            yield from _modules_with_tensors(f"{name}.{child}" if name else child, inner, preload_classes, seen)


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
    """Attach align hooks to the blocks that `execution_device` and `offload` name.

    Args:
        execution_device: a device for all, or name of a module or tensor (relative to `module`) to its device; names
            that `module` lacks are ignored, with a warning.
        offload: for all, or by name; a block that is not named is not offloaded.
        module_name: full name of `module`.

    The other arguments are those of `attach_align_device_hook`. The outermost module moves outputs to the device of
    the inputs.
    """
    devices = execution_device if isinstance(execution_device, Mapping) else {"": execution_device}
    offloads = offload if isinstance(offload, Mapping) else dict.fromkeys(devices, offload)
    warn_of_unknown_names(module, {**devices, **offloads})
    devices = matching_entries(module, devices)
    modules = dict(module.named_modules(remove_duplicate=False))
    blocks = _Blocks(
        module=module,
        module_name=module_name,
        weights_map=weights_map,
        offload_buffers=offload_buffers,
        preload_module_classes=preload_module_classes,
        options={"skip_keys": skip_keys, "tied_params_map": tied_params_map, "reader": reader or BlockReader()},
        entries={id(modules[name]) for name in devices if name in modules},
    )
    add_hook_to_module(module, OutermostHook(next(iter(devices.values()), None), **blocks.options), append=True)
    for name, device in devices.items():
        offloaded = offloads.get(name, False)
        if name not in modules:
            blocks.attach_to_tensor(name, device, offloaded)
        elif offloaded:
            blocks.attach_offloading(name, modules[name], device)
        else:
            blocks.place(modules[name], device)


@dataclass
class _Blocks:
    """State that the blocks of one model share while hooks are attached to them."""

    module: nn.Module
    module_name: str
    weights_map: Mapping[str, Tensor] | None
    offload_buffers: bool
    preload_module_classes: Collection[str] | None
    options: dict[str, Any]
    entries: set[int] = field(default_factory=set)

    def attach_offloading(self, name: str, block: nn.Module, device: Any) -> None:
        """Attach hooks to every module of a block that remove its weights between forwards."""
        preloading = set[int]()
        inside = _modules_with_tensors(self._full(name), block, self.preload_module_classes, self._other_entries(block))
        for full, module, preload in inside:
            self.add(module, full, device, place_submodules=preload)
            if preload:
                preloading.add(id(module))
        self._align_inputs(block, device, preloading)

    def place(self, block: nn.Module, device: Any) -> None:
        """Move the weights of a block to the device permanently; hooks move its inputs there."""
        if device is not None:
            for _, module, _ in _modules_with_tensors("", block, None, self._other_entries(block)):
                for leaf, _ in list(named_module_tensors(module)):
                    tied = self.options["tied_params_map"]
                    set_module_tensor_to_device(module, leaf, device, tied_params_map=tied, clear_cache=False)
            self._align_inputs(block, device)

    def _align_inputs(self, block: nn.Module, device: Any, preloading: Collection[int] = ()) -> None:
        """Attach a hook that moves inputs to every module with tensors, because a user may call any of them."""
        waiting, others = [block], self._other_entries(block)
        while waiting:
            module = waiting.pop()
            if id(module) in others or next(chain(module.parameters(), module.buffers()), None) is None:
                continue
            # A container such as ModuleList cannot be called.
            if not hasattr(module, HOOK) and getattr(module.forward, "__func__", None) is not nn.Module.forward:
                add_hook_to_module(module, AlignDevicesHook(device, names=(), **self.options))
            if id(module) not in preloading:
                waiting += module.children()

    def attach_to_tensor(self, name: str, device: Any, offloaded: bool) -> None:
        """Place a single tensor: move it permanently, or load it together with its module."""
        if not offloaded:
            set_module_tensor_to_device(self.module, name, device, clear_cache=False)
            return
        owner, leaf = submodule_and_leaf(self.module, name)
        self.add(owner, self._full(name.rpartition(".")[0]), device, names=(leaf,))

    def add(self, module: nn.Module, full: str, device: Any, offload: bool = True, **options: Any) -> None:
        """Add a hook to a module with this full name, after the hooks that it has."""
        weights = None if self.weights_map is None else PrefixedDataset(self.weights_map, f"{full}." if full else "")
        hook = AlignDevicesHook(
            device,
            offload=offload,
            weights_map=weights,
            offload_buffers=self.offload_buffers,
            **self.options,
            **options,
        )
        add_hook_to_module(module, hook, append=True)

    def _full(self, name: str) -> str:
        return ".".join(part for part in (self.module_name, name) if part)

    def _other_entries(self, block: nn.Module) -> set[int]:
        """Modules inside the block that have separate entries in the device map."""
        return self.entries - {id(block)}
