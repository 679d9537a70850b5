"""Placeholders for the optimizers and schedulers that DeepSpeed creates, and wrappers of its objects."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, ClassVar, Final

from torch.optim import Optimizer

from accel_plugins.manifest import ObjectKind
from accel_plugins.wrapped.optimizer import EngineSteppedOptimizer
from accel_plugins.wrapped.scheduler import AcceleratedScheduler
from accel_state.errors import NotOffered

if TYPE_CHECKING:
    from torch import Tensor

    from accel_state.gradient import GradientState

__all__ = (
    "DeepSpeedEngineWrapper",
    "DeepSpeedOptimizerWrapper",
    "DeepSpeedSchedulerWrapper",
    "DummyOptim",
    "DummyScheduler",
    "map_pytorch_optim_to_deepspeed",
)


class DummyOptim:
    """A placeholder for the optimizer that the entry "optimizer" of the DeepSpeed configuration describes.

    Args:
        params: parameters, or groups of them as for torch's optimizers.
        lr: learning rate, if the configuration has "auto".
        weight_decay: weight decay, if the configuration has "auto".
        kwargs: stored for code that reads them.

    Example:
        >>> optimizer = DummyOptim(model.parameters(), lr=3e-4)
        >>> model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    """

    placeholder_for: ClassVar[ObjectKind] = ObjectKind.OPTIMIZER

    def __init__(self, params: Iterable[Any], lr: float = 0.001, weight_decay: float = 0, **kwargs: Any) -> None:
        self.params = list(params)
        self.lr = lr
        self.weight_decay = weight_decay
        self.kwargs = kwargs
        self.state: dict[Any, Any] = {}
        grouped = bool(self.params) and isinstance(self.params[0], dict)
        self.param_groups: list[dict[str, Any]] = self.params if grouped else [{"params": self.params}]


class DummyScheduler:
    """A placeholder for the scheduler that the entry "scheduler" of the DeepSpeed configuration describes.

    Args:
        optimizer: its optimizer, or the placeholder for it.
        total_num_steps: number of steps of the schedule, if the configuration has "auto".
        warmup_num_steps: number of warm-up steps, if the configuration has "auto".
        lr_scheduler_callable: receives the optimizer and returns the scheduler, if the configuration describes none.
        kwargs: stored for code that reads them.
    """

    placeholder_for: ClassVar[ObjectKind] = ObjectKind.SCHEDULER

    def __init__(
        self,
        optimizer: Any,
        total_num_steps: int | None = None,
        warmup_num_steps: int = 0,
        lr_scheduler_callable: Callable[[Any], Any] | None = None,
        **kwargs: Any,
    ) -> None:
        self.optimizer = optimizer
        self.total_num_steps = total_num_steps
        self.warmup_num_steps = warmup_num_steps
        self.lr_scheduler_callable = lr_scheduler_callable
        self.kwargs = kwargs


class DeepSpeedEngineWrapper:
    """Runs backward and, at the end of an accumulation window, the full optimizer step.

    Args:
        engine: the engine of `deepspeed.initialize`.

    Attributes:
        client_state: the argument of `save_state(client_state=...)`, after a checkpoint was loaded.
    """

    def __init__(self, engine: Any) -> None:
        self.engine = engine
        self.client_state: dict[str, Any] = {}

    def backward(self, loss: Tensor, sync_gradients: bool = True, **kwargs: Any) -> None:
        """Compute gradients; with `sync_gradients`, also reduce and clip them, step, and advance the schedule.

        Args:
            loss: the loss, not divided by the number of micro-batches, because the engine divides it.
            sync_gradients: whether this is the last micro-batch of its window.
            kwargs: further arguments of the engine's `backward`.
        """
        self.engine.set_gradient_accumulation_boundary(is_boundary=sync_gradients)
        self.engine.backward(loss, **kwargs)
        if sync_gradients:
            self.engine.step()

    def get_global_grad_norm(self) -> float | None:
        """Total gradient norm of the last step, before clipping; None before the first step."""
        norm = self.engine.get_global_grad_norm()
        return float(norm) if hasattr(norm, "item") else norm


class DeepSpeedOptimizerWrapper(EngineSteppedOptimizer):
    """An optimizer that the engine steps during backward; see `EngineSteppedOptimizer`."""

    engine = "DeepSpeed"
    steps_when = "during backward"

    @property
    def step_was_skipped(self) -> bool:
        """Whether the last step was skipped because gradients overflowed."""
        return bool(getattr(self.optimizer, "overflow", False))


class DeepSpeedSchedulerWrapper(AcceleratedScheduler):
    """A scheduler that the engine steps; its own `step` does nothing.

    Args:
        scheduler: the engine's scheduler.
        optimizers: its optimizers.
    """

    def __init__(
        self, scheduler: Any, optimizers: Optimizer | Iterable[Optimizer], gradient: GradientState | None = None
    ) -> None:
        super().__init__(scheduler, optimizers, gradient=gradient, processes=1)

    def step(self, *args: Any, **kwargs: Any) -> None:
        """Do nothing: the engine has already stepped it."""


_HOST_OPTIMIZERS: Final = {
    "AdamW": ("DeepSpeedCPUAdam", {"adamw_mode": True}, ("lr", "betas", "eps", "weight_decay", "amsgrad")),
    "Adam": ("DeepSpeedCPUAdam", {"adamw_mode": False}, ("lr", "betas", "eps", "weight_decay", "amsgrad")),
    "Adagrad": ("DeepSpeedCPUAdagrad", {}, ("lr", "eps", "weight_decay")),
    "Lion": ("DeepSpeedCPULion", {}, ("lr", "betas", "weight_decay")),
}
"""For each class of a torch or bitsandbytes optimizer: DeepSpeed's class, its options, and the options to copy."""


def map_pytorch_optim_to_deepspeed(optimizer: Optimizer) -> Optimizer:
    """The equivalent DeepSpeed optimizer that steps in host memory; it has the same groups of parameters.

    Raises:
        NotOffered: DeepSpeed has no equivalent optimizer.

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
    if kind not in _HOST_OPTIMIZERS:
        raise NotOffered(
            f"Cannot use {name} while DeepSpeed stores optimizer states in host memory.",
            f"In host memory, DeepSpeed supports {', '.join(_HOST_OPTIMIZERS)} only.",
            "Use one of them, or set zero_force_ds_cpu_optimizer=false in the DeepSpeed configuration.",
        )
    target, options, taken = _HOST_OPTIMIZERS[kind]
    optimizer_class: Any = next(getattr(home, target) for home in homes if hasattr(home, target))
    defaults = {name: optimizer.defaults[name] for name in taken if name in optimizer.defaults}
    mapped: Optimizer = optimizer_class(optimizer.param_groups, **defaults, **options)
    return mapped
