"""Align hooks, which move weights and inputs to the device on which a module computes."""

from __future__ import annotations

import functools
import threading
from collections import ChainMap
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from accel_bigmodel.device_map import Device, resolve_device
from accel_bigmodel.hooks import ModelHook, SequentialHook
from accel_bigmodel.offload import OffloadedWeightsLoader, PrefixedDataset, place_in_memory
from accel_bigmodel.placeholder import Placeholder, refuse_weights_without_data
from accel_bigmodel.prefetch import Block, BlockReader
from accel_bigmodel.tensors import (
    TiedParameters,
    get_non_persistent_buffers,
    named_module_tensors,
    parameter_like,
    set_module_tensor_to_device,
    submodule_and_leaf,
)
from accel_ops.conversion import send_to_device
from accel_ops.tree import find_device
from accel_state.devices.select import family_of
from accel_state.errors import CheckpointError, NotOffered, ShapeMismatch
from accel_state.labels import HOOK

__all__ = (
    "AlignDevicesHook",
    "OutermostHook",
    "align_module_device",
    "has_offloaded_params",
    "refuse_second_offload",
    "take_new_weights",
)


_REPLACED = (Tensor, nn.Parameter, Placeholder)
"""Classes of weights that a placeholder replaces; a weight of another class, as of a quantised layer, keeps its class
on the meta device."""
_WITHOUT_CACHE = {torch.device("cpu"), torch.device("meta")}


@dataclass
class _OffloadedTensor:
    """One offloaded tensor of a module.

    Args:
        owner: the dictionary of parameters or buffers that contains it.
        leaf: its name in that dictionary.
        name: its name in the weights map.
        placeholder: the tensor on the meta device that the dictionary contains between forwards.
    """

    owner: dict[str, Any]
    leaf: str
    name: str
    placeholder: Tensor

    def with_data(self, weight: Tensor) -> Tensor:
        """The weight as a parameter of the same class, or as a buffer."""
        placeholder = self.placeholder
        if not isinstance(placeholder, nn.Parameter):
            return weight
        parameter = parameter_like(placeholder, weight, placeholder.requires_grad)
        if isinstance(placeholder, Placeholder) and parameter.requires_grad:
            move = functools.partial(_move_gradient, placeholder)
            parameter.register_post_accumulate_grad_hook(move)  # type: ignore[no-untyped-call]
        return parameter


def _move_gradient(placeholder: Placeholder, weight: Tensor) -> None:
    """Replace the gradient of the weight, which no optimizer steps, by one of the placeholder without data.

    An optimizer of the placeholders then raises an error. Without a gradient it would skip them without a word.
    """
    weight.grad = None
    placeholder.grad = Placeholder.of(weight.detach(), placeholder.weight_name)


class AlignDevicesHook(ModelHook):
    """Computes a module on a device, wherever its inputs and weights are.

    Offloaded weights are on the meta device between forwards. The hook uses a weight in place if it is already on the
    execution device with the right dtype, for example mapped from a file; `reader` reads the others ahead. Several
    threads may run the module at once. After a forward that raises an error, the module is unchanged.

    Args:
        execution_device: where the module computes; None leaves weights and inputs where they are.
        offload: remove the weights from the module between forwards.
        io_same_device: move the output to the device of the input.
        weights_map: name to offloaded weight; when None, the current weights on the CPU.
        offload_buffers: offload buffers too.
        place_submodules: the hook also handles the weights of submodules.
        skip_keys: keyword arguments with values that are not moved.
        tied_params_map: copies of tied weights by device.
        reader: reads weights ahead; if None, the hook creates one.
        names: the tensors of the module that the hook handles; all when None.
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
        self._offloaded: list[_OffloadedTensor] = []
        self._in_place: dict[str, Tensor] | None = None
        self._block: Block | None = None
        self._lock = threading.RLock()
        self._running = 0
        self._loaded: dict[str, Tensor] = {}
        self._input_devices: dict[int, list[torch.device | None]] = {}
        self._handle: Any = None

    def __getstate__(self) -> dict[str, Any]:
        at_rest: dict[str, Any] = {
            "_in_place": None,
            "_block": None,
            "_lock": None,
            "_running": 0,
            "_loaded": {},
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
            self._offload(module)
            self._refuse_new_weights(module)
        elif self.execution_device is not None:
            for name, _ in self._tensors(module):
                set_module_tensor_to_device(
                    module, name, self.execution_device, tied_params_map=self.tied_params_map, clear_cache=False
                )
        return module

    def _refuse_new_weights(self, module: nn.Module) -> None:
        """Let `load_state_dict` raise for weights that are offloaded, until the hook is removed."""
        self._handle = module.register_load_state_dict_pre_hook(_refuse_new_weights)  # type: ignore[no-untyped-call]

    def _offload(self, module: nn.Module) -> None:
        """Replace the tensors to offload by placeholders on the meta device."""
        if self.execution_device is None:
            self.execution_device = find_device(module.state_dict(keep_vars=True)) or torch.device("cpu")
        non_persistent = get_non_persistent_buffers(module, recurse=self.place_submodules, fqns=True)
        weights: dict[str, Tensor] = {}
        # A module with several names gets a hook for each of them; the first one loads the weights.
        loaded = set(map(id, _loaded_by_hook(module)))
        for name, tensor in self._tensors(module):
            if id(tensor) in loaded:
                continue
            self.original_devices[name] = tensor.device
            owner, leaf = submodule_and_leaf(module, name)
            is_buffer = leaf in owner._buffers
            if is_buffer and (not self.offload_buffers or name in non_persistent):
                value = self._weight_of(name) if tensor.is_meta and self.weights_map is not None else None
                set_module_tensor_to_device(module, name, self.execution_device, value, clear_cache=False)
                continue
            if self.weights_map is None:
                weights[name] = tensor.detach().to("cpu")
            tensors: dict[str, Any] = owner._buffers if is_buffer else owner._parameters
            if type(tensor) in _REPLACED:
                tensors[leaf] = Placeholder.of(tensor, self._full(name))
            else:
                set_module_tensor_to_device(module, name, "meta", clear_cache=False)
            self._offloaded.append(_OffloadedTensor(tensors, leaf, name, tensors[leaf]))
        self.weights_map = OffloadedWeightsLoader(weights) if self.weights_map is None else self.weights_map
        for device in {*self.original_devices.values()} - _WITHOUT_CACHE:
            family_of(device).empty_cache()

    def _weight_of(self, name: str) -> Tensor:
        if self.weights_map is None or name not in self.weights_map:
            raise CheckpointError(
                f"Cannot offload the module of {self._full(name)!r}.",
                "The tensor is on the meta device, and the offloaded weights do not have it. No checkpoint holds a "
                "buffer with persistent=False.",
                "Create the model with init_empty_weights(include_buffers=False), or set the tensor first.",
            )
        return self.weights_map[name]

    def _full(self, name: str) -> str:
        """The name of a tensor in the model, as far as the hook knows it."""
        return f"{getattr(self.weights_map, 'prefix', '')}{name}"

    @property
    def placeholders(self) -> list[Tensor]:
        """The tensors that the hook replaces by weights during a forward."""
        return [tensor.placeholder for tensor in self._offloaded]

    def _tensors(self, module: nn.Module) -> list[tuple[str, Tensor]]:
        named = named_module_tensors(module, recurse=self.place_submodules)
        return [(name, tensor) for name, tensor in named if self.names is None or name in self.names]

    def pre_forward(self, module: nn.Module, *args: Any, **kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        if self.io_same_device:
            self._input_devices.setdefault(threading.get_ident(), []).append(find_device([args, kwargs]))
        try:
            if self.offload:
                self._load()
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
            # After an error, the caller calls no other method of the hook.
            self.forward_failed(module)
            raise

    def post_forward(self, module: nn.Module, output: Any) -> Any:
        if self.offload:
            self._unload()
        device = self._pop_input_device()
        return output if device is None else send_to_device(output, device, skip_keys=self.skip_keys)

    def forward_failed(self, module: nn.Module) -> None:
        if self.offload:
            self._unload()
        self._pop_input_device()

    def _pop_input_device(self) -> torch.device | None:
        devices = self._input_devices.get(threading.get_ident())
        if not devices:
            return None
        device = devices.pop()
        if not devices:
            self._input_devices.pop(threading.get_ident(), None)
        return device

    def _load(self) -> None:
        """Load the weights into the module, unless another thread that runs it has already loaded them."""
        with self._lock:
            self._running += 1
            if self._running > 1:
                if self._block is not None:
                    self.reader.share(self._block)
                return
            try:
                if self._in_place is None:
                    self._in_place = self._plan()
                if self._block is not None:
                    self._loaded = self.reader.take(self._block)
                for tensor in self._offloaded:
                    if tensor.owner.get(tensor.leaf) is not tensor.placeholder:
                        self._refuse_replaced(tensor)
                    weight = self._in_place.get(tensor.name)
                    tensor.owner[tensor.leaf] = (
                        tensor.with_data(self._loaded[tensor.name]) if weight is None else weight
                    )
            except BaseException:
                self._unload()
                raise

    def _refuse_replaced(self, tensor: _OffloadedTensor) -> None:
        """Raise for a weight that somebody has set in the module: the forward would use the offloaded one."""
        present = tensor.owner.get(tensor.leaf)
        # Another placeholder is that of a tied weight.
        if type(present) is Placeholder or type(tensor.placeholder) is not Placeholder:
            return
        name = self._full(tensor.name)
        # The new weight goes with the error; the offloaded one can be used again.
        tensor.owner[tensor.leaf] = tensor.placeholder
        raise NotOffered(
            f"Cannot compute with {name!r}, which was set after it was offloaded.",
            "The forward uses the offloaded weight, not the one that was set in the module.",
            "Remove the hooks before you set weights: remove_hook_from_submodules(model).",
        )

    def take_new_weights(self) -> None:
        """Let weights that were set in the module since it was offloaded replace the offloaded ones."""
        new: dict[str, Tensor] = {}
        for tensor in self._offloaded:
            present = tensor.owner.get(tensor.leaf)
            if present is not None and present is not tensor.placeholder and not present.is_meta:
                new[tensor.name] = present.detach()
                tensor.owner[tensor.leaf] = tensor.placeholder
        if not new:
            return
        weights: Any = self.weights_map
        if isinstance(weights, PrefixedDataset):
            named = {f"{weights.prefix}{name}": weight for name, weight in new.items()}
            older: Any = weights.dataset
            self.weights_map = PrefixedDataset(ChainMap(named, older), weights.prefix)
        else:
            self.weights_map = ChainMap(new, weights)
        self._in_place = self._block = None

    def _unload(self) -> None:
        """Restore the placeholders when no thread runs the module any more."""
        with self._lock:
            self._running -= 1
            if self._running:
                if self._block is not None:
                    self.reader.leave(self._block)
                return
            for tensor in self._offloaded:
                tensor.owner[tensor.leaf] = tensor.placeholder
            loaded, self._loaded = self._loaded, {}
            if self._block is not None:
                self.reader.release(self._block, loaded)

    def _plan(self) -> dict[str, Tensor]:
        """The weights that are used in place; the others become the block that the reader reads each time."""
        weights: Any = self.weights_map
        in_place: dict[str, Tensor] = {}
        to_read: dict[str, Callable[[], Tensor]] = {}
        size = 0
        for tensor in self._offloaded:
            weight = weights[tensor.name]
            _check_shape(tensor, weight)
            usable = weight.device == self.execution_device and weight.dtype == tensor.placeholder.dtype
            # If the map creates a new tensor at each look-up, storing it here would keep it in memory.
            if usable and weights[tensor.name] is weight:
                in_place[tensor.name] = tensor.with_data(weight)
            else:
                to_read[tensor.name] = functools.partial(weights.__getitem__, tensor.name)
                size += weight.numel() * tensor.placeholder.element_size()
        if to_read and self.execution_device is not None:
            dtypes = {tensor.name: tensor.placeholder.dtype for tensor in self._offloaded if tensor.name in to_read}
            in_memory = {name: place for name in to_read if (place := place_in_memory(weights, name)) is not None}
            self._block = Block(to_read, dtypes, self.execution_device, size, in_memory)
        return in_place

    def detach_hook(self, module: nn.Module) -> nn.Module:
        if self._handle is not None:
            self._handle.remove()
        if self.offload:
            offloaded = {tensor.name for tensor in self._offloaded}
            for name, device in self.original_devices.items():
                if device.type != "meta":
                    # A buffer that stayed in the module may have changed since.
                    weight = self.weights_map.get(name) if self.weights_map and name in offloaded else None
                    set_module_tensor_to_device(module, name, device, value=weight)
        return module


class OutermostHook(AlignDevicesHook):
    """The hook of a whole model with offloaded weights: moves outputs to the device of the inputs.

    It refuses what would give wrong results in silence: a forward of a model that has parts without data, and new
    weights for the offloaded ones.

    Args:
        execution_device: where the model's first part computes.
        reader: reads weights ahead for the modules of the model.
        options: `skip_keys` and `tied_params_map` of `AlignDevicesHook`.
    """

    def __init__(self, execution_device: Device | None, reader: BlockReader, **options: Any) -> None:
        super().__init__(execution_device, io_same_device=True, reader=reader, names=(), **options)

    def init_hook(self, module: nn.Module) -> nn.Module:
        self._refuse_new_weights(module)
        return super().init_hook(module)

    def pre_forward(self, module: nn.Module, *args: Any, **kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        if self.execution_device is None or self.execution_device.type != "meta":
            refuse_weights_without_data(module, _loaded_by_hook)
        return super().pre_forward(module, *args, **kwargs)

    def post_forward(self, module: nn.Module, output: Any) -> Any:
        self.reader.end_pass()
        return super().post_forward(module, output)

    def forward_failed(self, module: nn.Module) -> None:
        self.reader.end_pass()
        super().forward_failed(module)


def _loaded_by_hook(module: nn.Module) -> list[Tensor]:
    return [placeholder for hook in _offloading_hooks(module) for placeholder in hook.placeholders]


def _refuse_new_weights(module: nn.Module, state_dict: Mapping[str, Any], prefix: str, *_: Any) -> None:
    """Raise before torch loads the first weight of a state dict that has weights for placeholders."""
    tensors = chain(module.named_parameters(remove_duplicate=False), module.named_buffers(remove_duplicate=False))
    name = next((name for name, tensor in tensors if tensor.is_meta and prefix + name in state_dict), None)
    if name is not None:
        raise NotOffered(
            f"Cannot load new weights into {type(module).__name__}: {name!r} is offloaded.",
            "Its data is in host memory or on the disk, and not in the model. Nothing was loaded.",
            "Remove the hooks first: remove_hook_from_submodules(model). Then load the weights and offload the model "
            "again.",
        )


def _check_shape(tensor: _OffloadedTensor, weight: Tensor) -> None:
    expected = tensor.placeholder.shape
    if weight.shape != expected and type(tensor.placeholder) is Placeholder:
        raise ShapeMismatch(
            f"Cannot load the offloaded weight {tensor.name!r}.",
            f"It has shape {tuple(weight.shape)}, the module expects {tuple(expected)}.",
            "Use the offloaded weights of this model.",
        )


def _offloading_hooks(module: nn.Module) -> Iterator[AlignDevicesHook]:
    """The hooks that offload weights of a module, also among several hooks, from the last one."""
    waiting: list[Any] = [getattr(module, HOOK, None)]
    while waiting:
        hook = waiting.pop()
        if isinstance(hook, AlignDevicesHook) and hook.offload:
            yield hook
        if isinstance(hook, SequentialHook):
            waiting += hook.hooks


def take_new_weights(model: nn.Module) -> None:
    """Let weights that a load has set in a model with offloaded weights replace the offloaded ones."""
    for module in model.modules():
        for hook in _offloading_hooks(module):
            hook.take_new_weights()


def has_offloaded_params(module: nn.Module) -> bool:
    """Whether a module's own weights are offloaded: they are on the meta device between forwards."""
    return next(_offloading_hooks(module), None) is not None


def refuse_second_offload(model: nn.Module) -> None:
    """Check that no weight of a model is offloaded already: the model does not have its data.

    Raises:
        NotOffered: the hooks of a module load its weights.
    """
    name = next((name for name, module in model.named_modules() if has_offloaded_params(module)), None)
    if name is not None:
        raise NotOffered(
            f"Cannot offload {type(model).__name__} again.",
            f"The weights of {name or 'the model'!r} are offloaded already, and a hook loads them.",
            "Remove the hooks first: remove_hook_from_submodules(model).",
        )


@contextmanager
def align_module_device(module: nn.Module, execution_device: Device | None = None) -> Iterator[None]:
    """Inside the block, offloaded weights of the module are loaded, and all its weights are on `execution_device` if
    given.

    Changes to weights that were loaded from a file or another device are lost at the end of the block. Weights that
    were only moved keep their changes when they move back.

    Args:
        module: the module; weights of its submodules are not loaded or moved.
        execution_device: device of the weights inside the block; by default the device on which the hook computes.

    Example:
        with align_module_device(model.head, "cpu"):
            print(model.head.weight.norm())
    """
    hook = next(_offloading_hooks(module), None)
    # Nothing on the meta device can be moved back.
    kept = {}
    if str(execution_device) == "meta":
        kept = {name: tensor for name, tensor in named_module_tensors(module) if not tensor.is_meta}
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
        for name, tensor in kept.items():
            tensors: dict[str, Any] = module._parameters if name in module._parameters else module._buffers
            present = tensors.get(name)
            if present is not None and present.is_meta:
                tensors[name] = tensor
