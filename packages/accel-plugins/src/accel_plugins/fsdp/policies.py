"""Convert the settings to arguments of torch's functions, for both versions."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from torch.distributed.fsdp import CPUOffloadPolicy, OffloadPolicy
from torch.nn import Module, Parameter

from accel_plugins.fsdp.named_policies import named_policy
from accel_state.errors import NotOffered
from accel_state.settings.schema import plain_value

if TYPE_CHECKING:
    from accel_plugins.fsdp.config import FullyShardedDataParallelPlugin

__all__ = ("blocks_to_shard", "ignored_parameters", "offload", "shard_groups")


def blocks_to_shard(model: Module, config: FullyShardedDataParallelPlugin) -> list[Module]:
    """The submodules that are sharded separately, innermost first.

    Raises:
        SettingError: the block classes are unknown, or the model has none of them.
        NotOffered: a `CustomPolicy` returns different arguments for some blocks.
    """
    policy = plain_value(config, "auto_wrap_policy")
    if isinstance(policy, str):
        policy = named_policy(model, policy, config.min_num_params, config.transformer_cls_names_to_wrap)
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


def shard_groups(model: Module, config: FullyShardedDataParallelPlugin) -> list[Module]:
    """Groups of blocks with jointly gathered parameters; other parameters are gathered with the whole model.

    Modules that share a parameter must be in one group, because a group replaces only the parameters of its modules. A
    block with only some of these modules therefore belongs to the enclosing group.

    Raises:
        SettingError, NotOffered: as `blocks_to_shard`.
    """
    holders: dict[Parameter, set[Module]] = {}
    for module in model.modules():
        for parameter in module.parameters(recurse=False):
            holders.setdefault(parameter, set()).add(module)
    tied = [modules for modules in holders.values() if len(modules) > 1]
    blocks = blocks_to_shard(model, config)
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


def offload(config: FullyShardedDataParallelPlugin, pins_memory: bool) -> OffloadPolicy:
    """The offload policy of version 2; by default, memory is pinned if the device supports it."""
    policy = config.cpu_offload
    if not isinstance(policy, CPUOffloadPolicy):
        return OffloadPolicy()
    return CPUOffloadPolicy(pin_memory=policy.pin_memory and pins_memory)


def ignored_parameters(model: Module, config: FullyShardedDataParallelPlugin) -> set[Parameter]:
    """The parameters that are not sharded."""
    ignored = config.ignored_modules
    if ignored is None:
        return set()
    if isinstance(ignored, str):
        ignored = [part for name, part in model.named_modules() if re.fullmatch(ignored, name)]
    modules: Iterable[Any] = ignored
    return {parameter for module in modules for parameter in module.parameters()}
