"""Compile a model with `torch.compile`: as a whole, or only its repeated blocks, which share one compilation."""

from __future__ import annotations

import functools
import platform
from types import MethodType
from typing import TYPE_CHECKING, Any, ClassVar, Final
from weakref import ReferenceType, ref

import torch
from torch.nn import Module, ModuleList, Parameter

from accel_plugins.blocks import has_repeated_blocks, is_repeated_blocks, repeated_blocks
from accel_plugins.layers import COMPILED_IN_PLACE, extract_model_from_parallel, is_compiled_module
from accel_plugins.manifest import Manifest
from accel_plugins.precision.native import ORIGINAL_FORWARD
from accel_plugins.transform import Stage, Transform
from accel_plugins.transforms.config import TorchDynamoPlugin
from accel_state.choices import DynamoBackend
from accel_state.errors import NotOffered
from accel_state.labels import OLD_FORWARD
from accel_state.settings.schema import given_value

if TYPE_CHECKING:
    from accel_plugins.bundle import Bundle
    from accel_plugins.context import Context

__all__ = (
    "Compile",
    "CompileBlocks",
    "GradientCopies",
    "compile_regions",
    "compile_regions_in_place",
    "has_compiled_regions",
)

_FORWARD_ATTRIBUTES: Final = ("forward", ORIGINAL_FORWARD, OLD_FORWARD)
"""Attributes of a module whose forward was replaced by the script, by autocast or by a hook."""


class Compile(Transform):
    """Compiles models as a `TorchDynamoPlugin` specifies; does nothing when its backend is NO.

    If the plugin does not set `use_regional_compilation`, it compiles whole models, except those in which
    `CompileBlocks` already compiled the blocks.
    """

    name: ClassVar[str] = "compile"
    stage: ClassVar[Stage] = Stage.COMPILE

    def __init__(self, config: TorchDynamoPlugin) -> None:
        self._config = config

    def takes_part(self, manifest: Manifest) -> bool:
        """Whether the backend leaves compiling to transforms."""
        return not manifest.capabilities.own_compile

    def before_wrap(self, manifest: Manifest) -> bool:
        """True for blocks, which must be compiled before they are wrapped; for whole models, what the backend says."""
        return bool(self._config.use_regional_compilation) or manifest.capabilities.compile_before_wrap

    def check(self, bundle: Bundle, context: Context) -> None:
        if self._config.backend is DynamoBackend.NO:
            return
        dynamo: Any = torch._dynamo
        if dynamo.is_dynamo_supported():
            return
        raise NotOffered(
            f"Cannot compile with dynamo_backend={self._config.backend.name}.",
            f"torch {torch.__version__} cannot compile models on Python {platform.python_version()}.",
            "Install a newer torch (2.10 or newer on Python 3.14) or an older Python, or set dynamo_backend=NO.",
        )

    def apply(self, model: Module, context: Context) -> Module:
        if self._config.backend is DynamoBackend.NO or is_compiled_module(model):
            return model
        compiled = self._apply(model)
        if self._config.captures_cuda_graphs and not _copies_gradients(compiled):
            compiled.register_forward_pre_hook(GradientCopies())
        return compiled

    def _apply(self, model: Module) -> Module:
        arguments = self._config.to_kwargs()
        regional = given_value(self._config, "use_regional_compilation")
        if regional and _blocks_compiled(model, arguments):
            return model
        if regional is None and any(_compiled_by_prepare(part) for part in model.modules()):
            return model
        return _compiled(model, arguments)

    def undo(self, model: Module) -> Module:
        return extract_model_from_parallel(model, keep_torch_compile=False)


class CompileBlocks(Compile):
    """Compiles the models' repeated blocks, if the plugin does not specify it and the backend prefers it."""

    name: ClassVar[str] = "compile blocks"

    def before_wrap(self, manifest: Manifest) -> bool:
        """True, because the strategy wraps the blocks."""
        return True

    def takes_part(self, manifest: Manifest) -> bool:
        """Whether blocks are compiled by default with the backend."""
        is_open = given_value(self._config, "use_regional_compilation") is None
        return is_open and manifest.capabilities.compiles_blocks and super().takes_part(manifest)

    def _apply(self, model: Module) -> Module:
        _blocks_compiled(model, self._config.to_kwargs())
        return model


class GradientCopies:
    """A forward pre-hook of a model that is compiled with CUDA graphs: accumulated gradients survive the next replay.

    Each replay of a CUDA graph writes its outputs to the same memory, and the gradients of the first micro-batch of a
    step are such outputs. This hook copies them before the model runs again; the gradients of the next micro-batches
    are then added to the copies. Without gradient accumulation, a loop that sets its gradients to None after each step
    makes no copies.
    """

    def __init__(self) -> None:
        self._copies: dict[Parameter, ReferenceType[torch.Tensor]] = {}

    def __call__(self, model: Module, inputs: Any) -> None:
        for parameter in model.parameters():
            gradient = parameter.grad
            if gradient is None or self._is_copy(parameter, gradient):
                continue
            parameter.grad = copied = gradient.clone()
            self._copies[parameter] = ref(copied)

    def __reduce__(self) -> tuple[type[GradientCopies], tuple[()]]:
        # A copy of the model has other gradients.
        return type(self), ()

    def _is_copy(self, parameter: Parameter, gradient: torch.Tensor) -> bool:
        copied = self._copies.get(parameter)
        return copied is not None and copied() is gradient


def _copies_gradients(model: Module) -> bool:
    return any(isinstance(hook, GradientCopies) for hook in model._forward_pre_hooks.values())


def _blocks_compiled(model: Module, arguments: dict[str, Any]) -> bool:
    """Compile the repeated blocks of a model; return whether there are any."""
    blocks = repeated_blocks(model)
    for block in blocks:
        _compile_in_place(block, arguments)
    return bool(blocks)


def compile_regions(module: Module, **compile_kwargs: Any) -> Module:
    """A compiled copy of a module: repeated blocks are compiled one by one, other submodules as wholes.

    It shares all parameters and buffers with `module`, which does not change and is its attribute `_orig_mod`. A module
    whose forward was replaced by a function that may belong to this one module is compiled as a whole.

    Args:
        module: any module.
        compile_kwargs: arguments of `torch.compile`.
    """
    if is_repeated_blocks(module):
        blocks = ModuleList([_compiled(block, compile_kwargs) for block in module.children()])
        blocks.training = module.training
        return blocks
    if not has_repeated_blocks(module):
        return _compiled(module, compile_kwargs)
    shell = type(module).__new__(type(module))
    attributes = {name: _bound_to(shell, module, value) for name, value in vars(module).items()}
    if any(callable(attributes.get(name)) and attributes[name] is vars(module)[name] for name in _FORWARD_ATTRIBUTES):
        return _compiled(module, compile_kwargs)
    vars(shell).update(attributes)
    # The function of `module.compile()` calls that module.
    vars(shell).pop("_compiled_call_impl", None)
    parts = {name: compile_regions(child, **compile_kwargs) for name, child in module.named_children()}
    vars(shell)["_modules"] = {**module._modules, **parts}
    vars(shell)["_orig_mod"] = module
    return shell


def _bound_to(copied: Module, module: Module, value: Any) -> Any:
    """An attribute of a module for a copy of it: a method, or a partial function, of the copy instead of the module."""
    if isinstance(value, MethodType) and value.__self__ is module:
        return MethodType(value.__func__, copied)
    if isinstance(value, functools.partial) and any(argument is module for argument in value.args):
        arguments = [copied if argument is module else argument for argument in value.args]
        partial = functools.partial(value.func, *arguments, **value.keywords)
        vars(partial).update(vars(value))
        return partial
    return value


def compile_regions_in_place(module: Module, **compile_kwargs: Any) -> Module:
    """Compile the repeated blocks of a module one by one, and other submodules as wholes, without wrapping any.

    Parameter names do not change; sharded models and engines rely on this.

    Args:
        module: any module; it is changed in place and returned.
        compile_kwargs: arguments of `torch.compile`.
    """
    if is_repeated_blocks(module):
        for block in module.children():
            _compile_in_place(block, compile_kwargs)
    elif has_repeated_blocks(module):
        for child in module.children():
            compile_regions_in_place(child, **compile_kwargs)
    else:
        _compile_in_place(module, compile_kwargs)
    return module


def _compile_in_place(module: Module, arguments: dict[str, Any]) -> None:
    if module._compiled_call_impl is None and not is_compiled_module(module):
        module.compile(**arguments)
        setattr(module, COMPILED_IN_PLACE, True)


def _compiled(module: Module, arguments: dict[str, Any]) -> Module:
    if is_compiled_module(module):
        return module
    compiled: Any = torch.compile(module, **arguments)
    result: Module = compiled
    return result


def _compiled_by_prepare(module: Module) -> bool:
    """Whether `prepare` compiled a block; a deep copy of one has the mark, and is not compiled."""
    return COMPILED_IN_PLACE in vars(module) and module._compiled_call_impl is not None


def has_compiled_regions(module: Module) -> bool:
    """Whether a module or one of its submodules is compiled; `is_compiled_module` checks only the module itself."""
    return any(is_compiled_module(part) or part._compiled_call_impl is not None for part in module.modules())
