"""Runs that save continuously, killed at random moments; each takes up where the one before was killed.

The steps that two runs have both made must have the same losses bit for bit, and every state that a run took, except
the last one, must be a complete checkpoint: a kill costs at most the time between two saves and that of a commit.
"""

from __future__ import annotations

import os
import random
import time
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Final

import torch
from faults.sweeps import Tally
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from accel_plugins.checkpoint.retention import checkpoints, find_newest
from accel_torch import Accelerator, ContinuousSavePolicy, DataLoaderConfiguration, ProjectConfiguration
from injected.children import Child

__all__ = ("continuous_kills",)

_KILLS: Final = 100
_SAVES: Final = 3
"""Saves after which a run is killed at the latest."""
_LATEST: Final = 0.5
"""Seconds until the kill after the last of them."""


@dataclass
class Life:
    """What one run has written down before it was killed.

    Args:
        resumed: the step after which it took up.
        losses: of its steps, by number.
        taken: the steps after which a state was taken for a checkpoint.
    """

    resumed: int = 0
    losses: dict[int, str] = field(default_factory=dict)
    taken: list[int] = field(default_factory=list)

    @classmethod
    def read(cls, path: Path) -> Life:
        """What is in a log, whose last line may be incomplete."""
        life = cls()
        text = path.read_text(encoding="utf-8") if path.exists() else ""
        for line in text.splitlines(keepends=True):
            if not line.endswith("\n"):
                break
            kind, step, value = line.split()
            if kind == "begin":
                life.resumed = int(step)
            elif kind == "step":
                life.losses[int(step)] = value
            else:
                life.taken.append(int(step))
        return life

    def wrong(self, before: int, known: dict[int, str], kept: set[int]) -> str | None:
        """What is wrong with this run.

        Args:
            before: the step of the newest complete checkpoint before it began.
            known: the losses of all runs until then, by step.
            kept: the steps of all complete checkpoints.
        """
        if self.resumed != before:
            return f"it took up after step {self.resumed}, and step {before} was saved"
        for step, loss in self.losses.items():
            if known.get(step, loss) != loss:
                return f"the loss of step {step} is another one than before"
        for step in self.taken[:-1]:
            if step not in kept:
                return f"the save of step {step} was not complete when the next one began"
        return None


class _Steps:
    """Counts steps, and writes down each, and each state that is taken."""

    def __init__(self, log: Path) -> None:
        self.done, self._log = 0, os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def tell(self, kind: str, value: str = "-") -> None:
        os.write(self._log, f"{kind} {self.done} {value}\n".encode())

    def state_dict(self) -> dict[str, int]:
        self.tell("take")
        return {"done": self.done}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.done = state["done"]


def _train(project: Path, log: Path) -> None:
    """Train from the newest checkpoint on, until a kill."""
    torch.set_num_threads(1)
    torch.manual_seed(1)
    policy = ContinuousSavePolicy(max_overhead=0.1, keep_last=10_000)
    accelerator = Accelerator(
        cpu=True,
        project_config=ProjectConfiguration(str(project), automatic_checkpoint_naming=True, save_policy=policy),
        dataloader_config=DataLoaderConfiguration(restore_position=True),
    )
    steps = _Steps(log)
    model: Any = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Dropout(0.1), nn.Linear(256, 64))
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=1e-3)
    loader: Any = DataLoader(TensorDataset(torch.randn(4096, 64)), batch_size=8, shuffle=True)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    accelerator.register_for_checkpointing(steps)
    accelerator.load_state(missing_ok=True)
    steps.tell("begin")
    while True:
        for (batch,) in loader:
            loss = (model(batch) - batch).square().mean()
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            steps.done += 1
            steps.tell("step", loss.item().hex())


def _complete(project: Path) -> set[int]:
    """The steps of the good checkpoints, after what a killed run had completed is put in its place."""
    folder = project / "checkpoints"
    if checkpoints(folder):
        find_newest(folder, hashes=True)
    good = [one.path for one in checkpoints(folder) if one.verdict().good]
    return {torch.load(path / "custom_checkpoint_0.pkl", weights_only=True)["done"] for path in good}


def continuous_kills(folder: Path, every: int) -> Tally:
    """SIGKILL to runs that save continuously, some moments after one of their first saves."""
    tally, project = Tally("SIGKILL at a random moment"), folder / "project"
    chance, known, before = random.Random(0), dict[int, str](), 0
    for number in range(_KILLS // every):
        log, saves = folder / f"log-{number}", chance.randrange(_SAVES + 1)
        run = Child(partial(_train, project, log))
        while run.process.is_alive() and (len((life := Life.read(log)).taken) < saves or not life.losses):
            time.sleep(0.01)
        time.sleep(chance.uniform(0, _LATEST))
        run.process.kill()
        ended = run.answer()
        life, kept = Life.read(log), _complete(project)
        wrong = None if ended.error is None or "exit code -9" in ended.error else ended.error
        tally.count(f"kill {number}", wrong or life.wrong(before, known, kept))
        known |= life.losses
        before = max(kept, default=0)
    return tally
