"""What is sharded together; and building a model in shards. It knows no settings, which are passed as plain values.

While a model is built in shards, a process replaces full parameters by its shards as soon as the next module is built.
Every process initialises full parameters, one at a time and with the random numbers of the first process, so a model
has the same values as on one process. A parameter on the meta device then replaces the full one; its attribute contains
this process's shard until `materialise` loads the shard into the model.
"""

from __future__ import annotations

import functools
import inspect
import re
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Final

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, OffloadPolicy
from torch.distributed.fsdp.wrap import size_based_auto_wrap_policy, transformer_auto_wrap_policy
from torch.distributed.tensor import DTensor, Shard
from torch.nn import Module, Parameter
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakIdKeyDictionary

from accel_ops.dtensors import with_shard
from accel_plugins.blocks import blocks_of_class
from accel_plugins.model_part import ModelPart, random_numbers_of_first
from accel_state.errors import NotOffered, SettingError

__all__ = (
    "arrives_sharded",
    "block_classes",
    "blocks_to_shard",
    "build_in_shards",
    "ignored_parameters",
    "is_built_in_shards",
    "materialise",
    "named_policy",
    "offload",
    "shard_groups",
)


_DEFAULT_MIN_PARAMETERS: Final = 100_000_000
"""The minimum number of parameters of a block, as in launchers."""


def named_policy(
    model: Module, name: str, min_num_params: int | None, class_names: Sequence[str] | None
) -> Callable[..., bool] | None:
    """Torch's policy for a model; None for one without blocks.

    Args:
        model: the model to shard.
        name: "TRANSFORMER_BASED_WRAP", "SIZE_BASED_WRAP" or "NO_WRAP".
        min_num_params: the minimum number of parameters of a block chosen by size; None: 100 million.
        class_names: names of the block classes; None or empty: those that the model declares.

    Raises:
        SettingError: no classes are specified, or the model has none of them.
    """
    if name == "TRANSFORMER_BASED_WRAP":
        classes = block_classes(model, class_names)
        return functools.partial(transformer_auto_wrap_policy, transformer_layer_cls=classes)
    least = _DEFAULT_MIN_PARAMETERS if min_num_params is None else min_num_params
    if name == "SIZE_BASED_WRAP" and least > 0:
        return functools.partial(size_based_auto_wrap_policy, min_num_params=least)
    return None


def block_classes(model: Module, names: Sequence[str] | None) -> set[type[Module]]:
    """The block classes with these names, else those that the model declares.

    Raises:
        SettingError: no classes are specified, or the model has none of them.
    """
    names = names or tuple(getattr(model, "_no_split_modules", None) or ())
    if not names:
        raise SettingError(
            f"Cannot shard blocks of {type(model).__name__} by class (TRANSFORMER_BASED_WRAP).",
            "Neither the settings nor the model specify the classes.",
            "Set transformer_cls_names_to_wrap=['...'], or wrap by size.",
        )
    return {type(block) for block in blocks_of_class(model, names)}


def blocks_to_shard(model: Module, policy: Any) -> list[Module]:
    """The submodules that are sharded separately, innermost first.

    Args:
        model: the model to shard.
        policy: a policy of torch, or a function that receives a module; None: no submodules.

    Raises:
        NotOffered: a `CustomPolicy` returns different arguments for some blocks.
    """
    if policy is None:
        return []
    if callable(policy):
        return _blocks_by_function(model, policy)
    chosen = policy._run_policy(model, ignored_modules=set(), root_kwargs={})
    if any(chosen.values()):
        raise NotOffered(
            "Cannot use a CustomPolicy with different arguments for some blocks.",
            "Every block is sharded with the settings of the plugin.",
            "Make the function of the policy return True or False.",
        )
    return [part for part in reversed(list(model.modules())) if part is not model and part in chosen]


def shard_groups(model: Module, policy: Any) -> list[Module]:
    """Groups of blocks with jointly gathered parameters; other parameters are gathered with the whole model.

    Modules that share a parameter must be in one group, because a group replaces only the parameters of its modules. A
    block with only some of these modules therefore belongs to the enclosing group.

    The arguments and errors are those of `blocks_to_shard`.
    """
    holders: dict[Parameter, set[Module]] = {}
    for module in model.modules():
        for parameter in module.parameters(recurse=False):
            holders.setdefault(parameter, set()).add(module)
    tied = [modules for modules in holders.values() if len(modules) > 1]
    blocks = blocks_to_shard(model, policy)
    if not tied:
        return blocks
    inside = {block: set(block.modules()) for block in blocks}
    return [block for block in blocks if all(inside[block] >= one or not inside[block] & one for one in tied)]


def _blocks_by_function(model: Module, policy: Callable[..., bool]) -> list[Module]:
    """The blocks for a policy with the arguments (module, recurse, nonwrapped_numel), or only with a module.

    With three, the policy decides whether to recurse into a module, and then whether it is a block, by the parameters
    that are not in inner blocks.
    """
    if not _takes_torch_arguments(policy):
        return [part for part in reversed(list(model.modules())) if part is not model and policy(part)]
    blocks: list[Module] = []
    # The root is not a block, so the policy decides only whether to recurse into it.
    if policy(module=model, recurse=True, nonwrapped_numel=_numel(model)):
        seen = {model}
        for child in model.children():
            if child not in seen:
                _parameters_in_blocks(child, policy, blocks, seen)
    return blocks


def _numel(module: Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def _parameters_in_blocks(part: Module, policy: Callable[..., bool], blocks: list[Module], seen: set[Module]) -> int:
    """The number of parameters of a submodule that are in blocks; the blocks in it are appended."""
    seen.add(part)
    total = _numel(part)
    if not policy(module=part, recurse=True, nonwrapped_numel=total):
        return 0
    inside = sum(_parameters_in_blocks(child, policy, blocks, seen) for child in part.children() if child not in seen)
    if not policy(module=part, recurse=False, nonwrapped_numel=total - inside):
        return inside
    blocks.append(part)
    return total


def _takes_torch_arguments(policy: Callable[..., bool]) -> bool:
    try:
        inspect.signature(policy).bind(module=None, recurse=True, nonwrapped_numel=0)
    except (TypeError, ValueError):
        return False
    return True


def offload(policy: object, pins_memory: bool) -> OffloadPolicy:
    """The offload policy of version 2; by default, memory is pinned if the device supports it."""
    if not isinstance(policy, CPUOffloadPolicy):
        return OffloadPolicy()
    return CPUOffloadPolicy(pin_memory=policy.pin_memory and pins_memory)


def ignored_parameters(model: Module, modules: Iterable[Any] | str | None) -> set[Parameter]:
    """The parameters of modules that are not sharded: a regular expression for their names, or the modules."""
    ignored: Iterable[Any] = modules or ()
    if isinstance(modules, str):
        ignored = [part for name, part in model.named_modules() if re.fullmatch(modules, name)]
    return {parameter for module in ignored for parameter in module.parameters()}


_SHARD_ATTRIBUTE: Final = "_accel_shard"
"""Attribute of a parameter on the meta device: this process's shard, or None if it is not initialised."""

_FUNCTIONS_WITHOUT_VALUES: Final = frozenset(
    {"__hash__", "__len__", "dim", "element_size", "get_device", "is_complex", "is_contiguous", "is_floating_point"}
    | {"ndimension", "nelement", "numel", "requires_grad_", "size", "stride", "type"}
)
_READABLE_ATTRIBUTES: Final = frozenset(
    {"dtype", "grad", "is_cuda", "is_leaf", "is_sparse", "layout", "names", "ndim", "requires_grad", "shape"}
)
_ATTRIBUTES_OF_WHOLE: Final = {"is_meta": False, "device": torch.device("cpu")}
"""Attributes that must be those of the full parameter, because functions of `torch.nn.init` skip meta tensors."""

_OVERWRITING_FUNCTIONS: Final = frozenset(
    {"bernoulli_", "copy_", "exponential_", "fill_", "geometric_", "log_normal_", "normal_", "random_", "uniform_"}
    | {"zero_"}
)


def arrives_sharded(model: Module, tensor_mesh: DeviceMesh | None) -> bool:
    """Whether a model is already sharded: by `fully_shard`, or into other DTensors.

    Args:
        model: the model.
        tensor_mesh: the run's tensor-parallel submesh, if any. DTensors over it are not counted, because they are still
            sharded along the other axes.
    """
    return any(isinstance(module, FSDPModule) for module in model.modules()) or any(
        isinstance(parameter, DTensor) and parameter.device_mesh != tensor_mesh for parameter in model.parameters()
    )


def is_built_in_shards(model: Module) -> bool:
    """Whether a model has parameters that `materialise` must load."""
    return any(_SHARD_ATTRIBUTE in vars(parameter) for parameter in model.parameters())


@contextmanager
def build_in_shards(mesh: DeviceMesh, *, empty: bool = False) -> Iterator[ModelPart]:
    """Models that this thread creates inside contain only this process's shards; entered by every process.

    Args:
        mesh: the mesh; parameters are sharded over its last dimension.
        empty: skip initialisation: shards are allocated in `materialise`, and a checkpoint gives the values.
    """
    mode = _Initialising(mesh[mesh.mesh_dim_names[-1]] if mesh.mesh_dim_names else mesh, empty)
    handle = register_module_parameter_registration_hook(mode.note)
    try:
        with random_numbers_of_first(), mode:
            yield ModelPart()
    finally:
        handle.remove()
        mode.close()


class _Initialising(TorchFunctionMode):
    """Passes full parameters to functions that use sharded ones, and takes the shards of the results.

    Only one full parameter exists at a time, or as many as one function uses.

    Args:
        mesh: 1-dimensional mesh of the processes that share the parameters.
        empty: whether initialisation is skipped.
    """

    def __init__(self, mesh: DeviceMesh, empty: bool) -> None:
        super().__init__()
        self._mesh, self._empty, self._thread = mesh, empty, threading.get_ident()
        self._taken: Any = WeakIdKeyDictionary()
        self._open: list[tuple[Parameter, Tensor]] = []
        self._last: Module | None = None

    def note(self, module: Module, name: str, parameter: Parameter | None) -> None:
        """Shard the parameters of the previous module when another one registers a parameter."""
        if threading.get_ident() == self._thread and self._last is not module:
            self._take()
            self._last = module

    def _take(self) -> None:
        module, self._last = self._last, None
        if module is None:
            return
        with torch._C.DisableTorchFunction():
            for name, parameter in list(module._parameters.items()):
                if parameter is not None and parameter.ndim and not parameter.is_meta:
                    module._parameters[name] = self._in_shards(parameter)

    def _in_shards(self, parameter: Parameter) -> Parameter:
        if parameter not in self._taken:
            placeholder = Parameter(torch.empty_like(parameter, device="meta"), parameter.requires_grad)
            vars(placeholder).update(vars(parameter))
            vars(placeholder)[_SHARD_ATTRIBUTE] = None if self._empty else self._shard(parameter.detach()).cpu().clone()
            self._taken[parameter] = placeholder
        taken: Parameter = self._taken[parameter]
        return taken

    def _shard(self, full: Tensor) -> Tensor:
        chunks, index = full.chunk(self._mesh.size()), self._mesh.get_local_rank()
        return chunks[index] if index < len(chunks) else full[:0]

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        initialises = getattr(func, "__module__", None) == "torch.nn.init"
        if self._empty and initialises:
            return kwargs["tensor"] if "tensor" in kwargs else args[0]
        used = [
            one for one in (*args, *kwargs.values()) if isinstance(one, Parameter) and _SHARD_ATTRIBUTE in vars(one)
        ]
        attribute = getattr(func.__self__, "__name__", "") if getattr(func, "__name__", "") == "__get__" else ""
        if used and attribute in _ATTRIBUTES_OF_WHOLE and not self._empty:
            return _ATTRIBUTES_OF_WHOLE[attribute]
        if (
            not used
            or self._empty
            or attribute in _READABLE_ATTRIBUTES
            or getattr(func, "__name__", "") in _FUNCTIONS_WITHOUT_VALUES
        ):
            return func(*args, **kwargs)
        self._close_others(used)
        overwrites = initialises or getattr(func, "__name__", "") in _OVERWRITING_FUNCTIONS
        full = {id(one): self._full(one, overwrites and one is used[0]) for one in used}
        result = func(*(full.get(id(one), one) for one in args), **{k: full.get(id(v), v) for k, v in kwargs.items()})
        return next((one for one in used if full[id(one)] is result), result)

    def _full(self, parameter: Parameter, overwritten: bool) -> Tensor:
        for one, full in self._open:
            if one is parameter:
                return full
        shard: Tensor = vars(parameter)[_SHARD_ATTRIBUTE]
        full = (
            torch.empty(parameter.shape, dtype=parameter.dtype)
            if overwritten
            else _gathered(shard, parameter, self._mesh).cpu()
        )
        self._open.append((parameter, full))
        return full

    def _close_others(self, used: list[Parameter]) -> None:
        """Replace full parameters that the next function does not use by their shards."""
        for parameter, full in self._open:
            if all(parameter is not one for one in used):
                vars(parameter)[_SHARD_ATTRIBUTE].copy_(self._shard(full))
        self._open = [(one, full) for one, full in self._open if any(one is other for other in used)]

    def close(self) -> None:
        """Replace all full parameters by their shards."""
        self._take()
        with torch.no_grad():
            self._close_others([])


def _gathered(shard: Tensor, parameter: Tensor, mesh: DeviceMesh) -> Tensor:
    placed = DTensor.from_local(
        shard.to(mesh.device_type), mesh, [Shard(0)], run_check=False, shape=parameter.shape, stride=parameter.stride()
    )
    full: Tensor = placed.full_tensor()
    return full


def materialise(model: Module, mesh: DeviceMesh, device: torch.device, shard: Callable[[], None]) -> None:
    """Apply `fully_shard` to a model that was built in shards, and load this process's shards.

    Args:
        model: the model.
        mesh: the mesh for which it was built.
        device: the device of the shards; parameters that are not sharded are placed on that of the mesh.
        shard: applies `fully_shard` to the model; its parameters are on the meta device.
    """
    before = dict(model.named_parameters(remove_duplicate=False))
    shard()
    inner = mesh[mesh.mesh_dim_names[-1]] if mesh.mesh_dim_names else mesh
    replaced: dict[int, Parameter] = {}
    state: dict[str, Parameter] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        waiting = before[name]
        if _SHARD_ATTRIBUTE not in vars(waiting):
            continue
        if id(parameter) not in replaced:
            replaced[id(parameter)] = Parameter(_value(waiting, parameter, inner, device), parameter.requires_grad)
            vars(waiting)[_SHARD_ATTRIBUTE] = None
        state[name] = replaced[id(parameter)]
    model.load_state_dict(state, strict=False, assign=True)


def _value(waiting: Parameter, parameter: Tensor, mesh: DeviceMesh, device: torch.device) -> Tensor:
    """The value of a parameter: a DTensor of this process's shard, or the full tensor if it is not sharded."""
    held: Tensor | None = vars(waiting)[_SHARD_ATTRIBUTE]
    if not isinstance(parameter, DTensor):
        # It computes on the device, also when the shards of others are kept on the host.
        whole = torch.empty_like(parameter, device=mesh.device_type) if held is None else _gathered(held, waiting, mesh)
        return whole.to(parameter.dtype)
    local = parameter.to_local()
    shard = torch.empty_like(local, device=device) if held is None else held.to(device, local.dtype)
    placed: Tensor = with_shard(parameter, shard)
    return placed
