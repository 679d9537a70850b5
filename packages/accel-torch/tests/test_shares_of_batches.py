"""A backend that distributes the batches of a step itself: micro-batches of any sizes make the whole batch's step."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from accel_state.errors import Conflict, NotOffered, NotReady
from accel_state.run_state import AcceleratorState
from accel_testing.backends.reference_loop import near
from accel_torch import Accelerator

BACKEND = '''
import torch

from accel_plugins import BatchShare, Capabilities, Manifest, Strategy
from accel_state.errors import Conflict

SIZES = (1, 3, 2)
"""Samples of the micro-batches of a step."""


class Ragged(Strategy):
    """Cuts each batch into micro-batches of different sizes."""

    share = None

    def check_loader(self, loader):
        if isinstance(loader.dataset, torch.utils.data.IterableDataset):
            raise Conflict("Cannot cut batches.", "The loader reads a stream.", "Use a map-style data set.")

    def wrap_loader(self, loader):
        loader.epoch_reader = self.read
        return loader

    def share_of_batch(self, loader):
        return self.share

    def read(self, loader):
        for step, (batch,) in enumerate(loader.source.open()):
            for number, piece in enumerate(batch.split(SIZES)):
                self.share = BatchShare(step, len(piece), len(batch), 1, number == len(SIZES) - 1)
                yield piece
        self.share = None


class States(Strategy):
    """Declares the capability alone."""


MANIFEST = Manifest(
    name="ragged", strategy="ragged_backend:Ragged", capabilities=Capabilities(elastic=True), protocol=3
)
ALONE = Manifest(name="alone", strategy="ragged_backend:States", capabilities=Capabilities(elastic=True), protocol=3)
'''

BATCH, STEPS = 6, 3


@pytest.fixture(autouse=True)
def backend(tmp_path: Path, fresh_state: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The installed backend."""
    info = tmp_path / "ragged_backend-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: ragged-backend\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(
        "[accel.backends]\nragged = ragged_backend:MANIFEST\nalone = ragged_backend:ALONE\n"
    )
    (tmp_path / "ragged_backend.py").write_text(BACKEND)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield
    AcceleratorState._reset_state(True)
    sys.modules.pop("ragged_backend", None)


def data() -> TensorDataset:
    return TensorDataset(torch.randn(BATCH * STEPS, 4, generator=torch.Generator().manual_seed(3)))


def small() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))


def prepared(name: str = "ragged") -> tuple[Accelerator, nn.Module, Any, Any]:
    accelerator = Accelerator(cpu=True, backend=name)
    model = small()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return (accelerator, *accelerator.prepare(model, optimizer, DataLoader(data(), batch_size=BATCH)))


def whole_steps() -> list[Any]:
    """Weights after the same steps with whole batches, in plain PyTorch."""
    model = small()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for (inputs,) in DataLoader(data(), batch_size=BATCH):
        optimizer.zero_grad()
        (model(inputs) ** 2).mean().backward()
        optimizer.step()
    return [parameter.flatten().tolist() for parameter in model.parameters()]


def test_micro_batches_of_different_sizes_make_the_step_of_the_whole_batch() -> None:
    accelerator, model, optimizer, loader = prepared()
    synchronised = []
    for inputs in loader:
        with accelerator.accumulate(model):
            accelerator.backward((model(inputs) ** 2).mean())
            optimizer.step()
            optimizer.zero_grad()
            synchronised.append(accelerator.sync_gradients)
    assert synchronised == [False, False, True] * STEPS
    assert [parameter.flatten().tolist() for parameter in model.parameters()] == near(whole_steps())


def test_the_share_records_what_the_loop_did() -> None:
    accelerator, model, optimizer, loader = prepared()
    strategy = accelerator.session.strategy
    for number, inputs in enumerate(loader):
        share: Any = strategy.share_of_batch(loader)
        assert (share.accumulated, share.stepped) == (False, False)
        with accelerator.accumulate(model):
            accelerator.backward(model(inputs).mean())
            if number == 2:
                optimizer.step()
        assert (share.accumulated, share.stepped) == (True, number == 2)


def test_a_loop_without_accumulate_is_refused() -> None:
    accelerator, model, _, loader = prepared()
    inputs = next(batches := iter(loader))
    with pytest.raises(NotReady, match=r"accelerator\.accumulate"):
        accelerator.backward(model(inputs).mean())
    del batches


def test_weights_of_micro_batches_are_refused() -> None:
    accelerator, model, _, loader = prepared()
    next(batches := iter(loader))
    with (
        pytest.raises(NotOffered, match="weighted by their number of samples"),
        accelerator.accumulate(model, weight=3),
    ):
        pass
    del batches


def test_training_on_a_batch_without_a_share_is_refused() -> None:
    accelerator, model, _, loader = prepared()
    loader.epoch_reader = None
    next(batches := iter(loader))
    with pytest.raises(Conflict, match=r"Call model\.train\(\)"), accelerator.accumulate(model):
        pass
    del batches


def test_the_capability_without_the_method_is_an_error() -> None:
    accelerator, model, _, loader = prepared("alone")
    next(batches := iter(loader))
    with pytest.raises(NotImplementedError, match=r"States declares .* share_of_batch"), accelerator.accumulate(model):
        pass
    del batches


class Stream(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(3))


def test_the_backend_refuses_a_loader_before_it_is_sharded() -> None:
    accelerator = Accelerator(cpu=True, backend="ragged")
    with pytest.raises(Conflict, match="reads a stream"):
        accelerator.prepare(DataLoader(Stream()))
