"""Runs that save checkpoints and are hit by a fault, and what must be true of what a restart then finds."""

from __future__ import annotations

import contextlib
import errno
import importlib
import logging
import os
import random
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final

import torch
from faults import sweeps, tracing
from faults.sweeps import Tally
from torch import Tensor, nn

from accel_plugins.checkpoint.manifest import verify
from accel_plugins.checkpoint.recovery import unfinished
from accel_plugins.checkpoint.retention import checkpoints, find_newest
from accel_plugins.checkpoint.state import CheckpointState
from accel_state.errors import CheckpointError
from accel_testing.processes import ReservedPort
from accel_torch import Accelerator, FullyShardedDataParallelPlugin, ProjectConfiguration
from injected.children import Answer, Child, ask, contained, require_containers, with_pid

__all__ = ("Run",)

STEPS: Final = 2
"""Steps that are trained after a resume, to compare the losses."""
_SAVES: Final = 87
_KILLS: Final = 100
_LATEST: Final = 0.05
"""Seconds after its first save until a run is killed: some saves."""


class _Step:
    """Counts steps; registered for checkpoints."""

    def __init__(self) -> None:
        self.done = 0

    def state_dict(self) -> dict[str, Any]:
        return {"done": self.done}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.done = state["done"]


class Session:
    """One start of a training script.

    Args:
        run: the run.
        project: its folder, or another one with a copy of it.
        deadline: seconds that a save waits for other processes.
    """

    def __init__(self, run: Run, project: Path, deadline: float) -> None:
        torch.manual_seed(0)
        self.behind = run.behind
        self.folder = str(project / "checkpoints" / "latest") if run.overwrite else None
        configuration = ProjectConfiguration(
            str(project),
            automatic_checkpoint_naming=not run.overwrite,
            total_limit=2,
            verify="hashes",
            deadline=deadline,
        )
        plugin = FullyShardedDataParallelPlugin(fsdp_version=2) if run.sharded else None
        self.accelerator = Accelerator(cpu=True, project_config=configuration, fsdp_plugin=plugin)
        model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 1))
        self.model: Any
        self.optimizer: Any
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
        self.accelerator.save_state(self.folder, async_save=self.behind)

    def load(self) -> None:
        """Load the newest good checkpoint."""
        self.accelerator.load_state(self.folder)


class Run:
    """A small project with two good checkpoints, whose processes are forked from this one for each fault.

    Args:
        project: folder of the project; made here.
        processes: one or two.
        hit: rank of the process that faults hit.
        overwrite: save over one name, in place of new ones with numbers.
        behind: save while training goes on.
        sharded: train with FSDP and save shards.
        exchange: whether names can be exchanged in one step where the save that is hit runs.
    """

    def __init__(
        self,
        project: Path,
        *,
        processes: int = 1,
        hit: int = 0,
        overwrite: bool = False,
        behind: bool = False,
        sharded: bool = False,
        exchange: bool = True,
    ) -> None:
        logging.getLogger("accel_plugins").setLevel(logging.ERROR)
        torch.set_num_threads(1)
        self.project, self.processes, self.hit = project, processes, hit
        self.overwrite, self.behind, self.sharded, self.exchange = overwrite, behind, sharded, exchange
        self._reserved, self._port = ReservedPort(), 0
        begun = [answer.get() for answer in self.each(self._begin)]
        self.losses: list[list[float]] = [losses for losses, _ in begun]
        for name in begun[0][1]:
            # Once here, and not in every process that is forked; some entries of torch are no modules.
            with contextlib.suppress(ImportError):
                importlib.import_module(name)

    def prepare(self) -> None:
        """Choose where the next processes meet."""
        self._port = self._reserved.reserve()

    def each(self, function: Callable[[int], Any]) -> list[Answer]:
        """What a function of the rank answers in each process of the run."""
        self.prepare()
        return ask(*(partial(function, rank) for rank in range(self.processes)))

    def session(self, rank: int = 0, project: Path | None = None, deadline: float = 60.0) -> Session:
        """A fresh start of the training script, in a forked process."""
        if self.sharded or self.processes > 1:
            os.environ.update(
                RANK=str(rank),
                LOCAL_RANK=str(rank),
                WORLD_SIZE=str(self.processes),
                LOCAL_WORLD_SIZE=str(self.processes),
                MASTER_ADDR="127.0.0.1",
                MASTER_PORT=str(self._port),
                GLOO_SOCKET_IFNAME="lo",
                TORCH_CPP_LOG_LEVEL="ERROR",
            )
        return Session(self, project or self.project, deadline)

    def _begin(self, rank: int) -> tuple[list[float], list[str]]:
        session, losses = self.session(rank), list[float]()
        for _ in range(2):
            losses += session.train(1)
            session.save()
        losses += session.train(1 + STEPS)
        session.accelerator.wait_for_checkpoint()
        return losses, [name for name in sys.modules if name.startswith(("accel_", "torch."))]

    def resumed(self) -> Session:
        """A session of a single process that has loaded the newest good checkpoint."""
        session = self.session()
        session.load()
        return session

    def save(self, rank: int = 0) -> None:
        """What a process does that is hit by a fault: resume, train one step, save."""
        if not self.exchange:
            tracing.refuse_exchange()
        session = self.session(rank, deadline=10.0 if self.processes > 1 else 60.0)
        session.load()
        session.train(1)
        session.save()
        session.accelerator.wait_for_checkpoint()

    def wrong(self, folder: Path, steps: Sequence[int] = (2, 3)) -> str | None:
        """What is wrong with what a restart finds; None when it resumes with the losses of an undisturbed run.

        Args:
            folder: the project, or what a fault left of it.
            steps: after which of them it may resume.
        """
        for answer, losses in zip(self.each(partial(self._resume, folder)), self.losses, strict=True):
            if answer.error is not None:
                return f"nothing good was found: {answer.error}"
            done, again = answer.value
            if done not in steps:
                return f"it went back to step {done}"
            if again != (expected := losses[done : done + STEPS]):
                return f"from step {done} the losses are {again}, not {expected}"
        return None

    def _resume(self, folder: Path, rank: int) -> tuple[int, list[float]]:
        session = self.session(rank, folder)
        session.load()
        return session.step.done, session.train(STEPS)

    def workload(self) -> sweeps.Workload:
        """This run, to be hit by faults."""
        other = partial(self.save, 1 - self.hit) if self.processes > 1 else None
        return sweeps.Workload(self.project, partial(self.save, self.hit), self.wrong, other, self.prepare, 300.0)

    def goes_on(self) -> str | None:
        """What is wrong with the newest checkpoint, after some saves more."""
        newest = find_newest(self.project / "checkpoints", hashes=True)
        known = checkpoints(self.project / "checkpoints")
        return None if known and newest == known[-1].path else f"the newest good one is {newest.name}"

    def left(self) -> list[str]:
        """What interrupted saves have left behind."""
        return [f"{entry.name} stayed" for entry in unfinished(self.project / "checkpoints")]

    def left_after_save(self) -> list[str]:
        """What is damaged or left over after one more save: what was read when it was replaced stays until then."""
        (answer,) = ask(lambda: self.resumed().save())
        damage = verify(self.project / "checkpoints" / "latest", hashes=True).damage
        return [*filter(None, [answer.error]), *damage, *self.left()]


FAULTS: Final[Mapping[str, Callable[..., Tally]]] = {
    "SIGKILL": sweeps.kill_everywhere,
    "disk full": partial(sweeps.fail_everywhere, error=errno.ENOSPC),
    "EIO": partial(sweeps.fail_everywhere, error=errno.EIO),
    "loss of power": sweeps.lose_power,
}
"""What may happen at each file operation of a save."""


def everywhere(folder: Path, every: int, fault: str, **options: Any) -> Tally:
    """A fault at each `every`-th file operation of a save; the options are those of `Run`."""
    return FAULTS[fault](Run(folder / "project", **options).workload(), every=every)


# ---------------------------------------------------------------- single faults


def refusals(folder: Path, every: int, kind: str) -> Tally:
    """One of two processes comes late, or has other keys: every process raises, none waits, and nothing is harmed."""
    tally = Tally(kind)
    function, words = _REFUSED[kind]
    for hit in (0, 1):
        run = Run(folder / str(hit) / "project", processes=2, hit=hit)
        errors = [answer.error for answer in run.each(partial(function, run))]
        wrong = None if None not in errors and words in str(errors) else f"the processes ended with {errors}"
        tally.count(f"process {hit}", wrong or run.wrong(run.project))
    return tally


def _come_late(run: Run, rank: int) -> None:
    session = run.session(rank)
    session.load()
    session.train(1)
    session.accelerator.project_configuration.deadline = 0.5
    if rank == run.hit:
        time.sleep(3)
    session.save()


def _register_more(run: Run, rank: int) -> None:
    session = run.session(rank, deadline=30.0)
    if rank == run.hit:
        session.accelerator.register_for_checkpointing(_Step())
    session.load()


_REFUSED: Final[Mapping[str, tuple[Callable[[Run, int], None], str]]] = {
    "slow process": (_come_late, "did not arrive within"),
    "other keys": (_register_more, "registered objects from"),
}


def damage(folder: Path, every: int) -> Tally:
    """Damage to each file of the newest checkpoint: it is passed over, or what is extra does not matter."""
    run = Run(folder / "project")
    newest = find_newest(run.project / "checkpoints", hashes=True)

    def wrong(serious: bool, path: Path) -> str | None:
        if verify(newest, hashes=True).good is serious:
            return "damage was not noticed" if serious else "a good checkpoint was refused"
        if serious and path.name == "checkpoint_manifest.json" and not path.exists():
            # Without a manifest it counts as another library's, behind those that have one.
            return None if find_newest(newest.parent) != newest else "an unverified checkpoint was preferred"
        return run.wrong(run.project, [1 if serious else 2])

    return sweeps.harm_everything(newest, wrong)


def stale_folders(folder: Path, every: int) -> Tally:
    """What dead processes left behind: swept away by the next save, and never taken for a checkpoint."""
    tally, run = Tally("folder left behind by a dead process"), Run(folder / "project")
    for at in range(0, 30, 3):
        if tracing.run(run.save, run.project, tracing.Fault(at), log=folder / "output").hit is None:
            break
        before = len(run.left())
        (answer,) = ask(run.save)
        tally.count(f"{before} left", answer.error or run.goes_on() or ", ".join(run.left()) or None)
    return tally


def two_writers(folder: Path, every: int, *, exchange: bool = True) -> Tally:
    """Two processes that know nothing of each other save under one name at the same time."""
    tally, run = Tally("two writers of one name at once"), Run(folder / "project", exchange=exchange)
    target = run.project / "checkpoints" / "contested"

    def save() -> None:
        if not run.exchange:
            tracing.refuse_exchange()
        session = run.resumed()
        session.train(1)
        session.accelerator.project_configuration.automatic_checkpoint_naming = False
        for _ in range(3):
            session.accelerator.save_state(str(target))

    for number in range(10 // every + 1):
        hung = [answer.error for answer in ask(save, save) if answer.error == "it hung"]
        verdict = verify(target, hashes=True)
        tally.count(f"time {number}", "a process hung" if hung else ", ".join(verdict.damage) or None)
    return tally


def signals(folder: Path, every: int) -> Tally:
    """SIGTERM to a process while it saves, at moments spread over the save."""
    tally, run = Tally("SIGTERM during a save"), Run(folder / "project")

    def save(end_after: float | None) -> float:
        session = run.resumed()
        session.train(1)
        begun = time.monotonic()
        if end_after is not None:
            threading.Timer(end_after, os.kill, (os.getpid(), signal.SIGTERM)).start()
        session.save()
        return time.monotonic() - begun

    duration, moments = ask(partial(save, None))[0].get(), 20 // every + 1
    for number in range(moments):
        ask(partial(save, duration * number / moments))
        tally.count(f"moment {number}", run.goes_on())
    return tally


# ---------------------------------------------------------------- beside loads, and in containers


def _save_numbers(run: Run, first: int, times: int, done: Path) -> None:
    """Save numbers from the first one on, under one name; all that one save holds is its number."""
    if not run.exchange:
        tracing.refuse_exchange()
    session = run.resumed()
    for number in range(first, first + times):
        session.step.done = number
        for parameter in session.model.parameters():
            parameter.data.fill_(number)
        session.save()
        done.write_text(str(number))


def _mixed(session: Session) -> str | None:
    """What is wrong with a load; None when it reads one save."""
    try:
        session.load()
    except CheckpointError as error:
        return f"a load failed: {error}"
    numbers = {value for parameter in session.model.parameters() for value in parameter.detach().flatten().tolist()}
    return None if numbers == {float(session.step.done)} else f"a load has numbers of several saves: {sorted(numbers)}"


def _load_until(run: Run, over: Path) -> list[str]:
    """Load until a file appears; returns each kind of wrong load."""
    session, wrong, newest = run.session(), set[str](), 0
    while not over.exists():
        wrong.add(_mixed(session) or "")
        newest = max(newest, session.step.done)
    return [*filter(None, sorted(wrong)), *(["no load read a new save"] if not newest else [])]


@contextlib.contextmanager
def _beside_loads(run: Run, tally: Tally) -> Iterator[None]:
    """While another run loads all the time; what it finds wrong, and what is left after one more save, is counted."""
    over = run.project.with_name("over")
    for answer in ask(partial(_save_numbers, run, 0, 1, run.project.with_name("done"))):
        answer.get()
    reader = Child(partial(_load_until, run, over))
    try:
        yield
    finally:
        over.touch()
        answer = reader.answer()
    for sentence in {*(answer.value or [answer.error]), *run.left_after_save()} - {None}:
        tally.count("beside them", sentence)


def neighbours(folder: Path, every: int, *, exchange: bool = True) -> Tally:
    """Two containers with one host name save under one name at once: no save fails, and every load reads one save."""
    require_containers()
    tally = Tally("another PID namespace saves there, and a run loads")
    run, times = Run(folder / "project", overwrite=True, exchange=exchange), -(-_SAVES // every)

    def save(pid: int) -> None:
        work = partial(_save_numbers, run, pid, times, folder / f"done_{pid}")
        contained(lambda: with_pid(pid, lambda: ask(work)[0].get()))

    with _beside_loads(run, tally):
        answers = ask(partial(save, 100), partial(save, 200), seconds=400.0)
    for pid, answer in zip((100, 200), answers, strict=True):
        done = folder / f"done_{pid}"
        saved = 1 + int(done.read_text()) - pid if done.exists() else 0
        for number in range(times):
            tally.count(f"container {pid}, save {number}", None if number < saved else f"it failed: {answer.error}")
    return tally


def kills(folder: Path, every: int, *, exchange: bool = True) -> Tally:
    """SIGKILL to a run that saves over one name, at random moments, while another one loads it all the time."""
    tally = Tally("SIGKILL at a random moment, beside loads")
    run = Run(folder / "project", overwrite=True, exchange=exchange)
    chance, done, number = random.Random(0), folder / "done", 0

    def look() -> tuple[str | None, int]:
        session = run.session()
        return _mixed(session), session.step.done

    with _beside_loads(run, tally):
        for kill in range(_KILLS // every):
            done.unlink(missing_ok=True)
            writer = Child(partial(_save_numbers, run, number + 1, 1 << 20, done))
            while not done.exists() and writer.process.is_alive():
                time.sleep(0.001)
            time.sleep(chance.uniform(0, _LATEST))
            writer.process.kill()
            writer.answer()
            wrong, newest = ask(look)[0].get()
            if wrong is None and newest <= number:
                wrong = f"after {number} it went back to {newest}"
            number = newest
            tally.count(f"kill {kill}", wrong)
    return tally


def restarts(folder: Path, every: int) -> Tally:
    """A container is killed while it saves; its successor, with its host name and pid, cleans up and resumes."""
    require_containers()
    tally = Tally("SIGKILL before a file operation, and a restart with the same pid")
    run, before = Run(folder / "project", overwrite=True, exchange=False), folder / "before"
    shutil.copytree(run.project, before)

    def hit(at: int) -> bool:
        return tracing.run(run.save, run.project, tracing.Fault(at), log=folder / "output").hit is not None

    def save_beside() -> None:
        run.resumed().accelerator.save_state(str(run.project / "checkpoints" / "another"))

    def in_container(function: Callable[[], Any]) -> Answer:
        (answer,) = ask(lambda: contained(lambda: with_pid(300, function)))
        return answer

    at = 0
    while True:
        shutil.rmtree(run.project)
        shutil.copytree(before, run.project)
        if not in_container(partial(hit, at)).get():
            return tally
        again = in_container(lambda: ask(save_beside)[0].get())
        tally.count(f"operation {at}", again.error or ", ".join(run.left()) or run.wrong(run.project))
        at += every


# ---------------------------------------------------------------- writes through `.data` during an asynchronous save


def _change_adam(session: Session) -> None:
    for state in session.optimizer.state.values():
        state["exp_avg"].data.mul_(0.5)


def _change_each(change: Callable[[Tensor], object]) -> Callable[[Session], None]:
    def write(session: Session) -> None:
        for parameter in session.model.parameters():
            change(parameter.data)

    return write


WRITES: Final[Mapping[str, Callable[[Session], object]]] = {
    "clamped": _change_each(lambda data: data.clamp_(-0.01, 0.01)),
    "averaged": _change_each(lambda data: data.lerp_(torch.zeros_like(data), 0.01)),
    "replaced": _change_each(lambda data: data.copy_(torch.randn_like(data))),
    "one element of a bias": lambda session: session.model[0].bias.data[3].add_(1e-6),
    "a column of a matrix": lambda session: session.model[0].weight.data[:, 2].zero_(),
    "the state of Adam": _change_adam,
}


def _moment(session: Session) -> list[Any]:
    """Everything that the writes change."""
    states = session.optimizer.state_dict()["state"].values()
    tensors = [*session.model.parameters(), *(value for state in states for value in state.values())]
    return [tensor.tolist() for tensor in tensors]


def _save_hit(run: Run, write: Callable[[Session], object], place: int) -> tuple[list[Any], int]:
    """Save behind the training, and write before file `place` is written; the moment of the call, and the files."""
    session, files, real = run.resumed(), list[Path](), CheckpointState.write
    session.train(1)
    called = _moment(session)

    def hit(self: CheckpointState, folder: Path, strategy: Any, *, written: Any, **options: Any) -> None:
        def count(path: Path) -> None:
            files.append(path)
            if len(files) == place:
                write(session)
            written(path)

        if not place:
            write(session)
        real(self, folder, strategy, written=count, **options)

    CheckpointState.write = hit  # type: ignore[method-assign, assignment]
    session.save()
    session.accelerator.wait_for_checkpoint()
    return called, len(files)


def data_writes(folder: Path, every: int) -> Tally:
    """Each write before each file that the thread writes: what is saved is the moment of the call."""
    tally, place, number, files = Tally("write through .data"), 0, 0, 1
    run = Run(folder / "project", overwrite=True, behind=True)
    while place < files:
        for name, write in WRITES.items():
            number += 1
            if (number - 1) % every == 0:
                called, files = ask(partial(_save_hit, run, write, place))[0].get()
                (loaded,) = ask(lambda: _moment(run.resumed()))
                wrong = loaded.error or (None if loaded.value == called else "what was loaded is of another moment")
                tally.count(f"{name} before file {place}", wrong)
        place += 1
    return tally
