"""Runs that save continuously, killed at random moments, and what saving costs them; see `tools/reliability.py`.

    python tools/reliability_continuous.py kills       kill a hundred runs, and print what was lost
    python tools/reliability_continuous.py overhead    measure what saving costs

A small GPT learns the characters of this file. Each run takes up where the one before was killed. Afterwards

- the steps that two runs have both made must have the same losses bit for bit;
- every state that a run took, except the last one, must be a complete checkpoint: a kill costs at most the time between
  two saves and that of a commit, however busy the machine is;
- the work that the kills have cost, from the moment of the newest complete checkpoint to the kill, must at P95 be at
  most the time between two saves and that of a commit, each at P95, in the same runs. The kill cuts the last of these
  times; Kaplan and Meier's estimate counts what was cut as longer than it was seen to be. Where too many were cut,
  nothing is known, and that counts as lost.

What saving costs is how much longer a run takes, which is what the policy limits, than the same steps of runs that do
not save: of the one before it and of the one after it, because the machine may change its pace meanwhile. The median
over many short runs counts, since whatever else the machine does disturbs some of them. The CPU time of all threads is
printed too, which includes what a second core does while training goes on.
"""

from __future__ import annotations

import math
import multiprocessing
import os
import random
import signal
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any, Final

sys.path.append(str(Path(__file__).resolve().parents[1] / "tests-integration"))

import torch
from faults import sweeps
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

from accel_plugins.checkpoint.manifest import read_manifest
from accel_plugins.checkpoint.retention import checkpoints, find_newest
from accel_torch import Accelerator, ContinuousSavePolicy, DataLoaderConfiguration, ProjectConfiguration

__all__ = ("CharGPT", "random_kills")

KILLS: Final = 100
CONTEXT, WIDTH, LAYERS, HEADS = 32, 64, 2, 4
_PROCESSES: Final = multiprocessing.get_context("spawn")
"""Not forked: this process may have threads of autograd, without which backward fails in a forked one."""

_FIRST, _LAST = 1.0, 6.0
"""Seconds from the first step of a run to its kill."""
_SAVES: Final = 6
"""Times between two saves that a run lasts at most, where that is longer."""
_PAIRS: Final = 12
"""Runs that save, whose cost is measured."""
_SECONDS: Final = 15.0
"""How long each of them trains."""
_SHARE: Final = 0.02


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
    """A run that is killed some seconds after its first step, and when.

    Raises:
        RuntimeError: the run has ended by itself.
    """
    process = _PROCESSES.Process(target=_train, args=(project, log, policy, 600.0))
    process.start()
    assert process.pid is not None
    while not (log.exists() and log.stat().st_size) and process.is_alive():
        time.sleep(0.01)
    process.join(seconds)
    if process.exitcode is not None:
        raise RuntimeError(f"The run ended by itself before it was killed, with exit code {process.exitcode}.")
    os.kill(process.pid, signal.SIGKILL)
    at = time.time()
    process.join()
    return _Life.read(log), at


@dataclass(frozen=True)
class _Lasted:
    """How long something took.

    Args:
        seconds: until it ended, or until the kill.
        ended: whether it ended.
    """

    seconds: float
    ended: bool


def _percentile(values: Sequence[_Lasted], percent: float) -> float:
    """Seconds within which so many have ended, as Kaplan and Meier (1958) estimate it; infinite where too few have."""
    going = 1.0
    for index, one in enumerate(sorted(values, key=lambda one: (one.seconds, not one.ended))):
        going *= 1 - one.ended / (len(values) - index)
        if going <= 1 - percent / 100 + 1e-9:
            return one.seconds
    return math.inf


@dataclass
class _Kills:
    """What the kills have shown so far.

    Args:
        lost: work of each kill.
        intervals: from each save, or the beginning of a run, to the next save.
        commits: from each save until it was complete.
    """

    lost: list[_Lasted] = field(default_factory=list)
    intervals: list[_Lasted] = field(default_factory=list)
    commits: list[_Lasted] = field(default_factory=list)

    def add(self, life: _Life, at: float, kept: Mapping[int, float]) -> None:
        """Count a run that was killed.

        Args:
            life: what it wrote down.
            at: when it was killed.
            kept: when each checkpoint that is complete was so, by step.
        """
        moments = [life.begun, *life.taken.values()]
        self.intervals += [_Lasted(later - earlier, True) for earlier, later in pairwise(moments)]
        self.intervals.append(_Lasted(at - moments[-1], False))
        self.commits += [_Lasted(kept.get(step, at) - when, step in kept) for step, when in life.taken.items()]
        newest = max((when for step, when in life.taken.items() if step in kept), default=life.begun)
        self.lost.append(_Lasted(at - newest, True))

    def longest_run(self) -> float:
        """Seconds after which a run is killed at the latest: there should be several saves."""
        typical = _percentile(self.intervals, 50) if self.intervals else 0.0
        return max(_LAST, _SAVES * typical) if math.isfinite(typical) else 2 * _SAVES * _LAST

    def __str__(self) -> str:
        lost, intervals, commits = (
            f"{_percentile(values, 50):.2f} s in the median and {_percentile(values, 95):.2f} s at P95"
            for values in (self.lost, self.intervals, self.commits)
        )
        return (
            f"{len(self.lost)} kills lost {lost}; the time between two saves was {intervals}, "
            f"and that of the {len(self.commits)} commits {commits}"
        )


def _fault_of(life: _Life, before: int, known: Mapping[int, str], kept: Mapping[int, float]) -> str | None:
    """What is wrong with a run that was killed.

    Args:
        life: what it wrote down.
        before: the step of the newest complete checkpoint before it began.
        known: the losses of all runs until then, by step.
        kept: when each checkpoint that is complete was so, by step.
    """
    if life.resumed != before:
        return f"it took up after step {life.resumed}, and step {before} was saved"
    for step, loss in life.losses.items():
        if known.get(step, loss) != loss:
            return f"the loss of step {step} is another one than before"
    for step in list(life.taken)[:-1]:
        if step not in kept:
            return f"the save of step {step} was not complete when the next one began"
    return None


def random_kills(folder: Path, every: int) -> sweeps.Tally:
    """SIGKILL at random moments of runs that save continuously.

    The last entry is about all kills together: the work that was lost took at most the time between two saves and that
    of a commit, each at P95.

    Args:
        folder: for the runs.
        every: of the hundred kills, how many there are for one that is made.
    """
    tally = sweeps.Tally("SIGKILL at a random moment")
    policy, project = ContinuousSavePolicy(max_overhead=0.1, keep_last=10_000), folder / "project"
    chance, losses, kills = random.Random(0), dict[int, str](), _Kills()
    before = 0
    for number in range(KILLS // every):
        life, at = _killed(project, folder / f"log-{number}", chance.uniform(_FIRST, kills.longest_run()), policy)
        kept = _committed(project)
        tally.count(f"kill {number}", _fault_of(life, before, losses, kept))
        losses |= life.losses
        kills.add(life, at, kept)
        before = max(kept, default=0)
        print(
            f"kill {number} after {at - life.begun:.1f} s, {len(life.losses)} steps and {len(life.taken)} saves",
            flush=True,
        )
    print(kills, flush=True)
    bound = _percentile(kills.intervals, 95) + _percentile(kills.commits, 95)
    held = math.isfinite(bound) and _percentile(kills.lost, 95) <= bound
    tally.count("work that was lost", None if held else str(kills))
    return tally


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
        process = _PROCESSES.Process(target=_train, args=(Path(place) / "project", log, policy, seconds))
        process.start()
        process.join()
        life = _Life.read(log)
    print(
        f"{len(life.losses)} steps, {len(life.taken)} saves, {life.spent:.1f} s of CPU time in {life.lasted:.1f} s",
        flush=True,
    )
    return life


def main() -> int:
    """Print the figures; 1 when a kill has lost something, or saving costs more than it may."""
    if sys.argv[1:] == ["kills"]:
        with tempfile.TemporaryDirectory(prefix="continuous-") as folder:
            tally = random_kills(Path(folder), 1)
        print("".join(f"lost: {lost}\n" for lost in tally.lost), end="")
        return 1 if tally.lost else 0
    if sys.argv[1:] != ["overhead"]:
        raise SystemExit(__doc__)
    costs: list[float] = []
    spent: list[float] = []
    plain = _measured(_SECONDS, None)
    for _ in range(_PAIRS):
        saving, after = _measured(_SECONDS, ContinuousSavePolicy(max_overhead=_SHARE)), _measured(_SECONDS, None)
        steps = (len(plain.losses) + len(after.losses)) / len(saving.losses)
        costs.append(1 - (plain.lasted + after.lasted) / steps / saving.lasted)
        spent.append((saving.spent - (plain.spent + after.spent) / steps) / saving.lasted)
        plain = after
        medians = f"median so far {median(costs):+.2%}, in CPU time {median(spent):+.2%}"
        print(f"{costs[-1]:+.2%} of this run's time; {medians}", flush=True)
    return 0 if median(costs) <= _SHARE else 1


if __name__ == "__main__":
    sys.exit(main())
