"""Checkpoints that are saved behind training, from a device whose work goes on when calls have returned.

A snapshot tells tensors apart by their memory, of which those of the simulated device have none of their own.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from accel_testing.plugin import on_devices
from accel_torch import Accelerator, ProjectConfiguration

WIDTH = 512


class Run:
    """A model whose every weight changes with every step, by as much as everyone can compute."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.accelerator = Accelerator(project_config=ProjectConfiguration(fsync=False))
        model: Any = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(4)))
        optimizer: Any = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
        self.model, self.optimizer = self.accelerator.prepare(model, optimizer)
        self.inputs = torch.ones(64, WIDTH, device=self.accelerator.device)

    def train(self, steps: int) -> None:
        for _ in range(steps):
            self.accelerator.backward(self.model(self.inputs).square().mean())
            self.optimizer.step()
            self.optimizer.zero_grad()

    def weights(self) -> dict[str, torch.Tensor]:
        state = self.accelerator.get_state_dict(self.model)
        return {name: value.detach().cpu().clone() for name, value in state.items()}


@contextmanager
def elsewhere(device: torch.device) -> Iterator[None]:
    """On a stream of the device that is not the default one."""
    if device.type != "cuda":
        yield
        return
    stream = torch.cuda.Stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        yield
    torch.cuda.current_stream(device).wait_stream(stream)


def delay(device: torch.device) -> None:
    """Work that the next step has to wait for."""
    side = 4096 if device.type == "cuda" else 64
    product = torch.full((side, side), 1.0 / side, device=device)
    for _ in range(4):
        product = product @ product


@pytest.mark.parametrize("aside", [False, True], ids=["default stream", "another stream"])
@on_devices("cpu", differs="the thread that copies has a stream of its own, beside the one that trains")
def test_what_is_saved_is_the_moment_of_the_call(device: torch.device, tmp_path: Path, aside: bool) -> None:
    run = Run()
    with elsewhere(device) if aside else nullcontext():
        run.train(2)
        for number in range(3):
            folder = str(tmp_path / str(number))
            delay(device)
            run.train(1)
            run.accelerator.save_state(folder, async_save=True)
            run.train(2)
            run.accelerator.wait_for_checkpoint()
            expected = plain_after(2 + 3 * number + 1, device)
            run.accelerator.load_state(folder)
            found = run.weights()
            assert all(torch.equal(found[name], expected[name]) for name in expected), number
            run.train(2)


def plain_after(steps: int, device: torch.device) -> dict[str, torch.Tensor]:
    """The weights after so many steps of a run that saves nothing."""
    run = Run()
    run.train(steps)
    return run.weights()


@on_devices("cpu", differs="copies go into pinned memory, which is kept for the next save")
def test_memory_for_copies_is_kept_and_given_back(device: torch.device, tmp_path: Path) -> None:
    run = Run()
    held = []
    for number in range(2):
        run.train(1)
        run.accelerator.save_state(str(tmp_path / str(number)), async_save=True)
        run.accelerator.wait_for_checkpoint()
        saver: Any = run.accelerator.session.saver
        held.append(saver.buffers.nbytes)
        assert {kept.is_pinned() for kept in saver.buffers._kept.values()} == {device.type == "cuda"}
    assert held[0] == held[1] >= 2 * 4 * 4 * WIDTH * WIDTH
    saver.release()
    assert saver.buffers.nbytes == 0


@on_devices("cpu", "simulated", differs="a blocking save reads the device while kernels are still queued")
def test_a_save_waits_for_what_the_device_has_to_do(device: torch.device, tmp_path: Path) -> None:
    run = Run()
    delay(device)
    run.train(3)
    run.accelerator.save_state(str(tmp_path / "now"))
    run.train(1)
    expected = plain_after(3, device)
    run.accelerator.load_state(str(tmp_path / "now"))
    assert all(torch.equal(value, expected[name]) for name, value in run.weights().items())
