"""What is copied to a device with pinned memory and streams, in which order, and what the host waits for."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from accel_bigmodel import (
    cpu_offload,
    disk_offload,
    dispatch_model,
    init_empty_weights,
    load_checkpoint_and_dispatch,
    prefetch,
    save_weights,
)
from accel_bigmodel.align import AlignDevicesHook
from accel_state.devices.base import DeviceFamily, HostCopies
from accel_state.devices.select import family_of
from accel_testing.simulated_device import NAME, POSSIBLE, simulated_device

if not POSSIBLE:
    pytest.skip("this torch cannot have a device written in Python", allow_module_level=True)

DEVICE = torch.device(NAME, 0)
BLOCKS, WIDTH = 12, 32
BLOCK_BYTES = 4 * WIDTH * (WIDTH + 1)


@dataclass
class Counted:
    """What was asked of the copies to the device."""

    started: list[int] = field(default_factory=list)
    pinned: dict[int, torch.Tensor] = field(default_factory=dict)
    staged: int = 0
    host_waits: int = 0
    waits_of_device: int = 0


class QueuedCopies(HostCopies):
    """Copies that arrive only when the device waits for them: before that the memory holds NaN."""

    counted: Counted

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._queue: list[tuple[Callable[[], torch.Tensor | None], torch.Tensor]] = []
        self._done = 0
        self._lock = threading.Lock()

    def pin(self, tensor: torch.Tensor) -> torch.Tensor:
        pinned = tensor.clone()
        self.counted.pinned[pinned.data_ptr()] = pinned
        return pinned

    def is_pinned(self, tensor: torch.Tensor) -> bool:
        return tensor.data_ptr() in self.counted.pinned

    def start(self, tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        self.counted.started.append(tensor.nbytes)
        self.counted.staged += not self.is_pinned(tensor)
        target = torch.full(tensor.shape, float("nan"), dtype=dtype, device=self.device)
        # As on a device, memory of a copy that nobody waits for can be freed.
        with self._lock:
            self._queue.append((weakref.ref(target), tensor))
        return target

    def mark(self) -> int:
        with self._lock:
            return self._done + len(self._queue)

    def use_after(self, mark: Any) -> None:
        self.counted.waits_of_device += 1
        with self._lock:
            while self._done < mark:
                target_of, source = self._queue.pop(0)
                if (target := target_of()) is not None:
                    target.copy_(source)
                self._done += 1

    def start_after_use(self) -> None:
        self.counted.waits_of_device += 1

    def keep_until_used(self, tensor: torch.Tensor) -> None:
        pass


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> Iterator[Counted]:
    with simulated_device(), torch.no_grad():
        counts = QueuedCopies.counted = Counted()

        def host_waits(*_: Any) -> None:
            counts.host_waits += 1

        monkeypatch.setattr(DeviceFamily, "host_copies", lambda self, device: QueuedCopies(device))
        monkeypatch.setattr(type(torch.get_device_module(NAME)), "synchronize", host_waits)
        monkeypatch.setattr(type(torch.get_device_module(NAME).current_stream()), "synchronize", host_waits)
        yield counts
        prefetch.end_threads()


def model_and_output(blocks: int = BLOCKS, dtype: torch.dtype = torch.float32) -> tuple[nn.Module, Any, Any]:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(blocks))).eval().to(dtype)
    x = torch.randn(2, WIDTH, dtype=dtype)
    return model, x, model(x)


def reader_of(model: Any) -> prefetch.BlockReader:
    hook: AlignDevicesHook = model[0]._hf_hook
    return hook.reader


def close(output: torch.Tensor, expected: torch.Tensor) -> bool:
    return torch.allclose(output.cpu().float(), expected.float(), atol=1e-2 if output.dtype != torch.float32 else 1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("how", ["cpu_offload", "dispatch_model"])
def test_later_passes_only_copy(counted: Counted, how: str, dtype: torch.dtype) -> None:
    model, x, expected = model_and_output(dtype=dtype)
    size = sum(parameter.nbytes for parameter in model.parameters())
    if how == "cpu_offload":
        cpu_offload(model, DEVICE)
    else:
        dispatch_model(model, {str(number): "cpu" if number else 0 for number in range(BLOCKS)})
        size -= sum(parameter.nbytes for parameter in model[0].parameters())  # type: ignore[index]
    assert close(model(x), expected)
    assert reader_of(model[1:] if how == "dispatch_model" else model).wait(60)
    blocks = BLOCKS if how == "cpu_offload" else BLOCKS - 1
    assert len(counted.pinned) == 2 * blocks
    for _ in range(2):
        counted.started.clear()
        counted.staged = counted.host_waits = counted.waits_of_device = 0
        assert close(model(x), expected)
        # One copy of each weight, from pinned memory, and no wait of the host.
        assert (sum(counted.started), len(counted.started), counted.staged) == (size, 2 * blocks, 0)
        assert counted.host_waits == 0
        # Each block is waited for by what computes with it, and its memory by the next copies.
        assert counted.waits_of_device == 2 * blocks
        assert len(counted.pinned) == 2 * blocks
    assert family_of(DEVICE).used_memory() == (0 if how == "cpu_offload" else BLOCK_BYTES * dtype.itemsize // 4)


def test_two_blocks_are_copied_ahead(counted: Counted) -> None:
    model, x, _ = model_and_output()
    cpu_offload(model, DEVICE)
    model(x)
    assert reader_of(model).wait(60)
    started: list[int] = []
    for block in model.children():
        block.register_forward_hook(lambda *_: started.append(len(counted.started) // 2))
    counted.started.clear()
    model(x)
    assert started == [min(number + 3, BLOCKS) for number in range(BLOCKS)]
    assert family_of(DEVICE).peak_memory() <= 4 * BLOCK_BYTES + 8 * 2 * WIDTH * 4


def test_a_share_of_the_host_memory_is_pinned_and_the_rest_is_right(
    counted: Counted, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, x, expected = model_and_output()
    # Memory is taken in powers of two: 4096 bytes for a weight, 128 for a bias.
    monkeypatch.setattr(type(family_of("cpu")), "free_memory", lambda self, index=None: 2 * (3 * (4096 + 128) + 4000))
    cpu_offload(model, DEVICE)
    for _ in range(3):
        assert close(model(x), expected)
        assert reader_of(model).wait(60)
    pinned = sum(1 << (tensor.nbytes - 1).bit_length() for tensor in counted.pinned.values())
    assert 3 * (4096 + 128) <= pinned <= 3 * (4096 + 128) + 4000


def test_weights_on_the_disk_are_not_kept_in_memory(counted: Counted, tmp_path: Path) -> None:
    model, x, expected = model_and_output()
    disk_offload(model, tmp_path, DEVICE)
    for _ in range(3):
        assert close(model(x), expected)
    assert counted.pinned == {}
    assert counted.host_waits == 0


def test_names_of_a_tied_weight_share_a_pinned_copy(counted: Counted) -> None:
    model, x, _ = model_and_output(blocks=4)
    model[3].weight = model[0].weight  # type: ignore[index]
    expected = model(x)
    cpu_offload(model, DEVICE)
    for _ in range(2):
        assert close(model(x), expected)
        assert reader_of(model).wait(60)
    # Three weights and four biases.
    assert len(counted.pinned) == 7


def test_a_loaded_checkpoint_is_pinned_too(counted: Counted, tmp_path: Path) -> None:
    model, x, expected = model_and_output()
    save_weights(model.state_dict(), tmp_path)
    with init_empty_weights():
        empty = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(BLOCKS)))
    device_map = {str(number): "cpu" if number else 0 for number in range(BLOCKS)}
    loaded: Any = load_checkpoint_and_dispatch(empty.eval(), tmp_path, device_map)
    for _ in range(2):
        assert close(loaded(x), expected)
        assert reader_of(loaded[1:]).wait(60)
    assert len(counted.pinned) == 2 * (BLOCKS - 1)


def test_nothing_stays_on_the_device_after_a_pass_that_fails(counted: Counted) -> None:
    model, x, expected = model_and_output()
    cpu_offload(model, DEVICE)
    for _ in range(2):
        assert close(model(x), expected)
        assert reader_of(model).wait(60)
    with pytest.raises(RuntimeError):
        model(torch.randn(2, WIDTH + 1))
    # The traceback of the error refers to the weights of the layer.
    gc.collect()
    assert family_of(DEVICE).used_memory() == 0
    assert close(model(x), expected)


def test_whoever_uses_loaded_weights_too_waits_for_the_copies(counted: Counted) -> None:
    model, x, expected = model_and_output(blocks=1)
    cpu_offload(model, DEVICE)
    hook: AlignDevicesHook = model[0]._hf_hook  # type: ignore[index, assignment]
    # As another thread, which is in the layer at the same time.
    hook.pre_forward(model[0])  # type: ignore[index]
    waits = counted.waits_of_device
    assert close(model(x), expected)
    # It waits for the copies before it computes, and later copies for it; nothing is copied again.
    assert counted.waits_of_device == waits + 2
    assert len(counted.started) == 2
    hook.forward_failed(model[0])  # type: ignore[index]
    assert family_of(DEVICE).used_memory() == 0
