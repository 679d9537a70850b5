"""Walking nested data: every kind of container, rebuilt as it was."""

from __future__ import annotations

import dataclasses
import types
from collections import OrderedDict, UserDict, defaultdict, namedtuple
from collections.abc import Mapping
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from accel_ops import honor_type, is_namedtuple, is_torch_tensor, recursively_apply
from accel_ops.tree import flatten, leaves_with_paths, rebuild
from accel_state.errors import UnknownKind

Pair = namedtuple("Pair", "first second")


class Typed(NamedTuple):
    image: torch.Tensor
    label: int


@dataclasses.dataclass
class Batch:
    pixels: Any
    name: str = "batch"
    extra: Any = None


@dataclasses.dataclass(frozen=True)
class Frozen:
    values: Any


def plus_one(tensor: torch.Tensor) -> torch.Tensor:
    return tensor + 1


def one() -> torch.Tensor:
    return torch.ones(2)


nested = st.recursive(
    st.builds(lambda number: torch.tensor([float(number)]), st.integers(0, 100)),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(st.text(max_size=2) | st.integers(0, 3), inner, max_size=3)
        | st.builds(Pair, inner, inner)
        | st.builds(Frozen, inner)
    ),
    max_leaves=12,
)


@settings(max_examples=40, deadline=None)
@given(nested)
def test_flattened_data_are_rebuilt_the_same(data: Any) -> None:
    leaves, _ = flatten(data, "test")
    again = rebuild(data, iter(leaves))
    assert type(again) is type(data)
    found = dict(leaves_with_paths(again))
    for (path, before), leaf in zip(leaves_with_paths(data), leaves, strict=True):
        assert before is leaf
        assert found[path] is leaf


@settings(max_examples=40, deadline=None)
@given(nested)
def test_structures_are_equal_for_data_that_differ_in_leaves_alone(data: Any) -> None:
    other = recursively_apply(plus_one, data)
    assert flatten(data, "test")[1] == flatten(other, "test")[1]
    assert hash(flatten(data, "test")[1]) == hash(flatten(other, "test")[1])


@pytest.mark.parametrize(
    ("one_way", "another_way"),
    [([1.0], (1.0,)), ([1.0, 2.0], [1.0]), ({"a": 1.0}, {"b": 1.0}), (Pair(1.0, 2.0), (1.0, 2.0)), ([[1.0]], [1.0])],
)
def test_structures_differ_when_containers_do(one_way: Any, another_way: Any) -> None:
    def tensors(data: Any) -> Any:
        return recursively_apply(torch.tensor, data, test_type=lambda value: isinstance(value, float))

    assert flatten(tensors(one_way), "test")[1] != flatten(tensors(another_way), "test")[1]


@pytest.mark.parametrize(
    "container",
    [
        [one()],
        (one(),),
        {"a": one()},
        OrderedDict(b=one(), a=one()),
        UserDict(a=one()),
        defaultdict(list, a=one()),
        types.MappingProxyType({"a": one()}),
        Pair(one(), one()),
        Typed(one(), 3),
        Batch(one()),
        Frozen([one()]),
    ],
    ids=lambda container: type(container).__name__,
)
def test_each_container_keeps_its_type_and_the_given_one_is_not_changed(container: Any) -> None:
    applied = recursively_apply(plus_one, container)
    assert type(applied) is type(container)
    for path, leaf in leaves_with_paths(applied):
        if is_torch_tensor(leaf):
            assert leaf.tolist() == [2.0, 2.0], path
    for _, leaf in leaves_with_paths(container):
        if is_torch_tensor(leaf):
            assert leaf.tolist() == [1.0, 1.0]


def test_a_defaultdict_keeps_its_factory() -> None:
    applied = recursively_apply(plus_one, defaultdict(list, a=one()))
    assert applied["missing"] == []


def test_the_order_of_an_ordered_dict_is_kept() -> None:
    assert list(recursively_apply(plus_one, OrderedDict(b=one(), a=one()))) == ["b", "a"]


def test_a_dataclass_without_tensors_keeps_its_identity() -> None:
    configuration = Batch(pixels=[1, 2], extra={"a": 1})
    assert recursively_apply(plus_one, {"config": configuration})["config"] is configuration


def test_results_of_torch_keep_their_type() -> None:
    applied = recursively_apply(plus_one, torch.tensor([[1.0, 3.0]]).max(0))
    assert type(applied) is torch.return_types.max
    assert applied.values.tolist() == [2.0, 4.0]


def test_recursively_apply_keeps_other_leaves_and_passes_arguments() -> None:
    def scaled(tensor: torch.Tensor, factor: int, *, offset: int) -> torch.Tensor:
        return tensor * factor + offset

    applied = recursively_apply(scaled, [one(), "text", None, 3], 2, offset=1)
    assert applied[0].tolist() == [3.0, 3.0]
    assert applied[1:] == ["text", None, 3]


def test_recursively_apply_uses_test_type_to_find_leaves() -> None:
    assert recursively_apply(str, {"a": [1, "b"]}, test_type=lambda value: isinstance(value, int)) == {"a": ["1", "b"]}


@pytest.mark.parametrize(
    ("data", "path"),
    [
        ({"a": [one(), {"b": 3}]}, r"The leaf \['a'\]\[1\]\['b'\] is of type builtins.int"),
        (Typed(one(), 3), r"The leaf \.label"),
        (Batch(one()), r"The leaf \.name"),
        (None, r"The value is of type builtins.NoneType"),
    ],
)
def test_the_path_of_an_unsupported_leaf_is_named(data: Any, path: str) -> None:
    with pytest.raises(UnknownKind, match=path) as refused:
        recursively_apply(plus_one, data, error_on_other_type=True)
    assert "plus_one" in str(refused.value)
    with pytest.raises(UnknownKind, match=path):
        flatten(data, "gather")
    with pytest.raises(TypeError):
        flatten(data, "gather")


def test_parameters_and_subclasses_of_tensors_are_leaves() -> None:
    class Tagged(torch.Tensor):
        pass

    tagged = one().as_subclass(Tagged)
    leaves, _ = flatten([torch.nn.Parameter(one()), tagged], "test")
    assert len(leaves) == 2
    assert leaves[1] is tagged


def test_is_namedtuple_distinguishes_named_tuples_from_tuples() -> None:
    assert is_namedtuple(Pair(1, 2))
    assert is_namedtuple(Typed(one(), 1))
    assert not is_namedtuple((1, 2))
    assert not is_namedtuple([1])
    assert not is_namedtuple(one())


def test_honor_type_makes_the_same_kind_of_sequence() -> None:
    assert honor_type([1], iter((1, 2))) == [1, 2]
    assert honor_type((), iter((1, 2))) == (1, 2)
    made = honor_type(Pair(1, 2), iter((3, 4)))
    assert isinstance(made, Pair)
    assert made.second == 4


def test_a_user_s_mapping_type_is_rebuilt_from_its_items() -> None:
    class Row(Mapping[str, Any]):
        def __init__(self, items: Mapping[str, Any]) -> None:
            self._items = dict(items)

        def __getitem__(self, key: str) -> Any:
            return self._items[key]

        def __iter__(self) -> Any:
            return iter(self._items)

        def __len__(self) -> int:
            return len(self._items)

    applied = recursively_apply(plus_one, Row({"a": one()}))
    assert isinstance(applied, Row)
    assert applied["a"].tolist() == [2.0, 2.0]
