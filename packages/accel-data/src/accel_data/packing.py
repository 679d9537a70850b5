"""Several samples in one item, one behind the other, and the mask that separates them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Sized
from typing import Any, cast

import torch
from torch import Tensor
from torch.utils.data import Dataset

from accel_data.order import permutation
from accel_data.token_batches import generator_of
from accel_data.token_plan import Buckets, as_lengths, best_fit
from accel_state.errors import DataError, SettingError

__all__ = ("PackedDataset", "count_labels", "packed_attention_mask")


class PackedDataset(Dataset[dict[str, Tensor]]):
    """Items of at most `max_tokens` tokens, each of which has several samples of a data set.

    The samples are dicts of 1-D tensors, or lists, of one length. An item has their values one behind the other, and:

    - `position_ids`: (tokens,), int64: the position of a token in its sample;
    - `sequence_ids`: (tokens,), int64: the number of its sample in the item;
    - `cu_seqlens`: (samples + 1,), int32: where each sample begins, and the end of the last one.

    Samples of similar length exchange their places in each epoch. The number of items is the same in all of them.

    Args:
        dataset: a map-style data set of dicts.
        lengths: the tokens of each sample: a list, an array or a tensor of integers.
        max_tokens: tokens of an item at most.
        keys: the values to use; None uses those of the first sample of the item.
        shuffle: pack anew in each epoch. Without it, items begin with the longest samples of the data set.
        seed: the seed of the order.

    Attributes:
        epoch: number of the epoch; a prepared loader sets it.

    Raises:
        SettingError: a sample is longer than `max_tokens`, or the number of lengths is not that of the samples.

    Example:
        >>> packed = PackedDataset(texts, [len(text["input_ids"]) for text in texts], max_tokens=4096)
        >>> loader = DataLoader(packed, shuffle=True)
    """

    def __init__(
        self,
        dataset: Dataset[Mapping[str, Tensor]],
        lengths: Any,
        max_tokens: int,
        *,
        keys: Sequence[str] | None = None,
        shuffle: bool = True,
        seed: int = 0,
    ) -> None:
        tokens = as_lengths(lengths, max_tokens)
        if tokens.numel() != len(cast("Sized", dataset)):
            raise SettingError(
                f"Cannot pack a data set of {len(cast('Sized', dataset))} samples.",
                f"There are {tokens.numel()} lengths.",
                "Give one length for each sample.",
            )
        self.dataset, self.max_tokens = dataset, max_tokens
        self.keys = None if keys is None else tuple(keys)
        self.shuffle, self.seed, self.epoch = shuffle, seed, 0
        self._buckets = Buckets(tokens)
        self._places, self._starts = best_fit(self._buckets.places, max_tokens)
        # The samples of all items of an epoch, and the number that an item has in the packing.
        self._packed: tuple[int, Tensor, Tensor] | None = None

    def set_epoch(self, epoch: int) -> None:
        """Pack as in epoch number `epoch`."""
        self.epoch = epoch

    def __len__(self) -> int:
        return len(self._starts) - 1

    def _of_epoch(self) -> tuple[Tensor, Tensor]:
        if self._packed is None or self._packed[0] != self.epoch:
            generator = generator_of(self.seed, self.epoch, "packing") if self.shuffle else None
            samples = self._buckets.samples(generator)[self._places]
            items = torch.arange(len(self)) if generator is None else permutation(len(self), generator)
            self._packed = self.epoch, samples, items
        return self._packed[1:]

    def samples(self, item: int) -> list[int]:
        """The indices of the samples in an item of the current epoch."""
        samples, items = self._of_epoch()
        number = int(items[item])
        own: list[int] = samples[self._starts[number] : self._starts[number + 1]].tolist()
        return own

    @property
    def sample_counts(self) -> list[int]:
        """The number of samples in each item of the current epoch: with how much it counts in exact epochs."""
        starts = torch.tensor(self._starts)
        counts: list[int] = starts.diff()[self._of_epoch()[1].long()].tolist()
        return counts

    def __getitem__(self, item: int) -> dict[str, Tensor]:
        indices = self.samples(item)
        samples = [self.dataset[index] for index in indices]
        keys = self.keys or tuple(samples[0])
        samples = [_values(index, sample, keys) for index, sample in zip(indices, samples, strict=True)]
        lengths = torch.tensor([len(sample[keys[0]]) for sample in samples])
        if int(lengths.sum()) > self.max_tokens:
            raise DataError(
                f"Cannot pack samples {', '.join(map(str, indices))} into one item.",
                f"They have {int(lengths.sum())} tokens, more than max_tokens={self.max_tokens}.",
                "Correct `lengths`: at least one of these samples is longer than its length there.",
            )
        packed = {key: torch.cat([sample[key] for sample in samples]) for key in keys}
        packed["position_ids"] = torch.cat([torch.arange(length) for length in lengths.tolist()])
        packed["sequence_ids"] = torch.arange(len(indices)).repeat_interleave(lengths)
        packed["cu_seqlens"] = torch.cat([torch.zeros(1, dtype=torch.int32), lengths.cumsum(0).int()])
        return packed


def _values(index: int, sample: Any, keys: Sequence[str]) -> dict[str, Tensor]:
    """The values of a sample that are packed.

    Raises:
        DataError: it lacks one of them, or they are not 1-D and of one length.
    """
    if not isinstance(sample, Mapping):
        obstacle = f"It is of type {type(sample).__name__}, not a dict."
    elif missing := [key for key in keys if key not in sample]:
        obstacle = f"It has no value {missing[0]!r}, but {', '.join(map(repr, sample))}."
    else:
        values = {key: torch.as_tensor(sample[key]) for key in keys}
        shapes = {key: tuple(value.shape) for key, value in values.items()}
        if len(set(shapes.values())) == 1 and all(len(shape) == 1 for shape in shapes.values()):
            return values
        obstacle = f"Its values have the shapes {shapes}."
    raise DataError(
        f"Cannot pack sample {index}.",
        obstacle,
        "Give dicts of 1-D tensors or lists with one value for each token, and the names of these values as `keys`.",
    )


def packed_attention_mask(sequence_ids: Tensor, causal: bool = False) -> Tensor:
    """The mask with which each token attends to its own sample only.

    Args:
        sequence_ids: (..., tokens): the sample of each token, as in an item of a `PackedDataset`. Tokens of padding,
            with a number of their own such as -1, attend to each other.
        causal: whether a token attends to earlier ones and itself only.

    Returns:
        A boolean mask, True where a token (row) attends to another (column): (tokens, tokens), or with batches
        (..., 1, tokens, tokens), for any number of heads.

    Example:
        >>> packed_attention_mask(torch.tensor([0, 0, 1])).int().tolist()
        [[1, 1, 0], [1, 1, 0], [0, 0, 1]]
        >>> scaled_dot_product_attention(q, k, v, attn_mask=packed_attention_mask(batch["sequence_ids"], causal=True))
    """
    mask = sequence_ids.unsqueeze(-1) == sequence_ids.unsqueeze(-2)
    if causal:
        mask = mask.tril()
    return mask if sequence_ids.ndim == 1 else mask.unsqueeze(-3)


def count_labels(batch: Any, ignore_index: int = -100) -> Tensor:
    """The number of labels that count in a batch, as a tensor without dimensions, for `accumulate(weight=...)`.

    Args:
        batch: a dict with "labels", or the labels themselves.
        ignore_index: the label that does not count.

    Raises:
        DataError: the batch has no labels.

    Example:
        >>> count_labels({"labels": torch.tensor([[5, -100], [7, 8]])}).item()
        3
        >>> with accelerator.accumulate(model, weight=count_labels(batch)):
        ...     accelerator.backward(model(**batch).loss)
    """
    labels = batch if isinstance(batch, Tensor) else batch.get("labels") if isinstance(batch, Mapping) else None
    if not isinstance(labels, Tensor):
        raise DataError(
            f"Cannot count the labels of a {type(batch).__name__}.",
            "It is neither a tensor nor a dict with the tensor 'labels'.",
            "Give the tensor of labels.",
        )
    return (labels != ignore_index).sum()
