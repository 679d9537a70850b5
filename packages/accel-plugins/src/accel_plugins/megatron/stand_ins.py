"""What stands in `prepare` for objects that Megatron-LM makes by itself: its schedule and its data."""

from __future__ import annotations

from typing import Any, ClassVar

from accel_plugins.manifest import Part

__all__ = ("MegatronLMDummyDataLoader", "MegatronLMDummyScheduler")


class MegatronLMDummyScheduler:
    """Stands for the schedule of Megatron-LM, whose form `MegatronLMPlugin` says.

    Args:
        optimizer: the optimizer it follows.
        total_num_steps: length of the schedule, counted over all processes that see different samples.
        warmup_num_steps: length of its beginning, counted likewise.
        kwargs: kept for whoever reads them.
    """

    stands_for: ClassVar[Part] = Part.SCHEDULER

    def __init__(
        self, optimizer: Any, total_num_steps: int | None = None, warmup_num_steps: int = 0, **kwargs: Any
    ) -> None:
        self.optimizer = optimizer
        self.total_num_steps = total_num_steps
        self.warmup_num_steps = warmup_num_steps
        self.kwargs = kwargs


class MegatronLMDummyDataLoader:
    """Stands for loaders of Megatron's own datasets; given three times, for those of training, validation and test.

    Args:
        dataset_kwargs: paths of the data and their split, under the names of Megatron-LM: `data_path` (prefixes of
            the files, with weights before them or without), `split`, `micro_batch_size`, `seq_length`,
            `data_cache_path`, `tokenizer`.

    Example:
        >>> data = MegatronLMDummyDataLoader(data_path=["corpus"], split="900,50,50", micro_batch_size=4)
        >>> model, optimizer, train, valid, test = accelerator.prepare(model, optimizer, data, data, data)
    """

    stands_for: ClassVar[Part] = Part.LOADER

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
        from accel_plugins.megatron.datasets import provider

        return provider(accelerator.state.megatron_lm_plugin)

    def build_train_valid_test_data_iterators(self, accelerator: Any) -> tuple[Any, Any, Any]:
        """Endless iterators over batches of training, validation and test data, each None where there are no data.

        Args:
            accelerator: has `state.megatron_lm_plugin`.
        """
        from accel_plugins.megatron.datasets import iterators

        self.set_megatron_data_args(accelerator.state.megatron_lm_plugin)
        return iterators(accelerator.state.megatron_lm_plugin)
