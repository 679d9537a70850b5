"""Every collective on tensors of a device: over NCCL with a GPU for each process, and over gloo on one GPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from accel_ops import (
    broadcast,
    broadcast_object_list,
    gather,
    gather_object,
    pad_across_processes,
    reduce,
    scatter,
)
from accel_ops.checked_call import PACKED_BYTES
from accel_ops.reduction import REDUCED_PACKED_BYTES
from accel_state import PartialState
from accel_testing.plugin import on_devices, working_on
from accel_testing.processes import Processes

DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.uint8)


def busy(device: torch.device) -> torch.Tensor:
    """Zero, which the device has to compute for a while before what is added to it is known."""
    side = 4096 if device.type == "cuda" else 64
    product = torch.full((side, side), 1.0 / side, device=device)
    for _ in range(4):
        product = product @ product
    return product[0, 0] * 0


def nested(rank: int, device: torch.device) -> dict[str, Any]:
    """Numbers that tell their process, in many dtypes and sizes; none is known when the call begins."""
    late = busy(device)
    kinds = {str(kind): (torch.full((3, 2), float(rank), device=device) + late).to(kind) for kind in DTYPES}
    return {
        **kinds,
        "large": torch.full((PACKED_BYTES // 4 + 1,), float(rank), device=device) + late,
        "empty": torch.zeros(0, 4, device=device),
        "scalar": torch.tensor(float(rank), device=device) + late,
        "crosswise": (torch.full((4, 6), float(rank), device=device) + late).t(),
    }


def check(found: dict[str, Any], values: list[float], device: torch.device, rows: int) -> None:
    """See that each leaf is `rows` copies of its rows, one for each value, on the device; read at once."""
    for name, leaf in found.items():
        assert leaf.device == device, name
        parts = leaf.reshape(1, -1) if rows == 1 else leaf.reshape(rows, -1)
        for part, value in zip(parts, values, strict=True):
            assert part.eq(value).all(), (name, part[:8], value)


def exchange(kind: str, backend: str | None) -> str:
    """Each collective in turn, each result used at once."""
    with working_on(kind):
        state = PartialState(**({} if backend is None else {"backend": backend}))
        device, rank, count = state.device, state.process_index, state.num_processes
        assert device.type == kind
        ranks = [float(other) for other in range(count)]
        check(gather(nested(rank, device)), ranks, device, count)
        check(reduce(nested(rank, device), "sum"), [sum(ranks)], device, 1)
        check(reduce({"mean": nested(rank, device)["large"]}, "mean"), [sum(ranks) / count], device, 1)
        check(reduce({"scaled": nested(rank, device)["scalar"]}, "sum", 2.0), [2 * sum(ranks)], device, 1)
        check(broadcast(nested(rank, device), src=count - 1), [count - 1.0], device, 1)
        to_last = gather(nested(rank, device), dst=count - 1)
        if rank == count - 1:
            check(to_last, ranks, device, count)
        whole = torch.arange(4.0 * count, device=device) + busy(device)
        assert scatter(whole if rank == 0 else None).tolist() == [4.0 * rank + index for index in range(4)]
        padded = pad_across_processes(torch.ones(1 + rank, device=device) + busy(device))
        assert padded.tolist() == [1.0] * (1 + rank) + [0.0] * (count - 1 - rank)
        assert gather_object([rank]) == list(range(count))
        assert broadcast_object_list([rank, "text"], src=count - 1) == [count - 1, "text"]
        assert gather(torch.tensor([rank])).tolist() == list(range(count))
        state.wait_for_everyone()
        return str(state.backend)


@on_devices("cpu", differs="NCCL's kernels are ordered after those that make their tensors, on streams of their own")
def test_each_collective_with_a_device_for_each_process(device: torch.device, gpus: Processes) -> None:
    assert set(gpus.run(exchange, device.type, None)) == {"nccl" if device.type == "cuda" else "gloo"}


@on_devices("cpu", differs="gloo copies through the host and has to wait for the stream; two processes share a GPU")
def test_each_collective_of_two_processes_over_gloo(device: torch.device, two: Processes) -> None:
    assert set(two.run(exchange, device.type, "gloo")) == {"gloo"}


def on_another_stream(kind: str) -> list[float]:
    with working_on(kind):
        device = PartialState().device
        if kind != "cuda":
            return reduce(torch.ones(REDUCED_PACKED_BYTES, device=device), "sum")[:3].tolist()
        with torch.cuda.stream(torch.cuda.Stream(device)):
            return reduce(torch.ones(REDUCED_PACKED_BYTES, device=device) + busy(device), "sum")[:3].tolist()


@on_devices("cpu", differs="the caller works on a stream that is not the default one")
def test_a_collective_is_ordered_with_the_stream_of_its_caller(device: torch.device, gpus: Processes) -> None:
    assert gpus.run(on_another_stream, device.type) == [[float(gpus.count)] * 3] * gpus.count


@pytest.mark.parametrize("operation", [gather, reduce, broadcast])
@on_devices("cpu", differs="a tensor on the host is not what NCCL moves")
def test_tensors_of_the_host_are_moved_beside_those_of_the_device(
    device: torch.device, gpus: Processes, operation: Any
) -> None:
    for host, there in gpus.run(mixed, device.type, operation.__name__):
        assert (host, there) == ("cpu", device.type)


def mixed(kind: str, operation: str) -> tuple[str, str]:
    with working_on(kind):
        device = PartialState().device
        called = {"gather": gather, "reduce": reduce, "broadcast": broadcast}[operation]
        found = called({"host": torch.ones(3), "there": torch.ones(3, device=device)})
        return found["host"].device.type, found["there"].device.type
