"""The optimizers, schedules and data of a script: placeholders for those that Megatron-LM makes, and wrappers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

from accel_plugins.manifest import Part
from accel_plugins.precision.base import Closure
from accel_plugins.wrapped.optimizer import AcceleratedOptimizer
from accel_plugins.wrapped.scheduler import AcceleratedScheduler
from accel_state.errors import NotOffered

if TYPE_CHECKING:
    from accel_state.gradient import GradientState

__all__ = (
    "MegatronLMDummyDataLoader",
    "MegatronLMDummyScheduler",
    "MegatronLMOptimizerWrapper",
    "MegatronLMSchedulerWrapper",
)


class MegatronLMDummyScheduler:
    """A placeholder for the schedule of Megatron-LM, whose form `MegatronLMPlugin` says.

    Args:
        optimizer: the optimizer it follows.
        total_num_steps: length of the schedule, counted over all processes that see different samples.
        warmup_num_steps: length of its beginning, counted likewise.
        kwargs: kept for code that reads them.
    """

    placeholder_for: ClassVar[Part] = Part.SCHEDULER

    def __init__(
        self, optimizer: Any, total_num_steps: int | None = None, warmup_num_steps: int = 0, **kwargs: Any
    ) -> None:
        self.optimizer = optimizer
        self.total_num_steps = total_num_steps
        self.warmup_num_steps = warmup_num_steps
        self.kwargs = kwargs


class MegatronLMDummyDataLoader:
    """A placeholder for loaders of Megatron's own datasets; given thrice: training, validation, test.

    Args:
        dataset_kwargs: paths of the data and their split, under the names of Megatron-LM: `data_path` (prefixes of
            the files, with weights before them or without), `split`, `micro_batch_size`, `seq_length`,
            `data_cache_path`, `tokenizer`.

    Example:
        >>> data = MegatronLMDummyDataLoader(data_path=["corpus"], split="900,50,50", micro_batch_size=4)
        >>> model, optimizer, train, valid, test = accelerator.prepare(model, optimizer, data, data, data)
    """

    placeholder_for: ClassVar[Part] = Part.LOADER

    def __init__(self, **dataset_kwargs: Any) -> None:
        self.dataset_args: dict[str, Any] = dataset_kwargs

    def set_megatron_data_args(self, plugin: Any = None) -> None:
        """Take what is said of data into the settings.

        Args:
            plugin: the settings; those of the run when None.
        """
        if plugin is None:
            from accel_state.run_state import AcceleratorState

            plugin = AcceleratorState().megatron_lm_plugin
        plugin.megatron_dataset_flag = True
        plugin.dataset_args.update(self.dataset_args)
        plugin.megatron_lm_default_args.update(self.dataset_args)

    def get_train_valid_test_datasets_provider(self, accelerator: Any) -> Any:
        """The function that makes three datasets from their three lengths.

        Args:
            accelerator: has `state.megatron_lm_plugin`.
        """
        from accel_plugins.megatron.data import provider

        return provider(accelerator.state.megatron_lm_plugin)

    def build_train_valid_test_data_iterators(self, accelerator: Any) -> tuple[Any, Any, Any]:
        """Endless iterators over batches of training, validation and test data, each None where there are no data.

        Args:
            accelerator: has `state.megatron_lm_plugin`.
        """
        from accel_plugins.megatron.data import iterators

        self.set_megatron_data_args(accelerator.state.megatron_lm_plugin)
        return iterators(accelerator.state.megatron_lm_plugin)


class MegatronLMOptimizerWrapper(AcceleratedOptimizer):
    """An optimizer of Megatron-LM, which the engine steps; its own `step` and `zero_grad` do nothing.

    Args:
        optimizer: what `get_megatron_optimizer` made.
        gradient: says whether gradients are synchronised; the state made last when None.

    Attributes:
        skipped: whether the engine's last step was skipped because gradients overflowed.
    """

    def __init__(self, optimizer: Any, gradient: GradientState | None = None) -> None:
        super().__init__(optimizer, device_placement=False, scaler=None, gradient=gradient)
        self.skipped = False

    def step(self, closure: Closure | None = None) -> Any:
        """Nothing but to count: the engine has stepped.

        Raises:
            NotOffered: a closure was given.
        """
        if closure is not None:
            raise NotOffered(
                "optimizer.step(closure) was called with Megatron-LM.",
                "The engine steps when the model is called, and cannot compute gradients again.",
                "Call step() without a closure.",
            )
        if self.gradient_state.sync_gradients:
            self._count_step()

    def zero_grad(self, set_to_none: bool | None = None) -> None:
        """Nothing: the engine forgets gradients before each step."""

    @property
    def step_was_skipped(self) -> bool:
        """Whether the last step was skipped because gradients overflowed."""
        return self.skipped


class MegatronLMSchedulerWrapper(AcceleratedScheduler):
    """A schedule that the engine moves when it steps; its own `step` does nothing.

    Args:
        scheduler: that of Megatron-LM, or one of torch that follows Megatron's optimizer.
        optimizers: those it follows.
    """

    def __init__(self, scheduler: Any, optimizers: Any, gradient: GradientState | None = None) -> None:
        super().__init__(scheduler, optimizers, gradient=gradient, processes=1)

    def step(self, *args: Any, **kwargs: Any) -> None:
        """Nothing: the engine has moved it."""

    def get_last_lr(self) -> list[float]:
        """Learning rate of each group of parameters."""
        ours = getattr(self.scheduler, "get_last_lr", None)
        if ours is not None:
            return list(ours())
        return [float(group["lr"]) for group in self.scheduler.optimizer.param_groups]
