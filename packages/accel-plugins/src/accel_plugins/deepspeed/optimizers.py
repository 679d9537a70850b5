"""DeepSpeed's own optimizers for states that are kept on the host."""

from __future__ import annotations

from typing import Any, Final

from torch.optim import Optimizer

from accel_state.errors import NotOffered

__all__ = ("map_pytorch_optim_to_deepspeed",)

_ON_HOST: Final = {
    "AdamW": ("DeepSpeedCPUAdam", {"adamw_mode": True}, ("lr", "betas", "eps", "weight_decay", "amsgrad")),
    "Adam": ("DeepSpeedCPUAdam", {"adamw_mode": False}, ("lr", "betas", "eps", "weight_decay", "amsgrad")),
    "Adagrad": ("DeepSpeedCPUAdagrad", {}, ("lr", "eps", "weight_decay")),
    "Lion": ("DeepSpeedCPULion", {}, ("lr", "betas", "weight_decay")),
}
"""By class of a torch or bitsandbytes optimizer: DeepSpeed's class, its options, and the options taken over."""


def map_pytorch_optim_to_deepspeed(optimizer: Optimizer) -> Optimizer:
    """The optimizer of DeepSpeed that steps on the host as this one would; it has the same groups of parameters.

    Raises:
        NotOffered: DeepSpeed has none of this kind.

    Example:
        >>> type(map_pytorch_optim_to_deepspeed(torch.optim.AdamW(model.parameters()))).__name__
        'DeepSpeedCPUAdam'
    """
    import deepspeed.ops.adagrad
    import deepspeed.ops.adam
    import deepspeed.ops.lion

    homes: tuple[Any, ...] = (deepspeed.ops.adam, deepspeed.ops.adagrad, deepspeed.ops.lion)
    name = type(optimizer).__name__
    if name.startswith("DeepSpeed"):
        return optimizer
    kind = name.removesuffix("8bit").removesuffix("32bit")
    if kind not in _ON_HOST:
        raise NotOffered(
            f"Cannot use {name} while DeepSpeed keeps optimizer states on the host.",
            f"DeepSpeed steps there with {', '.join(_ON_HOST)} only.",
            "Use one of them, or set zero_force_ds_cpu_optimizer=false in the DeepSpeed configuration.",
        )
    target, options, taken = _ON_HOST[kind]
    made: Any = next(getattr(home, target) for home in homes if hasattr(home, target))
    given = {name: optimizer.defaults[name] for name in taken if name in optimizer.defaults}
    mapped: Optimizer = made(optimizer.param_groups, **given, **options)
    return mapped
