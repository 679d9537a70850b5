"""Collectives between GPUs over NCCL, whose headers travel on the CPU; skipped where there are no two of them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from accel_ops import broadcast, gather, gather_object, pad_across_processes, reduce
from accel_ops.checked_call import PACKED_BYTES
from accel_state import PartialState
from accel_state.errors import ShapeMismatch
from accel_testing.processes import Processes
from accel_testing.recording_transport import recording

pytestmark = pytest.mark.cuda(differs="NCCL moves tensors between GPUs, and gloo the headers on the host", gpus=2)


@pytest.fixture(scope="module")
def two() -> Iterator[Processes]:
    with Processes(2, timeout=250) as group:
        yield group


def nested(rank: int, device: Any) -> dict[str, Any]:
    return {
        "small": [torch.full((3, index), rank, dtype=torch.float32, device=device) for index in range(4)],
        "half": torch.full((5,), rank, dtype=torch.bfloat16, device=device),
        "large": torch.full((PACKED_BYTES // 4 + 1,), rank, dtype=torch.float32, device=device),
        "scalar": torch.tensor(float(rank), device=device),
    }


def on_gpus() -> list[str]:
    state = PartialState()
    device, rank = state.device, state.process_index
    with recording() as records:
        gathered = gather(nested(rank, device))
    assert gathered["large"].device == device
    assert gathered["scalar"].tolist() == [0.0, 1.0]
    assert torch.equal(gathered["half"], torch.cat([nested(other, device)["half"] for other in range(2)]))
    mean = reduce(nested(rank, device))
    assert all(leaf.eq(0.5).all() for leaf in (*mean["small"], mean["half"], mean["large"], mean["scalar"]))
    sent = broadcast(nested(rank, device), src=1)
    assert sent["large"].eq(1).all()
    assert sent["large"].device == device
    padded = pad_across_processes(torch.ones(1 + rank, device=device))
    assert gather(padded).tolist() == [1.0, 0.0, 1.0, 1.0]
    assert gather_object([rank]) == [0, 1]
    on_the_host = gather(torch.tensor([rank]))
    assert on_the_host.device.type == "cpu"
    assert on_the_host.tolist() == [0, 1]
    return [record.operation for record in records]


def test_nested_data_stay_on_their_gpus(two: Processes) -> None:
    assert two.run(on_gpus) == [["all_gather"] * 3] * 2


def differ() -> str:
    state = PartialState()
    with pytest.raises(ShapeMismatch) as caught:
        gather(torch.ones(2 + state.process_index, device=state.device))
    assert gather(torch.ones(1, device=state.device)).tolist() == [1.0, 1.0]
    return str(caught.value)


def test_a_mismatch_on_gpus_raises_and_later_calls_work(two: Processes) -> None:
    first, second = two.run(differ)
    assert first == second
    assert "(2,) torch.float32 on rank 0" in first
