"""`scatter_object`: each process receives its own object, tensors as bytes and everything else pickled."""

from __future__ import annotations

import re
from collections import namedtuple
from typing import Any

import pytest
import torch

from accel_ops import gather, scatter_object
from accel_state import PartialState
from accel_state.errors import SettingError, ShapeMismatch
from accel_testing.processes import Processes

Pair = namedtuple("Pair", ["x", "name"])


def objects_for(rank: int) -> Any:
    """Each process gets other shapes, dtypes and texts."""
    return {
        "pair": Pair(torch.full((rank + 1, 2), float(rank)), f"text of {rank}"),
        "half": [torch.tensor(rank).bfloat16(), torch.empty(0, 3)],
        "numbers": list(range(rank)),
        "sparse": torch.eye(2).to_sparse(),
    }


def received() -> bool:
    state = PartialState(cpu=True)
    for src in (0, 1):
        own = scatter_object([objects_for(0), objects_for(1)] if state.process_index == src else None, src)
        expected = objects_for(state.process_index)
        assert type(own["pair"]).__name__ == "Pair"
        assert own["pair"].name == expected["pair"].name
        assert torch.equal(own["pair"].x, expected["pair"].x)
        assert own["half"][0].dtype == torch.bfloat16
        assert own["half"][1].shape == (0, 3)
        assert own["numbers"] == expected["numbers"]
        assert torch.equal(own["sparse"].to_dense(), torch.eye(2))
    return True


def test_every_process_gets_its_own(two: Processes) -> None:
    assert two.run(received) == [True, True]


def kept_alone() -> int:
    """Bytes of the storage of a small tensor that came beside a large one."""
    state = PartialState(cpu=True)
    both = [{"large": torch.zeros(1000), "small": torch.zeros(2, dtype=torch.int64)}] * 2
    small: torch.Tensor = scatter_object(both if state.is_main_process else None)["small"]
    return small.untyped_storage().nbytes()


def test_a_small_tensor_does_not_keep_the_message(two: Processes) -> None:
    assert two.run(kept_alone) == [16, 16]


def counted_bytes() -> list[int]:
    from accel_testing.recording_transport import recording

    state = PartialState(cpu=True)
    with recording() as records:
        scatter_object([torch.zeros(4000), torch.zeros(4000)] if state.is_main_process else None)
    return [record.nbytes for record in records if record.operation == "scatter"]


def test_a_process_receives_only_its_own_bytes(two: Processes) -> None:
    (sent,), (passed,) = two.run(counted_bytes)
    assert 2 * 16_000 < sent < 2 * (16_000 + 512)
    assert passed == 0


def refused(objects: Any) -> tuple[str, list[int]]:
    state = PartialState(cpu=True)
    with pytest.raises((SettingError, ShapeMismatch)) as caught:
        scatter_object(objects if state.is_main_process else None)
    return str(caught.value), gather(torch.tensor([state.process_index])).tolist()


@pytest.mark.parametrize("objects", [[1], {"a": 1}, None])
def test_what_is_not_one_for_each_is_refused_on_all(two: Processes, objects: Any) -> None:
    for text, ranks in two.run(refused, objects):
        assert "There must be one for each process" in text
        assert ranks == [0, 1]


def called_alone() -> str:
    state = PartialState(cpu=True)
    with pytest.raises(ShapeMismatch) as caught:
        scatter_object([1, 2], operation="my_function") if state.is_main_process else state.wait_for_everyone()
    return str(caught.value)


def test_a_process_that_calls_something_else_is_named(two: Processes) -> None:
    (text,) = set(two.run(called_alone))
    assert re.search(r"my_function\(\) at \S*test_scattered_objects.py:\d+ on rank 0", text), text


def test_one_process_gets_its_object_unchanged(cpu_state: None) -> None:
    value = object()
    assert scatter_object([value]) is value
    with pytest.raises(SettingError, match="one for each process"):
        scatter_object([1, 2])
