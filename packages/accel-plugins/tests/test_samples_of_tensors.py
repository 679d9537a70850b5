"""Samples of tensors see writes that torch does not count."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from accel_plugins.checkpoint.background import changed, samples_of

KINDS: list[Callable[[], Tensor]] = [
    lambda: torch.randn(3),
    lambda: torch.tensor(3.0),
    lambda: torch.zeros(0),
    lambda: torch.randn(300, 300),
    lambda: torch.randn(400, 500).t(),
    lambda: torch.randn(64, 64, 3, 3).to(memory_format=torch.channels_last),
    lambda: torch.randn(200, 200, dtype=torch.complex128),
    lambda: torch.randn(200, 200).bfloat16(),
    lambda: torch.arange(40_000, dtype=torch.int64),
    lambda: torch.ones(5, dtype=torch.bool),
]

WRITES: list[Callable[[Tensor], object]] = [
    lambda tensor: tensor.add_(1),
    lambda tensor: tensor.zero_(),
    lambda tensor: tensor.neg_(),
]


@pytest.mark.parametrize("write", WRITES)
def test_writes_into_whole_tensors_are_seen(write: Callable[[Tensor], object]) -> None:
    tensors = [make() for make in KINDS if make().dtype is not torch.bool and make().numel()]
    before = samples_of(tensors)
    assert changed(before, samples_of(tensors)) == []
    for index, tensor in enumerate(tensors):
        version = tensor._version
        write(tensor.data)
        assert tensor._version == version
        assert changed(before, samples_of(tensors)) == list(range(index + 1))


@pytest.mark.parametrize("make", KINDS)
def test_every_element_of_a_small_tensor_is_seen_and_a_bounded_share_of_a_large_one(make: Callable[[], Tensor]) -> None:
    tensor = make()
    before = samples_of([tensor])
    assert before[0].numel() <= max(1 << 14, tensor.numel() // 500)
    for index in range(min(tensor.numel(), 20)) if tensor.numel() <= 1 << 14 else ():
        tensor.data.view(-1)[index] = 0 if tensor.view(-1)[index] else 1
        assert changed(before, samples_of([tensor])) == [0]


@pytest.mark.parametrize("shape", [(2048, 2048), (160, 160), (509, 1018), (1527, 700), (3000, 771)])
@pytest.mark.parametrize("where", [0.0, 0.3, 0.99])
def test_rows_and_columns_of_a_matrix_are_seen(shape: tuple[int, int], where: float) -> None:
    matrix = torch.randn(shape)
    before = samples_of([matrix])
    row, column = int(where * shape[0]), int(where * shape[1])
    for part in (matrix.data[:, column], matrix.data[row]):
        old = part.clone()
        part.zero_()
        assert changed(before, samples_of([matrix])) == [0]
        part.copy_(old)
        assert changed(before, samples_of([matrix])) == []
