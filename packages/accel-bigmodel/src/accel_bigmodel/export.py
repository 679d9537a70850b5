"""The weights of a model that is partly offloaded, gathered into one state dict on the CPU."""

from __future__ import annotations

from collections.abc import MutableMapping
from typing import Any

from torch import nn

from accel_bigmodel.align import align_module_device, has_offloaded_params
from accel_bigmodel.device_map import Device

__all__ = ("get_state_dict_from_offload", "get_state_dict_offloaded_model")


def get_state_dict_offloaded_model(model: nn.Module) -> dict[str, Any]:
    """The state dict of a dispatched model: offloaded weights brought to the CPU, all others where they are.

    Weights that are mapped from a file stay mapped, so that memory is used when they are.
    """
    state_dict: dict[str, Any] = dict(model.state_dict())
    for name, module in model.named_modules(remove_duplicate=False):
        if has_offloaded_params(module):
            prefix = f"{name}." if name else ""
            with align_module_device(module, "cpu"):
                state_dict.update(_own(module, prefix, state_dict))
    return state_dict


def get_state_dict_from_offload(
    module: nn.Module,
    module_name: str,
    state_dict: MutableMapping[str, Any],
    device_to_put_offload: Device = "cpu",
) -> MutableMapping[str, Any]:
    """Put the offloaded weights of one module into a state dict.

    Args:
        module_name: full name of one of its weights, such as "blocks.0.weight".
        state_dict: changed and returned.
        device_to_put_offload: where the weights are put.
    """
    if has_offloaded_params(module):
        prefix = module_name[: module_name.rfind(".") + 1]
        with align_module_device(module, device_to_put_offload):
            state_dict.update(_own(module, prefix, None))
    return state_dict


def _own(module: nn.Module, prefix: str, wanted: MutableMapping[str, Any] | None) -> dict[str, Any]:
    """The state of a module that is at hand now, under full names; of `wanted` only, when given."""
    own = {prefix + name: value for name, value in module.state_dict().items()}
    at_hand = {name: value for name, value in own.items() if not getattr(value, "is_meta", False)}
    return {name: value for name, value in at_hand.items() if wanted is None or name in wanted}
