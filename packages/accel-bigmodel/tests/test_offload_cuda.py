"""What only a real GPU shows: pinned copies on a stream of their own, and memory that is given back."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from accel_bigmodel import (
    cpu_offload,
    disk_offload,
    dispatch_model,
    infer_auto_device_map,
    init_empty_weights,
    load_checkpoint_and_dispatch,
    save_weights,
)

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no NVIDIA GPU"),
]

WIDTH = 1024
BLOCK = 2 * 4 * (WIDTH * WIDTH + WIDTH)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(self.up(x).relu())


def model_and_output(blocks: int = 12) -> tuple[nn.Sequential, torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(*(Block() for _ in range(blocks))).eval()
    x = torch.randn(4, WIDTH)
    with torch.no_grad():
        return model, x, model(x)


def close(found: torch.Tensor, expected: torch.Tensor) -> bool:
    return torch.allclose(found.cpu(), expected, rtol=1e-3, atol=1e-2)


@pytest.mark.parametrize("ahead", [None, 0])
@pytest.mark.parametrize("where", ["memory", "disk"])
def test_weights_arrive_in_time_and_leave_again(tmp_path: Path, ahead: int | None, where: str) -> None:
    model, x, expected = model_and_output()
    if where == "disk":
        disk_offload(model, tmp_path, 0, max_prefetch_bytes=ahead)
    else:
        cpu_offload(model, 0, max_prefetch_bytes=ahead)
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    with torch.no_grad():
        for _ in range(20):
            assert close(model(x), expected)
    torch.cuda.synchronize()
    assert torch.cuda.max_memory_allocated() - before < 4 * BLOCK + 2**24


def test_a_map_over_gpu_memory_and_disk(tmp_path: Path) -> None:
    model, x, expected = model_and_output()
    device_map = infer_auto_device_map(model, {0: 5 * BLOCK, "cpu": 4 * BLOCK}, ["Block"])
    assert {0, "cpu", "disk"} == set(device_map.values())
    dispatch_model(model, device_map, offload_dir=tmp_path)
    with torch.no_grad():
        for _ in range(3):
            found = model(x.to(0))
            assert found.device == torch.device("cuda", 0)
            assert close(found, expected)


def test_a_checkpoint_in_another_dtype_is_loaded_to_the_gpu(tmp_path: Path) -> None:
    model, x, expected = model_and_output(4)
    save_weights(model.state_dict(), tmp_path, "10MB")
    with init_empty_weights():
        empty = nn.Sequential(*(Block() for _ in range(4))).eval()
    loaded: Any = load_checkpoint_and_dispatch(empty, tmp_path, {"": 0}, dtype=torch.bfloat16)
    assert {p.dtype for p in loaded.parameters()} == {torch.bfloat16}
    with torch.no_grad():
        found = loaded(x.to("cuda", torch.bfloat16)).float().cpu()
    assert (found - expected).norm() / expected.norm() < 0.05


def test_a_model_moves_from_memory_to_the_gpu_in_float64(tmp_path: Path) -> None:
    model, x, _ = model_and_output(2)
    model.double()
    with torch.no_grad():
        expected = model(x.double())
        cpu_offload(model, 0)
        for _ in range(3):
            assert torch.allclose(model(x.double()).cpu(), expected)
