"""Samples packed into items, the mask that separates them, and the labels that count."""

from __future__ import annotations

import math
import re
from itertools import chain
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from torch.utils.data import DataLoader

from accel_data import PackedDataset, count_labels, packed_attention_mask, prepare_data_loader
from accel_state import PartialState
from accel_state.errors import DataError, SettingError
from accel_testing.processes import Processes

LIMIT = 8192


def lognormal(count: int) -> Tensor:
    """Lengths with a median of 300 and a sigma of 1."""
    drawn = torch.randn(count, generator=torch.Generator().manual_seed(0), dtype=torch.float64) + math.log(300)
    return drawn.exp().long().clamp(1, LIMIT)


def samples_of(lengths: list[int]) -> Any:
    """Samples whose tokens are their index."""
    return [
        {"input_ids": torch.full((length,), index), "labels": torch.arange(length)}
        for index, length in enumerate(lengths)
    ]


@pytest.mark.parametrize("count", [2000, 20_000])
def test_items_are_full(count: int) -> None:
    lengths = lognormal(count)
    packed = PackedDataset(range(count), lengths, LIMIT)  # type: ignore[arg-type]
    assert int(lengths.sum()) / (len(packed) * LIMIT) >= 0.97
    items = [packed.samples(item) for item in range(len(packed))]
    assert sorted(chain.from_iterable(items)) == list(range(count))
    assert max(int(lengths[item].sum()) for item in items) <= LIMIT
    assert packed.sample_counts == [len(item) for item in items]


def test_an_item_has_its_samples_one_behind_the_other() -> None:
    lengths = [3, 5, 2, 4, 1]
    packed = PackedDataset(samples_of(lengths), lengths, 8)
    assert len(packed) == 2
    seen: list[int] = []
    for number in range(2):
        item, samples = packed[number], packed.samples(number)
        seen += samples
        own = [lengths[sample] for sample in samples]
        assert item["input_ids"].tolist() == [sample for sample in samples for _ in range(lengths[sample])]
        assert item["labels"].tolist() == list(chain.from_iterable(map(range, own)))
        assert item["position_ids"].tolist() == item["labels"].tolist()
        assert item["sequence_ids"].tolist() == [place for place, length in enumerate(own) for _ in range(length)]
        assert item["cu_seqlens"].dtype == torch.int32
        assert item["cu_seqlens"].tolist() == [sum(own[:place]) for place in range(len(own) + 1)]
    assert sorted(seen) == list(range(5))
    keyed = PackedDataset(samples_of(lengths), lengths, 8, keys=["input_ids"])
    assert set(keyed[0]) == {"input_ids", "position_ids", "sequence_ids", "cu_seqlens"}


def test_each_epoch_packs_anew_with_the_same_length() -> None:
    lengths = lognormal(500)
    packed = PackedDataset(range(500), lengths, LIMIT)  # type: ignore[arg-type]
    epochs = []
    for epoch in (0, 1, 0):
        packed.set_epoch(epoch)
        epochs.append([tuple(packed.samples(item)) for item in range(len(packed))])
    assert epochs[0] == epochs[2] != epochs[1]
    assert {frozenset(item) for item in epochs[0]} != {frozenset(item) for item in epochs[1]}
    still = PackedDataset(range(500), lengths, LIMIT, shuffle=False)  # type: ignore[arg-type]
    first = [still.samples(item) for item in range(len(still))]
    still.set_epoch(1)
    assert first == [still.samples(item) for item in range(len(still))]


def test_prepared_loaders_pack_anew_in_each_epoch() -> None:
    lengths = lognormal(300).tolist()
    epochs: list[list[list[int]]] = [[], []]
    for index in range(2):
        data = PackedDataset(samples_of(lengths), lengths, LIMIT)
        loader = prepare_data_loader(DataLoader(data, num_workers=1), num_processes=2, process_index=index)
        for epoch in epochs:
            epoch += [batch["input_ids"][0].unique().tolist() for batch in loader]
    assert epochs[0] != epochs[1]
    for epoch in epochs:
        # Only whole items are repeated.
        assert len(epoch) - len({tuple(item) for item in epoch}) <= 1
        assert set(chain.from_iterable(epoch)) == set(range(300))


@pytest.mark.parametrize("causal", [False, True])
def test_the_mask_gives_the_attention_of_each_sample_alone(causal: bool) -> None:
    torch.manual_seed(0)
    lengths = [3, 5, 2]
    sequence_ids = torch.arange(3).repeat_interleave(torch.tensor(lengths))[None]
    q, k, v = torch.randn(3, 1, 4, 10, 8, dtype=torch.float64)
    mask = packed_attention_mask(sequence_ids, causal=causal)
    assert mask.shape == (1, 1, 10, 10)
    packed = scaled_dot_product_attention(q, k, v, attn_mask=mask)
    parts = zip(*(tensor.split(lengths, dim=2) for tensor in (q, k, v)), strict=True)
    alone = torch.cat([scaled_dot_product_attention(a, b, c, is_causal=causal) for a, b, c in parts], dim=2)
    torch.testing.assert_close(packed, alone)
    # Padding attends to itself, so nothing is NaN.
    padded = packed_attention_mask(torch.tensor([0, 0, -1]), causal=causal)
    assert padded.any(dim=1).all()
    assert not padded[2, 0]
    assert not padded[0, 2]


def real_samples(lengths: list[int]) -> list[int]:
    state = PartialState(cpu=True)
    data = PackedDataset(samples_of(lengths), lengths, 64)
    loader: Any = prepare_data_loader(DataLoader(data, batch_size=1))
    seen: list[int] = []
    for batch in loader:
        padding = loader.progress.padding
        if padding is None or padding.of(state.process_index):
            seen += batch["input_ids"][0].unique().tolist()
    return seen


def test_repeated_items_are_marked_as_padding(two: Processes) -> None:
    lengths = lognormal(40).clamp(max=64).tolist()
    packed = PackedDataset(samples_of(lengths), lengths, 64)
    while len(packed) % 2 == 0:
        lengths.append(64)
        packed = PackedDataset(samples_of(lengths), lengths, 64)
    seen = list(chain.from_iterable(two.run(real_samples, lengths)))
    assert sorted(seen) == list(range(len(lengths)))


def test_bad_lengths_are_named() -> None:
    with pytest.raises(SettingError, match="Sample 1 has a length of 9"):
        PackedDataset(samples_of([3, 9]), [3, 9], 8)
    with pytest.raises(SettingError, match=r"data set of 2 samples\.\n  There are 1 lengths"):
        PackedDataset(samples_of([3, 9]), [3], 8)
    wrong = PackedDataset(samples_of([3, 9]), [3, 3], 8)
    with pytest.raises(DataError, match="12 tokens, more than max_tokens=8"):
        wrong[0]


def test_samples_that_cannot_be_packed_are_named() -> None:
    ones = torch.ones(3)
    for first, second, keys, obstacle in [
        ({"x": ones}, {"y": ones}, None, "Cannot pack sample 1.\n  It has no value 'x', but 'y'."),
        ({"x": ones}, {"x": ones}, ("y",), "It has no value 'y'"),
        ({"x": ones, "label": torch.tensor(1)}, {"x": ones}, None, "'label': ()"),
        ({"x": ones, "y": torch.ones(4)}, {"x": ones}, None, "'y': (4,)"),
        (ones, ones, None, "It is of type Tensor, not a dict"),
    ]:
        packed = PackedDataset([first, second], [3, 3], 8, keys=keys, shuffle=False)  # type: ignore[arg-type, list-item]
        with pytest.raises(DataError, match=re.escape(obstacle)):
            packed[0]


def test_lists_are_packed_and_an_empty_data_set_has_no_items() -> None:
    (item,) = PackedDataset([{"x": [1, 2]}, {"x": [3]}], [2, 1], 8, shuffle=False)  # type: ignore[arg-type, list-item]
    assert item["x"].tolist() == [1, 2, 3]
    assert len(PackedDataset([], [], 8)) == 0  # type: ignore[arg-type]


def test_labels_that_count() -> None:
    labels = torch.tensor([[1, -100, 2], [-100, -100, 0]])
    assert count_labels({"labels": labels}).item() == count_labels(labels).item() == 3
    assert count_labels(labels, ignore_index=0).item() == 5
    with pytest.raises(DataError, match="neither a tensor nor a dict"):
        count_labels({"input_ids": labels})
