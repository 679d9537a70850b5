"""Writes through `.data` while an asynchronous save copies, which torch does not count; see `tools/reliability.py`."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import torch
from faults import sweeps
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from accel_plugins.checkpoint.background import Snapshot
from accel_plugins.checkpoint.manifest import verify
from accel_testing.fresh import fresh
from accel_torch import Accelerator, ProjectConfiguration

__all__ = ("data_writes",)

STEPS = 4


class Training:
    """A small run on one process, and every moment of it that a checkpoint may hold."""

    def __init__(self, project: Path) -> None:
        torch.manual_seed(3)
        configuration = ProjectConfiguration(str(project), fsync=False)
        self.accelerator = Accelerator(cpu=True, project_config=configuration)
        model = nn.Sequential(nn.Linear(8, 160), nn.Linear(160, 160), nn.Linear(160, 1))
        loader = DataLoader(TensorDataset(torch.randn(64, 8)), batch_size=4)
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
        prepared: Any = self.accelerator.prepare(model, optimizer, loader)
        self.model, self.optimizer, self.loader = prepared
        self.moments: list[list[Tensor]] = []

    @property
    def parameters(self) -> list[Tensor]:
        return [parameter.detach() for parameter in self.model.parameters()]

    @property
    def moment(self) -> list[Tensor]:
        """Everything that a save copies behind training."""
        states = self.optimizer.state_dict()["state"]
        return [
            tensor.clone() for tensor in (*self.parameters, *(v for state in states.values() for v in state.values()))
        ]

    def step(self, batch: Tensor) -> None:
        self.accelerator.backward(self.model(batch).square().mean())
        self.optimizer.step()
        self.optimizer.zero_grad()


Write = Callable[[Training], object]


def clamped(run: Training) -> None:
    for parameter in run.model.parameters():
        parameter.data.clamp_(-0.01, 0.01)


def averaged(run: Training) -> None:
    """An exponential average in the place of the parameters."""
    for parameter in run.model.parameters():
        parameter.data.lerp_(torch.zeros_like(parameter), 0.01)


def replaced(run: Training) -> None:
    for parameter in run.model.parameters():
        parameter.data.copy_(torch.randn_like(parameter))


def one_bias(run: Training) -> None:
    run.model[0].bias.data[3] += 1e-6


def a_column(run: Training) -> None:
    run.model[1].weight.data[:, 5] = 0


def moments_of_adam(run: Training) -> None:
    for state in run.optimizer.state.values():
        state["exp_avg"].data.mul_(0.5)


WRITES: Final[Mapping[str, Write]] = {
    "clamped": clamped,
    "averaged": averaged,
    "replaced": replaced,
    "one element of a bias": one_bias,
    "a column of a matrix": a_column,
    "the state of Adam": moments_of_adam,
}


class _Places(list[Any]):
    """What is to be copied, with something done before a place of the first pass over it and undone at its end."""

    def hit(self, place: int, do: Callable[[], object], undo: Callable[[], object]) -> _Places:
        self._place, self._do, self._undo, self._passes = place, do, undo, 0
        return self

    def __iter__(self) -> Iterator[Any]:
        self._passes += 1
        if self._passes > 1:
            yield from list(self[:])
            return
        for index, pending in enumerate(self[:]):
            if index == self._place:
                self._do()
            yield pending
        self._undo()


@contextmanager
def _writing(place: int, do: Callable[[], object], undo: Callable[[], object]) -> Iterator[None]:
    """Let the next copy be hit before a place, by the thread that copies."""
    real = Snapshot.copy

    def hit(self: Snapshot) -> list[str]:
        Snapshot.copy = real  # type: ignore[method-assign]
        self._pending = _Places(self._pending).hit(place, do, undo)
        return real(self)

    Snapshot.copy = hit  # type: ignore[method-assign]
    try:
        yield
    finally:
        Snapshot.copy = real  # type: ignore[method-assign]


def _saved(project: Path, write: Write, place: int, taken_back: bool) -> tuple[list[list[Tensor]], int]:
    """The moments of a run whose save is hit, and how many tensors it copied behind training."""
    with fresh():
        run = Training(project)
        copied = 0
        for number, (batch,) in enumerate(run.loader):
            run.moments.append(run.moment)
            run.step(batch)
            if number == STEPS:
                break
            if number != 1:
                continue
            run.moments.append(run.moment)
            before = run.moment

            def undo(before: list[Tensor] = before) -> None:
                if taken_back:
                    for parameter, old in zip(run.parameters, before, strict=False):
                        parameter.data.copy_(old)

            with _writing(place, lambda: write(run), undo):
                run.accelerator.save_state(str(project / "saved"), async_save=True)
                _copied()
            copied = len(before)
        run.moments.append(run.moment)
        run.accelerator.wait_for_checkpoint()
        return run.moments, copied


def _copied() -> None:
    """Wait for the thread that copies and writes."""
    for thread in threading.enumerate():
        if thread.name == "accel-save":
            thread.join()


def _wrong(project: Path, moments: list[list[Tensor]]) -> str | None:
    """What is wrong with what was saved, or None: it is one of the moments, and nothing of another."""
    if not verify(project / "saved", hashes=True).good:
        return "there is no good checkpoint"
    with fresh():
        run = Training(project)
        run.accelerator.load_state(str(project / "saved"))
        found = run.moment
    same = any(
        len(moment) == len(found) and all(torch.equal(a, b) for a, b in zip(found, moment, strict=True))
        for moment in moments
    )
    return None if same else "what was loaded is of no single moment"


def data_writes(folder: Path, every: int) -> sweeps.Tally:
    """Each write before each tensor that is copied, for good and taken back before the copy is complete."""
    logging.getLogger("accel_torch").setLevel(logging.ERROR)
    tally = sweeps.Tally("write through .data")
    place, number, tensors = 0, 0, 1
    while place < tensors:
        for name, write in WRITES.items():
            for taken_back in (False, True):
                number += 1
                if (number - 1) % every:
                    continue
                project = folder / str(number)
                project.mkdir()
                moments, tensors = _saved(project, write, place, taken_back)
                told = f"{name} before tensor {place}{', and taken back' if taken_back else ''}"
                tally.count(told, _wrong(project, moments))
        place += 1
    return tally
