"""Saving while training goes on: what is saved is the moment of the call, and no failure stays unheard."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from accel_plugins.checkpoint import state
from accel_plugins.checkpoint.manifest import verify
from accel_plugins.checkpoint.retention import find_newest
from accel_state.errors import CheckpointError
from accel_testing.fresh import fresh
from accel_testing.processes import Processes
from accel_torch import Accelerator, ProjectConfiguration


class Counter:
    """A registered object whose tensor changes with every step."""

    def __init__(self) -> None:
        self.seen = torch.zeros(1)

    def state_dict(self) -> dict[str, Any]:
        return {"seen": self.seen}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.seen = state["seen"]


class Session:
    """A small run whose every state changes with every step."""

    def __init__(self, project: ProjectConfiguration | None = None, accumulate: int = 1, **options: Any) -> None:
        torch.manual_seed(5)
        self.accelerator = Accelerator(
            cpu=True,
            project_config=project or ProjectConfiguration(fsync=False),
            gradient_accumulation_steps=accumulate,
            **options,
        )
        model = nn.Sequential(nn.Linear(4, 16), nn.BatchNorm1d(16), nn.Dropout(0.5), nn.Linear(16, 1))
        optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
        data = TensorDataset(torch.randn(128, 4), torch.randn(128, 1))
        loader: DataLoader[Any] = DataLoader(data, batch_size=4, shuffle=True)
        self.model, self.optimizer, self.scheduler, self.loader = self.accelerator.prepare(
            model, optimizer, scheduler, loader
        )
        self.counter = Counter()
        self.accelerator.register_for_checkpointing(self.counter)

    def train(self, batches: Iterator[Any], steps: int, between: Callable[[], object] = lambda: None) -> list[float]:
        losses = []
        for _ in range(steps):
            inputs, targets = next(batches)
            with self.accelerator.accumulate(self.model):
                loss = (self.model(inputs) - targets).square().mean()
                self.accelerator.backward(loss)
                between()
                self.optimizer.step()
                self.scheduler.step()
                self.optimizer.zero_grad()
            self.counter.seen += 1
            losses.append(loss.item())
        return losses


def resume(session: Session, folder: str, done: int, steps: int) -> list[float]:
    session.accelerator.load_state(folder)
    return session.train(iter(session.accelerator.skip_first_batches(session.loader, done)), steps)


@pytest.mark.parametrize(("before", "accumulate"), [(0, 1), (4, 1), (4, 3), (5, 3)])
def test_what_is_saved_is_the_moment_of_the_call(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, before: int, accumulate: int
) -> None:
    written = threading.Event()
    real = state.pickled.write

    def late(state: Any, path: Path) -> None:
        # Nothing is written before training has changed everything there is.
        assert written.wait(250)
        real(state, path)

    monkeypatch.setattr(state.pickled, "write", late)
    with fresh():
        session = Session(accumulate=accumulate)
        batches = iter(session.loader)
        session.train(batches, before)
        folder = session.accelerator.save_state(str(tmp_path / "a"), async_save=True)
        expected = session.train(batches, 6)
        assert not (tmp_path / "a").exists()
        written.set()
        session.accelerator.wait_for_checkpoint()

        assert verify(tmp_path / "a", hashes=True).good
        assert resume(session, folder, before, 6) == expected
        assert session.counter.seen.item() == before + 6


def clamp(session: Session) -> None:
    for parameter in session.model.parameters():
        parameter.data.clamp_(-0.01, 0.01)


def swap(session: Session) -> None:
    """Put an average in the place of the parameters, as for an evaluation."""
    for parameter in session.model.parameters():
        parameter.data.copy_(parameter.data * 0.5)


def one_element(session: Session) -> None:
    session.model[0].bias.data[7] += 1


def optimizer_state(session: Session) -> None:
    for moments in session.optimizer.state.values():
        moments["exp_avg"].data.mul_(2)


def buffers(session: Session) -> None:
    session.model[1].running_mean.fill_(9)


def registered(session: Session) -> None:
    session.counter.seen += 40


@pytest.mark.parametrize("change", [clamp, swap, one_element, optimizer_state, buffers, registered])
def test_whatever_is_changed_after_the_call_is_not_in_the_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: Callable[[Session], None]
) -> None:
    may_write, real = threading.Event(), state.CheckpointState.write

    def late(self: state.CheckpointState, *arguments: Any, **options: Any) -> None:
        assert may_write.wait(250)
        real(self, *arguments, **options)

    monkeypatch.setattr(state.CheckpointState, "write", late)
    with fresh():
        session = Session()
        batches = iter(session.loader)
        session.train(batches, 2)
        session.accelerator.save_state(str(tmp_path / "a"), async_save=True)
        change(session)
        may_write.set()
        session.accelerator.wait_for_checkpoint()
        resumed = resume(session, str(tmp_path / "a"), 2, 3)
    with fresh():
        straight = Session()
        assert straight.train(iter(straight.loader), 5)[2:] == resumed
        assert straight.counter.seen.item() == 5


def test_a_thread_that_cannot_start_fails_the_save_and_nothing_else(tmp_path: Path) -> None:
    with fresh():
        session = Session()
        batches = iter(session.loader)
        session.accelerator.save_state(str(tmp_path / "good"))
        # No system has that much memory for a stack.
        usual = threading.stack_size(1 << 46)
        try:
            with pytest.raises(CheckpointError, match="Cannot start the thread"):
                session.accelerator.save_state(str(tmp_path / "bad"), async_save=True)
        finally:
            threading.stack_size(usual)
        assert [entry.name for entry in tmp_path.iterdir()] == ["good"]
        session.train(batches, 1)
        session.accelerator.save_state(str(tmp_path / "next"), async_save=True)
        session.accelerator.wait_for_checkpoint()
        assert verify(tmp_path / "next", hashes=True).good


def test_memory_that_cannot_be_had_fails_the_save_and_nothing_else(tmp_path: Path) -> None:
    with fresh():
        session = Session()
        usual, session.counter.seen = session.counter.seen, torch.zeros(1).expand(2**58)
        with pytest.raises(CheckpointError, match="no host memory"):
            session.accelerator.save_state(str(tmp_path / "bad"), async_save=True)
        assert list(tmp_path.iterdir()) == []
        session.counter.seen = usual
        session.train(iter(session.loader), 1)
        session.accelerator.save_state(str(tmp_path / "next"), async_save=True)
        session.accelerator.wait_for_checkpoint()
        assert verify(tmp_path / "next", hashes=True).good


def failing_write(state: Any, path: Path) -> None:
    raise CheckpointError("Cannot write it.", "The disk is full.", "Make room.")


@pytest.mark.parametrize("where", ["save_state", "load_state", "wait_for_checkpoint", "end_training", "free_memory"])
def test_a_failure_is_raised_by_whoever_waits_next_and_only_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    with fresh():
        session = Session()
        accelerator = session.accelerator
        accelerator.save_state(str(tmp_path / "good"))
        with monkeypatch.context() as patch:
            patch.setattr(state.pickled, "write", failing_write)
            accelerator.save_state(str(tmp_path / "bad"), async_save=True)
            arguments = (str(tmp_path / "good"),) if where in ("save_state", "load_state") else ()
            with pytest.raises(CheckpointError, match="disk is full"):
                getattr(accelerator, where)(*arguments)
        accelerator.wait_for_checkpoint()
        assert accelerator.save_state(str(tmp_path / "next"), async_save=True)
        accelerator.wait_for_checkpoint()
    assert {entry.name for entry in tmp_path.iterdir()} == {"good", "next"}
    assert verify(tmp_path / "good", hashes=True).good


def test_memory_is_used_again_and_given_back(tmp_path: Path) -> None:
    with fresh():
        session = Session()
        batches = iter(session.loader)
        session.train(batches, 1)
        session.accelerator.save_state(str(tmp_path / "a"), async_save=True)
        session.accelerator.wait_for_checkpoint()
        saver = session.accelerator.session.saver
        assert saver is not None
        buffers, size = saver.buffers, saver.buffers.nbytes
        parameters = sum(parameter.nbytes for parameter in session.model.parameters())
        assert size > 3 * parameters
        session.train(batches, 1)
        session.accelerator.save_state(str(tmp_path / "b"), async_save=True)
        session.accelerator.wait_for_checkpoint()
        assert (saver.buffers, buffers.nbytes) == (buffers, size)
        session.accelerator.free_memory()
        assert saver.buffers.nbytes == 0


def test_total_limit_removes_checkpoints_after_an_async_commit(tmp_path: Path) -> None:
    with fresh():
        project = ProjectConfiguration(str(tmp_path), automatic_checkpoint_naming=True, total_limit=2, fsync=False)
        accelerator = Session(project).accelerator
        for _ in range(4):
            accelerator.save_state(async_save=True)
        accelerator.wait_for_checkpoint()
    assert sorted(entry.name for entry in (tmp_path / "checkpoints").iterdir()) == ["checkpoint_2", "checkpoint_3"]


SCRIPT = """
import os, signal, sys
from torch import nn
from accel_torch import Accelerator, ProjectConfiguration
from accel_plugins.checkpoint import state
from accel_state.errors import CheckpointError

accelerator = Accelerator(cpu=True, project_config=ProjectConfiguration(sys.argv[1], automatic_checkpoint_naming=True))
accelerator.prepare(nn.Linear(4, 4))
accelerator.save_state()
def write(state, path):
    if sys.argv[2] == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    raise CheckpointError("Cannot write it.", "The disk is full.", "Make room.")
if sys.argv[2] != "well":
    state.pickled.write = write
accelerator.save_state(async_save=True)
"""


@pytest.mark.usefixtures("preloaded_python")
@pytest.mark.parametrize(("how", "code"), [("well", 0), ("fail", 1), ("kill", -9)])
def test_the_end_of_the_program_completes_a_save_or_says_that_it_failed(tmp_path: Path, how: str, code: int) -> None:
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(tmp_path), how],
        capture_output=True,
        text=True,
        timeout=250,
        check=False,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    newest = find_newest(tmp_path / "checkpoints", hashes=True)

    assert done.returncode == code, done.stderr
    assert newest.name == ("checkpoint_1" if how == "well" else "checkpoint_0")
    assert ("The disk is full." in done.stderr) is (how == "fail")


def resume_on_two(folder: str, backend: str) -> tuple[list[float], list[float]]:
    fsdp: dict[str, Any] = {}
    if backend == "fsdp2":
        from accel_torch import FullyShardedDataParallelPlugin

        fsdp["fsdp_plugin"] = FullyShardedDataParallelPlugin(fsdp_version=2, state_dict_type="SHARDED_STATE_DICT")
    session = Session(**fsdp)
    batches = iter(session.loader)
    session.train(batches, 2)
    session.accelerator.save_state(folder, async_save=True)
    session.train(batches, 1)
    session.accelerator.save_state(f"{folder}_next", async_save=True)
    expected = session.train(batches, 3)
    session.accelerator.wait_for_checkpoint()
    return expected, resume(session, f"{folder}_next", 3, 3)


@pytest.mark.parametrize("backend", ["ddp", "fsdp2"])
def test_two_processes_save_while_they_train(two: Processes, tmp_path: Path, backend: str) -> None:
    for expected, resumed in two.run(resume_on_two, str(tmp_path / "a"), backend):
        assert resumed == expected
    assert verify(tmp_path / "a", hashes=True).good
    assert verify(tmp_path / "a_next", hashes=True).good


def fail_on_two(folder: str) -> list[str]:
    session = Session()
    accelerator = session.accelerator
    accelerator.save_state(folder)
    batches = iter(session.loader)
    real = state.pickled.write
    if accelerator.process_index == 1:
        state.pickled.write = failing_write
    accelerator.save_state(folder, async_save=True)
    session.train(batches, 2)
    told = []
    for _ in range(2):
        try:
            accelerator.wait_for_checkpoint()
        except CheckpointError as error:
            told.append(str(error))
    state.pickled.write = real
    accelerator.wait_for_everyone()
    return told


def no_thread_on_one(folder: str) -> tuple[bool, list[str]]:
    session = Session()
    usual = threading.stack_size(1 << 46 if session.accelerator.process_index == 1 else 0)
    told = []
    try:
        session.accelerator.save_state(folder, async_save=True)
    except CheckpointError as error:
        told.append(str(error))
    finally:
        threading.stack_size(usual)
    session.train(iter(session.loader), 2)
    try:
        session.accelerator.wait_for_checkpoint()
    except CheckpointError as error:
        told.append(str(error))
    return Path(folder).exists(), told


def test_a_thread_that_one_process_cannot_start_fails_the_save_on_all(two: Processes, tmp_path: Path) -> None:
    for exists, told in two.run(no_thread_on_one, str(tmp_path / "a")):
        assert not exists
        assert len(told) == 1
        assert "Cannot start the thread" in told[0]
    assert list(tmp_path.iterdir()) == []


def test_a_failure_of_one_process_is_heard_on_all(two: Processes, tmp_path: Path) -> None:
    first, second = two.run(fail_on_two, str(tmp_path / "a"))

    assert len(first) == len(second) == 1
    assert "Process 1 failed" in first[0]
    assert "The disk is full." in second[0]
    assert verify(tmp_path / "a", hashes=True).good
