"""Batch sizes, devices, shapes, padding, slicing and joining in one process."""

from __future__ import annotations

from collections import namedtuple
from collections.abc import Iterator
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from accel_ops import (
    TensorInformation,
    concatenate,
    find_batch_size,
    find_device,
    get_data_structure,
    get_shape,
    initialize_tensors,
    is_tensor_information,
    listify,
    pad_input_tensors,
    slice_tensors,
)
from accel_state.errors import SettingError, ShapeMismatch, UnknownKind

Pair = namedtuple("Pair", "first second")
X = torch.arange(6.0).reshape(2, 3)


@dataclass
class Sample:
    name: str
    tensor: torch.Tensor


@pytest.mark.parametrize("data", [X, [X], {"a": {"b": X}, "c": torch.ones(9)}, Pair((X,), None)])
def test_the_batch_size_is_that_of_the_first_tensor(data: Any) -> None:
    assert find_batch_size(data) == 2


@pytest.mark.parametrize(
    ("data", "error", "words"),
    [
        ([], SettingError, "empty list"),
        ({}, SettingError, "empty dict"),
        ([[], X], SettingError, "empty list"),
        (None, UnknownKind, "NoneType"),
        ([1, X], UnknownKind, "int"),
        ("text", UnknownKind, "str"),
        (torch.tensor(1), UnknownKind, "without dimensions"),
    ],
)
def test_data_without_a_batch_size_are_refused(data: Any, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        find_batch_size(data)


def test_the_device_is_that_of_the_first_tensor() -> None:
    assert find_device([1, {"a": torch.ones(1, device="meta")}]) == torch.device("meta")
    assert find_device(["text", []]) is None


def test_find_device_reads_nothing_behind_the_first_tensor() -> None:
    class Counting(list[Any]):
        read = 0

        def __iter__(self) -> Iterator[Any]:
            for item in super().__iter__():
                self.read += 1
                yield item

    data = Counting(["text", torch.ones(1), *(torch.ones(1, device="meta") for _ in range(200))])
    assert find_device({"leaves": data}) == torch.device("cpu")
    assert data.read == 2


def test_find_device_looks_into_containers_of_all_kinds() -> None:
    on_meta = torch.ones(1, device="meta")
    for data in (on_meta, (1, [on_meta]), Pair("a", on_meta), MappingProxyType({"a": on_meta}), Sample("a", on_meta)):
        assert find_device(data) == torch.device("meta")
    assert find_device(TensorInformation(torch.Size([1]), torch.float32)) is None


def test_shapes_structures_and_numbers_take_the_place_of_tensors() -> None:
    data = [X, {"a": X.bfloat16(), "b": 1}]
    assert get_shape(data) == [[2, 3], {"a": [2, 3], "b": 1}]
    assert listify(data) == [X.tolist(), {"a": X.tolist(), "b": 1}]
    structure = get_data_structure(data)
    assert structure[1]["a"] == TensorInformation(torch.Size((2, 3)), torch.bfloat16)
    assert is_tensor_information(structure[0])
    made = initialize_tensors(structure)
    assert made[1]["a"].shape == (2, 3)
    assert made[1]["a"].dtype is torch.bfloat16
    assert initialize_tensors(get_data_structure(torch.tensor(1))).shape == ()


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 20), st.integers(1, 8))
def test_padding_for_a_split_adds_zeros_up_to_the_next_multiple(size: int, parts: int) -> None:
    padded = pad_input_tensors({"a": torch.ones(size, 2)}, size, parts)["a"]
    assert padded.shape[0] % parts == 0
    assert 0 <= padded.shape[0] - size < parts
    assert padded[:size].eq(1).all()
    assert padded[size:].eq(0).all()


def test_padding_for_a_split_works_along_other_dimensions() -> None:
    padded = pad_input_tensors(torch.ones(2, 5), 5, 4, dim=1)
    assert padded.shape == (2, 8)
    assert padded[:, 5:].eq(0).all()


def test_padding_for_a_split_does_not_copy_divisible_tensors() -> None:
    tensor = torch.ones(4)
    assert pad_input_tensors(tensor, 4, 2) is tensor


def test_padding_refuses_leaves_that_are_not_tensors() -> None:
    with pytest.raises(UnknownKind, match=r"\[1\]"):
        pad_input_tensors([X, "text"], 2, 4)


def test_slices_are_taken_of_each_tensor() -> None:
    sliced = slice_tensors([X, {"a": "text"}], slice(0, 1), process_index=0, num_processes=2)
    assert sliced[0].tolist() == [[0.0, 1.0, 2.0]]
    assert sliced[1] == {"a": "text"}


def test_concatenating_a_single_item_keeps_its_other_leaves() -> None:
    joined = concatenate([{"a": torch.ones(2), "b": ["text", None]}])
    assert torch.equal(joined["a"], torch.ones(2))
    assert joined["b"] == ["text", None]


def test_nested_data_are_joined_leaf_by_leaf() -> None:
    joined = concatenate([{"a": [X], "b": Pair(X, X)}, {"a": [X], "b": Pair(X, X)}])
    assert joined["a"][0].shape == (4, 3)
    assert isinstance(joined["b"], Pair)
    assert joined["b"].second.shape == (4, 3)
    assert concatenate([X, X], dim=1).shape == (2, 6)
    assert concatenate([torch.tensor(1), torch.tensor(2)]).tolist() == [1, 2]


@pytest.mark.parametrize(
    ("data", "error", "words"),
    [
        ([], SettingError, "empty"),
        (["a", "b"], UnknownKind, "str"),
        ([[X, 1], [X, 2]], UnknownKind, r"\[1\]"),
        ([None, None], UnknownKind, "NoneType"),
        ([{"a": X}, {"b": X}], ShapeMismatch, "keys"),
        ([{"a": [X]}, {"a": [X, X]}], ShapeMismatch, r"\['a'\]"),
        ([[X], X], ShapeMismatch, "types"),
        ([X, [X]], UnknownKind, "list"),
    ],
)
def test_concatenate_refuses_data_that_differ(data: Any, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        concatenate(data)
