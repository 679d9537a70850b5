"""The largest micro-batch that fits the memory of every rank, and the accumulation that keeps the global batch."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import torch

from accel_data.mesh import data_coordinates
from accel_ops.agreement import StoreBarrier
from accel_ops.batch_size import all_fit
from accel_ops.rng import restore, snapshot
from accel_ops.shape import slice_tensors
from accel_ops.tree import find_batch_size
from accel_plugins.manifest import Axis
from accel_state import current
from accel_state.errors import AccelError, NotOffered, NotReady, OutOfMemory, SettingError
from accel_state.exit_codes import leave_to_resume
from accel_state.memory import clear_device_cache, should_reduce_batch_size
from accel_torch.accumulation import no_sync_all

if TYPE_CHECKING:
    from accel_state.identity import Process
    from accel_torch.accelerator import Accelerator

__all__ = ("MicroBatches", "Search", "find_micro_batch_size")

_WITHIN: Final = 0.05
"""How much smaller than the true limit the size found may be, as a fraction of the limit."""
_FEW: Final = 128
"""The number of candidate sizes: one trial for the largest, and seven more to find the limit below it."""
_FILE: Final = "micro_batch_size.json"
_LOOK: Final = 0.1
"""Seconds between checks whether another rank ran out of memory."""
_INNER_AXES: Final = frozenset({Axis.CONTEXT.value, Axis.SEQUENCE.value, Axis.TENSOR.value})
"""Mesh axes whose processes compute a forward pass together."""


@dataclass(frozen=True)
class MicroBatches:
    """How each process divides its shard of a global batch.

    Args:
        size: samples of a micro-batch; the last one of a step may be smaller.
        per_process: samples of one process in a global batch: the batch size of its loader.
        trials: the number of sizes tried.
        accelerator: the Accelerator that accumulates gradients.
    """

    size: int
    per_process: int
    trials: int
    accelerator: Accelerator | None = field(default=None, repr=False, compare=False)

    @property
    def steps(self) -> int:
        """Micro-batches of an optimizer step."""
        return -(-self.per_process // self.size)

    @property
    def sizes(self) -> tuple[int, ...]:
        """Samples of each micro-batch of an optimizer step."""
        return tuple(min(self.size, self.per_process - start) for start in range(0, self.per_process, self.size))

    def split(self, batch: Any) -> Iterator[tuple[Any, int]]:
        """Yield the micro-batches of one batch of the loader in order, each with its number of samples.

        Together they are one window of gradient accumulation, so the optimizer steps at the last one. Give the number
        of samples to `accumulate` as the weight, so that a smaller last micro-batch counts less.

        Args:
            batch: a pytree of tensors with the samples in their first dimension.

        Raises:
            NotReady: the previous batch was not read to its last micro-batch.
            NotOffered: the backend accumulates gradients itself.

        Example:
            >>> for batch in loader:
            ...     for micro_batch, samples in plan.split(batch):
            ...         with accelerator.accumulate(model, weight=samples):
            ...             accelerator.backward(loss_of(model, micro_batch))
            ...             optimizer.step()
            ...             optimizer.zero_grad()
        """
        count = find_batch_size(batch)
        starts = range(0, count, self.size)
        with nullcontext() if self.accelerator is None else _window(self.accelerator, len(starts)):
            for start in starts:
                yield slice_tensors(batch, slice(start, start + self.size)), min(self.size, count - start)


@contextmanager
def _window(accelerator: Accelerator, steps: int) -> Iterator[None]:
    """Accumulate over exactly `steps` micro-batches inside the block."""
    failed = f"Cannot split a batch into {steps} micro-batches."
    if accelerator.session.backend.capabilities.own_accumulation:
        raise NotOffered(
            failed,
            f"The backend {accelerator.session.backend.name!r} accumulates gradients itself.",
            "Set the accumulation steps and the micro-batch size in its settings, and use loaders of that batch size.",
        )
    gradient = accelerator.gradient_state
    plugin = gradient.plugin
    if not gradient.sync_gradients:
        raise NotReady(
            failed,
            "The previous batch was not read to its last micro-batch, or gradient accumulation is already active.",
            "Read each batch to its last micro-batch, and set gradient_accumulation_steps to 1.",
        )
    accelerator.step = 0
    gradient.plugin = replace(plugin, num_steps=steps, sync_with_dataloader=False)
    try:
        yield
    finally:
        gradient.plugin = plugin
        accelerator.step = 0


def find_micro_batch_size(
    step: Callable[[int], object],
    global_batch_size: int = 512,
    *,
    accelerator: Accelerator | None = None,
    file: str | os.PathLike[str] | None = None,
    deadline: float = 600.0,
) -> MicroBatches:
    """Find the largest micro-batch size that fits the memory of every rank; call it on every rank.

    Sizes are bisected: the result is at most 5 % below the true limit (exact below 20), after at most 8 trials for up
    to three million samples in a rank's shard. A size that is too large on one rank is too large for all. The global
    batch and the order of its samples do not change: loaders have the batch size `per_process`, and `split` yields
    the micro-batches.

    Trials restore gradients, buffers and random-number generators, and do not synchronise gradients. If forward or
    backward has collectives (see `Strategy.passes_are_local`; or processes shard the layers), the
    ranks cannot continue after one of them ran out of memory. Such a run ends on every rank with the exit code
    `accel_state.exit_codes.RESUME`, within the deadline. After a restart it reads the file and tries smaller sizes.

    Args:
        step: computes forward and backward of the given number of samples as training does, without an optimizer
            step. Step the optimizer once before the search if its state should count.
        global_batch_size: samples of one optimizer step on all ranks together.
        accelerator: the Accelerator that prepared the models of `step`. It is required in a run of several processes;
            without it, each trial would synchronise gradients.
        file: the file in which a run that must end stores its results for the restart. None uses
            `micro_batch_size.json` in the project's folder. Delete it when the model changes.
        deadline: seconds that one trial may take.

    Raises:
        SettingError: the global batch is not divisible by the number of ranks, or there is no folder for the file.
        OutOfMemory: a single sample does not fit; raised on every rank.
        CollectiveError: another rank failed in `step`, or did not finish before the deadline.

    Example:
        >>> plan = find_micro_batch_size(lambda size: None, global_batch_size=96)
        >>> plan.size, plan.steps, plan.sizes
        (96, 1, (96,))
    """
    process = current.process_or_start()
    search = Search(_shard_size(global_batch_size, process, accelerator))
    barrier = StoreBarrier(process, "micro-batch size", "Cannot find a micro-batch size.", deadline)
    if accelerator is None or _passes_are_local(accelerator):
        with barrier.reporting(), _restored(accelerator):
            while (size := search.size) is not None:
                fits = _fits(step, size, process)
                search.note(barrier.wait(f"trial {search.trials}", "yes" if fits else "no", all_fit) == "yes")
        barrier.leave()
    else:
        _search_with_restarts(step, search, barrier, process, accelerator, _Memory.of(accelerator, file), deadline)
    if not search.fitting:
        raise OutOfMemory(
            f"Cannot find a micro-batch size for a global batch of {global_batch_size}.",
            "The device of at least one process ran out of memory with a single sample.",
            "Use a smaller model or shorter samples, or shard the model.",
        )
    return MicroBatches(search.fitting, search.largest, search.trials, accelerator)


def _shard_size(global_batch_size: int, process: Process, accelerator: Accelerator | None) -> int:
    """Samples of one process in a global batch."""
    mesh = None if accelerator is None else accelerator.state.device_mesh
    shards = process.world_size if mesh is None else data_coordinates(mesh)[0]
    if global_batch_size < shards or global_batch_size % shards:
        raise SettingError(
            f"Cannot divide a global batch of {global_batch_size} samples.",
            f"It must be a multiple of the {shards} processes that read different data.",
            f"Give a multiple of {shards}.",
        )
    return global_batch_size // shards


def _passes_are_local(accelerator: Accelerator) -> bool:
    """Whether one rank may stop inside forward or backward without blocking the others."""
    if accelerator.session.process.world_size == 1:
        return True
    mesh = accelerator.state.device_mesh
    axes = () if mesh is None else mesh.mesh_dim_names or ()
    strategy, models = accelerator.session.strategy, accelerator.session.prepared.models
    return _INNER_AXES.isdisjoint(axes) and all(map(strategy.passes_are_local, models))


class Search:
    """Bisection over candidate sizes, each at most 5 % smaller than any size up to the next candidate.

    Attributes:
        largest: the largest size.
        trials: sizes tried so far.
    """

    def __init__(self, largest: int) -> None:
        self.largest, self.trials = largest, 0
        self._sizes = [1]
        while self._sizes[-1] < largest:
            self._sizes.append(min(int(self._sizes[-1] / (1 - _WITHIN)) + 1, largest))
        self._fits, self._fails = -1, len(self._sizes)

    @property
    def size(self) -> int | None:
        """The size to try next; None when the limit is known."""
        index = self.index
        return None if index is None else self._sizes[index]

    @property
    def index(self) -> int | None:
        """The index of the size to try next; None when the limit is known."""
        if self._fails - self._fits == 1:
            return None
        untried = self._fails - self._fits == len(self._sizes) + 1
        return len(self._sizes) - 1 if untried and len(self._sizes) <= _FEW else (self._fits + self._fails) // 2

    @property
    def fitting(self) -> int:
        """The largest size known to fit, or 0."""
        return self._sizes[self._fits] if self._fits >= 0 else 0

    def note(self, fits: bool) -> None:
        """Record whether the current size fits."""
        index = self.index
        assert index is not None
        self.trials += 1
        if fits:
            self._fits = index
        else:
            self._fails = index

    def state(self) -> list[int]:
        """The results so far, for `go_on`."""
        return [self.largest, self._fits, self._fails, self.trials]

    def go_on(self, state: object) -> None:
        """Continue from earlier results, if they belong to this search."""
        if not isinstance(state, list) or len(state) != 4 or state[0] != self.largest:
            return
        _, fits, fails, trials = state
        if all(type(value) is int for value in state) and -1 <= fits < fails <= len(self._sizes) and trials >= 0:
            self._fits, self._fails, self.trials = fits, fails, trials


def _fits(step: Callable[[int], object], size: int, process: Process) -> bool:
    """Whether a step of this many samples fits the memory of this rank."""
    clear_device_cache(garbage_collection=True)
    try:
        step(size)
        process.family.synchronize()
    except Exception as error:
        if not should_reduce_batch_size(error):
            raise
        return False
    return True


@contextmanager
def _restored(accelerator: Accelerator | None) -> Iterator[None]:
    """Do not synchronise gradients inside the block, and restore the state from before it."""
    generators = snapshot()
    if accelerator is None:
        try:
            yield
        finally:
            restore(generators)
        return
    models = tuple(accelerator.session.prepared.models)
    buffers = [(buffer, buffer.detach().clone()) for model in models for buffer in model.buffers()]
    gradients = [(parameter, parameter.grad) for model in models for parameter in model.parameters()]
    gradient, counted = accelerator.gradient_state, accelerator.step
    synchronises = gradient.sync_gradients
    gradient.sync_gradients = False
    holds = accelerator.session.backend.capabilities.no_sync
    try:
        with no_sync_all(accelerator.session.strategy, models) if holds and models else nullcontext():
            yield
    finally:
        gradient.sync_gradients, accelerator.step = synchronises, counted
        with torch.no_grad():
            for buffer, before in buffers:
                buffer.copy_(before)
        for parameter, before_trials in gradients:
            parameter.grad = before_trials
        restore(generators)


class _Memory:
    """The file in which a search stores its results if it must end the run.

    Args:
        path: the path of the file.
    """

    def __init__(self, path: Path) -> None:
        self._path = path

    @classmethod
    def of(cls, accelerator: Accelerator, file: str | os.PathLike[str] | None) -> _Memory:
        """The given file, or one in the project's folder."""
        folder = accelerator.project_dir or accelerator.logging_dir
        if file is None and folder is None:
            raise SettingError(
                "Cannot find a micro-batch size with this backend.",
                "Its forward or backward has collectives, so the run must end when memory runs out, and it has no "
                "file to "
                "store its results.",
                "Give file=..., or project_dir to the Accelerator.",
            )
        return cls(Path(file) if file is not None else Path(folder or "") / _FILE)

    def read(self) -> str:
        """The text of the file, or an empty text."""
        try:
            return self._path.read_text()
        except OSError:
            return ""

    def write(self, search: Search, tried: bool = False) -> None:
        """Store the results; with `tried`, the current size counts as too large."""
        state = search.state()
        if tried and search.index is not None:
            state[2:] = search.index, search.trials + 1
        self._path.parent.mkdir(parents=True, exist_ok=True)
        new = self._path.with_suffix(".new")
        new.write_text(json.dumps(state))
        new.replace(self._path)


def _search_with_restarts(
    step: Callable[[int], object],
    search: Search,
    barrier: StoreBarrier,
    process: Process,
    accelerator: Accelerator,
    memory: _Memory,
    deadline: float,
) -> None:
    """Search for backends with collectives in forward or backward: each failed trial ends the run."""
    with barrier.reporting():
        text = barrier.wait("begin", memory.read() if process.rank == 0 else "")
        search.go_on(_parsed(text))
    while search.size is not None:
        with barrier.reporting():
            if process.rank == 0:
                # However the run ends, the next one reads that this size did not fit.
                memory.write(search, tried=True)
            barrier.wait(f"ready {search.trials}")
        try:
            with _leaving_with_others(barrier, deadline), _restored(accelerator):
                fits = _fits(step, search.size, process)
            if not fits:
                barrier.fail(OutOfMemory(f"Cannot run a micro-batch of {search.size}.", "", ""))
                leave_to_resume()
            barrier.wait(f"trial {search.trials}")
        except OutOfMemory:
            # Another rank ran out of memory, reported at the end of the trial.
            leave_to_resume()
        search.note(True)
        if process.rank == 0:
            memory.write(search)
    barrier.wait("end", last=True)


def _parsed(text: str) -> object:
    try:
        return json.loads(text)
    except ValueError:
        return None


@contextmanager
def _leaving_with_others(barrier: StoreBarrier, deadline: float) -> Iterator[None]:
    """End this process when another one reports that it ran out of memory, or after the deadline."""
    over = threading.Event()

    def watch() -> None:
        left = deadline
        while not over.wait(_LOOK):
            left -= _LOOK
            try:
                barrier.check()
            except AccelError:
                left = 0.0
            if left <= 0:
                # The main thread is blocked in a collective.
                leave_to_resume(at_once=True)

    watcher = threading.Thread(target=watch, name="micro-batch watch", daemon=True)
    watcher.start()
    try:
        yield
    finally:
        over.set()
        watcher.join()
