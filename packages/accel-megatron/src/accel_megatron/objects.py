"""Placeholders for the optimizers, schedules and data that Megatron-LM creates, and wrappers of its objects.

Data are loaders, with micro-batches joined to the batch of a step, or Megatron's own indexed datasets of tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Final

from torch.utils.data import DataLoader, Sampler

from accel_megatron.config import MegatronLMPlugin
from accel_megatron.parallel import parallel_state
from accel_ops import concatenate
from accel_plugins.manifest import ObjectKind
from accel_plugins.wrapped.optimizer import EngineSteppedOptimizer
from accel_plugins.wrapped.scheduler import AcceleratedScheduler
from accel_state.errors import SettingError

if TYPE_CHECKING:
    from accel_state.gradient import GradientState

__all__ = (
    "JoinedLoader",
    "MegatronLMDummyDataLoader",
    "MegatronLMDummyScheduler",
    "MegatronLMOptimizerWrapper",
    "MegatronLMSchedulerWrapper",
    "MegatronLoader",
    "iterators",
    "lengths",
    "provider",
)


class MegatronLMDummyScheduler:
    """A placeholder for the schedule of Megatron-LM, which `MegatronLMPlugin` specifies.

    Args:
        optimizer: its optimizer.
        total_num_steps: number of steps of the schedule, summed over data-parallel processes.
        warmup_num_steps: number of warm-up steps, counted in the same way.
        kwargs: stored for code that reads them.
    """

    placeholder_for: ClassVar[ObjectKind] = ObjectKind.SCHEDULER

    def __init__(
        self, optimizer: Any, total_num_steps: int | None = None, warmup_num_steps: int = 0, **kwargs: Any
    ) -> None:
        self.optimizer = optimizer
        self.total_num_steps = total_num_steps
        self.warmup_num_steps = warmup_num_steps
        self.kwargs = kwargs


class MegatronLMDummyDataLoader:
    """A placeholder for loaders of Megatron's own datasets; pass it three times: for training, validation and test.

    Args:
        dataset_kwargs: paths of the data and their split, with Megatron-LM's names: `data_path` (prefixes of the files,
            optionally each after a weight), `split`, `micro_batch_size`, `seq_length`, `data_cache_path`, `tokenizer`.

    Example:
        >>> data = MegatronLMDummyDataLoader(data_path=["corpus"], split="900,50,50", micro_batch_size=4)
        >>> model, optimizer, train, valid, test = accelerator.prepare(model, optimizer, data, data, data)
    """

    placeholder_for: ClassVar[ObjectKind] = ObjectKind.LOADER

    def __init__(self, **dataset_kwargs: Any) -> None:
        self.dataset_args: dict[str, Any] = dataset_kwargs

    def set_megatron_data_args(self, plugin: Any = None) -> None:
        """Add the arguments to the settings.

        Args:
            plugin: the settings; None: those of the run.
        """
        if plugin is None:
            from accel_state.run_state import AcceleratorState

            plugin = AcceleratorState().megatron_lm_plugin
        plugin.megatron_dataset_flag = True
        plugin.dataset_args.update(self.dataset_args)
        plugin.megatron_lm_default_args.update(self.dataset_args)

    def get_train_valid_test_datasets_provider(self, accelerator: Any) -> Any:
        """The function that returns three datasets for their three lengths.

        Args:
            accelerator: has `state.megatron_lm_plugin`.
        """
        return provider(accelerator.state.megatron_lm_plugin)

    def build_train_valid_test_data_iterators(self, accelerator: Any) -> tuple[Any, Any, Any]:
        """Infinite iterators over batches of training, validation and test data; None for one without data.

        Args:
            accelerator: has `state.megatron_lm_plugin`.
        """
        self.set_megatron_data_args(accelerator.state.megatron_lm_plugin)
        return iterators(accelerator.state.megatron_lm_plugin)


class MegatronLMOptimizerWrapper(EngineSteppedOptimizer):
    """An optimizer of Megatron-LM, which the engine steps; see `EngineSteppedOptimizer`.

    Attributes:
        skipped: whether the engine's last step was skipped because gradients overflowed.
    """

    engine = "Megatron-LM"
    steps_when = "when the model is called"

    def __init__(self, optimizer: Any, gradient: GradientState | None = None) -> None:
        super().__init__(optimizer, gradient)
        self.skipped = False

    @property
    def step_was_skipped(self) -> bool:
        """Whether the last step was skipped because gradients overflowed."""
        return self.skipped


class MegatronLMSchedulerWrapper(AcceleratedScheduler):
    """A scheduler that the engine steps; its own `step` does nothing.

    Args:
        scheduler: Megatron-LM's scheduler, or a torch scheduler of Megatron-LM's optimizer.
        optimizers: its optimizers.
    """

    def __init__(self, scheduler: Any, optimizers: Any, gradient: GradientState | None = None) -> None:
        super().__init__(scheduler, optimizers, gradient=gradient, processes=1)

    def step(self, *args: Any, **kwargs: Any) -> None:
        """Do nothing: the engine has already stepped it."""

    def get_last_lr(self) -> list[float]:
        """The learning rate of each group of parameters."""
        ours = getattr(self.scheduler, "get_last_lr", None)
        if ours is not None:
            return list(ours())
        return [float(group["lr"]) for group in self.scheduler.optimizer.param_groups]


# ---------------------------------------------------------------------------- data


class JoinedLoader:
    """A prepared loader that joins the micro-batches of a step to one batch.

    The last batch of an epoch has the remaining ones. All other attributes are those of the inner loader.

    Args:
        loader: yields micro-batches.
        count: number of micro-batches of a step.

    Attributes:
        micro_batches: that number.
    """

    def __init__(self, loader: Any, count: int) -> None:
        self.base_dataloader = loader
        self.micro_batches = count

    def __iter__(self) -> Iterator[Any]:
        waiting: list[Any] = []
        for batch in self.base_dataloader:
            waiting.append(batch)
            if len(waiting) == self.micro_batches:
                yield concatenate(waiting)
                waiting = []
        if waiting:
            yield concatenate(waiting)

    def __len__(self) -> int:
        return -(-len(self.base_dataloader) // self.micro_batches)

    @property
    def total_batch_size(self) -> int:
        """Number of samples of a step, over all processes."""
        return int(self.base_dataloader.total_batch_size) * self.micro_batches

    def __getattr__(self, name: str) -> Any:
        if name == "base_dataloader":
            raise AttributeError(name)
        return getattr(self.base_dataloader, name)


class MegatronLoader:
    """Infinite batches of one of Megatron's datasets, which is created at the first use.

    Args:
        source: returns the three iterators of training, validation and test data.
        index: index of this one among the three.
        dataset_args: the arguments of the placeholder.
    """

    def __init__(self, source: Any, index: int, dataset_args: Mapping[str, Any]) -> None:
        self._source, self._index = source, index
        self.dataset_args = dataset_args
        self.end_of_dataloader, self.remainder = False, -1

    def __iter__(self) -> Iterator[Any]:
        iterator = self._source()[self._index]
        return iter(()) if iterator is None else iter(iterator)


_DATA_SEED: Final = 1234
_MASKED_DATA_SETTINGS: Final[dict[str, Any]] = {
    "masking_probability": 0.15,
    "short_sequence_probability": 0.1,
    "masking_do_full_word": True,
    "masking_do_permutation": False,
    "masking_use_longer_ngrams": False,
    "masking_use_geometric_distribution": False,
}


def lengths(plugin: MegatronLMPlugin) -> list[int]:
    """Numbers of training, validation and test samples that a training needs.

    Raises:
        SettingError: the length of training is unknown.
    """
    batch = plugin.global_batch_size or 1
    training = plugin.train_samples or (plugin.train_iters or 0) * batch
    if not training:
        raise SettingError(
            "Cannot construct the data sets of Megatron-LM.",
            "The number of training samples is not known.",
            "Pass MegatronLMPlugin(train_iters=...) or train_samples, or a MegatronLMDummyScheduler with its steps.",
        )
    evaluations = training // batch // plugin.eval_interval + 1
    return [training, evaluations * plugin.eval_iters * batch, plugin.eval_iters * batch]


def provider(plugin: MegatronLMPlugin) -> Callable[[Sequence[int]], Sequence[Any]]:
    """The function that returns three datasets for their three lengths: that of the settings, or the default."""
    if plugin.custom_megatron_datasets_provider_function is not None:
        return plugin.custom_megatron_datasets_provider_function

    def build_datasets(train_val_test_num_samples: Sequence[int]) -> Sequence[Any]:
        from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder

        kind, config = _dataset(plugin)
        builder = BlendedMegatronDatasetBuilder(kind, list(train_val_test_num_samples), _is_built_here, config)
        datasets: Sequence[Any] = builder.build()
        return datasets

    return build_datasets


def _is_built_here() -> bool:
    """Every process reads: tensor-parallel processes read the same samples, so that none must be sent."""
    return True


def _dataset(plugin: MegatronLMPlugin) -> tuple[Any, Any]:
    """The dataset class and its configuration."""
    from megatron.core.datasets.bert_dataset import BERTMaskedWordPieceDataset, BERTMaskedWordPieceDatasetConfig
    from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig
    from megatron.core.datasets.t5_dataset import T5MaskedWordPieceDataset, T5MaskedWordPieceDatasetConfig
    from megatron.core.datasets.utils import get_blend_from_list

    megatron_args = plugin.megatron_lm_default_args
    usual = {
        "random_seed": megatron_args.get("seed", _DATA_SEED),
        "sequence_length": megatron_args["seq_length"],
        "blend": get_blend_from_list([str(part) for part in _listed(megatron_args)]),
        "split": megatron_args.get("split", "969,30,1"),
        "path_to_cache": megatron_args.get("data_cache_path"),
        "tokenizer": megatron_args.get("tokenizer"),
    }
    kind = megatron_args["model_type_name"]
    if kind == "bert":
        more = {
            **_MASKED_DATA_SETTINGS,
            "masking_max_ngram": 3,
            "classification_head": bool(megatron_args["bert_binary_head"]),
        }
        return BERTMaskedWordPieceDataset, BERTMaskedWordPieceDatasetConfig(**usual, **more)
    if kind == "t5":
        more = {
            **_MASKED_DATA_SETTINGS,
            "masking_max_ngram": 10,
            "sequence_length_decoder": megatron_args["decoder_seq_length"],
        }
        return T5MaskedWordPieceDataset, T5MaskedWordPieceDatasetConfig(**usual, **more)
    marks = {
        name: bool(megatron_args.get(name, False))
        for name in ("reset_position_ids", "reset_attention_mask", "eod_mask_loss")
    }
    # The train step creates masks in the form that it needs.
    return GPTDataset, GPTDatasetConfig(**usual, **marks, create_attention_mask=False)


def _listed(megatron_args: dict[str, Any]) -> list[Any]:
    path = megatron_args.get("data_path")
    if not path:
        raise SettingError(
            "Cannot construct the data sets of Megatron-LM.",
            "The path of the data is missing.",
            'Pass MegatronLMDummyDataLoader(data_path=["prefix of the files"]).',
        )
    return [path] if isinstance(path, str) else list(path)


def iterators(plugin: MegatronLMPlugin) -> tuple[Any, Any, Any]:
    """Infinite iterators over training, validation and test data; None for one without data."""
    datasets = provider(plugin)(lengths(plugin))
    begun = list(plugin.consumed_samples or (0, 0, 0))
    endless = [
        None if dataset is None else _endless(dataset, plugin, consumed)
        for dataset, consumed in zip(datasets, begun, strict=True)
    ]
    return endless[0], endless[1], endless[2]


def _endless(dataset: Any, plugin: MegatronLMPlugin, consumed: int) -> Iterator[Any]:
    per_process = (plugin.micro_batch_size or 1) * plugin.num_micro_batches
    sampler = _Share(len(dataset), consumed, per_process)
    loader: DataLoader[Any] = DataLoader(dataset, batch_sampler=sampler, pin_memory=False)
    while True:
        yield from loader


class _Share(Sampler[list[int]]):
    """Batches of one process: each step is a consecutive range of samples, divided among data-parallel processes.

    Args:
        total: number of samples of the data.
        consumed: number of samples that were used before.
        size: number of samples of a step on one process.
    """

    def __init__(self, total: int, consumed: int, size: int) -> None:
        ways: int = parallel_state.get_data_parallel_world_size()
        self._total, self._size = total, size
        self._rank = parallel_state.get_data_parallel_rank()
        self._step = size * ways
        self._begin = consumed % max(total - total % self._step, 1)
        if total < self._step:
            raise SettingError(
                f"Cannot draw a step of {self._step} samples.",
                f"The data set has {total}.",
                "Use smaller batches or more data.",
            )

    def __iter__(self) -> Iterator[list[int]]:
        for begin in range(self._begin, self._total - self._step + 1, self._step):
            first = begin + self._rank * self._size
            yield list(range(first, first + self._size))
        self._begin = 0

    def __len__(self) -> int:
        return self._total // self._step
