"""What a result is like beyond its values: memory, gradients, devices, modes, containers, DTensors."""

from __future__ import annotations

import re
import time
from collections import OrderedDict, namedtuple
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from accel_ops import (
    broadcast,
    broadcast_object_list,
    gather,
    gather_object,
    pad_across_processes,
    recent_calls,
    reduce,
    scatter,
    where_is_everyone,
)
from accel_state import PartialState
from accel_state.errors import ShapeMismatch, UnknownKind
from accel_testing.processes import Processes

Pair = namedtuple("Pair", "first second")


@dataclass(frozen=True)
class Output:
    logits: torch.Tensor
    states: Any


def rank() -> int:
    return PartialState(cpu=True).process_index


def containers() -> None:
    one = torch.tensor([float(rank())])
    data = Output(one, OrderedDict(b=Pair(one, [one]), a=(one, torch.return_types.max((one, one)))))
    gathered = gather(data)
    assert type(gathered) is Output
    assert list(gathered.states) == ["b", "a"]
    assert type(gathered.states["b"]) is Pair
    assert type(gathered.states["a"][1]) is torch.return_types.max
    assert gathered.states["a"][1].indices.tolist() == [0.0, 1.0]
    assert gather(torch.tensor([[1, 2]]).max(1)).values.tolist() == [2, 2]


def memory() -> None:
    """No result holds the memory of another, whatever way it came."""
    data = [torch.ones(8, 16) for _ in range(64)] + [torch.ones(300, 300), torch.ones(20_000)]
    results = [*gather(data), *reduce(data), *gather(data[:64]), *reduce(data[:64]), *scatter(data)]
    assert all(result.untyped_storage().nbytes() == result.nbytes for result in results)


def no_gradients() -> None:
    leaf = torch.ones(2, requires_grad=True)
    for result in (gather(leaf), reduce(leaf), gather([leaf * 2])[0]):
        assert not result.requires_grad
        assert type(result) is torch.Tensor
    parameter = torch.nn.Parameter(torch.full((2,), float(rank())))
    assert broadcast(parameter, src=1) is parameter
    assert parameter.tolist() == [1.0, 1.0]
    assert parameter.requires_grad
    assert parameter.is_leaf
    assert type(gather({"weight": parameter})["weight"]) is torch.Tensor


def in_place() -> None:
    """Every kind of target is overwritten where it lies, also parts of a larger tensor."""
    whole = torch.full((600, 600), float(rank()))
    targets = [whole[:2, :2], whole.t()[300:, 300:], torch.full((2,), rank()), torch.full((400, 400), float(rank()))]
    broadcast(targets, src=1)
    assert all(target.eq(1).all() for target in targets)
    assert whole[0, 5] == rank()
    assert whole[450, 450] == 1
    assert whole[450, 10] == rank()


def lazily_conjugated() -> None:
    value = torch.complex(torch.ones(2), torch.full((2,), 2.0))
    big = torch.complex(torch.ones(200, 200), torch.full((200, 200), 2.0))
    assert gather(value.conj()).imag.eq(-2).all()
    assert gather(big.conj()).imag.eq(-2).all()
    assert reduce(big.conj(), "sum").imag.eq(-4).all()
    assert gather(value.conj().imag).eq(-2).all()


def inference_mode() -> None:
    """Buffers that are kept from call to call work in and out of the mode, whatever the first call was made in."""
    with torch.inference_mode():
        small, large = torch.full((2,), float(rank())), torch.full((300, 300), float(rank()))
        assert gather(small).tolist() == [0.0, 0.0, 1.0, 1.0]
    assert gather([small, large])[0].tolist() == [0.0, 0.0, 1.0, 1.0]
    assert reduce([small, large], "sum")[1].eq(1).all()
    broadcast([small, large], src=1)
    assert small.eq(1).all()
    assert large.eq(1).all()
    with torch.inference_mode():
        parameter = torch.nn.Parameter(torch.ones(2))
        broadcast(parameter)
        normal = gather(torch.ones(1))
    assert normal.is_inference()


def autocast() -> None:
    with torch.autocast("cpu", torch.bfloat16):
        assert reduce([torch.full((3,), 1.0)], "sum")[0].dtype is torch.float32
        assert gather(torch.ones(3)).dtype is torch.float32


def sums_of_small_types() -> None:
    """Bools are "any"; whole numbers wrap as they do in torch; also where they do not fit into the eager header."""
    for size in (3, 70_000, 400_000):
        first_only = torch.zeros(size, dtype=torch.bool)
        first_only[0] = rank() == 0
        total = reduce(first_only, "sum")
        assert total.dtype is torch.bool
        assert total.view(torch.uint8).unique().tolist() == [0, 1]
        assert total.sum() == 1
        numbers = reduce(torch.full((size,), 30_000, dtype=torch.int16), "sum")
        assert numbers.unique().tolist() == [60_000 - 65_536]


def bitwise_equal() -> None:
    generator = torch.Generator().manual_seed(rank())
    for shape in ((50,), (30_000,), (300, 300)):
        mean = reduce(torch.randn(shape, generator=generator))
        first, second = gather(mean.view(1, -1)).view(2, -1).unbind(0)
        assert torch.equal(first, second)


def orders_of_keys() -> None:
    """Dictionaries that were filled in different orders are matched by key."""
    data = {"a": torch.full((1,), 1.0), "b": torch.full((1,), 2.0)}
    if rank():
        data = dict(reversed(data.items()))
    gathered = gather(data)
    assert gathered["a"].tolist() == [1.0, 1.0]
    assert gathered["b"].tolist() == [2.0, 2.0]
    assert list(gathered) == list(data)


def subclasses() -> None:
    class Tagged(torch.Tensor):
        @classmethod
        def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            return super().__torch_function__(func, types, args, kwargs or {})

    tagged = torch.full((2,), float(rank())).as_subclass(Tagged)
    assert gather([tagged])[0].tolist() == [0.0, 0.0, 1.0, 1.0]
    broadcast(tagged, src=1)
    assert tagged.tolist() == [1.0, 1.0]


def padding() -> None:
    mine = rank() + 1
    assert pad_across_processes(torch.ones(mine, 2)).tolist()[mine:] == [[0.0, 0.0]] * (2 - mine)
    assert pad_across_processes(torch.ones(2, mine), dim=-1, pad_index=-1, pad_first=True).shape == (2, 2)
    mask = pad_across_processes(torch.ones(mine, dtype=torch.bool), pad_index=1)
    assert mask.dtype is torch.bool
    assert mask.all()
    scalar, other = torch.tensor(1.0), torch.ones(2, 3)
    kept = pad_across_processes([scalar, other, torch.ones(mine)], dim=0)
    assert kept[0] is scalar
    assert kept[1] is other
    assert pad_across_processes(other, dim=5) is other
    for dtype in (torch.float8_e4m3fn, torch.complex64, torch.bfloat16, torch.int64):
        padded = pad_across_processes(torch.ones(mine).to(dtype), pad_index=2)
        assert padded.dtype is dtype
        assert padded.to(torch.complex64).real.tolist()[mine:] == [2.0] * (2 - mine)


def distributed_tensors() -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

    rank()
    mesh = init_device_mesh("cpu", (2,))
    whole = torch.arange(8.0).reshape(4, 2)
    spread = distribute_tensor(whole, mesh, [Shard(0)])
    gathered = gather({"spread": spread, "plain": torch.ones(1)})
    assert gathered["spread"].equal(torch.cat([whole, whole]))
    assert type(gathered["spread"]) is torch.Tensor
    assert reduce(spread).equal(whole)
    partial = DTensor.from_local(torch.ones(2), mesh, [Partial()])
    assert gather(partial).tolist() == [2.0] * 4
    own = init_device_mesh("cpu", (2, 1), mesh_dim_names=("data", "tensor"))["tensor"]
    for placement in (Shard(0), Shard(1), Replicate()):
        target = distribute_tensor(whole if rank() else whole * 0, own, [placement], src_data_rank=None)
        beside = torch.full((2,), float(rank()))
        broadcast([target, beside], src=1)
        assert target.to_local().equal(distribute_tensor(whole, own, [placement], src_data_rank=None).to_local())
        assert beside.tolist() == [1.0, 1.0]
    with pytest.raises(UnknownKind, match="partial sum"):
        broadcast(partial, src=1)
    with pytest.raises(ShapeMismatch, match="DTensor"):
        gather(spread if rank() else distribute_tensor(whole, mesh, [Replicate()], src_data_rank=None))


def objects() -> None:
    number = rank()
    fp8 = torch.ones(2, 2).to(torch.float8_e4m3fn)
    items = gather_object([number, {"a": (number,)}, fp8, torch.zeros(0, dtype=torch.uint16)] + [7] * number)
    assert items[0] == 0
    assert items[4] == 1
    assert items[5] == {"a": (1,)}
    assert items[-1] == 7
    assert items[2].dtype is torch.float8_e4m3fn
    assert items[2].float().eq(1).all()
    assert items[3].shape == (0,)
    assert gather_object((number, "x")) == [0, "x", 1, "x"]
    assert gather_object([]) == []
    assert len(gather_object(["x" * 100_000 * number])[1]) == 100_000
    assert gather_object(torch.tensor([[number]]))[1].tolist() == [1]
    for length in (1, 100_000):
        given = ["x" * length, number]
        assert broadcast_object_list(given, src=1) is given
        assert given == ["x" * length, 1]
    assert broadcast_object_list([]) == []


def log() -> list[tuple[int, str, str]]:
    rank()
    gather([torch.ones(2)])
    reduce([torch.ones(2)])
    first, second = recent_calls()[-2:]
    assert first.fingerprint != second.fingerprint
    assert recent_calls(1) == (second,)
    # The other process publishes where it is within a tick of its own.
    deadline = time.monotonic() + 250
    while "unknown" in (told := where_is_everyone()) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert "unknown" not in told
    assert re.search(r"ranks? 0", told, re.IGNORECASE), told
    assert "reduce() at " in told
    # Process 0 hosts the store from which the other one reads.
    PartialState().wait_for_everyone()
    return [(call.number, call.operation, str(call.location)) for call in (first, second)]


DETAILS = [
    containers,
    memory,
    no_gradients,
    in_place,
    lazily_conjugated,
    inference_mode,
    autocast,
    sums_of_small_types,
    bitwise_equal,
    orders_of_keys,
    subclasses,
    padding,
    distributed_tensors,
    objects,
]


@pytest.mark.parametrize("detail", DETAILS, ids=lambda detail: detail.__name__)
def test_detail(two: Processes, detail: Any) -> None:
    two.run(detail)


def test_the_log_names_numbers_operations_and_the_lines_of_the_caller(two: Processes) -> None:
    for first, second in two.run(log):
        assert (first[0], second[0]) == (1, 2)
        assert (first[1], second[1]) == ("gather", "reduce")
        line = log.__code__.co_firstlineno + 2
        assert first[2].endswith(f"test_details_of_collectives.py:{line}")
        assert second[2].endswith(f"test_details_of_collectives.py:{line + 1}")
