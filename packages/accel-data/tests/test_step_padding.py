"""Leaving out of gathered results exactly the samples that were added."""

from __future__ import annotations

from collections import namedtuple
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from accel_data import Padding, drop_padding
from accel_data.padding import PaddedBatch, PaddingCollate, PaddingMarker

Output = namedtuple("Output", ["logits", "label"])


@settings(deadline=None)
@given(size=st.integers(1, 6), processes=st.integers(1, 6), total=st.integers(0, 36), width=st.integers(1, 3))
def test_what_is_real_stands_first_in_each_part(size: int, processes: int, total: int, width: int) -> None:
    total = min(total, size * processes)
    padding = Padding(total, size, processes)
    real = torch.cat(
        [(torch.arange(size) < (padding.of(process) or 0)).repeat_interleave(width) for process in range(processes)]
    )
    assert int(real.sum()) == total * width
    assert drop_padding(real, padding).all()
    assert drop_padding(real, padding).numel() == total * width


def test_drop_padding_trims_nested_batches() -> None:
    tensor = torch.arange(8).reshape(8, 1)
    trimmed = drop_padding({"a": Output(tensor, [tensor[:, 0]])}, Padding(5, 4, 2))
    assert trimmed["a"].logits.flatten().tolist() == [0, 1, 2, 3, 4]
    assert trimmed["a"].label[0].tolist() == [0, 1, 2, 3, 4]


def test_rows_that_are_no_samples_stay() -> None:
    padding = Padding(5, 4, 2)
    for kept in (torch.tensor(3.0), torch.arange(2), torch.arange(7), torch.arange(0)):
        assert drop_padding(kept, padding) is kept


@pytest.mark.parametrize("shape", [(), (1,), (3,)])
@pytest.mark.parametrize(("total", "real"), [(1, 1), (4, 1), (5, 2), (9, 3), (13, 4)])
def test_one_value_for_a_batch_of_padding_is_dropped(total: int, real: int, shape: tuple[int, ...]) -> None:
    gathered = torch.stack([torch.full(shape[1:], process) for process in range(4)])
    assert len(drop_padding(gathered, Padding(total, 4, 4))) == real


def test_nothing_added_is_nothing_dropped() -> None:
    tensor = torch.arange(8)
    assert drop_padding(tensor, None) is tensor
    assert drop_padding(tensor, Padding(8, 4, 2)) is tensor


def test_counts_by_process() -> None:
    padding = Padding.by_process([2, 1, 0], 2)
    assert padding.total == 3
    assert drop_padding(torch.arange(6), padding).tolist() == [0, 1, 2]
    whole_or_nothing = Padding.by_process([None, 0], 0)
    assert whole_or_nothing.total == -1
    assert drop_padding(torch.arange(6), whole_or_nothing).tolist() == [0, 1, 2]


@pytest.mark.parametrize("collate", [list, tuple])
def test_the_mark_moves_from_the_last_sample_to_the_batch(collate: Any) -> None:
    padding = Padding(3, 2, 2)
    marking = PaddingCollate(collate)
    assert marking([1, 2]) == collate([1, 2])
    marked = marking([1, PaddingMarker(2, padding)])
    assert type(marked) is PaddedBatch
    assert (marked.batch, marked.padding) == (collate([1, 2]), padding)


def test_a_single_sample_is_real_as_a_whole_or_not_at_all() -> None:
    marked = PaddingCollate(lambda sample: sample)(PaddingMarker([1, 2, 3], Padding(1, 1, 2)))
    assert marked.batch == [1, 2, 3]
    assert (marked.padding.of(0), marked.padding.of(1)) == (None, 0)
