"""Runs that save continuously, killed at random moments, and what saving costs them; see `tools/reliability.py`.

    python tools/reliability_continuous.py kills       kill a hundred runs, and print what was lost
    python tools/reliability_continuous.py overhead    measure what saving costs

A small GPT learns the characters of this file. Each run takes up where the one before was killed. Afterwards the steps
that two runs have both made must have the same losses bit for bit, and the work that a kill has cost, from the moment
of the newest complete checkpoint to the kill, is compared with the time between two saves and the time of a commit in a
run that nobody kills.

What saving costs is the CPU time of all threads from the first step on, above that of as many steps of a run that does
not save, as a share of the run's time. Figures of a busy machine mean little.
"""

from __future__ import annotations

import multiprocessing
import os
import random
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

from accel_plugins.checkpoint.manifest import read_manifest
from accel_plugins.checkpoint.retention import checkpoints, find_newest
from accel_plugins.testing import faults
from accel_torch import Accelerator, ContinuousSavePolicy, DataLoaderConfiguration, ProjectConfiguration

__all__ = ("CharGPT", "random_kills")

KILLS: Final = 100
CONTEXT, WIDTH, LAYERS, HEADS = 32, 64, 2, 4
_FIRST, _LAST = 1.0, 6.0
"""Seconds from the first step of a run to its kill."""
_UNDISTURBED: Final = 120.0
"""Seconds of the run that nobody kills."""


class CharGPT(nn.Module):
    """Predicts the next character.

    Args:
        characters: how many different ones there are.
    """

    def __init__(self, characters: int) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(characters, WIDTH), nn.Embedding(CONTEXT, WIDTH)
        layer = nn.TransformerEncoderLayer(WIDTH, HEADS, 4 * WIDTH, batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, LAYERS, enable_nested_tensor=False)
        self.head = nn.Linear(WIDTH, characters)
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(CONTEXT), persistent=False)

    def forward(self, text: Tensor) -> Tensor:
        """The loss of a batch of texts, of shape (batch, CONTEXT + 1)."""
        told = self.tokens(text[:, :-1]) + self.places.weight
        logits = self.head(self.layers(told, mask=self.mask, is_causal=True))
        return functional.cross_entropy(logits.flatten(0, 1), text[:, 1:].flatten())


def _texts() -> tuple[Tensor, int]:
    content = Path(__file__).read_text(encoding="utf-8")
    known = {character: index for index, character in enumerate(sorted(set(content)))}
    codes = torch.tensor([known[character] for character in content])
    return codes.unfold(0, CONTEXT + 1, CONTEXT // 4).contiguous(), len(known)


@dataclass
class _Life:
    """What one run has written down before it was killed.

    Args:
        begun: when its first step began; all times are seconds since 1970.
        resumed: the step after which it took up.
        losses: of its steps, by number.
        taken: when the state after a step was taken for a checkpoint, by number of the step.
        spent: CPU seconds of the process, from the first step to its end.
        lasted: seconds from the first step to its end.
    """

    begun: float = 0.0
    resumed: int = 0
    losses: dict[int, str] = field(default_factory=dict)
    taken: dict[int, float] = field(default_factory=dict)
    spent: float = 0.0
    lasted: float = 0.0

    @classmethod
    def read(cls, path: Path) -> _Life:
        life = cls()
        for line in path.read_text(encoding="utf-8").splitlines(keepends=True):
            if not line.endswith("\n"):
                break
            kind, number, value = line.split()
            if kind == "begin":
                life.resumed, life.begun = int(number), float(value)
            elif kind == "step":
                life.losses[int(number)] = value
            elif kind == "spent":
                life.spent = float(value)
            elif kind == "lasted":
                life.lasted = float(value)
            else:
                life.taken[int(number)] = float(value)
        return life


class _Steps:
    """Counts steps; a checkpoint that is taken is written down."""

    def __init__(self, log: int) -> None:
        self.done, self._log = 0, log

    def tell(self, kind: str, value: object) -> None:
        os.write(self._log, f"{kind} {self.done} {value}\n".encode())

    def state_dict(self) -> dict[str, int]:
        self.tell("take", time.time())
        return {"done": self.done}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.done = state["done"]


def _train(project: Path, log: Path, policy: ContinuousSavePolicy | None, seconds: float) -> None:
    """Train from the newest checkpoint on, for some seconds or until a kill."""
    torch.set_num_threads(1)
    torch.manual_seed(1)
    accelerator = Accelerator(
        cpu=True,
        project_config=ProjectConfiguration(str(project), automatic_checkpoint_naming=True, save_policy=policy),
        dataloader_config=DataLoaderConfiguration(restore_position=True),
    )
    texts, characters = _texts()
    steps = _Steps(os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND))
    model: Any = CharGPT(characters)
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model, optimizer, loader = accelerator.prepare(
        model, optimizer, DataLoader(TensorDataset(texts), batch_size=8, shuffle=True)
    )
    accelerator.register_for_checkpointing(steps)
    accelerator.load_state(missing_ok=True)
    begun, spent = time.time(), time.process_time()
    steps.tell("begin", begun)
    while time.time() < begun + seconds:
        for (batch,) in loader:
            loss = model(batch)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            steps.done += 1
            steps.tell("step", loss.item().hex())
            if time.time() > begun + seconds:
                break
    accelerator.end_training()
    steps.tell("lasted", time.time() - begun)
    steps.tell("spent", time.process_time() - spent)


def _killed(project: Path, log: Path, seconds: float, policy: ContinuousSavePolicy) -> tuple[_Life, float]:
    """A run that is killed some seconds after its first step, and when."""
    process = multiprocessing.get_context("fork").Process(target=_train, args=(project, log, policy, 600.0))
    process.start()
    assert process.pid is not None
    while not (log.exists() and log.stat().st_size) and process.is_alive():
        time.sleep(0.01)
    time.sleep(seconds)
    os.kill(process.pid, signal.SIGKILL)
    at = time.time()
    process.join()
    return _Life.read(log), at


def _percentile(values: Sequence[float], percent: float) -> float:
    ordered = sorted(values) or [0.0]
    return ordered[min(len(ordered) - 1, int(len(ordered) * percent / 100))]


def random_kills(folder: Path, every: int) -> faults.Tally:
    """SIGKILL at random moments of runs that save continuously.

    The last entry is about all kills together: the work that was lost took at most the time between two saves and that
    of a commit, each at P95.

    Args:
        folder: for the runs.
        every: of the hundred kills, how many there are for one that is made.
    """
    tally = faults.Tally("SIGKILL at a random moment")
    policy, project = ContinuousSavePolicy(max_overhead=0.1, keep_last=10_000), folder / "project"
    intervals, commits = _undisturbed(folder / "undisturbed", policy, _UNDISTURBED / every)
    chance, losses = random.Random(0), dict[int, str]()
    lost, before = list[float](), 0
    for number in range(KILLS // every):
        life, at = _killed(project, folder / f"log-{number}", chance.uniform(_FIRST, _LAST), policy)
        known = {step: loss for step, loss in life.losses.items() if losses.setdefault(step, loss) != loss}
        kept = _committed(project)
        newest = max(kept, default=0)
        wrong = None
        if life.resumed != before:
            wrong = f"it took up after step {life.resumed}, and step {before} was saved"
        elif known:
            wrong = f"the loss of step {min(known)} is another one than before"
        tally.count(f"kill {number}", wrong)
        taken = {life.resumed: life.begun, **{step: when for step, when in life.taken.items() if step in kept}}
        lost.append(at - taken.get(newest, life.begun))
        before = newest
        print(
            f"kill {number} after {at - life.begun:.1f} s, {len(life.losses)} steps and {len(life.taken)} saves",
            flush=True,
        )
    bound = _percentile(intervals, 95) + _percentile(commits, 95)
    told = (
        f"{len(lost)} kills lost {_percentile(lost, 50):.2f} s in the median and {_percentile(lost, 95):.2f} s at P95; "
        f"{len(commits)} saves, {_percentile(intervals, 50):.2f} s apart in the median and "
        f"{_percentile(intervals, 95):.2f} s at P95, took {_percentile(commits, 50):.2f} s and "
        f"{_percentile(commits, 95):.2f} s to be complete"
    )
    print(told, flush=True)
    tally.count("work that was lost", None if _percentile(lost, 95) <= bound else told)
    return tally


def _undisturbed(folder: Path, policy: ContinuousSavePolicy, seconds: float) -> tuple[list[float], list[float]]:
    """Seconds between two saves of a run that nobody kills, and those from each until it was complete."""
    folder.mkdir()
    process = multiprocessing.get_context("fork").Process(
        target=_train, args=(folder / "project", folder / "log", policy, max(seconds, _LAST))
    )
    process.start()
    process.join()
    life, kept = _Life.read(folder / "log"), _committed(folder / "project")
    moments = [life.begun, *life.taken.values()]
    commits = [kept[step] - when for step, when in life.taken.items() if step in kept]
    return [later - earlier for earlier, later in pairwise(moments)], commits


def _committed(project: Path) -> dict[int, float]:
    """When each good checkpoint was complete, by the step that it holds."""
    folder, kept = project / "checkpoints", dict[int, float]()
    if checkpoints(folder):
        find_newest(folder, hashes=True)
    for checkpoint in checkpoints(folder):
        manifest = read_manifest(checkpoint.path)
        if manifest is not None and checkpoint.verdict().good:
            state = torch.load(checkpoint.path / "custom_checkpoint_0.pkl", weights_only=True)
            kept[state["done"]] = manifest.written
    return kept


def _measured(seconds: float, policy: ContinuousSavePolicy | None) -> _Life:
    """A run of some seconds that nobody kills."""
    with tempfile.TemporaryDirectory(prefix="continuous-") as place:
        log = Path(place) / "log"
        process = multiprocessing.get_context("fork").Process(
            target=_train, args=(Path(place) / "project", log, policy, seconds)
        )
        process.start()
        process.join()
        life = _Life.read(log)
    print(
        f"{len(life.losses)} steps, {len(life.taken)} saves, {life.spent:.1f} s of CPU time in {life.lasted:.1f} s",
        flush=True,
    )
    return life


def main() -> int:
    """Print the figures; 1 when a kill has lost something."""
    if sys.argv[1:] == ["kills"]:
        with tempfile.TemporaryDirectory(prefix="continuous-") as folder:
            tally = random_kills(Path(folder), 1)
        print("".join(f"lost: {lost}\n" for lost in tally.lost), end="")
        return 1 if tally.lost else 0
    if sys.argv[1:] != ["overhead"]:
        raise SystemExit(__doc__)
    for _ in range(3):
        plain, saving = _measured(60.0, None), _measured(60.0, ContinuousSavePolicy(max_overhead=0.02))
        cost = saving.spent - plain.spent / len(plain.losses) * len(saving.losses)
        print(f"overhead {cost / saving.lasted:+.2%} of the run's time", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
