"""Sequence sharding by DeepSpeed (Ulysses): shards of sequences, and in attention some heads over the full sequence.

DeepSpeed replaces the attention of transformers, so it supports only models of transformers.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, Final

import deepspeed
import deepspeed.runtime.sequence_parallel.parallel_state_sp as groups
from deepspeed.runtime.sequence_parallel.ulysses_sp import UlyssesSPAttentionHF, UlyssesSPDataLoaderAdapter

from accel_state.errors import Conflict, DataError, NotOffered, NotReady

if TYPE_CHECKING:
    import torch
    from torch.nn import Module

    from accel_state.mesh import ParallelismConfig

__all__ = ("SequenceShardedLoader", "Ulysses")

_REQUIRED_INPUTS: Final = ("input_ids", "labels", "position_ids")


class Ulysses:
    """Sequence parallelism of one model.

    Args:
        parallelism_config: the number of processes that share a sequence, and options.
        device: the device of the batches.
    """

    def __init__(self, parallelism_config: ParallelismConfig, device: torch.device) -> None:
        self.count = parallelism_config.sp_size or 1
        self.device = device
        self._options: Any = parallelism_config.sp_handler
        self._replaced: tuple[str, Any] | None = None

    @property
    def length(self) -> int | None:
        """Number of tokens of every sequence, or None when they differ."""
        length: int | None = None if self._options.sp_seq_length_is_variable else self._options.sp_seq_length
        return length

    @property
    def ready(self) -> bool:
        """Whether there is a model with sharded sequences."""
        return self._replaced is not None

    def shard(self, model: Module, samples: int) -> Any:
        """Make a model's attention work on sharded sequences; called on every process.

        Args:
            model: a model of transformers.
            samples: number of samples in a batch of one process.

        Returns:
            The object from which DeepSpeed gets its process groups.

        Raises:
            NotOffered: the model is not a model of transformers.
            Conflict: its attention cannot be sharded, or another model is already sharded.
        """
        failure = f"Cannot shard the sequences of {type(model).__name__} with DeepSpeed (sp_size={self.count})."
        config = getattr(model, "config", None)
        name = getattr(config, "_attn_implementation", None)
        if config is None or name is None:
            raise NotOffered(
                failure,
                "DeepSpeed shards sequences only for models of transformers.",
                "Set sp_backend='torch', or sp_size=1.",
            )
        if self.ready:
            raise Conflict(
                failure,
                "DeepSpeed shards sequences for only one model, and another one is already prepared.",
                "Train this model in a separate run.",
            )
        self._replaced = self._registered(failure, model, self._options.sp_attn_implementation or name, samples)
        return groups

    def _registered(self, failure: str, model: Module, name: str, samples: int) -> tuple[str, Any]:
        from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

        before = ALL_ATTENTION_FUNCTIONS.get(name)
        deepspeed.init_distributed(auto_mpi_discovery=False, verbose=False)
        try:
            UlyssesSPAttentionHF.register_with_transformers(
                model, name, self.count, samples, self.length, self.length is None
            )
        except ValueError as error:
            groups._release_sequence_parallel_groups()
            raise Conflict(
                failure,
                f"DeepSpeed refuses: {error}",
                "Create the model with attn_implementation='sdpa' or a flash attention, and a number of heads that "
                "sp_size divides.",
            ) from error
        return name, before

    def loader(self, loader: Any) -> SequenceShardedLoader:
        """Wrap a loader; its sequences are sharded."""
        return SequenceShardedLoader(loader, self)

    def close(self) -> None:
        """Restore the attention of transformers."""
        if self._replaced is None:
            return
        from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

        name, attention = self._replaced
        ALL_ATTENTION_FUNCTIONS[name] = attention
        self._replaced = None
        groups._release_sequence_parallel_groups()


class SequenceShardedLoader:
    """Yields the batches of all processes of a group, one after another; of each batch, this process's shard.

    Every batch is a mapping of tensors of the shape (samples, tokens), with "input_ids", "labels" and "position_ids".
    "labels" is replaced by "shift_labels": the target of each token.

    Args:
        loader: a prepared loader.
        ulysses: how the sequences are sharded.

    Raises:
        DataError: a batch lacks an entry; raised during iteration.
    """

    def __init__(self, loader: Any, ulysses: Ulysses) -> None:
        self._loader, self._ulysses = loader, ulysses

    def __getattr__(self, name: str) -> Any:
        if name in ("_loader", "_ulysses"):  # the attribute does not exist during unpickling
            raise AttributeError(name)
        return getattr(self._loader, name)

    def __len__(self) -> int:
        return len(self._loader) * self._ulysses.count

    def __iter__(self) -> Iterator[Any]:
        ulysses = self._ulysses
        if not ulysses.ready:
            raise NotReady(
                "Cannot read a loader with sequences that DeepSpeed shards.",
                "Sharding needs the process groups of a prepared model, and no model was prepared.",
                "Prepare model, optimizer and loader before the iteration over the loader.",
            )
        rank, group = groups.get_sequence_parallel_rank(), groups.get_sequence_parallel_group()
        batches = _Once(self._checked())
        adapter: Iterator[Any] = UlyssesSPDataLoaderAdapter(batches, rank, group, ulysses.count, ulysses.device)
        return adapter

    def _checked(self) -> Iterator[Any]:
        length = self._ulysses.length
        for batch in self._loader:
            missing = (
                [name for name in _REQUIRED_INPUTS if name not in batch]
                if hasattr(batch, "keys")
                else list(_REQUIRED_INPUTS)
            )
            if missing:
                raise DataError(
                    "Cannot shard the sequences of a batch with DeepSpeed.",
                    f"It has no {', '.join(missing)}.",
                    "Make the collate function return a dict with these entries; position_ids count the tokens of "
                    "each sample: torch.arange(tokens).",
                )
            tokens = batch["input_ids"].shape[1]
            if tokens % self._ulysses.count or tokens != (length or tokens):
                raise DataError(
                    f"Cannot shard a batch with sequences of {tokens} tokens over {self._ulysses.count} processes.",
                    "All shards must have the same length" + (f", but sp_seq_length is {length}." if length else "."),
                    f"Pad sequences to {length or f'a multiple of {self._ulysses.count}'} tokens.",
                )
            yield dict(batch) if isinstance(batch, Mapping) else {name: batch[name] for name in batch.keys()}  # noqa: SIM118


class _Once:
    """Batches that can be iterated only once: DeepSpeed restarts them at their end, before the next epoch begins."""

    def __init__(self, batches: Iterator[Any]) -> None:
        self._batches = batches

    def __iter__(self) -> Iterator[Any]:
        batches, self._batches = self._batches, iter(())
        return batches
