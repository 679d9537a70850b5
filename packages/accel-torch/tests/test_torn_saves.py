"""Asynchronous saves whose parameters are changed before they are copied: nothing torn is ever called good."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from accel_plugins.checkpoint import background
from accel_plugins.checkpoint.background import Snapshot
from accel_plugins.checkpoint.manifest import read_manifest, verify
from accel_state.errors import CheckpointError
from accel_testing.fresh import fresh
from accel_testing.processes import Processes
from accel_torch import Accelerator, LocalSGD, ProjectConfiguration

REAL_COPY = Snapshot.copy


class Counter:
    """Steps done; registered for checkpoints."""

    def __init__(self) -> None:
        self.done = 0

    def state_dict(self) -> dict[str, int]:
        return {"done": self.done}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.done = state["done"]


class Session:
    """A run with a model, one large parameter, an optimizer, a loader and a counter."""

    def __init__(self, loaded: bool = True, samples: int = 128, deadline: float = 60.0, **options: Any) -> None:
        torch.manual_seed(5)
        project = ProjectConfiguration(fsync=False, deadline=deadline)
        self.accelerator = Accelerator(cpu=True, project_config=project, **options)
        model = nn.Sequential(nn.Linear(4, 160), nn.Dropout(0.5), nn.Linear(160, 160), nn.Linear(160, 1))
        optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
        data = TensorDataset(torch.randn(samples, 4), torch.randn(samples, 1))
        loader: DataLoader[Any] = DataLoader(data, batch_size=4, shuffle=True)
        self.model, self.optimizer = self.accelerator.prepare(model, optimizer)
        self.loader = self.accelerator.prepare(loader) if loaded else loader
        self.counter = Counter()
        self.accelerator.register_for_checkpointing(self.counter)

    def step(self, batch: Any) -> float:
        inputs, targets = batch
        loss = (self.model(inputs) - targets).square().mean()
        self.accelerator.backward(loss)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.counter.done += 1
        return loss.item()

    @property
    def weights(self) -> dict[str, torch.Tensor]:
        unwrapped = self.accelerator.unwrap_model(self.model)
        return {name: value.clone() for name, value in unwrapped.state_dict().items()}


class Late:
    """Copies that wait until they are let through, as many as are late."""

    def __init__(self, patch: pytest.MonkeyPatch, late: int = 1) -> None:
        self.may_copy, self.copies, self._late = threading.Event(), 0, late
        patch.setattr(background.Snapshot, "copy", lambda taken: self._copy(taken))

    def _copy(self, taken: Snapshot) -> list[str]:
        self.copies += 1
        if self.copies <= self._late:
            assert self.may_copy.wait(250)
        return REAL_COPY(taken)


def join_background_saves() -> None:
    """Wait until the threads that write checkpoints have ended, without what `wait_for_checkpoint` does besides."""
    for thread in threading.enumerate():
        if thread.name == "accel-save":
            thread.join(250)


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
    for state in session.optimizer.state.values():
        state["exp_avg"].data.mul_(2)


def counted(session: Session) -> None:
    with torch.no_grad():
        session.model[0].weight.mul_(2)


CHANGES = [clamp, swap, one_element, optimizer_state, counted]


@pytest.mark.parametrize("change", CHANGES)
def test_a_torn_save_is_reported_and_taken_again_at_the_next_step_boundary(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, change: Callable[[Session], None]
) -> None:
    late = Late(monkeypatch)
    losses, states = [], []
    with fresh():
        session = Session()
        with caplog.at_level(logging.WARNING):
            for number, batch in enumerate(session.loader):
                states.append((session.weights, session.counter.done))
                losses.append(session.step(batch))
                if number == 1:
                    session.accelerator.save_state(str(tmp_path / "a"), async_save=True)
                    change(session)
                    late.may_copy.set()
                    # What is torn is known before the next boundary.
                    join_background_saves()
                    assert not (tmp_path / "a").exists()
                if number == 8:
                    break
            assert late.copies == 2
            session.accelerator.wait_for_checkpoint()
        reports = [record.getMessage() for record in caplog.records if "not committed" in record.getMessage()]
        assert len(reports) == 1, reports
        assert "model 0: 0." in reports[0] or "optimizer 0: state." in reports[0]
        assert verify(tmp_path / "a", hashes=True).good

        # All of it is of one moment: the beginning of a later iteration of the loop.
        session.accelerator.load_state(str(tmp_path / "a"))
        taken = session.counter.done
        assert taken == 3
        assert all(torch.equal(value, states[taken][0][name]) for name, value in session.weights.items())
        rest = session.accelerator.skip_first_batches(session.loader, taken)
        again = [session.step(batch) for batch, _ in zip(rest, range(9 - taken), strict=False)]
        assert again == losses[taken:]


def test_a_change_that_is_taken_back_tears_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    late = Late(monkeypatch)
    with fresh():
        session = Session()
        session.accelerator.save_state(str(tmp_path / "a"), async_save=True)
        before, real = session.weights, background.samples_of

        def samples_of(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
            # The copy is made, and the evaluation is over.
            for name, parameter in session.model.named_parameters():
                parameter.data.copy_(before[name])
            return real(tensors)

        monkeypatch.setattr(background, "samples_of", samples_of)
        for parameter in session.model.parameters():
            parameter.data.mul_(0.5)
        late.may_copy.set()
        with caplog.at_level(logging.WARNING):
            session.accelerator.wait_for_checkpoint()
        assert "not committed" in caplog.text
        session.accelerator.load_state(str(tmp_path / "a"))
        assert all(torch.equal(value, before[name]) for name, value in session.weights.items())


def test_an_evaluation_with_other_parameters_is_no_boundary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    late = Late(monkeypatch)
    with fresh():
        session = Session()
        held_out = session.accelerator.prepare(DataLoader(TensorDataset(torch.randn(16, 4)), batch_size=2))
        trained: list[dict[str, torch.Tensor]] = []
        for number, batch in enumerate(session.loader):
            session.step(batch)
            trained.append(session.weights)
            if number == 1:
                session.accelerator.save_state(str(tmp_path / "a"), async_save=True)
                clamp(session)
                late.may_copy.set()
                join_background_saves()
            if number in (1, 2):
                own = session.weights
                for parameter in session.model.parameters():
                    parameter.data.zero_()
                for (inputs,) in held_out:
                    session.model(inputs)
                session.accelerator.unwrap_model(session.model).load_state_dict(own)
            if number == 5:
                break
        session.accelerator.wait_for_checkpoint()
        session.accelerator.load_state(str(tmp_path / "a"))
        assert session.counter.done == 3
        assert all(torch.equal(value, trained[2][name]) for name, value in session.weights.items())


def test_a_loop_over_no_prepared_loader_takes_it_again_before_a_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    late = Late(monkeypatch)
    with fresh():
        session = Session(loaded=False)
        trained = []
        for number, batch in enumerate(session.loader):
            session.step(batch)
            trained.append(session.weights)
            if number == 1:
                session.accelerator.save_state(str(tmp_path / "a"), async_save=True)
                clamp(session)
                late.may_copy.set()
                join_background_saves()
                trained[-1] = session.weights
            if number == 4:
                break
        assert late.copies == 2
        session.accelerator.wait_for_checkpoint()
        session.accelerator.load_state(str(tmp_path / "a"))
        done = session.counter.done
        assert done == 2
        assert all(torch.equal(value, trained[done - 1][name]) for name, value in session.weights.items())


@pytest.mark.parametrize("where", ["wait_for_checkpoint", "save_state", "end_training", "free_memory"])
def test_whoever_waits_next_takes_it_again_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str) -> None:
    late = Late(monkeypatch)
    with fresh():
        session = Session()
        session.accelerator.save_state(str(tmp_path / "a"), async_save=True)
        clamp(session)
        weights = session.weights
        late.may_copy.set()
        getattr(session.accelerator, where)(*([str(tmp_path / "b")] if where == "save_state" else []))
        assert verify(tmp_path / "a", hashes=True).good
        other = Session()
        other.accelerator.load_state(str(tmp_path / "a"))
        assert all(torch.equal(value, weights[name]) for name, value in other.weights.items())


def test_after_three_torn_copies_training_stands_still_for_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    threads = []

    def disturbed(taken: Snapshot) -> list[str]:
        threads.append(threading.current_thread() is threading.main_thread())
        if not threads[-1]:
            clamp(session)
            session.model[0].bias.data.add_(1)
        return REAL_COPY(taken)

    monkeypatch.setattr(background.Snapshot, "copy", disturbed)
    with fresh():
        session = Session()
        for number, batch in enumerate(session.loader):
            session.step(batch)
            if number == 0:
                session.accelerator.save_state(str(tmp_path / "a"), async_save=True)
            join_background_saves()
            if number == 20:
                break
        assert threads == [False, False, False, True]
        session.accelerator.wait_for_checkpoint()
        assert verify(tmp_path / "a", hashes=True).good


def test_parameters_that_another_thread_changes_all_the_time_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def disturbed(taken: Snapshot) -> list[str]:
        session.model[0].bias.data.add_(1)
        return REAL_COPY(taken)

    monkeypatch.setattr(background.Snapshot, "copy", disturbed)
    with fresh():
        session = Session()
        session.accelerator.save_state(str(tmp_path / "a"), async_save=True)
        for _, batch in zip(range(20), session.loader, strict=False):
            session.step(batch)
            join_background_saves()
        with pytest.raises(CheckpointError, match="Another thread"):
            session.accelerator.wait_for_checkpoint()
    assert list(tmp_path.iterdir()) == []


SCRIPT = """
import sys, threading
import torch
from torch import nn
from accel_plugins.checkpoint.background import Snapshot
from accel_torch import Accelerator, ProjectConfiguration

def train(folder):
    accelerator = Accelerator(cpu=True, project_config=ProjectConfiguration(folder, automatic_checkpoint_naming=True))
    model = nn.Linear(4, 4)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    may_copy, real = threading.Event(), Snapshot.copy
    def late(taken):
        may_copy.wait(250)
        return real(taken)
    Snapshot.copy = late
    accelerator.save_state(async_save=True)
    model.weight.data.fill_(3)
    may_copy.set()

train(sys.argv[1])
"""


def test_a_torn_save_is_copied_again_when_the_program_ends(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=250,
        check=False,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert done.returncode == 0, done.stderr
    folder = tmp_path / "checkpoints" / "checkpoint_0"
    assert verify(folder, hashes=True).good
    from accel_bigmodel.weight_files import load_weights_file

    assert load_weights_file(folder / "model.safetensors")["weight"].unique().tolist() == [3.0]


def torn_on_two(folder: str, hit: int, fsdp2: bool) -> tuple[int, int, bool]:
    """One process changes its parameters behind the counter before they are copied, the other one afterwards.

    Returns:
        Copies made, the step that was saved, and whether a restart goes on with the same losses.
    """
    options: dict[str, Any] = {}
    if fsdp2:
        from accel_torch import FullyShardedDataParallelPlugin

        options["fsdp_plugin"] = FullyShardedDataParallelPlugin(fsdp_version=2, state_dict_type="SHARDED_STATE_DICT")
    with pytest.MonkeyPatch.context() as patch:
        late = Late(patch)
        session = Session(samples=8000, **options)
        losses = []
        for number, batch in enumerate(session.loader):
            losses.append(session.step(batch))
            if number == 1:
                session.accelerator.save_state(folder, async_save=True)
                if session.accelerator.process_index != hit:
                    late.may_copy.set()
                    session.accelerator.session.saver.wait_for_copy()  # type: ignore[union-attr]
                for parameter in session.model.parameters():
                    local: Any = parameter.to_local() if fsdp2 else parameter  # type: ignore[operator]
                    local.data.mul_(1.5)
                late.may_copy.set()
            # Both copy again at the same boundary, so both end here at the same batch.
            if number >= 10 and late.copies == 2:
                break
        session.accelerator.wait_for_checkpoint()
        copies = late.copies
    session.accelerator.load_state(folder)
    taken = session.counter.done
    rest = session.accelerator.skip_first_batches(session.loader, taken)
    expected = losses[taken : taken + 8]
    return copies, taken, [session.step(batch) for batch, _ in zip(rest, expected, strict=False)] == expected


@pytest.mark.parametrize(("hit", "fsdp2"), [(0, False), (0, True), (1, True)])
def test_one_torn_process_makes_all_take_it_again_together(
    two: Processes, tmp_path: Path, hit: int, fsdp2: bool
) -> None:
    first, second = two.run(torn_on_two, str(tmp_path / "a"), hit, fsdp2)
    assert first == second
    copies, taken, same = first
    assert copies == 2
    assert taken > 2
    assert same
    assert verify(tmp_path / "a", hashes=True).good
    manifest = read_manifest(tmp_path / "a")
    assert manifest is not None
    assert manifest.facts["positions"][0]["batch"] == taken


def torn_at_the_end(folder: str) -> int:
    """Both wait right after the save, so that no boundary comes."""
    with pytest.MonkeyPatch.context() as patch:
        late = Late(patch)
        session = Session()
        session.accelerator.save_state(folder, async_save=True)
        clamp(session)
        late.may_copy.set()
        session.accelerator.wait_for_checkpoint()
        return late.copies


def test_processes_that_wait_take_it_again_together(two: Processes, tmp_path: Path) -> None:
    assert two.run(torn_at_the_end, str(tmp_path / "a")) == [1, 1]
    assert verify(tmp_path / "a", hashes=True).good


def averaging(folder: str) -> tuple[int, bool]:
    """Local SGD averages while a checkpoint is being copied."""
    with pytest.MonkeyPatch.context() as patch:
        late = Late(patch)
        session = Session()
        with LocalSGD(accelerator=session.accelerator, model=session.model, local_sgd_steps=1) as local_sgd:
            for number, batch in enumerate(session.loader):
                session.step(batch)
                if number == 1:
                    break
            before = session.weights
            session.accelerator.save_state(folder, async_save=True)
            threading.Timer(0.3, late.may_copy.set).start()
            local_sgd.step()
        averaged = any(not torch.equal(value, before[name]) for name, value in session.weights.items())
        session.accelerator.wait_for_checkpoint()
        return late.copies, averaged


def test_averages_of_local_sgd_wait_for_the_copy(two: Processes, tmp_path: Path) -> None:
    assert two.run(averaging, str(tmp_path / "a")) == [(1, True), (1, True)]
    assert verify(tmp_path / "a", hashes=True).good
