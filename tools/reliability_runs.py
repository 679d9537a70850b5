"""Runs that save checkpoints, and what must be true of what is found after a fault; see `tools/reliability.py`."""

from __future__ import annotations

import importlib
import logging
import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from faults import sweeps, tracing
from torch import nn

from accel_plugins.checkpoint.manifest import verify
from accel_plugins.checkpoint.recovery import unfinished
from accel_plugins.checkpoint.retention import checkpoints, find_newest
from accel_state import current
from accel_state.errors import CheckpointError
from accel_testing.fresh import fresh
from accel_testing.processes import ReservedPort
from accel_torch import Accelerator, FullyShardedDataParallelPlugin, ProjectConfiguration

__all__ = ("Run", "Together")

STEPS = 2
"""Steps that are trained after a resume, to compare the losses."""


class Run:
    """A small project on one process with two good checkpoints.

    Args:
        project: folder of the project; made here.
        overwrite: save over the newest checkpoint by name, in place of a new one with a number.
        behind: save while training goes on.
        sharded: train with FSDP and save shards.
        exchange: whether names can be exchanged in one step where the save that is hit runs.
    """

    def __init__(
        self,
        project: Path,
        *,
        overwrite: bool = False,
        behind: bool = False,
        sharded: bool = False,
        exchange: bool = True,
    ) -> None:
        logging.getLogger("accel_plugins").setLevel(logging.ERROR)
        torch.set_num_threads(1)
        self.project, self.overwrite, self.behind, self.sharded = project, overwrite, behind, sharded
        self.exchange = exchange
        self.losses: list[float] = []
        self._reserved = ReservedPort()
        self.saved: dict[int, str] = {}
        self._begin()

    def _begin(self) -> None:
        with fresh():
            session = self.session()
            self.losses += session.train(1)
            session.save()
            self.losses += session.train(1)
            session.save()
            session.accelerator.wait_for_checkpoint()
        with fresh():
            session = self.session()
            session.load()
            self.losses += session.train(1 + STEPS)

    def session(self, folder: Path | None = None) -> Session:
        """A fresh start of the training script."""
        if self.sharded:
            _place(0, 1, self._reserved.reserve())
        return Session(folder or self.project, overwrite=self.overwrite, behind=self.behind, sharded=self.sharded)

    def save(self) -> None:
        """What a process does that is hit by a fault: resume, train one step, save."""
        if not self.exchange:
            tracing.refuse_exchange()
        session = self.session()
        session.load()
        session.train(1)
        session.save()
        session.accelerator.wait_for_checkpoint()

    def wrong(self, folder: Path) -> str | None:
        """What is wrong with what a restart finds; None when it resumes with the losses of an undisturbed run."""
        with fresh():
            session = self.session(folder)
            try:
                session.load()
            except CheckpointError as error:
                return f"nothing good was found: {error}"
            done = session.step.done
            losses = session.train(STEPS)
        if done not in (2, 3):
            return f"it went back to step {done}"
        expected = self.losses[done : done + STEPS]
        return None if losses == expected else f"from step {done} the losses are {losses}, not {expected}"

    def job(self, **options: Any) -> sweeps.Workload:
        """This run, to be hit by faults."""
        return sweeps.Workload(self.project, self.save, self.wrong, **options)


class _Step:
    """Counts steps; registered for checkpoints."""

    def __init__(self) -> None:
        self.done = 0

    def state_dict(self) -> dict[str, Any]:
        return {"done": self.done}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.done = state["done"]


class Session:
    """One start of a training script."""

    def __init__(
        self,
        project: Path,
        *,
        overwrite: bool = False,
        behind: bool = False,
        sharded: bool = False,
        deadline: float = 60.0,
    ) -> None:
        torch.manual_seed(0)
        self.overwrite, self.behind = overwrite, behind
        self.folder = project / "checkpoints" / "latest"
        configuration = ProjectConfiguration(
            str(project),
            automatic_checkpoint_naming=not overwrite,
            total_limit=2,
            verify="hashes",
            deadline=deadline,
        )
        plugin = FullyShardedDataParallelPlugin(fsdp_version=2) if sharded else None
        self.accelerator = Accelerator(cpu=True, project_config=configuration, fsdp_plugin=plugin)
        model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 1))
        self.model, self.optimizer = self.accelerator.prepare(model, torch.optim.Adam(model.parameters(), lr=0.05))
        self.step = _Step()
        self.accelerator.register_for_checkpointing(self.step)

    def train(self, steps: int) -> list[float]:
        """Losses of some steps; dropout draws on."""
        losses = []
        for _ in range(steps):
            loss = self.model(torch.randn(4, 4)).square().mean()
            self.accelerator.backward(loss)
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.step.done += 1
            losses.append(loss.item())
        return losses

    def save(self) -> None:
        """Save; with the usual name, or with the next number."""
        self.accelerator.save_state(str(self.folder) if self.overwrite else None, async_save=self.behind)

    def load(self) -> None:
        """Load the newest good checkpoint."""
        self.accelerator.load_state(str(self.folder) if self.overwrite else None)


def _place(rank: int, processes: int, port: int) -> None:
    """Say which process of a run this one is."""
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(processes),
        LOCAL_WORLD_SIZE=str(processes),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
        GLOO_SOCKET_IFNAME="lo",
        TORCH_CPP_LOG_LEVEL="ERROR",
    )


class Together:
    """The same on two processes, forked from this one for each fault.

    Args:
        project: folder of the project.
        hit: rank of the process that the fault hits.
        sharded: train with FSDP and save shards.
        overwrite: save over one name, in place of new ones with numbers.
        exchange: whether names can be exchanged in one step where the save that is hit runs.
    """

    def __init__(
        self,
        project: Path,
        hit: int = 0,
        *,
        sharded: bool = False,
        overwrite: bool = False,
        exchange: bool = True,
    ) -> None:
        logging.getLogger("accel_plugins").setLevel(logging.ERROR)
        torch.set_num_threads(1)
        self.project, self.hit, self.sharded = project, hit, sharded
        self.overwrite, self.exchange = overwrite, exchange
        if sharded:
            # Once here, and not in every process that is forked.
            importlib.import_module("accel_plugins.fsdp.fsdp2")
        self._reserved, self.port = ReservedPort(), 0
        self.prepare()
        self._both(self._begin)
        self.prepare()

    def prepare(self) -> None:
        """Choose where the next two processes meet."""
        self.port = self._reserved.reserve()

    def _both(self, function: Callable[[int], None]) -> None:
        ended = tracing.run(lambda: function(0), self.project.parent, companion=lambda: function(1))
        if (ended.code, ended.companion_code) != (0, 0):
            raise AssertionError(f"The undisturbed processes ended with {ended.code} and {ended.companion_code}.")

    def _session(self, rank: int, project: Path | None = None, deadline: float = 10.0) -> Session:
        _place(rank, 2, self.port)
        current.clear()
        return Session(project or self.project, overwrite=self.overwrite, sharded=self.sharded, deadline=deadline)

    def _begin(self, rank: int) -> None:
        session = self._session(rank, deadline=60.0)
        losses = []
        for _ in range(2):
            losses += session.train(1)
            session.save()
        losses += session.train(1 + STEPS)
        (self.project.parent / f"losses_{rank}").write_text(repr(losses))

    def save(self, rank: int) -> None:
        """Resume, train one step and save."""
        if not self.exchange:
            tracing.refuse_exchange()
        session = self._session(rank)
        session.load()
        session.train(1)
        session.save()

    def _resume(self, rank: int, folder: Path) -> None:
        session = self._session(rank, folder, deadline=60.0)
        session.load()
        done = session.step.done
        expected = _numbers(self.project.parent / f"losses_{rank}")[done : done + STEPS]
        if done < STEPS or session.train(STEPS) != expected:
            raise SystemExit(3)

    def wrong(self, folder: Path) -> str | None:
        """What is wrong with what a restart of both processes finds."""
        self.prepare()
        ended = tracing.run(
            lambda: self._resume(0, folder),
            self.project.parent / "nowhere",
            companion=lambda: self._resume(1, folder),
            log=self.project.parent / "output",
        )
        codes = (ended.code, ended.companion_code)
        return None if codes == (0, 0) else f"the restarted processes ended with {codes}"

    def job(self) -> sweeps.Workload:
        """This run, to be hit by faults."""
        mine, other = self.hit, 1 - self.hit
        return sweeps.Workload(
            self.project, lambda: self.save(mine), self.wrong, lambda: self.save(other), self.prepare, timeout=300.0
        )

    def slow(self) -> str | None:
        """One process comes later than the others are prepared to wait: they say so, and nothing is harmed."""
        return self._refused(lambda rank: self._late(rank), "did not come within")

    def _late(self, rank: int) -> None:
        session = self._session(rank, deadline=60.0)
        session.load()
        session.train(1)
        session.accelerator.project_configuration.deadline = 0.5
        if rank == self.hit:
            time.sleep(3)
        session.save()

    def other_keys(self) -> str | None:
        """One process has registered one object more: every process raises, and none waits for the other."""
        return self._refused(self._differing, "registered objects from")

    def _differing(self, rank: int) -> None:
        session = self._session(rank, deadline=30.0)
        if rank == self.hit:
            session.accelerator.register_for_checkpointing(_Step())
        session.load()

    def _refused(self, function: Callable[[int], None], words: str) -> str | None:
        self.prepare()
        log = self.project.parent / "refusal"
        log.unlink(missing_ok=True)
        ended = tracing.run(
            lambda: function(0), self.project.parent / "nowhere", companion=lambda: function(1), log=log
        )
        if ended.hung or (ended.code, ended.companion_code) != (1, 1):
            return f"the processes ended with {ended.code} and {ended.companion_code}"
        if words not in log.read_text():
            return f"nobody said {words!r}"
        return self.wrong(self.project)


def _numbers(path: Path) -> list[float]:
    return [float(text) for text in path.read_text().strip("[]").split(",")]


# ---------------------------------------------------------------- single faults


def harm(run: Run) -> sweeps.Tally:
    """Damage to each file of the newest checkpoint: it is passed over, or what is extra does not matter."""
    newest = find_newest(run.project / "checkpoints", hashes=True)

    def wrong(serious: bool, path: Path) -> str | None:
        good = verify(newest, hashes=True).good
        if good is serious:
            return "damage was not noticed" if serious else "a good checkpoint was refused"
        if serious and path.name == "checkpoint_manifest.json" and not path.exists():
            # Without a manifest it counts as another library's, behind those that have one.
            return None if find_newest(newest.parent) != newest else "an unverified checkpoint was preferred"
        return resumed_from(run, 1 if serious else 2)

    return sweeps.harm_everything(newest, wrong)


def resumed_from(run: Run, step: int) -> str | None:
    """What is wrong with a resume that must begin at a step."""
    with fresh():
        session = run.session()
        session.load()
        found, losses = session.step.done, session.train(STEPS)
    expected = run.losses[step : step + STEPS]
    return None if (found, losses) == (step, expected) else f"resumed from step {found} with losses {losses}"


def stale_folders(run: Run) -> sweeps.Tally:
    """What dead processes left behind: swept away by the next save, and never taken for a checkpoint."""
    tally = sweeps.Tally("folder left behind by a dead process")
    for at in range(0, 30, 3):
        ended = tracing.run(run.save, run.project, tracing.Fault(at), log=run.project.with_name("output"))
        if ended.hit is None:
            break
        left = _unfinished(run.project)
        tracing.run(run.save, run.project, log=run.project.with_name("output"))
        wrong = run_goes_on(run)
        if wrong is None and _unfinished(run.project):
            wrong = f"{_unfinished(run.project)} stayed"
        tally.count(f"{len(left)} left", wrong)
    return tally


def _unfinished(project: Path) -> list[str]:
    return [entry.name for entry in unfinished(project / "checkpoints")]


def run_goes_on(run: Run) -> str | None:
    """What is wrong with the newest checkpoint, after some saves more."""
    newest = find_newest(run.project / "checkpoints", hashes=True)
    known = checkpoints(run.project / "checkpoints")
    return None if known and newest == known[-1].path else f"the newest good one is {newest.name}"


def two_writers(run: Run, times: int = 10) -> sweeps.Tally:
    """Two processes that know nothing of each other save under one name at the same time."""
    tally = sweeps.Tally("two writers of one name at once")
    target = run.project / "checkpoints" / "contested"

    def save() -> None:
        if not run.exchange:
            tracing.refuse_exchange()
        session = run.session()
        session.load()
        session.train(1)
        session.accelerator.project_configuration.automatic_checkpoint_naming = False
        for _ in range(3):
            session.accelerator.save_state(str(target))

    for time_ in range(times):
        ended = tracing.run(save, run.project, companion=save, log=run.project.with_name("output"))
        verdict = verify(target, hashes=True)
        wrong = "a process hung" if ended.hung else None if verdict.good else f"damaged: {verdict.damage}"
        tally.count(f"time {time_}", wrong)
    return tally


def signals(run: Run, times: int = 20) -> sweeps.Tally:
    """SIGTERM to a process while it saves, at moments spread over the save."""
    tally = sweeps.Tally("SIGTERM during a save")
    with fresh():
        session = run.session()
        session.load()
        begun = time.monotonic()
        session.save()
        duration = time.monotonic() - begun
    for number in range(times):
        pid = os.fork()
        if pid == 0:
            threading.Timer(duration * number / times, lambda: os.kill(os.getpid(), signal.SIGTERM)).start()
            run.save()
            os._exit(0)
        os.waitpid(pid, 0)
        tally.count(f"moment {number}", run_goes_on(run))
    return tally
