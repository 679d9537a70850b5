"""Attention over a divided sequence gives what attention over the whole one gives, and what cannot be is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from accel_plugins import Context
from accel_plugins.precision import choose
from accel_plugins.transforms import sequence_sharding
from accel_plugins.transforms.sequence_sharding import shard_sequences
from accel_state import PartialState, current
from accel_state.errors import AccelError
from accel_state.gradient import GradientState
from accel_state.mesh import ParallelismConfig
from accel_testing.processes import Processes as Group

pytestmark = pytest.mark.usefixtures("fresh_state")


HEADS, LENGTH, WIDTH = 4, 8, 6


def context_of(axis: str) -> Context:
    PartialState(cpu=True)
    process = current.process()
    parallelism_config = ParallelismConfig(**{f"{axis}_size": 2}, **({"sp_backend": "torch"} if axis == "sp" else {}))
    return Context(process, GradientState(), choose("no", process.family), parallelism_config.get_device_mesh("cpu"))


def tensors(key_heads: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(3)
    shapes = [(2, heads, LENGTH, WIDTH) for heads in (HEADS, key_heads, key_heads)]
    return [torch.randn(shape, generator=generator, requires_grad=True) for shape in shapes]


def mask_of(kind: str) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(8)
    if kind == "none":
        return {}
    if kind == "causal":
        return {"is_causal": True}
    shape = {"mask": (LENGTH, LENGTH), "row": (2, 1, 1, LENGTH), "mask of heads": (2, HEADS, LENGTH, LENGTH)}[kind]
    return {"attn_mask": torch.randn(shape, generator=generator)}


def attend(axis: str, kind: str, key_heads: int) -> dict[str, float]:
    """Largest difference of outputs and gradients from those of the whole sequence."""
    context = context_of(axis)
    whole, divided, options = tensors(key_heads), tensors(key_heads), mask_of(kind)
    options["enable_gqa"] = key_heads != HEADS
    expected = functional.scaled_dot_product_attention(*whole, **options)
    (expected * torch.arange(LENGTH).view(LENGTH, 1)).sum().backward()
    mine = slice(context.process.rank * LENGTH // 2, (context.process.rank + 1) * LENGTH // 2)
    positions = torch.arange(LENGTH)
    with shard_sequences(context, [positions], [0]):
        parts = [tensor[:, :, mine] for tensor in divided]
        output = functional.scaled_dot_product_attention(*parts, **options)
        (output * positions.view(-1, 1)).sum().backward()
    differences = {"output": (output - expected[:, :, mine]).abs().max().item()}
    for name, one, other in zip("qkv", divided, whole, strict=True):
        assert one.grad is not None
        assert other.grad is not None
        differences[name] = (one.grad[:, :, mine] - other.grad[:, :, mine]).abs().max().item()
    return {**differences, "positions": float(len(positions))}


@pytest.mark.parametrize("key_heads", [HEADS, 2])
@pytest.mark.parametrize("kind", ["none", "causal", "mask", "row", "mask of heads"])
@pytest.mark.parametrize("axis", ["cp", "sp"])
def test_outputs_and_gradients_are_those_of_the_whole_sequence(
    two: Group, axis: str, kind: str, key_heads: int
) -> None:
    for answer in two.run(attend, axis, kind, key_heads):
        assert answer.pop("positions") == LENGTH
        assert max(answer.values()) < 1e-4, answer


def collectives(axis: str) -> list[str]:
    context, given = context_of(axis), tensors(HEADS)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile, shard_sequences(context):
        functional.scaled_dot_product_attention(*given).sum().backward()
    names = [event.name for event in profile.events() or () if event.name.startswith("c10d::")]
    return [name.removeprefix("c10d::").strip("_") for name in names]


def test_each_attention_takes_few_collectives(two: Group) -> None:
    assert two.run(collectives, "cp") == [["allgather_into_tensor_coalesced", "reduce_scatter_tensor_coalesced"]] * 2
    assert two.run(collectives, "sp") == [["alltoall_base"] * 4] * 2


def cut(no_restore: bool) -> dict[str, Any]:
    context = context_of("cp")
    first, second = torch.arange(8).view(1, 8), torch.arange(16).view(4, 4)[:, 1:3]
    try:
        with shard_sequences(context, [first, second], [1, 0], [first] if no_restore else None):
            inside = (first.tolist(), second.tolist())
            raise KeyError("left by an error")
    except KeyError:
        pass
    return {"inside": inside, "after": (first.tolist(), second.tolist())}


@pytest.mark.parametrize("no_restore", [False, True])
def test_buffers_are_cut_inside_of_the_block_and_whole_afterwards(two: Group, no_restore: bool) -> None:
    for rank, answer in enumerate(two.run(cut, no_restore)):
        first = [list(range(rank * 4, rank * 4 + 4))]
        second = [[1, 2], [5, 6], [9, 10], [13, 14]]
        assert answer["inside"] == (first, second[rank * 2 : rank * 2 + 2])
        assert answer["after"] == (first if no_restore else [list(range(8))], second)


def refuse(what: str) -> str:
    context = context_of("sp" if what == "heads" else "cp")
    given = torch.zeros(1, 3 if what == "heads" else 4, 4, 2)
    attend, plain = functional.scaled_dot_product_attention, functional.scaled_dot_product_attention
    arguments: dict[str, Any] = {
        "uneven": {"buffers": [torch.zeros(1, 5)], "dims": [1]},
        "no dim": {"buffers": [torch.zeros(4)], "dims": [1]},
        "dims": {"buffers": [torch.zeros(4)]},
        "kept": {"kept_cut": [torch.zeros(4)]},
        "ring": {"exchange": "alltoall"},
    }.get(what, {})
    try:
        with shard_sequences(context, **arguments):
            if what == "nested":
                with shard_sequences(context):
                    pass
            if what in ("heads", "mask"):
                attend = functional.scaled_dot_product_attention
                attend(given, given, given, attn_mask=torch.zeros(4, 4) if what == "mask" else None)
    except AccelError as error:
        assert functional.scaled_dot_product_attention is plain
        return f"{type(error).__name__}: {error.obstacle}" if error.remedy else "an error without a remedy"
    return "nothing was raised"


@pytest.mark.parametrize(
    ("what", "error"),
    [
        ("uneven", "ShapeMismatch"),
        ("no dim", "ShapeMismatch"),
        ("dims", "SettingError"),
        ("kept", "SettingError"),
        ("ring", "NotOffered"),
        ("nested", "NotReady: Another such context is active"),
        ("heads", "ShapeMismatch: The number of heads"),
        ("mask", "ShapeMismatch: Its last dim must be the 8 keys"),
        ("no attention", "NotReady: The model did not call torch.nn"),
    ],
)
def test_what_cannot_be_divided_is_refused(two: Group, what: str, error: str) -> None:
    for answer in two.run(refuse, what):
        assert answer.startswith(error)


def without_axis() -> list[Any]:
    PartialState(cpu=True)
    process = current.process()
    buffer = torch.arange(5)
    with shard_sequences(Context(process, GradientState(), choose("no", process.family)), [buffer], [0]):
        inside = buffer.tolist()
    return [inside, buffer.tolist()]


def test_without_such_an_axis_nothing_is_cut() -> None:
    assert without_axis() == [list(range(5))] * 2


def ring(exchange: str) -> float:
    context = context_of("cp")
    assert context.mesh is not None
    whole = [tensor.detach() for tensor in tensors(HEADS)]
    # torch gives each process one part from the front and one from the back, which evens out causal attention.
    mine = [[0, 1, 6, 7], [2, 3, 4, 5]][context.process.rank]
    expected = functional.scaled_dot_product_attention(*whole)
    buffers = [tensor.clone() for tensor in whole]
    with sdpa_kernel(SDPBackend.MATH), sequence_sharding.by_torch(context.mesh["cp"], buffers, [2, 2, 2], [], exchange):
        output = functional.scaled_dot_product_attention(*buffers)
    assert [torch.equal(one, other) for one, other in zip(buffers, whole, strict=True)] == [True] * 3
    return (output - expected[:, :, mine]).abs().max().item()


@pytest.mark.parametrize("exchange", ["allgather", "alltoall"])
def test_the_block_of_torch_is_used_the_way_it_wants(two: Group, exchange: str) -> None:
    assert max(two.run(ring, exchange)) < 1e-5


def test_the_block_of_torch_needs_a_buffer(two: Group) -> None:
    assert two.run(without_buffers) == ["SettingError"] * 2


def without_buffers() -> str:
    context = context_of("cp")
    assert context.mesh is not None
    try:
        sequence_sharding.by_torch(context.mesh["cp"], [], [], [], "allgather")
    except AccelError as error:
        return type(error).__name__
    return "nothing was raised"
