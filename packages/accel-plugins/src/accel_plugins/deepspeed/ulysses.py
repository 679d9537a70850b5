"""Sequences sharded by DeepSpeed (Ulysses): each process has a shard of them, and in attention some heads in full.

DeepSpeed steps into the attention of transformers, so it shards the sequences of such models only.
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

_NEEDED: Final = ("input_ids", "labels", "position_ids")


class Ulysses:
    """Sequence parallelism of one model.

    Args:
        parallelism_config: how many processes share a sequence, and the options.
        device: device of the batches.
    """

    def __init__(self, parallelism_config: ParallelismConfig, device: torch.device) -> None:
        self.count = parallelism_config.sp_size or 1
        self.device = device
        self._options: Any = parallelism_config.sp_handler
        self._replaced: tuple[str, Any] | None = None

    @property
    def length(self) -> int | None:
        """Tokens of every sequence, or None when they differ."""
        length: int | None = None if self._options.sp_seq_length_is_variable else self._options.sp_seq_length
        return length

    @property
    def ready(self) -> bool:
        """Whether there is a model whose sequences are sharded."""
        return self._replaced is not None

    def shard(self, model: Module, samples: int) -> Any:
        """Let the attention of a model work on sharded sequences; called on every process.

        Args:
            model: one of transformers.
            samples: in a batch of one process.

        Returns:
            What DeepSpeed asks for the groups of processes.

        Raises:
            NotOffered: the model is not of transformers.
            Conflict: its attention cannot be sharded so, or that of another model is.
        """
        asked = f"Cannot shard the sequences of {type(model).__name__} with DeepSpeed (sp_size={self.count})."
        config = getattr(model, "config", None)
        name = getattr(config, "_attn_implementation", None)
        if config is None or name is None:
            raise NotOffered(
                asked, "It shards those of transformers' models only.", "Set sp_backend='torch', or sp_size=1."
            )
        if self.ready:
            raise Conflict(asked, "It shards those of one model, and has one.", "Train the other in a run of its own.")
        self._replaced = self._registered(asked, model, self._options.sp_attn_implementation or name, samples)
        return groups

    def _registered(self, asked: str, model: Module, name: str, samples: int) -> tuple[str, Any]:
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
                asked,
                f"DeepSpeed refuses: {error}",
                "Build the model with attn_implementation='sdpa' or a flash attention, and heads that sp_size divides.",
            ) from error
        return name, before

    def loader(self, loader: Any) -> SequenceShardedLoader:
        """A loader whose sequences are sharded."""
        return SequenceShardedLoader(loader, self)

    def close(self) -> None:
        """Give transformers its attention back."""
        if self._replaced is None:
            return
        from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

        name, attention = self._replaced
        ALL_ATTENTION_FUNCTIONS[name] = attention
        self._replaced = None
        groups._release_sequence_parallel_groups()


class SequenceShardedLoader:
    """The batches of all processes of a group, one after the other, of each the part that is this process's.

    Every batch is a mapping of tensors of the shape (samples, tokens), with "input_ids", "labels" and "position_ids".
    In place of "labels" comes "shift_labels": what each token is to predict.

    Args:
        loader: a prepared one.
        ulysses: how the sequences are sharded.

    Raises:
        DataError: a batch lacks something; while it is read.
    """

    def __init__(self, loader: Any, ulysses: Ulysses) -> None:
        self._loader, self._ulysses = loader, ulysses

    def __getattr__(self, name: str) -> Any:
        if name in ("_loader", "_ulysses"):  # not there yet: it is being unpickled
            raise AttributeError(name)
        return getattr(self._loader, name)

    def __len__(self) -> int:
        return len(self._loader) * self._ulysses.count

    def __iter__(self) -> Iterator[Any]:
        ulysses = self._ulysses
        if not ulysses.ready:
            raise NotReady(
                "Cannot read a loader whose sequences DeepSpeed shards.",
                "It shards them with the groups of a model, and none was prepared.",
                "Prepare model, optimizer and loader before you iterate over the loader.",
            )
        rank, group = groups.get_sequence_parallel_rank(), groups.get_sequence_parallel_group()
        batches = _Once(self._checked())
        adapter: Iterator[Any] = UlyssesSPDataLoaderAdapter(batches, rank, group, ulysses.count, ulysses.device)
        return adapter

    def _checked(self) -> Iterator[Any]:
        length = self._ulysses.length
        for batch in self._loader:
            missing = [name for name in _NEEDED if name not in batch] if hasattr(batch, "keys") else list(_NEEDED)
            if missing:
                raise DataError(
                    "Cannot shard the sequences of a batch with DeepSpeed.",
                    f"It has no {', '.join(missing)}.",
                    "Let the collate function return a dict with them; position_ids count the tokens of each sample: "
                    "torch.arange(tokens).",
                )
            tokens = batch["input_ids"].shape[1]
            if tokens % self._ulysses.count or tokens != (length or tokens):
                raise DataError(
                    f"Cannot shard a batch with sequences of {tokens} tokens over {self._ulysses.count} processes.",
                    "All shards have the same length" + (f", and sp_seq_length is {length}." if length else "."),
                    f"Pad sequences to {length or f'a multiple of {self._ulysses.count}'} tokens.",
                )
            yield dict(batch) if isinstance(batch, Mapping) else {name: batch[name] for name in batch.keys()}  # noqa: SIM118


class _Once:
    """Batches that are read once: DeepSpeed begins anew as soon as they end, and the next epoch is not due then."""

    def __init__(self, batches: Iterator[Any]) -> None:
        self._batches = batches

    def __iter__(self) -> Iterator[Any]:
        batches, self._batches = self._batches, iter(())
        return batches
