"""The hooks that bring weights and inputs to where a module computes, and putting them on the modules of a model."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from accel_bigmodel.device_map import Device, resolve_device
from accel_bigmodel.hooks import ModelHook, SequentialHook, add_hook_to_module
from accel_bigmodel.offload import PrefixedDataset
from accel_bigmodel.place import TiedParameters, parameter_like, set_module_tensor_to_device, submodule_and_leaf
from accel_bigmodel.prefetch import Block, BlockReader
from accel_bigmodel.sizes import get_non_persistent_buffers, named_module_tensors
from accel_ops.conversion import send_to_device
from accel_ops.tree import find_device
from accel_state.errors import ShapeMismatch
from accel_state.marks import HOOK

__all__ = (
    "AlignDevicesHook",
    "align_module_device",
    "attach_align_device_hook",
    "attach_align_device_hook_on_blocks",
    "attach_execution_device_hook",
    "has_offloaded_params",
)


@dataclass
class _Slot:
    """One offloaded tensor: the dictionary it stands in, its name there and among the weights, its stand-in."""

    tensors: dict[str, Any]
    leaf: str
    name: str
    empty: Tensor

    def fill(self, weight: Tensor) -> Tensor:
        """The weight as what stands in the slot: a parameter of the same class, or a buffer."""
        if not isinstance(self.empty, nn.Parameter):
            return weight
        return parameter_like(self.empty, weight, self.empty.requires_grad)


class AlignDevicesHook(ModelHook):
    """Computes a module on a device, wherever its inputs and weights are.

    Offloaded weights are on the meta device between forwards. Where a weight already lies on the execution device in
    the right dtype, for example mapped from a file, it is used as it is; others are read ahead by `reader`. Several
    threads may run the module at once, and a forward that raises leaves it as it was.

    Args:
        execution_device: where the module computes; None leaves weights and inputs where they are.
        offload: keep the weights away between forwards.
        io_same_device: bring the output to where the input was.
        weights_map: name to offloaded weight; the weights as they are now, on the CPU, when None.
        offload_buffers: buffers are offloaded too.
        place_submodules: weights of the modules inside belong to it as well.
        skip_keys: keyword arguments whose values stay where they are.
        tied_params_map: copies of tied weights by device.
        reader: reads ahead; one of its own when None.
        names: the tensors of the module that are the hook's; all when None.
    """

    def __init__(
        self,
        execution_device: Device | None = None,
        offload: bool = False,
        io_same_device: bool = False,
        weights_map: Mapping[str, Tensor] | None = None,
        offload_buffers: bool = False,
        place_submodules: bool = False,
        skip_keys: str | list[str] | None = None,
        tied_params_map: TiedParameters | None = None,
        reader: BlockReader | None = None,
        names: Collection[str] | None = None,
    ) -> None:
        self.execution_device = None if execution_device is None else resolve_device(execution_device)
        self.offload = offload
        self.io_same_device = io_same_device
        self.weights_map = weights_map
        self.offload_buffers = offload_buffers
        self.place_submodules = place_submodules
        self.skip_keys = skip_keys
        self.tied_params_map = tied_params_map
        self.reader = reader or BlockReader()
        self.names = names
        self.original_devices: dict[str, torch.device] = {}
        self._slots: list[_Slot] = []
        self._in_place: dict[str, Tensor] | None = None
        self._block: Block | None = None
        self._lock = threading.RLock()
        self._running = 0
        self._brought: dict[str, Tensor] = {}
        self._input_devices: dict[int, list[torch.device | None]] = {}

    def __getstate__(self) -> dict[str, Any]:
        at_rest: dict[str, Any] = {
            "_in_place": None,
            "_block": None,
            "_lock": None,
            "_running": 0,
            "_brought": {},
            "_input_devices": {},
        }
        return {**vars(self), **at_rest}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state, _lock=threading.RLock())

    def __repr__(self) -> str:
        return (
            f"AlignDevicesHook(execution_device={self.execution_device}, offload={self.offload}, "
            f"io_same_device={self.io_same_device}, offload_buffers={self.offload_buffers}, "
            f"place_submodules={self.place_submodules}, skip_keys={self.skip_keys!r})"
        )

    def init_hook(self, module: nn.Module) -> nn.Module:
        if self.offload:
            self._empty(module)
        elif self.execution_device is not None:
            for name, _ in self._tensors(module):
                set_module_tensor_to_device(
                    module, name, self.execution_device, tied_params_map=self.tied_params_map, clear_cache=False
                )
        return module

    def _empty(self, module: nn.Module) -> None:
        """Put the offloaded tensors on the meta device and remember what belongs where."""
        if self.execution_device is None:
            self.execution_device = find_device(module.state_dict(keep_vars=True)) or torch.device("cpu")
        kept = get_non_persistent_buffers(module, recurse=self.place_submodules, fqns=True)
        weights: dict[str, Tensor] = {}
        for name, tensor in self._tensors(module):
            self.original_devices[name] = tensor.device
            owner, leaf = submodule_and_leaf(module, name)
            is_buffer = leaf in owner._buffers
            if is_buffer and (not self.offload_buffers or name in kept):
                set_module_tensor_to_device(
                    module,
                    name,
                    self.execution_device,
                    self._known(name) if tensor.is_meta else None,
                    clear_cache=False,
                )
                continue
            if self.weights_map is None:
                weights[name] = tensor.detach().to("cpu")
            set_module_tensor_to_device(module, name, "meta")
            tensors: dict[str, Any] = owner._buffers if is_buffer else owner._parameters
            self._slots.append(_Slot(tensors, leaf, name, tensors[leaf]))
        self.weights_map = weights if self.weights_map is None else self.weights_map

    def _tensors(self, module: nn.Module) -> list[tuple[str, Tensor]]:
        named = named_module_tensors(module, recurse=self.place_submodules)
        return [(name, tensor) for name, tensor in named if self.names is None or name in self.names]

    def _known(self, name: str) -> Tensor | None:
        return None if self.weights_map is None else self.weights_map[name]

    def pre_forward(self, module: nn.Module, *args: Any, **kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        if self.io_same_device:
            self._input_devices.setdefault(threading.get_ident(), []).append(find_device([args, kwargs]))
        try:
            if self.offload:
                self._enter()
        except BaseException:
            self._pop_input_device()
            raise
        device = self.execution_device
        if device is None or (not kwargs and all(type(arg) is Tensor and arg.device == device for arg in args)):
            return args, kwargs
        try:
            return (
                send_to_device(args, self.execution_device, skip_keys=self.skip_keys),
                send_to_device(kwargs, self.execution_device, skip_keys=self.skip_keys),
            )
        except BaseException:
            # Whoever called this calls no other method of the hook when this one raises.
            self.forward_failed(module)
            raise

    def post_forward(self, module: nn.Module, output: Any) -> Any:
        if self.offload:
            self._leave()
        device = self._pop_input_device()
        return output if device is None else send_to_device(output, device, skip_keys=self.skip_keys)

    def forward_failed(self, module: nn.Module) -> None:
        if self.offload:
            self._leave()
        self._pop_input_device()

    def _pop_input_device(self) -> torch.device | None:
        devices = self._input_devices.get(threading.get_ident())
        if not devices:
            return None
        device = devices.pop()
        if not devices:
            self._input_devices.pop(threading.get_ident(), None)
        return device

    def _enter(self) -> None:
        """Fill the slots, unless another thread is running the module and has done it."""
        with self._lock:
            self._running += 1
            if self._running > 1:
                return
            try:
                if self._in_place is None:
                    self._in_place = self._sort_out()
                if self._block is not None:
                    self._brought = self.reader.take(self._block)
                for slot in self._slots:
                    found = self._in_place.get(slot.name)
                    slot.tensors[slot.leaf] = slot.fill(self._brought[slot.name]) if found is None else found
            except BaseException:
                self._leave()
                raise

    def _leave(self) -> None:
        """Empty the slots when no thread runs the module any more."""
        with self._lock:
            self._running -= 1
            if self._running:
                return
            for slot in self._slots:
                slot.tensors[slot.leaf] = slot.empty
            brought, self._brought = self._brought, {}
            self.reader.give_back(brought)

    def _sort_out(self) -> dict[str, Tensor]:
        """What can be used where it lies; the rest becomes the block that is read each time."""
        weights: Any = self.weights_map
        in_place: dict[str, Tensor] = {}
        to_read: dict[str, Callable[[], Tensor]] = {}
        size = 0
        for slot in self._slots:
            weight = weights[slot.name]
            _check_shape(slot, weight)
            usable = weight.device == self.execution_device and weight.dtype == slot.empty.dtype
            # What is made anew for each who asks would be kept in memory for good.
            if usable and weights[slot.name] is weight:
                in_place[slot.name] = slot.fill(weight)
            else:
                to_read[slot.name] = _source(weights, slot.name)
                size += weight.numel() * slot.empty.element_size()
        if to_read and self.execution_device is not None:
            dtypes = {slot.name: slot.empty.dtype for slot in self._slots if slot.name in to_read}
            self._block = Block(to_read, dtypes, self.execution_device, size)
        return in_place

    def detach_hook(self, module: nn.Module) -> nn.Module:
        if self.offload:
            for name, device in self.original_devices.items():
                if device.type != "meta":
                    weight = self.weights_map.get(name) if self.weights_map is not None else None
                    set_module_tensor_to_device(module, name, device, value=weight)
        return module


def _source(weights: Mapping[str, Tensor], name: str) -> Callable[[], Tensor]:
    return lambda: weights[name]


def _check_shape(slot: _Slot, weight: Tensor) -> None:
    if weight.shape != slot.empty.shape and type(slot.empty) in (Tensor, nn.Parameter):
        raise ShapeMismatch(
            f"Bring the offloaded weight {slot.name!r}.",
            f"It has shape {tuple(weight.shape)}, the module expects {tuple(slot.empty.shape)}.",
            "Offload the weights of this very model.",
        )


def _offloading(module: nn.Module) -> AlignDevicesHook | None:
    """The hook that keeps weights of a module away, also when it is one of several."""
    waiting: list[Any] = [getattr(module, HOOK, None)]
    while waiting:
        hook = waiting.pop()
        if isinstance(hook, AlignDevicesHook) and hook.offload:
            return hook
        if isinstance(hook, SequentialHook):
            waiting += hook.hooks
    return None


def has_offloaded_params(module: nn.Module) -> bool:
    """Whether a module's own weights are offloaded, and so on the meta device between forwards."""
    return _offloading(module) is not None


@contextmanager
def align_module_device(module: nn.Module, execution_device: Device | None = None) -> Iterator[None]:
    """Have a module's own weights at hand inside: offloaded ones are brought, others moved to `execution_device`.

    Changes to weights that were brought from a file or another device are lost when the block ends; those of weights
    that only moved go back with them.
    """
    hook = _offloading(module)
    if hook is not None:
        hook.pre_forward(module)
    before = {} if execution_device is None else {name: tensor.device for name, tensor in named_module_tensors(module)}
    try:
        for name in before:
            set_module_tensor_to_device(module, name, execution_device or "cpu")
        yield
    finally:
        if hook is not None:
            hook.forward_failed(module)
        for name, device in before.items():
            tensor = module._parameters.get(name, module._buffers.get(name))
            if tensor is not None and not tensor.is_meta:
                set_module_tensor_to_device(module, name, device)


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
