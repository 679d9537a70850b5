"""What an Accelerator charges to which category: scripts whose time is known, some of them killed and resumed.

Each script says by its own clock how long it spent on what. The category is charged at least that: what is charged to a
wrong one is missing there, because all categories together are the wall time. How much a loaded machine adds to a
category is not compared with anything.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from accel_state.errors import SettingError
from accel_state.watch.goodput import GoodputSummary, read_goodput
from accel_state.watch.record import EVALUATION, STATUS_RECORD, STEP
from accel_testing.preloaded import PreloadedPython
from accel_testing.processes import Finished, run_command
from accel_torch import Accelerator

pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="reads /proc"),
]

SCRIPT = """
import json
import os
import signal
import sys
import time
from pathlib import Path

import torch
from accel_torch import Accelerator, ProjectConfiguration

FOLDER = Path(os.environ["ACCEL_PROJECT_DIR"])
RANK = int(os.environ.get("RANK", "0"))
START = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
truth = {}


def spend(category, seconds, began=None):
    began = time.perf_counter() if began is None else began
    time.sleep(seconds)
    truth[category] = truth.get(category, 0.0) + time.perf_counter() - began
    (FOLDER / f"truth_{RANK}_{START}.json").write_text(json.dumps(truth))


class Samples(torch.utils.data.Dataset):
    def __len__(self):
        return 24

    def __getitem__(self, index):
        {item}
        return torch.full((2,), index / 24)


accelerator = Accelerator(cpu=True{settings})
model = torch.nn.Linear(2, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
loader = torch.utils.data.DataLoader(Samples(), batch_size=2)
other = torch.utils.data.DataLoader(torch.zeros(6, 2), batch_size=2)
model, optimizer, loader, other = accelerator.prepare(model, optimizer, loader, other)
checkpoint = FOLDER / "checkpoint"
{before}
for number, batch in enumerate(loader):
    {in_step}
    accelerator.backward(model(batch).sum())
    optimizer.step()
    optimizer.zero_grad()
    {after_step}
{after}
accelerator.wait_for_everyone()
"""

PASS: dict[str, str] = dict.fromkeys(("item", "before", "in_step", "after_step", "after"), "pass") | {"settings": ""}

KILLED = "if START == 0 and number == {at} and RANK == {rank}: os.kill(os.getpid(), signal.SIGKILL)"

SCRIPTS: dict[str, tuple[int, dict[str, str]]] = {
    "slow start": (1, {"before": "spend('start-up', 2.0)"}),
    "slow data": (1, {"item": "spend('waiting for data', 0.1)"}),
    "slow first step": (1, {"in_step": "spend('first step', 2.0) if number == 0 else None"}),
    "slow steps": (1, {"in_step": "spend('step', 0.25) if number else None"}),
    "evaluation": (1, {"after": "for batch in other: spend('evaluation', 0.7)"}),
    "evaluation in a run that saves on a signal": (
        1,
        {
            "settings": ", project_config=ProjectConfiguration("
            "str(FOLDER), automatic_checkpoint_naming=True, save_on_signal=True)",
            "after": "for batch in other: spend('evaluation', 0.7)",
        },
    ),
    "evaluation inside of training, with collectives": (
        2,
        {
            "after_step": "evaluate() if number in (1, 3) else None",
            "before": """
def evaluate():
    with torch.no_grad():
        for value in other:
            spend('evaluation', 0.4)
            accelerator.gather_for_metrics(value)
""",
        },
    ),
    "slow checkpoint": (
        1,
        {
            "before": "accelerator.register_save_state_pre_hook(lambda *_: spend('checkpoint stall', 1.0))",
            "after_step": "accelerator.save_state(str(checkpoint / str(number))) if number in (3, 7) else None",
        },
    ),
    "a slow process": (2, {"in_step": "spend('step' if number else 'first step', 0.4) if RANK == 1 else None"}),
    "recomputed work": (
        1,
        {
            "in_step": "again = START and number <= 6; "
            "spend(('recomputed work' if again else 'step') if number else 'first step', 0.3)",
            "after_step": KILLED.format(at=6, rank=0),
        },
    ),
    "killed in its data": (
        1,
        {
            "item": "spend('waiting for data', 1.5) if START == 0 and index == 9 else None\n"
            "        os.kill(os.getpid(), signal.SIGKILL) if START == 0 and index == 9 else None"
        },
    ),
    "killed in a checkpoint": (
        1,
        {
            "before": "accelerator.register_save_state_pre_hook(lambda *_: (spend('checkpoint stall', 1.5, began), "
            "os.kill(os.getpid(), signal.SIGKILL)))",
            "after_step": "began = time.perf_counter(); "
            "accelerator.save_state(str(checkpoint)) if number == 3 and START == 0 else None",
        },
    ),
}
"""By name, the processes and the parts of a script."""


@pytest.fixture(scope="module", autouse=True)
def preloaded() -> Iterator[None]:
    with PreloadedPython(("accel_torch.accelerator",)):
        yield


def launched(folder: Path, processes: int, parts: dict[str, str]) -> Finished:
    script = folder / "train.py"
    text = SCRIPT
    for name, part in {**PASS, **parts}.items():
        text = text.replace(f"{{{name}}}", part)
    script.write_text(text, encoding="utf-8")
    options = ["--cpu", "--num_processes", str(processes), "--project_dir", str(folder / "run")]
    options += ["--restart_policy", "auto", "--max_restarts", "3"]
    command = [sys.executable, "-m", "accel_cli.main", "launch", *options, str(script)]
    environment = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "TMPDIR": str(folder)}
    return run_command(command, timeout=280, env=environment, cwd=folder)


def truth_of(folder: Path, rank: int) -> dict[str, float]:
    """What the starts of a process spent, by its own clock."""
    total: dict[str, float] = {}
    for path in folder.glob(f"truth_{rank}_*.json"):
        for category, seconds in json.loads(path.read_text()).items():
            total[category] = total.get(category, 0.0) + seconds
    return total


@pytest.mark.slow
@pytest.mark.parametrize("name", SCRIPTS)
def test_time_is_charged_to_what_it_was_spent_on(name: str, tmp_path: Path) -> None:
    processes, parts = SCRIPTS[name]
    finished = launched(tmp_path, processes, parts)
    assert finished.returncode == 0, finished.stderr
    summary = read_goodput(tmp_path / "run")
    assert all(one.unattributed <= _end_of(tmp_path, one.rank, summary) + 0.02 * summary.wall for one in summary.ranks)
    for rank in range(processes):
        _holds(summary.ranks[rank].seconds, truth_of(tmp_path / "run", rank))
    if name == "a slow process":
        quick, slow = (one.seconds for one in summary.ranks)
        # While the slow process sleeps, the other one reads the same batch, works on the same step, or waits for it.
        meanwhile = ("waiting for data", "first step", "step", "waiting for other processes")
        assert sum(quick[category] for category in meanwhile) >= sum(truth_of(tmp_path / "run", 1).values())
        assert quick["waiting for other processes"] > slow["waiting for other processes"]
    _adds_up(summary)


def test_an_account_goes_on_over_a_restart(tmp_path: Path) -> None:
    _, parts = SCRIPTS["recomputed work"]
    finished = launched(tmp_path, 1, parts)
    assert finished.returncode == 0, finished.stderr
    summary = read_goodput(tmp_path / "run")
    assert (summary.restarts, summary.running, summary.damaged_lines) == (1, False, 0)
    spent = summary.ranks[0].seconds
    _holds(spent, truth_of(tmp_path / "run", 0))
    assert spent["down"] > 0
    _adds_up(summary)


def _end_of(folder: Path, rank: int, summary: GoodputSummary) -> float:
    """Seconds from the end of a script to the end of its run, which no account covers."""
    *_, last = (folder / "run" / "goodput" / f"rank_{rank}.jsonl").read_text().splitlines()
    end: dict[str, Any] = json.loads(last)
    return summary.ended - end["time"] if end["event"] == "end" else 0.0


def _holds(spent: Mapping[str, float], truth: Mapping[str, float]) -> None:
    """Every sleep lies inside of what is charged, to the precision of the lines."""
    for category, seconds in truth.items():
        assert spent[category] >= seconds - 0.001, (category, spent)


def _adds_up(summary: GoodputSummary) -> None:
    for one in summary.ranks:
        assert sum(one.seconds.values()) + one.unattributed == pytest.approx(summary.wall, abs=0.1)


def test_goodput_that_a_later_accelerator_records_has_the_time_before(fresh_state: Any, tmp_path: Path) -> None:
    Accelerator(cpu=True, straggler_report=True, goodput=False)
    assert not (tmp_path / "goodput").exists()
    Accelerator(cpu=True, goodput=True, project_dir=tmp_path)
    assert read_goodput(tmp_path).ranks[0].starts == 1


class Loops:
    """Two models, two loaders and an Accelerator that records its time."""

    def __init__(self, folder: Path) -> None:
        self.accelerator = Accelerator(cpu=True, goodput=True, project_dir=folder)
        self.first, self.second = (torch.nn.Linear(2, 1) for _ in range(2))
        optimizers = [torch.optim.SGD(model.parameters(), lr=0.01) for model in (self.first, self.second)]
        samples: Any = torch.zeros(12, 2)
        loaders = [torch.utils.data.DataLoader(samples, batch_size=2) for _ in range(2)]
        prepared: Any = self.accelerator.prepare(self.first, self.second, *optimizers, *loaders)
        self.first, self.second, self.one, self.other, self.loader, self.more = prepared

    def step(self, model: Any, optimizer: Any, batch: Any) -> None:
        self.accelerator.backward(model(batch).sum())
        optimizer.step()
        optimizer.zero_grad()

    def alternating(self) -> None:
        """Two models that are trained with every second batch, as those of a GAN."""
        for number, batch in enumerate(self.loader):
            self.step(*((self.first, self.one) if number % 2 else (self.second, self.other)), batch)

    def critic(self) -> None:
        """A second model that is trained in a loop of its own, inside of the loop of the first."""
        for batch in self.loader:
            for inner in self.more:
                self.step(self.second, self.other, inner)
            self.step(self.first, self.one, batch)

    def teacher(self) -> None:
        """A second model without gradients, whose outputs the step needs."""
        self.second.eval().requires_grad_(False)
        for batch in self.loader:
            with torch.no_grad():
                sum(self.second(inner).sum() for inner in self.more)
            self.step(self.first, self.one, batch)

    def pairs(self) -> None:
        """Two loaders that are read together."""
        for batch, inner in zip(self.loader, self.more, strict=True):
            with torch.no_grad():
                self.second(inner)
            self.step(self.first, self.one, batch)

    def evaluation_after_the_step(self) -> None:
        """An evaluation that does not set the mode of the model."""
        for batch in self.loader:
            self.step(self.first, self.one, batch)
            with torch.no_grad():
                sum(self.first(inner).sum() for inner in self.more)

    def evaluation_before_the_step(self) -> None:
        """An evaluation of both models."""
        for batch in self.loader:
            for model in (self.first, self.second):
                model.eval()
            with torch.no_grad():
                sum(self.first(inner).sum() for inner in self.more)
            for model in (self.first, self.second):
                model.train()
            self.step(self.first, self.one, batch)


@pytest.mark.parametrize("name", ["alternating", "critic", "teacher", "pairs"])
def test_a_second_model_trains(fresh_state: Any, tmp_path: Path, name: str) -> None:
    getattr(Loops(tmp_path), name)()
    spent = STATUS_RECORD.seconds
    assert spent[EVALUATION] == 0.0
    assert spent[STEP] > spent[EVALUATION]


@pytest.mark.parametrize("name", ["evaluation_after_the_step", "evaluation_before_the_step"])
def test_a_loop_without_a_step_evaluates(fresh_state: Any, tmp_path: Path, name: str) -> None:
    loops = Loops(tmp_path)
    getattr(loops, name)()
    spent = STATUS_RECORD.seconds
    assert spent[EVALUATION] > 0.0
    assert spent[STEP] > 0.0


def test_an_account_needs_a_folder(fresh_state: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ACCEL_PROJECT_DIR", raising=False)
    with pytest.raises(SettingError, match="Goodput is recorded in the project folder, and there is none"):
        Accelerator(cpu=True, goodput=True)
    with pytest.raises(SettingError, match="must be a bool"):
        Accelerator(cpu=True, goodput="yes")  # type: ignore[arg-type]
    assert not os.path.exists("goodput")
