"""Plain objects and dictionaries, and a tensor that one process alone has."""

from __future__ import annotations

import socket

import pytest
import torch

from accel_state.errors import SettingError, UnknownKind
from accel_testing.processes import Processes
from accelerate import PartialState
from accelerate.utils import get_pretty_name, merge_dicts, recursive_getattr
from accelerate.utils.operations import copy_tensor_to_devices


def test_attributes_by_dotted_name() -> None:
    assert recursive_getattr(socket, "socket.__name__") == "socket"
    with pytest.raises(AttributeError, match="nothing"):
        recursive_getattr(socket, "socket.nothing")


def test_names_for_people() -> None:
    assert get_pretty_name(PartialState) == "PartialState"
    assert get_pretty_name(get_pretty_name) == "get_pretty_name"
    assert get_pretty_name(5) == "int"
    assert get_pretty_name(Nested.Inner) == "Nested.Inner"
    assert get_pretty_name(Nested.Inner()) == "Nested.Inner"


class Nested:
    class Inner:
        pass


def test_dictionaries_are_put_together() -> None:
    into = {"a": {"b": 1}, "l": [1], "keep": 0}
    assert merge_dicts({"a": {"c": 2}, "l": [2], "new": {"d": 3}}, into) is into
    assert into == {"a": {"b": 1, "c": 2}, "l": [2], "keep": 0, "new": {"d": 3}}
    with pytest.raises(UnknownKind, match="'a'"):
        merge_dicts({"a": {"c": 2}}, {"a": 3})


def replicated() -> None:
    state = PartialState(cpu=True)
    given = torch.arange(3.0) + 5 if state.process_index == 1 else None
    copied = copy_tensor_to_devices(given)
    assert copied.tolist() == [5.0, 6.0, 7.0]
    assert given is None or given.tolist() == [5.0, 6.0, 7.0]
    with pytest.raises(SettingError, match="Every process gave None"):
        copy_tensor_to_devices(None)


def test_a_tensor_of_one_process_is_copied_to_all(two: Processes) -> None:
    two.run(replicated)
