"""The copy of a state for an asynchronous save: equal, apart from the objects, and in buffers that are used again."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from accel_plugins.checkpoint.background import BackgroundSaver, Buffers, copy_state
from accel_plugins.checkpoint.state import CheckpointState
from accel_plugins.manifest import ObjectKind
from accel_state.errors import CheckpointError


class Wrapper(Tensor):
    """A tensor without an address, as those of quantization libraries: its elements are in another tensor."""

    inner: Tensor

    @staticmethod
    def __new__(cls, inner: Tensor) -> Wrapper:
        made: Wrapper = Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype, device=inner.device)  # type: ignore[attr-defined]
        made.inner = inner
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        def unwrapped(value: Any) -> Any:
            return value.inner if isinstance(value, Wrapper) else value

        result = func(*map(unwrapped, args), **(kwargs or {}))
        wraps = isinstance(result, Tensor) and isinstance(args[0], Wrapper)
        return Wrapper(result) if wraps else result


def state_of(tensors: dict[str, Tensor]) -> CheckpointState:
    return CheckpointState({ObjectKind.MODEL: [tensors]})


def model_of(state: CheckpointState) -> dict[str, Any]:
    copied: dict[str, Any] = state.objects[ObjectKind.MODEL][0]
    return copied


def test_tensors_without_an_address_are_never_taken_for_one_another() -> None:
    tensors: dict[str, Tensor] = {str(number): Wrapper(torch.full((3, 7), float(number))) for number in range(50)}
    copied = model_of(copy_state(state_of(tensors), Buffers()))
    assert {name: value.unique().tolist() for name, value in copied.items()} == {str(n): [float(n)] for n in range(50)}


@pytest.mark.parametrize(
    "tensor",
    [
        torch.arange(12.0).view(3, 4).t(),
        torch.complex(torch.arange(4.0), torch.ones(4)).conj(),
        torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last),
        torch.eye(4).to_sparse(),
        torch.tensor(3),
        torch.empty(0, 3),
        nn.Parameter(torch.ones(2)),
    ],
)
def test_a_copy_is_equal_and_apart(tensor: Tensor) -> None:
    expected = tensor.detach().clone()
    copied = model_of(copy_state(state_of({"weight": tensor}), Buffers()))["weight"]
    tensor.data.mul_(0)
    assert not copied.requires_grad
    assert torch.equal(copied.to_dense() if copied.is_sparse else copied, expected.to_dense())


def test_tied_tensors_are_copied_once_and_stay_tied() -> None:
    weight, buffers = torch.ones(100), Buffers()
    copied = model_of(copy_state(state_of({"first": weight, "second": weight, "part": weight[:50]}), buffers))
    assert copied["first"] is copied["second"]
    assert buffers.nbytes == weight.nbytes + weight[:50].nbytes


def test_buffers_that_a_save_does_not_use_are_freed() -> None:
    buffers = Buffers()
    copy_state(state_of({"first": torch.ones(100), "second": torch.ones(50)}), buffers)
    kept = model_of(copy_state(state_of({"first": torch.zeros(100)}), buffers))["first"]
    assert buffers.nbytes == kept.nbytes == 400
    assert model_of(copy_state(state_of({"first": torch.ones(100)}), buffers))["first"] is kept


def test_memory_that_cannot_be_had_is_an_error_and_gives_back_the_rest() -> None:
    buffers = Buffers()
    # A view of one element, of which a copy would have 2^58.
    huge = torch.zeros(1).expand(2**58)
    with pytest.raises(CheckpointError, match="no host memory"):
        copy_state(state_of({"small": torch.ones(100), "huge": huge}), buffers)
    assert buffers.nbytes == 0


def test_an_error_is_raised_once_by_the_next_wait() -> None:
    saver = BackgroundSaver()

    def work() -> None:
        raise ValueError("full")

    saver.start(work)
    with pytest.raises(ValueError, match="full"):
        saver.wait()
    saver.wait()
    assert not saver.busy
