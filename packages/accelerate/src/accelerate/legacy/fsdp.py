"""The functions of `accelerate.utils.fsdp_utils` with an Accelerator as argument: they call its sharding backend."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch.nn import Module, Parameter
from torch.optim import Optimizer

from accel_plugins.bundle import Bundle
from accel_plugins.fsdp import weights
from accel_plugins.fsdp.fsdp2 import FSDP2Strategy, apply_fully_shard
from accel_plugins.fsdp.sharding import blocks_to_shard, ignored_parameters
from accel_plugins.parameters import canonical_name
from accel_plugins.strategy import Strategy
from accel_plugins.transforms.activation_checkpoint import ActivationCheckpoint
from accel_state import current
from accel_state.settings.environ import publish
from accel_torch.accelerator.training import PREPARING

_LOADING = "FSDP_CPU_RAM_EFFICIENT_LOADING"


def fsdp2_prepare_model(accelerator: Any, model: Module) -> Module:
    """Shard a model as `prepare` does; `accelerator` may be another object with the attributes used here."""
    strategy = getattr(getattr(accelerator, "session", None), "strategy", None)
    if not isinstance(strategy, Strategy):
        if accelerator.mixed_precision != "no":
            weights.train_in_fp32(model)
        pins_memory = current.process_or_start().family.spec.pins_memory
        apply_fully_shard(model, accelerator.state.fsdp_plugin, accelerator.torch_device_mesh, pins_memory)
        return model
    if PREPARING.get(None) is accelerator and isinstance(strategy, FSDP2Strategy):
        # A program's own function calls this one, within `prepare`.
        return strategy.shard_whole(model)
    prepared: Module = strategy.setup(Bundle.of([strategy.place(model)])).models[0]
    return prepared


def shard_by(function: Callable[[Any, Module], Module]) -> None:
    """Let `prepare` shard models with FSDP2 by a program's own `fsdp2_prepare_model`.

    Args:
        function: takes the Accelerator and a model, and returns the sharded model; this module's own undoes it.
    """

    def shard(model: Module) -> Module | None:
        accelerator = PREPARING.get(None)
        return None if accelerator is None else function(accelerator, model)

    own = getattr(function, "__module__", None) == __name__
    FSDP2Strategy.sharder = None if own else staticmethod(shard)


def fsdp2_apply_ac(accelerator: Any, model: Module) -> Module:
    """Apply activation checkpointing to the blocks that the run shards."""
    strategy = accelerator.session.strategy
    transform = ActivationCheckpoint(lambda whole: blocks_to_shard(whole, strategy.config.policy_for(whole)))
    return transform.apply(model, strategy.context)


def fsdp2_prepare_auto_wrap_policy(fsdp2_plugin: Any, model: Module) -> Callable[[Module], bool]:
    """A function that returns whether a module of the model is sharded separately."""
    blocks = {id(block) for block in blocks_to_shard(model, fsdp2_plugin.policy_for(model))}
    return lambda module: id(module) in blocks


def fsdp2_load_full_state_dict(
    accelerator: Any, model: Module, full_sd: Mapping[str, Any], cpu_offload: bool = False
) -> None:
    """Distribute the first process's full weights to the shards of all processes; called on every process.

    Args:
        accelerator: the Accelerator of the run.
        model: a sharded model.
        full_sd: full weights on the main process; ignored elsewhere.
        cpu_offload: whether the model's shards are in CPU memory; they remain there.
    """
    weights.distribute(model, full_sd if accelerator.is_main_process else {})


def fsdp2_canonicalize_names(named_params: Mapping[str, Any]) -> dict[str, Any]:
    """Rename parameters to their names in the user's model, without the prefixes of wrappers."""
    return {canonical_name(name): parameter for name, parameter in named_params.items()}


def fsdp2_switch_optimizer_parameters(optimizer: Optimizer, mapping: Mapping[int, Any]) -> None:
    """Replace the parameters of an optimizer.

    Args:
        optimizer: the optimizer.
        mapping: new parameters by the `data_ptr()` of the old ones, or by a value that was set as `data_ptr`.

    Raises:
        KeyError: the mapping lacks a parameter; the optimizer is not changed then.
    """
    groups = [[_switched(parameter, mapping) for parameter in group["params"]] for group in optimizer.param_groups]
    for group, parameters in zip(optimizer.param_groups, groups, strict=True):
        group["params"] = parameters


def _switched(parameter: Parameter, mapping: Mapping[int, Any]) -> Any:
    address: Any = parameter.data_ptr
    key = address() if callable(address) else address
    if key not in mapping:
        raise KeyError(f"A parameter of shape {tuple(parameter.shape)} of the optimizer is not among the new ones.")
    return mapping[key]


def get_fsdp2_grad_scaler(**kwargs: Any) -> torch.amp.GradScaler:
    """Create a scaler for fp16 losses on this process's device; `kwargs` are arguments of `GradScalerKwargs`."""
    scaler: torch.amp.GradScaler = current.process_or_start().family.grad_scaler(**kwargs)
    return scaler


def get_parameters_from_modules(modules: Iterable[Module] | str | None, model: Module, device: Any) -> set[Parameter]:
    """Parameters of some modules, moved to a device.

    Args:
        modules: modules, or a regular expression for their full names; None for no modules.
        model: the model with these modules.
        device: the device to which the parameters are moved in place.
    """
    parameters = ignored_parameters(model, modules)
    for parameter in parameters:
        parameter.data = parameter.data.to(device)
    return parameters


def ensure_weights_retied(
    param_init_fn: Callable[[Module], Any], model: Module, device: Any
) -> Callable[[Module], Any]:
    """Wrap an initialiser of modules on the meta device, so that tied weights remain tied.

    Args:
        param_init_fn: allocates the parameters of one module on the device.
        model: the model while its weights are still tied.
        device: the device of the initialised weights.
    """
    places: dict[int, list[tuple[Module, str]]] = {}
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            places.setdefault(id(parameter), []).append((module, name))
    tied = [group for group in places.values() if len(group) > 1]
    if not tied:
        return param_init_fn

    def initialise(module: Module) -> Any:
        answer = param_init_fn(module)
        for group in tied:
            for owner, name in group:
                if owner is module:
                    _tie(group, getattr(owner, name))
        return answer

    return initialise


def _tie(group: list[tuple[Module, str]], parameter: Any) -> None:
    """Set a parameter that is not on the meta device in all modules that share it."""
    if not parameter.is_meta:
        for owner, name in group:
            setattr(owner, name, parameter)


def enable_fsdp_ram_efficient_loading() -> None:
    """Load models on the first process only, which sends the others their shards."""
    publish({_LOADING: "True"})


def disable_fsdp_ram_efficient_loading() -> None:
    """Load models on every process."""
    publish({_LOADING: "False"})
