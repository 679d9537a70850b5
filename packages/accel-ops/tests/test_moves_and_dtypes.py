"""Moving nested data, and bringing half precision back to float32."""

from __future__ import annotations

import copy
import pickle
from collections import OrderedDict
from typing import Any

import pytest
import torch

from accel_ops import ConvertOutputsToFp32, convert_outputs_to_fp32, convert_to_fp32, send_to_device
from accel_testing.profiling import profile


class Movable:
    """An object with `.to`, as tokenizers return it."""

    def to(self, device: Any, non_blocking: bool = False) -> Any:
        return device, non_blocking


class MovableBlocking:
    def to(self, device: Any) -> Any:
        return device


class Broken:
    def to(self, device: Any, non_blocking: bool = False) -> Any:
        raise TypeError("something else is wrong")


def test_send_to_device_moves_tensors_at_every_depth_and_keeps_other_values() -> None:
    moved = send_to_device({"a": [torch.ones(2), "text"], "b": (torch.ones(1), None)}, "meta")
    assert moved["a"][0].is_meta
    assert moved["a"][1] == "text"
    assert moved["b"][0].is_meta
    assert moved["b"][1] is None


def test_send_to_device_does_not_copy_a_tensor_on_the_device() -> None:
    tensor = torch.ones(2)
    assert send_to_device([tensor], torch.device("cpu"))[0] is tensor
    assert send_to_device(tensor, "cpu") is tensor


def test_send_to_device_calls_the_method_to_of_objects() -> None:
    assert send_to_device(Movable(), "meta") == (torch.device("meta"), False)
    assert send_to_device([Movable()], "meta", non_blocking=True) == [(torch.device("meta"), True)]
    assert send_to_device(MovableBlocking(), "meta", non_blocking=True) == torch.device("meta")


def test_an_error_inside_of_to_is_not_hidden() -> None:
    with pytest.raises(TypeError, match="something else"):
        send_to_device(Broken(), "meta")


def test_packed_sequences_and_modules_move_by_their_own_to() -> None:
    packed = torch.nn.utils.rnn.pack_sequence([torch.ones(2), torch.ones(1)])
    assert send_to_device([packed], "meta")[0].data.is_meta
    assert send_to_device(torch.nn.Linear(2, 2), "meta").weight.is_meta


@pytest.mark.parametrize("skip", ["a", ["a"], {"a"}])
def test_skipped_keys_stay_at_every_depth(skip: Any) -> None:
    data = {"a": torch.ones(1), "b": [{"a": torch.ones(1), "c": torch.ones(1)}], "d": OrderedDict(a=torch.ones(1))}
    moved = send_to_device(data, "meta", skip_keys=skip)
    assert moved["a"] is data["a"]
    assert not moved["b"][0]["a"].is_meta
    assert moved["b"][0]["c"].is_meta
    assert not moved["d"]["a"].is_meta
    assert type(moved["d"]) is OrderedDict


def test_convert_to_fp32_converts_only_half_precision() -> None:
    given = [torch.ones(1, dtype=dtype) for dtype in (torch.float16, torch.bfloat16, torch.float64, torch.int32)]
    converted = convert_to_fp32({"tensors": given, "text": "a", "none": None})
    dtypes = [tensor.dtype for tensor in converted["tensors"]]
    assert dtypes == [torch.float32, torch.float32, torch.float64, torch.int32]
    assert converted["tensors"][2] is given[2]
    assert converted["text"] == "a"
    assert converted["none"] is None


def test_one_tensor_is_converted_without_a_walk() -> None:
    half, double = torch.ones(1, dtype=torch.float16), torch.ones(1, dtype=torch.float64)
    called: list[str] = []
    with profile(lambda frame, event, argument: called.append(frame.f_code.co_name) if event == "call" else None):
        converted, kept = convert_to_fp32(half), convert_to_fp32(double)
    # The block itself ends with two calls.
    assert called[:-2] == ["convert_to_fp32", "convert_to_fp32"]
    assert converted.dtype == torch.float32
    assert kept is double


def test_a_wrapped_forward_converts_and_has_the_original() -> None:
    def forward(tensor: torch.Tensor) -> dict[str, torch.Tensor]:
        """Halve."""
        return {"out": tensor.half()}

    wrapped = convert_outputs_to_fp32(forward)
    assert wrapped(torch.ones(1))["out"].dtype is torch.float32
    assert isinstance(wrapped.__wrapped__, ConvertOutputsToFp32)  # type: ignore[attr-defined]
    assert wrapped.__wrapped__.model_forward is forward  # type: ignore[attr-defined]
    direct = ConvertOutputsToFp32(forward)
    assert direct(torch.ones(1))["out"].dtype is torch.float32
    assert direct.__doc__ == "Halve."


def test_gradients_flow_through_the_conversion() -> None:
    leaf = torch.ones(1, requires_grad=True)
    convert_to_fp32([leaf.half()])[0].backward()
    assert leaf.grad is not None
    assert leaf.grad.item() == 1.0


def test_pickling_a_wrapped_forward_raises_a_typed_error() -> None:
    with pytest.raises(pickle.PicklingError, match="unwrap_model"):
        pickle.dumps(ConvertOutputsToFp32(torch.nn.Identity()))
    with pytest.raises(pickle.PicklingError, match="unwrap_model"):
        copy.deepcopy(ConvertOutputsToFp32(torch.nn.Identity()))
