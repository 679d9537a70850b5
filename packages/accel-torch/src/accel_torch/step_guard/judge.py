"""The judge of steps: one verdict for all processes before each step of a prepared optimizer, and what follows from it.

Good steps cost what is in `StepJudge.judge_step`. All else happens after a bad verdict, between two batches, or when a
checkpoint is written.
"""

from __future__ import annotations

import math
import weakref
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from statistics import median
from typing import TYPE_CHECKING, Any, Final, Literal, NamedTuple

import torch

from accel_ops import gather_object
from accel_plugins.precision.base import Precision
from accel_plugins.wrapped.optimizer import inner_optimizer
from accel_state.errors import NonFiniteStep, NotOffered, NotReady, SpikeStep
from accel_state.watch.record import STATUS_RECORD
from accel_torch.hooks import Hook
from accel_torch.samples_at_hand import SampleRecorder
from accel_torch.step_guard.config import Action, StepGuard
from accel_torch.step_guard.diagnosis import Conclusion, Evidence, collect, conclude
from accel_torch.step_guard.engine import EngineSteps
from accel_torch.step_guard.events import StepEvent, tell
from accel_torch.step_guard.first_module import ForwardInputs
from accel_torch.step_guard.history import History
from accel_torch.step_guard.rollback import BufferCopies, Snapshots
from accel_torch.step_guard.window import ReadBatch, Window

if TYPE_CHECKING:
    from torch import Tensor
    from torch.optim import Optimizer

    from accel_plugins.bundle import Bundle
    from accel_torch.session import Session

__all__ = ("StepJudge", "guard_steps")

_JUMP: Final = 5.0
"""A learning rate this many times its median explains a spike."""

_MOST_SAMPLES: Final = 256
"""Largest number of samples of a process in an event."""

_MOST_RANKS: Final = 16
"""Largest number of processes whose samples are in an event."""

_FAILED: Final = "Cannot guard the steps of this run with a StepGuard."


class _Measure(NamedTuple):
    """The numbers of a step, on the device.

    Args:
        window: number of the window.
        sums: over all processes: of the losses, of their weights, of overflows and scales in fp16, and of the norms;
            None in one process that does not scale.
        norm: the norm that this process has computed.
    """

    window: int
    sums: Tensor | None
    norm: Tensor | None


class _Verdict(NamedTuple):
    """Why a step is bad.

    Args:
        kind, quantity, value, limit: see `StepEvent`.
    """

    kind: Literal["nonfinite", "spike"]
    quantity: Literal["loss", "norm"]
    value: float
    limit: float | None = None


class _Watch:
    """What is known about the steps of one optimizer.

    Args:
        index: its place in the order of preparation.
        optimizer: the user's optimizer.
        guard: the settings.
        steps: steps of the run before its first one.

    Attributes:
        steps: its steps, also those that were left out.
        good: its good steps.
        bad_in_a_row: bad steps since the last good one.
        last_bad: number of the last bad step.
        measure: the numbers of the next step, if clipping computed its norm.
        loss, norm, rates: of the last good steps.
    """

    def __init__(self, index: int, optimizer: Optimizer, guard: StepGuard, steps: int) -> None:
        self.index, self.optimizer = index, weakref.ref(optimizer)
        self.steps, self.good, self.bad_in_a_row, self.last_bad = steps, 0, 0, 0
        self.measure: _Measure | None = None
        self.loss, self.norm = (History(guard.window, guard.spike or math.inf) for _ in range(2))
        self.rates: deque[float] = deque(maxlen=guard.window)
        self._clipped: list[int] = []
        self._covers = False

    def parameters(self) -> list[Tensor]:
        """The parameters of the optimizer."""
        optimizer = self.optimizer()
        return [] if optimizer is None else [one for group in optimizer.param_groups for one in group["params"]]

    def is_covered_by(self, clipped: list[int]) -> bool:
        """Whether parameters, given by id, include all of the optimizer's that have gradients."""
        if clipped != self._clipped:
            self._clipped, known = clipped, set(clipped)
            self._covers = all(id(one) in known for one in self.parameters() if one.grad is not None)
        return self._covers

    def rate(self) -> float:
        """The learning rate of the first group; 0 if there is none."""
        optimizer = self.optimizer()
        return 0.0 if optimizer is None else float(optimizer.param_groups[0].get("lr", 0.0))

    def leaves_its_course(self) -> bool:
        """Whether the learning rate jumped, or the loss or the norm rose before."""
        jumped = bool(self.rates) and max(self.rate(), self.rates[-1]) > _JUMP * median(self.rates)
        return jumped or self.loss.is_rising or self.norm.is_rising

    def state_dict(self) -> dict[str, Any]:
        """Its numbers as plain values."""
        counts = {"steps": self.steps, "good": self.good, "bad_in_a_row": self.bad_in_a_row, "last_bad": self.last_bad}
        return {**counts, "loss": [*self.loss.values], "norm": [*self.norm.values], "rates": [*self.rates]}

    def load(self, state: Mapping[str, Any], counts: bool = True) -> None:
        """Take over what `state_dict` returned.

        Args:
            state: the state.
            counts: also that of bad steps in a row, which a rollback keeps.
        """
        self.steps, self.good = int(state["steps"]), int(state["good"])
        if counts:
            self.bad_in_a_row, self.last_bad = int(state["bad_in_a_row"]), int(state["last_bad"])
        self.loss.replace(state["loss"])
        self.norm.replace(state["norm"])
        self.rates = deque(state["rates"], maxlen=self.rates.maxlen)
        self.measure = None


class StepJudge(Hook):
    """Judges the steps of a session's optimizers; `accelerator.guard`.

    Args:
        session: the session; weakly referenced.
        guard: the settings.

    Attributes:
        guard: the settings.
        events: the bad steps of this process so far.
        window: the losses and batches since the last step.
    """

    def __init__(self, session: Session, guard: StepGuard) -> None:
        self.guard = guard
        self.events: list[StepEvent] = []
        self._session = weakref.ref(session)
        self._strategy, self._process, self._gradient = session.strategy, session.process, session.gradient
        self._precision = session.precision
        self.window = Window(session.accumulation)
        self._watches: list[_Watch] = []
        self._is_engine = session.backend.capabilities.own_precision
        self._scales = not self._is_engine and type(session.precision).overflow is not Precision.overflow
        self._inputs = ForwardInputs(self.window) if guard.locate else None
        self._buffers = BufferCopies() if guard.skips else None
        pinned = session.process.family.spec.pins_memory
        self._snapshots = Snapshots(pinned) if guard.rolls_back else None
        self._replicas_separate = not session.backend.capabilities.equal_replicas
        self._training: weakref.WeakSet[Any] = weakref.WeakSet()
        self._judged = self._judged_before = self._good_at_snapshot = 0
        self._goes_back = False
        self._bad: list[ReadBatch] = []

    # ------------------------------------------------------------------ following the session

    def after_prepare(self, session: Session, bundle: Bundle) -> None:
        """Follow new models.

        Raises:
            NotOffered: an optimizer steps in backward.
        """
        if session.prepared.steps_in_backward:
            raise NotOffered(
                _FAILED,
                "An optimizer such as LOMO updates each parameter during backward, before a step could be judged.",
                "Use another optimizer, or remove the StepGuard.",
            )
        if self._inputs is not None:
            self._inputs.follow(bundle.models)
        if self._buffers is not None:
            self._buffers.follow(session, bundle.models)

    def loader_prepared(self, session: Session, loader: Any) -> None:
        """Let a loader keep its batches, if the run may return to a snapshot."""
        if self._snapshots is not None:
            loader.keeps_batches = True

    def after_backward(self, loss: Tensor) -> None:
        """Note the loss of a micro-batch."""
        if not self._is_engine:
            self.window.add(loss)

    def replicas_separate(self) -> None:
        """Note that gradients of processes differ from now on."""
        self._replicas_separate = True

    # ------------------------------------------------------------------ measuring

    def clip(self, parameters: list[Tensor], max_norm: float, norm_type: float) -> Tensor | None:
        """Clip complete gradients, and note the norm for the optimizers whose gradients these are."""
        ids = [*map(id, parameters)]
        covered = [watch for watch in self._all_watches() if watch.is_covered_by(ids)]
        if not covered:
            return self._strategy.clip_norm(parameters, max_norm, norm_type)
        sums = self._numbers(covered)
        norm = self._strategy.norm_with_sums(parameters, sums, max_norm, norm_type)
        for watch in covered:
            watch.measure = _Measure(self.window.number, sums, norm)
        return norm

    def measure(self) -> None:
        """Compute the norms of all optimizers with gradients, before a script changes gradients."""
        for watch in self._all_watches():
            watch.measure = self._measured(watch)

    def _measured(self, watch: _Watch) -> _Measure:
        optimizer = watch.optimizer()
        if self._scales and optimizer is not None:
            self._precision.unscale(optimizer)
        sums = self._numbers([watch])
        return _Measure(self.window.number, sums, self._strategy.norm_with_sums(watch.parameters(), sums))

    def _numbers(self, watches: Sequence[_Watch]) -> Tensor | None:
        """The numbers of this process, with a place for the norm at the end; None if nothing is added up or scaled."""
        window, device = self.window, self._process.device
        if self._process.world_size == 1 and not self._scales:
            return None
        numbers = torch.zeros(5 if self._scales else 3, device=device)
        if window.total is not None:
            numbers[0] = window.total
            numbers[1] = window.share
        if self._scales:
            overflows = [self._precision.overflow(one) for watch in watches if (one := watch.optimizer()) is not None]
            known = [overflow for overflow in overflows if overflow is not None]
            if known:
                numbers[2:4] = torch.stack(known).amax(0)
        return numbers

    def _all_watches(self) -> list[_Watch]:
        session = self._session()
        optimizers = [] if session is None else session.prepared.optimizers
        if len(optimizers) != len(self._watches):
            known = {watch.optimizer(): watch for watch in self._watches}
            inner = [inner_optimizer(optimizer) for optimizer in optimizers]
            self._watches = [
                known.get(one) or _Watch(index, one, self.guard, max(STATUS_RECORD.loaded, 0))
                for index, one in enumerate(inner)
            ]
        return self._watches

    # ------------------------------------------------------------------ the verdict

    def judge_step(self, optimizer: Optimizer) -> bool:
        """Judge a step; False leaves it out.

        Raises:
            NonFiniteStep, SpikeStep: the step is bad, and is to raise; on every process.
            NotReady: a bad step is to return to a snapshot, and there is none.
        """
        for watch in self._all_watches():
            if watch.optimizer() is optimizer:
                break
        else:
            return True
        if self._goes_back:
            # What follows in this turn of the loop is undone before the next batch.
            return False
        measure, watch.measure = watch.measure, None
        if measure is None or measure.window != self.window.number:
            measure = self._measured(watch)
        return self._judge(watch, measure)

    def judge_engine(self, sums: Tensor, norm: Tensor) -> None:
        """Judge a step that an engine makes, by the sums over all processes and this process's norm.

        Raises:
            NonFiniteStep, SpikeStep: the step is bad; on every process.
        """
        self._judge(self._all_watches()[0], _Measure(self.window.number, sums, norm))

    def _judge(self, watch: _Watch, measure: _Measure) -> bool:
        self._judged += 1
        self.window.end()
        watch.steps += 1
        values = self._read(measure)
        processes = self._process.world_size
        loss = values[0] / values[1] if values[1] else 0.0
        norm = values[-1] / processes
        if self._scales and self._is_normal_overflow(watch.optimizer(), loss, values, processes):
            return True
        verdict = self._verdict(watch, loss, norm)
        if verdict is not None:
            return self._act(watch, verdict, measure)
        if values[1]:
            watch.loss.add(loss)
        watch.norm.add(norm)
        watch.rates.append(watch.rate())
        watch.good += 1
        if watch.bad_in_a_row and watch.steps >= watch.last_bad:
            watch.bad_in_a_row = 0
        if self._buffers is not None:
            self._buffers.keep()
        return True

    def _read(self, measure: _Measure) -> list[float]:
        """The numbers on the host, which waits for the device once."""
        if measure.sums is not None:
            values: list[float] = measure.sums.cpu().tolist()
            return values
        total, share = self.window.total, self.window.share
        if total is None or measure.norm is None:
            known = total if measure.norm is None else measure.norm
            number = 0.0 if known is None else known.item()
            return [number, share, 0.0] if known is total else [0.0, 0.0, number]
        norm = measure.norm
        if total.is_cpu and norm.is_cpu:
            # There is nothing to wait for.
            return [total.item(), share, norm.item()]
        loss, number = torch.stack([total.float(), norm.to(total.device)]).cpu().tolist()
        return [loss, share, number]

    def _is_normal_overflow(self, optimizer: Any, loss: float, values: list[float], processes: int) -> bool:
        """Whether gradients overflowed only because the loss was scaled, so that the scaler skips the step."""
        overflows, scale = values[2], values[3] / processes
        if overflows in (0, processes):
            self._precision.learn_overflow(optimizer, bool(overflows))
        return overflows == processes and scale > 1 and math.isfinite(loss)

    def _verdict(self, watch: _Watch, loss: float, norm: float) -> _Verdict | None:
        if not math.isfinite(loss):
            return _Verdict("nonfinite", "loss", loss)
        if not math.isfinite(norm):
            return _Verdict("nonfinite", "norm", norm)
        if self.guard.spike is not None:
            limit = watch.loss.exceeded_by(loss)
            if limit is not None:
                return _Verdict("spike", "loss", loss, limit)
            limit = watch.norm.exceeded_by(norm)
            if limit is not None:
                return _Verdict("spike", "norm", norm, limit)
        return None

    # ------------------------------------------------------------------ what follows

    def _act(self, watch: _Watch, verdict: _Verdict, measure: _Measure) -> bool:
        watch.bad_in_a_row += 1
        watch.last_bad = watch.steps
        action: Action = self.guard.nonfinite if verdict.kind == "nonfinite" else self.guard.on_spike
        many = watch.bad_in_a_row >= self.guard.max_consecutive and action != "raise"
        everyones, finding = self._diagnosed(watch, measure)
        action = "raise" if many else action
        back_to = self._snapshot_step() if action == "rollback" else None
        event = _event(watch, verdict, action, finding, everyones, back_to)
        self.events.append(event)
        tell(event, self._process.rank, self._folder())
        if action == "raise":
            raise _error(event, watch.bad_in_a_row if many else 0)
        if self._buffers is not None:
            self._buffers.put_back()
        self._goes_back, self._bad = action == "rollback", self.window.batches
        return False

    def _folder(self) -> str | None:
        session = self._session()
        project = None if session is None else session.options.project
        return None if project is None else project.project_dir or project.logging_dir

    def _snapshot_step(self) -> int:
        if self._snapshots is None or not self._snapshots.exists:
            raise NotReady(
                "Cannot return to a snapshot after a bad step.",
                "There is none: snapshots are taken between two batches of a prepared DataLoader, and none was read.",
                "Prepare the DataLoader of the training loop, or use 'skip'.",
            )
        return self._snapshots.step

    def _diagnosed(self, watch: _Watch, measure: _Measure) -> tuple[list[Evidence], Conclusion]:
        def is_bad(loss: float) -> bool:
            return not math.isfinite(loss) or watch.loss.exceeded_by(loss) is not None

        # An engine keeps the weights that it trains in parts of its own.
        parameters = [] if self._is_engine else watch.parameters()
        own = collect(self._strategy, parameters, self.window, measure.norm)
        everyones: list[Evidence] = gather_object([own])
        if self._inputs is not None and (session := self._session()) is not None:
            bad = [index for one in everyones for index, loss in enumerate(one.losses) if is_bad(loss)]
            name = self._inputs.first_bad(session, min(bad, default=0))
            names: list[str | None] = gather_object([name])
            everyones = [one._replace(module=name) for one, name in zip(everyones, names, strict=True)]
        return everyones, conclude(everyones, is_bad, watch.leaves_its_course(), not self._replicas_separate)

    # ------------------------------------------------------------------ between two batches

    def before_boundary(self, loader: Any, first: bool) -> None:
        """Return to the snapshot after a bad step."""
        session = self._session()
        if not self._goes_back or self._snapshots is None or session is None or first:
            return
        self._goes_back = False
        state = self._snapshots.restore(session, self._bad)
        for watch, saved in zip(self._watches, state["watches"], strict=False):
            watch.load(saved, counts=False)
        self.window.end()

    def after_boundary(self, loader: Any, first: bool) -> None:
        """Take a snapshot, if it is due: before the first step, when an epoch begins, and every few good steps."""
        session = self._session()
        if self._snapshots is None or session is None:
            return
        has_stepped, self._judged_before = self._judged > self._judged_before, self._judged
        good = max((watch.good for watch in self._all_watches()), default=0)
        if first:
            due = loader in self._training or len(session.gradient.loaders) == 1
            due = due and any(model.training for model in session.prepared.models)
            self._goes_back = self._goes_back and not due
        else:
            if has_stepped:
                self._training.add(loader)
            due = has_stepped and session.gradient.sync_gradients
            due = due and good - self._good_at_snapshot >= (self.guard.snapshot_every or 1)
        if due or (not self._snapshots.exists and has_stepped):
            self._good_at_snapshot = good
            steps = max((watch.steps for watch in self._watches), default=0)
            self._snapshots.take(session, self.state_dict(), steps)

    # ------------------------------------------------------------------ checkpoints

    def state_dict(self) -> dict[str, Any]:
        """The history of each optimizer as plain values."""
        return {"watches": [watch.state_dict() for watch in self._all_watches()]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on with a saved history; snapshots of the state before are forgotten."""
        for watch, saved in zip(self._all_watches(), state["watches"], strict=False):
            watch.load(saved)
        self._goes_back = False
        if self._snapshots is not None:
            self._snapshots.forget()


def guard_steps(session: Session) -> None:
    """Let a session judge its steps, as its `StepGuard` says.

    Raises:
        NotOffered: the backend makes the steps itself, and cannot do what is asked.
    """
    guard, capabilities = session.options.handler(StepGuard), session.backend.capabilities
    if guard is None:
        return
    if capabilities.elastic:
        raise NotOffered(
            _FAILED,
            f"The number of processes of the backend {session.backend.name!r} may change, and all judge a step.",
            "Use another backend, or remove the StepGuard.",
        )
    judge = StepJudge(session, guard)
    if capabilities.own_precision:
        if guard.skips or guard.rolls_back or not session.strategy.overrides("gradients"):
            raise NotOffered(
                _FAILED,
                f"The engine of the backend {session.backend.name!r} makes the steps itself, within backward.",
                "With DeepSpeed use StepGuard(nonfinite='raise'), which raises before the step; else another backend.",
            )
        session.hooks.enter(EngineSteps(session, judge))
    session.guard = session.prepared.guard = judge
    session.hooks.enter(SampleRecorder())
    session.hooks.enter(judge)
    if guard.rolls_back:
        session.pauses.used = True


def _event(
    watch: _Watch,
    verdict: _Verdict,
    action: Action,
    finding: Conclusion,
    everyones: Sequence[Evidence],
    back_to: int | None,
) -> StepEvent:
    named = finding.ranks[:_MOST_RANKS]
    return StepEvent(
        step=watch.steps,
        kind=verdict.kind,
        action=action,
        cause=finding.cause,
        quantity=verdict.quantity,
        value=verdict.value,
        limit=verdict.limit,
        ranks=finding.ranks,
        samples={rank: everyones[rank].samples[:_MOST_SAMPLES] for rank in named if everyones[rank].samples},
        batches={rank: everyones[rank].batches for rank in named if everyones[rank].batches},
        module=next((everyones[rank].module for rank in finding.ranks if everyones[rank].module is not None), None),
        optimizer=watch.index,
        back_to=back_to,
    )


def _error(event: StepEvent, in_a_row: int) -> NonFiniteStep | SpikeStep:
    again = f" It is bad step number {in_a_row} in a row (max_consecutive)." if in_a_row else ""
    obstacle, remedy = f"{event.sentence} {event.details}", _REMEDIES[event.cause]
    samples = _flat(event.samples.values())
    if event.kind == "nonfinite":
        return NonFiniteStep(f"Cannot make step {event.step}.{again}", obstacle, remedy, event.cause, samples)
    return SpikeStep(f"Cannot make step {event.step}.{again}", obstacle, remedy, event.cause, samples)


_REMEDIES: Final[Mapping[str, str]] = {
    "data": "Weights did not change. Look at these samples, or leave such steps out with StepGuard(nonfinite='skip').",
    "numerics": "Weights did not change. Continue from an older checkpoint with a smaller learning rate, or clip "
    "gradients.",
    "hardware": "A bit was probably flipped in memory or on the way. Continue from a checkpoint on another machine.",
}


def _flat(samples: Iterable[Sequence[str]]) -> list[str]:
    return [sample for ids in samples for sample in ids]
