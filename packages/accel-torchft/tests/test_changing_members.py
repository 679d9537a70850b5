"""A backend whose members change between two steps: samples, gradients and repeated steps are those of one process."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from accel_data import DataLoaderConfiguration, SeedableRandomSampler
from accel_state.errors import Conflict, DataError, NotOffered, NotReady
from accel_state.run_state import AcceleratorState
from accel_testing.backends.reference_loop import near
from accel_testing.processes import Processes
from accel_torch import Accelerator
from accel_torchft.elastic import share_of_batch

BACKEND = '''
import torch

from accel_plugins import Capabilities, Manifest, Strategy
from accel_torchft.elastic import StepMembers, check_follows_steps, follow_steps, share_of_batch

BATCHES = 3
"""Batches of one process in a step."""

ATTEMPTS = []
"""(members, whether the step counts) of each attempt of a step; afterwards all processes are members."""


class Changing(Strategy):
    """Averages gradients over the members of each step. The others wait, and get the weights."""

    def __init__(self, context, config=None):
        super().__init__(context, config)
        self.number = self.attempt = 0
        self.models, self.parameters = [], []

    def setup(self, bundle):
        self.models += bundle.models
        self.parameters = [p for model in bundle.models for p in model.parameters()]
        self._heal(0)
        return bundle

    def check_loader(self, loader):
        check_follows_steps(loader)

    def wrap_loader(self, loader):
        follow_steps(loader, self.begin_step, lambda: any(model.training for model in self.models))
        return loader

    def share_of_batch(self, loader):
        return share_of_batch(loader)

    def begin_step(self):
        rank = self.context.process.rank
        while rank not in self._now()[0]:
            self._reduce([torch.zeros_like(parameter) for parameter in self.parameters])
            self._end_attempt()
        members, _ = self._now()
        return StepMembers(self.number, len(members), members.index(rank), BATCHES)

    def step(self, optimizer, closure=None):
        members, counts = self._now()
        gradients = [parameter.grad for parameter in self.parameters]
        self._reduce(gradients)
        for gradient in gradients:
            gradient /= len(members)
        stepped = counts and super().step(optimizer, closure)
        self._end_attempt()
        return stepped

    def _now(self):
        everyone = tuple(range(self.context.process.world_size))
        return ATTEMPTS[self.attempt] if self.attempt < len(ATTEMPTS) else (everyone, True)

    def _end_attempt(self):
        members, counts = self._now()
        self._heal(members[0])
        self.number += counts
        self.attempt += 1

    def _reduce(self, tensors):
        for tensor in tensors:
            self.context.process.transport.all_reduce(tensor).wait()

    def _heal(self, rank):
        for parameter in self.parameters:
            self.context.process.transport.broadcast(parameter.data, rank).wait()


MANIFEST = Manifest(
    name="changing", strategy="changing_backend:Changing", capabilities=Capabilities(elastic=True), protocol=3
)
'''

SAMPLES, BATCH, EPOCHS, SEED = 43, 2, 2, 5

ATTEMPTS = [
    ((0, 1, 2), True),
    ((0, 1, 2), False),
    ((0, 2), True),
    ((0, 2), True),
    ((2,), True),
    ((0, 1, 2), True),
    ((0, 1), False),
    ((0, 1), True),
]


@pytest.fixture
def site(tmp_path: Path) -> Path:
    """The folder of an installed backend."""
    info = tmp_path / "changing_backend-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: changing-backend\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[accel.backends]\nchanging = changing_backend:MANIFEST\n")
    (tmp_path / "changing_backend.py").write_text(BACKEND)
    return tmp_path


@pytest.fixture
def backend(site: Path, fresh_state: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The backend, in this process."""
    monkeypatch.syspath_prepend(str(site))
    yield
    AcceleratorState._reset_state(True)
    sys.modules.pop("changing_backend", None)


def data() -> TensorDataset:
    drawn = torch.Generator().manual_seed(3)
    return TensorDataset(torch.arange(SAMPLES), torch.randn(SAMPLES, 4, generator=drawn))


def model_of_the_run() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))


def train(site: str, attempts: list[Any], accumulation: int) -> tuple[list[Any], dict[int, list[int]]]:
    """Final weights, and the samples of each step that counted."""
    sys.path.insert(0, site)
    import changing_backend

    changing_backend.ATTEMPTS = attempts
    accelerator = Accelerator(
        cpu=True,
        backend="changing",
        gradient_accumulation_steps=accumulation,
        dataloader_config=DataLoaderConfiguration(data_seed=SEED),
    )
    plain = model_of_the_run()
    model, optimizer, loader = accelerator.prepare(
        plain,
        torch.optim.SGD(plain.parameters(), lr=0.1),
        DataLoader(data(), batch_size=BATCH, shuffle=True),
    )
    seen: dict[int, list[int]] = {}
    attempt: list[int] = []
    for _ in range(EPOCHS):
        for ids, inputs in loader:
            with accelerator.accumulate(model):
                share = share_of_batch(loader)
                attempt += ids.tolist()[: share.samples]
                accelerator.backward((model(inputs) ** 2).mean())
                optimizer.step()
                if accelerator.sync_gradients:
                    if not optimizer.step_was_skipped:
                        seen[share.step] = attempt
                    attempt = []
                optimizer.zero_grad()
    return [parameter.flatten().tolist() for parameter in plain.parameters()], seen


def one_process(accumulation: int) -> tuple[list[Any], list[list[int]]]:
    """The same with whole steps, in plain PyTorch."""
    model, dataset = model_of_the_run(), data()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    size, steps = BATCH * 3 * accumulation, []
    for epoch in range(EPOCHS):
        order = SeedableRandomSampler(range(SAMPLES), data_seed=SEED)
        order.set_epoch(epoch)
        ids = list(order)
        for begin in range(0, SAMPLES, size):
            steps.append(ids[begin : begin + size])
            optimizer.zero_grad()
            (model(dataset.tensors[1][steps[-1]]) ** 2).mean().backward()
            optimizer.step()
    return [parameter.flatten().tolist() for parameter in model.parameters()], steps


@pytest.mark.parametrize("accumulation", [1, 2])
def test_members_that_leave_and_return_change_neither_samples_nor_weights(
    three: Processes, site: Path, accumulation: int
) -> None:
    wanted, steps = one_process(accumulation)
    results = three.run(train, str(site), ATTEMPTS, accumulation)
    for weights, _ in results:
        assert weights == near(wanted)
    for number, samples in enumerate(steps):
        read = [sample for _, seen in results for sample in seen.get(number, [])]
        assert sorted(read) == sorted(samples), f"step {number}"


def prepared() -> tuple[Accelerator, nn.Module, Any, Any]:
    accelerator = Accelerator(cpu=True, backend="changing")
    plain = model_of_the_run()
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    return (accelerator, *accelerator.prepare(plain, optimizer, DataLoader(data(), batch_size=BATCH)))


def loop(accelerator: Accelerator, model: nn.Module, loader: Any, **weight: Any) -> None:
    """A training loop that forgot to step."""
    for _, inputs in loader:
        model.train()
        with accelerator.accumulate(model, **weight):
            accelerator.backward(model(inputs).mean())


def test_a_loop_without_accumulate_is_refused(backend: None) -> None:
    accelerator, model, _, loader = prepared()
    _, inputs = next(batches := iter(loader))
    with pytest.raises(NotReady, match=r"accelerator\.accumulate"):
        accelerator.backward(model(inputs).mean())
    del batches


def test_training_with_a_loader_that_does_not_follow_the_steps_is_refused(backend: None) -> None:
    accelerator, model, _, loader = prepared()
    model.eval()
    assert len(list(loader)) == len(range(0, SAMPLES, BATCH))
    with pytest.raises(Conflict, match=r"Call model\.train\(\)"):
        loop(accelerator, model, loader)


def test_weights_of_micro_batches_are_refused(backend: None) -> None:
    accelerator, model, _, loader = prepared()
    with pytest.raises(NotOffered, match="weighted by their number of samples"):
        loop(accelerator, model, loader, weight=3)


def test_a_loop_that_does_not_step_ends_with_an_error(backend: None) -> None:
    accelerator, model, _, loader = prepared()
    with pytest.raises(DataError, match="did not step a prepared optimizer"):
        loop(accelerator, model, loader)


class Stream(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(3))


def test_a_stream_is_refused(backend: None) -> None:
    accelerator = Accelerator(cpu=True, backend="changing")
    with pytest.raises(Conflict, match="reads a stream"):
        accelerator.prepare(DataLoader(Stream()))
