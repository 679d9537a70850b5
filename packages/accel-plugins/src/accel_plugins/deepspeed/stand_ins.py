"""Optimizers and schedulers that DeepSpeed makes by itself, from its configuration."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, ClassVar

from accel_plugins.manifest import Part

__all__ = ("DummyOptim", "DummyScheduler")


class DummyOptim:
    """Stands for the optimizer that the entry "optimizer" of the DeepSpeed configuration describes.

    Args:
        params: parameters, or groups of them as torch's optimizers take.
        lr: learning rate, where the configuration says "auto".
        weight_decay: weight decay, where the configuration says "auto".
        kwargs: kept for whoever reads them.

    Example:
        >>> optimizer = DummyOptim(model.parameters(), lr=3e-4)
        >>> model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    """

    stands_for: ClassVar[Part] = Part.OPTIMIZER

    def __init__(self, params: Iterable[Any], lr: float = 0.001, weight_decay: float = 0, **kwargs: Any) -> None:
        self.params = list(params)
        self.lr = lr
        self.weight_decay = weight_decay
        self.kwargs = kwargs
        self.state: dict[Any, Any] = {}
        grouped = bool(self.params) and isinstance(self.params[0], dict)
        self.param_groups: list[dict[str, Any]] = self.params if grouped else [{"params": self.params}]


class DummyScheduler:
    """Stands for the scheduler that the entry "scheduler" of the DeepSpeed configuration describes.

    Args:
        optimizer: the optimizer it follows, or what stands for it.
        total_num_steps: length of the schedule, where the configuration says "auto".
        warmup_num_steps: length of its beginning, where the configuration says "auto".
        lr_scheduler_callable: given the optimizer, makes the scheduler, where the configuration describes none.
        kwargs: kept for whoever reads them.
    """

    stands_for: ClassVar[Part] = Part.SCHEDULER

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
