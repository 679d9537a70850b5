"""A run that is resumed has the losses of one that was never interrupted, bit for bit."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from accel_state.errors import CheckpointError, NotReady
from accel_testing.fresh import fresh
from accel_testing.processes import Processes
from accel_torch import Accelerator, DataLoaderConfiguration, FullyShardedDataParallelPlugin, ProjectConfiguration

EPOCHS, BATCHES = 2, 5
SAVES = (0, 1, 3, 5, 6, 9)
FEW_SAVES = (3, 5, 9)
"""In an accumulation window of the first epoch, between two epochs, and between two windows of the second one."""


class Stream(IterableDataset[Any]):
    """The samples of a data set in another order in each epoch."""

    def __init__(self, data: TensorDataset) -> None:
        self._data, self._epoch = data, 0

    def set_epoch(self, epoch: int) -> None:
        self._epoch = epoch

    def __iter__(self) -> Iterator[Any]:
        order = torch.randperm(len(self._data), generator=torch.Generator().manual_seed(self._epoch))
        return (self._data[index] for index in order.tolist())


class Run:
    """One start of a training script.

    Args:
        backend: "single", "ddp", "fsdp2" (sharded checkpoints), "fsdp2-full" or "fsdp2-compiled".
        order: "default", "seedable", "dispatched" or "stream": who decides on the order of samples, and who reads them.
        restores: whether the position is restored by the loader; otherwise by `skip_first_batches`.
        accumulate: micro-batches per step.
        seed: of the weights before a load; that of the data is always the same.
        batch: samples of a batch of all processes.
    """

    def __init__(
        self,
        backend: str,
        order: str = "default",
        restores: bool = False,
        accumulate: int = 1,
        seed: int = 0,
        batch: int = 8,
    ) -> None:
        torch.manual_seed(1)
        samples = BATCHES * batch
        data = TensorDataset(torch.randn(samples, 4), torch.randn(samples, 1))
        loading = DataLoaderConfiguration(
            use_seedable_sampler=order == "seedable",
            data_seed=11,
            dispatch_batches={"dispatched": True, "stream": False}.get(order),
            restore_position=restores,
            split_batches=True,
        )
        options: dict[str, Any] = {}
        if backend.startswith("fsdp2"):
            kind = "FULL_STATE_DICT" if backend.endswith("full") else "SHARDED_STATE_DICT"
            options["fsdp_plugin"] = FullyShardedDataParallelPlugin(fsdp_version=2, state_dict_type=kind)
        self.accelerator = Accelerator(
            cpu=True,
            dataloader_config=loading,
            gradient_accumulation_steps=accumulate,
            project_config=ProjectConfiguration(fsync=False),
            dynamo_backend="inductor" if backend.endswith("compiled") else None,
            **options,
        )
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 6), nn.Linear(6, 1))
        first, second = list(model[0].parameters()), list(model[2:].parameters())
        optimizer = torch.optim.AdamW([{"params": second, "lr": 0.02}, {"params": first, "weight_decay": 0.2}], lr=0.05)
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
        given = DataLoader(data, batch, shuffle=True) if order != "stream" else DataLoader(Stream(data), batch)
        self.model, self.optimizer, self.scheduler, self.loader = self.accelerator.prepare(
            model, optimizer, scheduler, given
        )

    def train(self, epoch: int = 0, skip: int = 0, save_at: Mapping[int, str] | None = None) -> list[float]:
        """Losses from a step of an epoch to the end; checkpoints are saved on the way, in a folder for each step."""
        folders = save_at or {}
        losses: list[float] = []
        step = epoch * BATCHES + skip
        for now in range(epoch, EPOCHS):
            if step in folders and step % BATCHES == 0:
                self.accelerator.save_state(folders[step])
            self.loader.set_epoch(now)
            batches = self.accelerator.skip_first_batches(self.loader, skip) if skip and now == epoch else self.loader
            for inputs, targets in batches:
                losses.append(self._step(inputs, targets))
                step += 1
                if step in folders and step % BATCHES:
                    self.accelerator.save_state(folders[step])
        return losses

    def _step(self, inputs: torch.Tensor, targets: torch.Tensor) -> float:
        with self.accelerator.accumulate(self.model):
            loss = (self.model(inputs) - targets).square().mean()
            self.accelerator.backward(loss)
            self.optimizer.step()
            self.scheduler.step()
            self.optimizer.zero_grad()
        return float(loss.item())

    def resume(self, folder: str, done: int, restores: bool, **options: Any) -> list[float]:
        """Losses from a checkpoint to the end."""
        torch.randn(5)
        self.accelerator.load_state(folder, **options)
        epoch, skip = divmod(done, BATCHES)
        return self.train(self.loader.iteration) if restores else self.train(epoch, skip)


ORDERS = ("default", "seedable", "dispatched")


def resumes(
    folder: str, backend: str, accumulate: int, orders: Sequence[str] = ORDERS, steps: Sequence[int] = SAVES
) -> list[str]:
    """What is different after a resume, over all idioms, orders and steps."""
    wrong = []
    for order, restores in itertools.product(orders, (False, True)):
        whole = Run(backend, order, restores, accumulate).train()
        partial = accumulate > 1 and backend.startswith("fsdp2")
        saves = [done for done in steps if not (partial and done % BATCHES % accumulate)]
        folders = {done: f"{folder}/{order}-{restores}-{done}" for done in saves}
        if Run(backend, order, restores, accumulate).train(save_at=folders) != whole:
            wrong.append(f"saving changed the run: {order} {restores}")
        for done, path in folders.items():
            resumed = Run(backend, order, restores, accumulate, seed=9).resume(path, done, restores)
            if resumed != whole[done:]:
                wrong.append(f"{order} restores={restores} step {done}: {resumed} is not {whole[done:]}")
    return wrong


def combinations(*backends: str) -> list[Any]:
    """Backends with and without accumulation, with all orders and steps; and a part of each kind that is quick.

    Who decides on the order of samples does not know the backend, so one backend for each number of processes meets
    all orders.
    """
    every = [
        pytest.param(backend, accumulate, ORDERS, SAVES, marks=pytest.mark.slow)
        for backend in backends
        for accumulate in (1, 2)
    ]
    parts = {"single": (2, ORDERS), "ddp": (2, ORDERS), "fsdp2": (1, ORDERS[:1])}
    return [*every, *((backend, *parts[backend], FEW_SAVES) for backend in backends if backend in parts)]


@pytest.mark.parametrize(("backend", "accumulate", "orders", "steps"), combinations("single", "fsdp2"))
def test_exact_resume_of_one_process(
    one: Processes, tmp_path: Path, backend: str, accumulate: int, orders: Sequence[str], steps: Sequence[int]
) -> None:
    assert one.run(resumes, str(tmp_path), backend, accumulate, orders, steps) == [[]]


@pytest.mark.parametrize(("backend", "accumulate", "orders", "steps"), combinations("ddp", "fsdp2", "fsdp2-full"))
def test_exact_resume_of_two_processes(
    two: Processes, tmp_path: Path, backend: str, accumulate: int, orders: Sequence[str], steps: Sequence[int]
) -> None:
    assert two.run(resumes, str(tmp_path), backend, accumulate, orders, steps) == [[], []]


@pytest.mark.parametrize(
    ("backend", "steps"),
    [
        ("ddp", FEW_SAVES),
        pytest.param("ddp", SAVES, marks=pytest.mark.slow),
        pytest.param("fsdp2", SAVES, marks=pytest.mark.slow),
    ],
)
def test_exact_resume_of_two_processes_that_read_a_stream(
    two: Processes, tmp_path: Path, backend: str, steps: Sequence[int]
) -> None:
    assert two.run(resumes, str(tmp_path), backend, 1, ("stream",), steps) == [[], []]


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_exact_resume_of_two_processes_that_compile(two: Processes, tmp_path: Path) -> None:
    orders = ("seedable", "stream")
    assert two.run(resumes, str(tmp_path), "fsdp2-compiled", 1, orders, timeout=800) == [[], []]


def save_in_a_window(folder: str) -> str:
    run = Run("fsdp2", accumulate=2)
    with run.accelerator.accumulate(run.model):
        run.accelerator.backward(run.model(torch.ones(1, 4)).sum())
    with pytest.raises(NotReady) as caught:
        run.accelerator.save_state(folder)
    return str(caught.value)


def test_partial_gradients_that_cannot_be_saved_are_refused(two: Processes, tmp_path: Path) -> None:
    for message in two.run(save_in_a_window, str(tmp_path / "a")):
        assert "accelerator.sync_gradients is true" in message
    assert list(tmp_path.iterdir()) == []


def train_micro_batches(accelerator: Accelerator, model: nn.Module, optimizer: Any, count: int) -> None:
    for _ in range(count):
        with accelerator.accumulate(model):
            accelerator.backward(model(torch.ones(1, 4)).sum())
            optimizer.step()
            optimizer.zero_grad()


def started(steps: int) -> tuple[Accelerator, nn.Module, Any]:
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=steps)
    model = nn.Linear(4, 1)
    return (accelerator, *accelerator.prepare(model, torch.optim.SGD(model.parameters(), 0.1)))


def test_a_window_is_finished_with_as_many_micro_batches_as_it_began_with(tmp_path: Path) -> None:
    with fresh():
        accelerator, model, optimizer = started(4)
        train_micro_batches(accelerator, model, optimizer, 6)
        accelerator.save_state(str(tmp_path / "in a window"))
        train_micro_batches(accelerator, model, optimizer, 2)
        accelerator.save_state(str(tmp_path / "between two"))
    with fresh():
        accelerator, model, optimizer = started(3)
        before = [parameter.clone() for parameter in model.parameters()]
        with pytest.raises(CheckpointError, match="gradient_accumulation_steps was 4 and is 3"):
            accelerator.load_state(str(tmp_path / "in a window"))
        assert all(map(torch.equal, before, model.parameters()))
        accelerator.load_state(str(tmp_path / "between two"))
        before = [parameter.clone() for parameter in model.parameters()]
        train_micro_batches(accelerator, model, optimizer, 2)
        assert all(map(torch.equal, before, model.parameters()))
        train_micro_batches(accelerator, model, optimizer, 1)
        torch.testing.assert_close(model.weight, before[0] - 0.1)


# ------------------------------------------------------------------- other numbers of processes, other backends


def whole_state(run: Run) -> tuple[dict[str, Any], dict[str, Any]]:
    """Weights and optimizer state by name, whole."""
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict

    model = run.accelerator.unwrap_model(run.model)
    weights = run.accelerator.get_state_dict(run.model)
    options = StateDictOptions(full_state_dict=True)
    state = get_optimizer_state_dict(model, run.optimizer.optimizer, options=options)
    return copy.deepcopy(weights), copy.deepcopy(state)


def save_with(folder: str, backend: str, batch: int) -> Any:
    run = Run(backend, "seedable", batch=batch)
    run.train(epoch=1)
    run.accelerator.save_state(folder)
    return whole_state(run)


def load_with(folder: str, backend: str, batch: int) -> tuple[Any, list[float], Any]:
    """The state that was loaded, then the losses of an epoch and the weights after it."""
    run = Run(backend, "seedable", seed=9, batch=batch)
    run.accelerator.load_state(folder, allow_missing=("random_states",))
    state = whole_state(run)
    run.loader.set_epoch(3)
    torch.manual_seed(4)
    run.model.eval()
    losses = [run._step(inputs, targets) for inputs, targets in run.loader]
    # The parts of a batch are equal, so the mean over processes is the loss of the batch.
    mean = run.accelerator.reduce(torch.tensor(losses), "mean").tolist()
    return state, mean, copy.deepcopy(run.accelerator.get_state_dict(run.model))


def same(first: Any, second: Any) -> bool:
    if isinstance(first, torch.Tensor):
        return torch.equal(first, second)
    if isinstance(first, dict):
        return first.keys() == second.keys() and all(same(value, second[key]) for key, value in first.items())
    if isinstance(first, (list, tuple)):
        return len(first) == len(second) and all(map(same, first, second))
    return bool(first == second)


def changes_of_place(*pairs: tuple[tuple[str, int], tuple[str, int]], slow: bool = False) -> list[Any]:
    return [pytest.param(*pair, marks=pytest.mark.slow if slow else (), id=str(pair)) for pair in pairs]


@pytest.mark.parametrize(
    ("saved", "loaded"),
    [
        # More and fewer processes, parts of different sizes, and every format into every other.
        *changes_of_place(
            *((("fsdp2", 2), ("fsdp2", 4)), (("fsdp2", 2), ("fsdp2", 3)), (("fsdp2", 3), ("fsdp2-full", 2))),
            *((("ddp", 2), ("fsdp2", 2)), (("fsdp2-full", 2), ("ddp", 2)), (("fsdp2", 2), ("single", 1))),
            (("single", 1), ("fsdp2", 2)),
        ),
        *changes_of_place(
            *((("fsdp2", 2), ("fsdp2", 1)), (("fsdp2", 4), ("fsdp2", 2)), (("fsdp2", 2), ("ddp", 2))),
            *((("ddp", 2), ("fsdp2-full", 2)), (("fsdp2-full", 2), ("single", 1)), (("single", 1), ("ddp", 2))),
            *((("fsdp2-full", 2), ("fsdp2", 4)), (("ddp", 2), ("ddp", 3))),
            slow=True,
        ),
    ],
)
def test_a_checkpoint_loads_on_other_numbers_of_processes_and_other_backends(
    request: pytest.FixtureRequest, tmp_path: Path, saved: tuple[str, int], loaded: tuple[str, int]
) -> None:
    groups = {1: "one", 2: "two", 3: "three", 4: "four"}
    before, after = (request.getfixturevalue(groups[count]) for _, count in (saved, loaded))
    folder, batch = str(tmp_path / "a"), 12 if 3 in (saved[1], loaded[1]) else 8
    weights, state = before.run(save_with, folder, saved[0], batch)[0]
    _, expected, trained = before.run(load_with, folder, saved[0], batch)[0]
    (found_weights, found_state), losses, ended = after.run(load_with, folder, loaded[0], batch)[0]

    assert weights
    assert same(found_weights, weights)
    assert same(found_state, state)
    assert losses == pytest.approx(expected, rel=1e-5)
    torch.testing.assert_close(dict(ended), dict(trained), rtol=1e-4, atol=1e-6)


def load_strictly(folder: str) -> str:
    run = Run("ddp", seed=9)
    with pytest.raises(CheckpointError) as caught:
        run.accelerator.load_state(folder)
    return str(caught.value)


def test_generators_that_were_not_saved_are_missed_unless_they_are_waived(
    one: Processes, two: Processes, tmp_path: Path
) -> None:
    one.run(save_with, str(tmp_path / "a"), "single", 8)
    first, second = two.run(load_strictly, str(tmp_path / "a"))
    assert "allow_missing=('random_states',)" in second
    assert "Process 1 failed" in first
