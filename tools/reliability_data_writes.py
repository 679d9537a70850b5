"""Writes through `.data` while an asynchronous save writes its copy; see `tools/reliability.py`."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import torch
from faults import sweeps
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from accel_plugins.checkpoint.manifest import verify
from accel_plugins.checkpoint.state import CheckpointState
from accel_testing.fresh import fresh
from accel_torch import Accelerator, ProjectConfiguration

__all__ = ("data_writes",)

STEPS = 4


class Training:
    """A small run on one process."""

    def __init__(self, project: Path) -> None:
        torch.manual_seed(3)
        configuration = ProjectConfiguration(str(project), fsync=False)
        self.accelerator = Accelerator(cpu=True, project_config=configuration)
        model = nn.Sequential(nn.Linear(8, 160), nn.Linear(160, 160), nn.Linear(160, 1))
        loader = DataLoader(TensorDataset(torch.randn(64, 8)), batch_size=4)
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
        prepared: Any = self.accelerator.prepare(model, optimizer, loader)
        self.model, self.optimizer, self.loader = prepared

    @property
    def parameters(self) -> list[Tensor]:
        return [parameter.detach() for parameter in self.model.parameters()]

    @property
    def moment(self) -> list[Tensor]:
        """Everything that the writes change."""
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


@contextmanager
def _writing(place: int, do: Callable[[], object]) -> Iterator[list[Path]]:
    """Let the next save be hit before its file of this number, by the thread that writes; yields the files."""
    real, files = CheckpointState.write, list[Path]()

    def hit(self: CheckpointState, folder: Path, strategy: Any, *, written: Any, **options: Any) -> None:
        def counted(path: Path) -> None:
            files.append(path)
            if len(files) == place:
                do()
            written(path)

        if not place:
            do()
        real(self, folder, strategy, written=counted, **options)

    CheckpointState.write = hit  # type: ignore[method-assign, assignment]
    try:
        yield files
    finally:
        CheckpointState.write = real  # type: ignore[method-assign]


def _saved(project: Path, write: Write, place: int) -> tuple[list[Tensor], int]:
    """The moment of the call of a save that is hit, and the number of its files."""
    called: list[Tensor] = []
    files: list[Path] = []
    with fresh():
        run = Training(project)
        for number, (batch,) in enumerate(run.loader):
            run.step(batch)
            if number == STEPS:
                break
            if number == 1:
                called = run.moment
                with _writing(place, lambda: write(run)) as files:
                    run.accelerator.save_state(str(project / "saved"), async_save=True)
                    _written()
        run.accelerator.wait_for_checkpoint()
        return called, len(files)


def _written() -> None:
    """Wait for the thread that writes."""
    for thread in threading.enumerate():
        if thread.name == "accel-save":
            thread.join()


def _wrong(project: Path, called: list[Tensor]) -> str | None:
    """What is wrong with what was saved, or None: it is the moment of the call."""
    if not verify(project / "saved", hashes=True).good:
        return "there is no good checkpoint"
    with fresh():
        run = Training(project)
        run.accelerator.load_state(str(project / "saved"))
        found = run.moment
    same = len(called) == len(found) and all(torch.equal(a, b) for a, b in zip(found, called, strict=True))
    return None if same else "what was loaded is not the moment of the call"


def data_writes(folder: Path, every: int) -> sweeps.Tally:
    """Each write before each file."""
    tally = sweeps.Tally("write through .data")
    place, number, files = 0, 0, 1
    while place < files:
        for name, write in WRITES.items():
            number += 1
            if (number - 1) % every:
                continue
            project = folder / str(number)
            project.mkdir()
            called, files = _saved(project, write, place)
            tally.count(f"{name} before file {place}", _wrong(project, called))
        place += 1
    return tally
