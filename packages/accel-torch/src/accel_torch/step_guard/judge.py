"""The judge of steps: one verdict for all processes before each step of a prepared optimizer, and what follows from it.

Good steps cost what is in `StepJudge.judge_step`. All else happens after a bad verdict, between two batches, or when a
checkpoint is written.
"""

from __future__ import annotations

import math
import time
import weakref
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import torch

from accel_ops import gather_object
from accel_plugins.precision.base import Precision
from accel_plugins.wrapped.optimizer import inner_optimizer
from accel_state.errors import NotOffered
from accel_state.watch.record import STATUS_RECORD
from accel_torch.hooks import Hook
from accel_torch.samples_at_hand import SampleRecorder
from accel_torch.step_guard.buffers import BufferCopies
from accel_torch.step_guard.config import Action, StepGuard
from accel_torch.step_guard.diagnosis import Evidence, collect, conclude
from accel_torch.step_guard.events import StepEvent
from accel_torch.step_guard.first_module import ForwardInputs
from accel_torch.step_guard.history import Judgement, StepHistory
from accel_torch.step_guard.rollback import Rollback
from accel_torch.step_guard.window import Window

if TYPE_CHECKING:
    from torch import Tensor
    from torch.nn import Module
    from torch.optim import Optimizer

    from accel_plugins.bundle import Bundle
    from accel_torch.session import Session

__all__ = ("StepJudge", "guard_steps")

_MOST_SAMPLES: Final = 256
"""Largest number of samples of a process in an event."""

_MOST_RANKS: Final = 16
"""Largest number of processes whose samples are in an event."""

_FAILED: Final = "Cannot guard the steps of this run with a StepGuard."


class _Measure(NamedTuple):
    """The numbers of a step, on the device.

    Args:
        backwards: backward passes before it; after a further one it is out of date.
        sums: over all processes: of the losses, of their weights, of overflows and scales in fp16, and of the norms;
            None in one process that does not scale.
        norm: the norm that this process has computed; None if the backend does not compute it.
    """

    backwards: int
    sums: Tensor | None
    norm: Tensor | None


class StepJudge(Hook):
    """Judges the steps of a session's optimizers; `accelerator.guard`.

    Args:
        session: the session; weakly referenced.
        guard: the settings.

    Attributes:
        guard: the settings.
        events: the bad steps of this process so far.
        window: the losses and batches since the last step.
        histories: the steps of each optimizer.
        rollback: returns to snapshots; None if no bad step does.
    """

    def __init__(self, session: Session, guard: StepGuard) -> None:
        self.guard = guard
        self.events: list[StepEvent] = []
        self.window = Window(session.accumulation)
        self.histories: list[StepHistory] = []
        self.rollback: Rollback | None = None
        if guard.snapshot_every is not None and "rollback" in guard.actions:
            self.rollback = Rollback(session, guard.snapshot_every, self.histories, self.window)
        self._session = weakref.ref(session)
        self._strategy, self._process, self._precision = session.strategy, session.process, session.precision
        self._scales = type(session.precision).overflow is not Precision.overflow
        self._processes = session.process.world_size
        self._adds_up = self._scales or self._processes > 1
        self._measures: dict[int, _Measure] = {}
        self._inputs = ForwardInputs(self.window) if guard.locate else None
        self._buffers = BufferCopies(session) if "skip" in guard.actions else None
        self._replicated = session.backend.capabilities.equal_replicas

    # ------------------------------------------------------------------ following the session

    def after_prepare(self, session: Session, bundle: Bundle) -> None:
        """Follow new models and optimizers.

        Raises:
            NotOffered: an optimizer steps in backward.
        """
        if session.prepared.steps_in_backward:
            raise NotOffered(
                _FAILED,
                "An optimizer such as LOMO updates each parameter during backward, before a step could be judged.",
                "Use another optimizer, or remove the StepGuard.",
            )
        followed = {history.optimizer(): history for history in self.histories}
        steps = max(STATUS_RECORD.loaded, 0)
        self.histories[:] = [
            followed.get(optimizer) or StepHistory(index, optimizer, self.guard, steps)
            for index, optimizer in enumerate(map(inner_optimizer, session.prepared.optimizers))
        ]
        if self._inputs is not None:
            self._inputs.follow(bundle.models)
        if self._buffers is not None:
            self._buffers.follow(session, bundle.models)

    def replicas_separate(self) -> None:
        """Note that gradients and weights of processes differ from now on; the verdict is on the mean of their norms.

        Raises:
            NotOffered: each process scales its loss.
        """
        if self._scales:
            raise NotOffered(
                "Cannot train replicas separately in fp16 with a StepGuard.",
                "Each process scales its own loss. An overflow on one of them is normal, and must not be judged as the "
                "step of all.",
                "Use bf16, or remove the StepGuard.",
            )
        self._replicated = False
        if self.rollback is not None:
            self.rollback.forget()

    # ------------------------------------------------------------------ measuring

    def clip(self, parameters: list[Tensor], max_norm: float, norm_type: float) -> Tensor | None:
        """Clip complete gradients, and note the norm for the optimizers whose gradients these are."""
        ids = [*map(id, parameters)]
        clipped = [history for history in self.histories if history.is_covered_by(ids)]
        if not clipped:
            return self._strategy.clip_norm(parameters, max_norm, norm_type)
        measure = self._measure(clipped, parameters, max_norm, norm_type)
        for history in clipped:
            self._measures[history.index] = measure
        return measure.norm

    def measure(self) -> None:
        """Compute the norms of all optimizers with gradients, before a script changes gradients."""
        for history in self.histories:
            self._measures[history.index] = self._measure([history], history.parameters())

    def _measure(
        self,
        histories: Sequence[StepHistory],
        parameters: list[Tensor],
        max_norm: float | None = None,
        norm_type: float = 2.0,
    ) -> _Measure:
        sums = self._numbers(histories) if self._adds_up else None
        norm = self._strategy.norm_with_sums(parameters, sums, max_norm, norm_type)
        return _Measure(self.window.backwards, sums, norm)

    def _numbers(self, histories: Sequence[StepHistory]) -> Tensor:
        """The numbers of this process, with a place for the norm at the end."""
        numbers = torch.zeros(5 if self._scales else 3, device=self._process.device)
        numbers[0] = self.window.total
        numbers[1] = self.window.share
        for optimizer in [history.optimizer() for history in histories] if self._scales else ():
            if optimizer is not None:
                self._precision.unscale(optimizer)
                overflow = self._precision.overflow(optimizer)
                if overflow is not None:
                    numbers[2:4] = torch.maximum(numbers[2:4], overflow)
        return numbers

    # ------------------------------------------------------------------ the verdict

    def judge_step(self, optimizer: Optimizer) -> bool:
        """Judge a step; False leaves it out.

        Raises:
            NonFiniteStep, SpikeStep: the step is bad, and is to raise; on every process.
            NotReady: a bad step returns to a snapshot, and none was made.
        """
        for history in self.histories:
            if history.optimizer() is optimizer:
                break
        else:
            return True
        if self.rollback is not None and self.rollback.goes_back:
            # What follows in this turn of the loop is undone before the next batch.
            return False
        measure = self._measures.pop(history.index, None)
        if measure is None or measure.backwards != self.window.backwards:
            measure = self._measure([history], history.parameters())
        return self.judge(history, measure)

    def judge(self, history: StepHistory, measure: _Measure) -> bool:
        """Judge the next step of an optimizer by its numbers; see `judge_step`."""
        self.window.has_ended = True
        if self.rollback is not None:
            self.rollback.has_stepped = True
        total, share, *scaling, norm = self._read(measure)
        loss = total / share if share else None
        if scaling and self._is_normal_overflow(history, loss, *scaling):
            return True
        verdict = history.judge(loss, norm / self._processes)
        if verdict is not None:
            return self._act(history, verdict, measure)
        if self._buffers is not None:
            self._buffers.keep()
        return True

    def _read(self, measure: _Measure) -> list[float]:
        """The numbers on the host, which waits for the device once."""
        if measure.sums is not None:
            sums: list[float] = measure.sums.cpu().tolist()
            return sums
        window, norm = self.window, measure.norm
        if norm is None or not isinstance(window.total, torch.Tensor):
            return [float(window.total), window.share, 0.0 if norm is None else norm.item()]
        total, number = torch.stack([window.total.float(), norm.to(window.total.device).float()]).cpu().tolist()
        return [total, window.share, number]

    def _is_normal_overflow(self, history: StepHistory, loss: float | None, overflows: float, scales: float) -> bool:
        """Whether gradients overflowed only because the loss was scaled, so that the scaler skips the step."""
        processes, optimizer = self._processes, history.optimizer()
        if overflows in (0, processes) and optimizer is not None:
            self._precision.learn_overflow(optimizer, bool(overflows))
        is_normal = overflows == processes and scales / processes > 1 and (loss is None or math.isfinite(loss))
        if is_normal:
            history.steps += 1
        return is_normal

    # ------------------------------------------------------------------ what follows from a bad one

    def _act(self, history: StepHistory, verdict: Judgement, measure: _Measure) -> bool:
        action: Action = self.guard.nonfinite if verdict.kind == "nonfinite" else self.guard.on_spike
        too_many = history.bad_in_a_row >= self.guard.max_consecutive and action != "raise"
        everyones = self._evidence(history, measure)
        changed = history.leaves_its_course()
        cause, ranks = conclude(everyones, history.is_bad_loss, changed, self._replicated)
        action = "raise" if too_many else action
        back_to = None
        if action == "rollback" and self.rollback is not None:
            back_to = self.rollback.go_back(self.window.batches)
        named = {rank: everyones[rank] for rank in ranks[:_MOST_RANKS]}
        event = StepEvent(
            step=history.steps,
            action=action,
            cause=cause,
            ranks=ranks,
            samples={rank: one.samples[:_MOST_SAMPLES] for rank, one in named.items() if one.samples},
            batches={rank: one.batches for rank, one in named.items() if one.batches},
            module=next((module for rank in ranks if (module := everyones[rank].module) is not None), None),
            optimizer=history.index,
            back_to=back_to,
            time=time.time(),
            **verdict._asdict(),
        )
        self.events.append(event)
        event.tell(self._process.rank, self._folder())
        if action == "raise":
            raise event.error(history.bad_in_a_row if too_many else 0)
        if self._buffers is not None:
            self._buffers.put_back()
        return False

    def _evidence(self, history: StepHistory, measure: _Measure) -> list[Evidence]:
        """What all processes know about a bad step."""
        session = self._session()
        module = None if self._inputs is None or session is None else self._inputs.first_bad(session)
        own = collect(self._strategy, self._shown_parameters(history), self.window, measure.norm, module)
        everyones: list[Evidence] = gather_object([own])
        return everyones

    def _shown_parameters(self, history: StepHistory) -> list[Tensor]:
        """The parameters in which a flipped bit can be seen."""
        return history.parameters()

    def _folder(self) -> str | None:
        session = self._session()
        project = None if session is None else session.options.project
        return None if project is None else project.project_dir or project.logging_dir

    # ------------------------------------------------------------------ checkpoints

    def state_dict(self) -> dict[str, Any]:
        """The history of each optimizer as plain values."""
        return {"histories": [history.state_dict() for history in self.histories]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on with a saved history; snapshots of the state before are forgotten."""
        for history, saved in zip(self.histories, state["histories"], strict=False):
            history.load_state_dict(saved)
        if self.rollback is not None:
            self.rollback.forget()


class EngineJudge(StepJudge):
    """Judges the steps that an engine such as DeepSpeed's makes within backward: a bad one raises.

    Args:
        session: the session, whose strategy calls `on_gradients` before each update.
        guard: the settings.
    """

    def __init__(self, session: Session, guard: StepGuard) -> None:
        super().__init__(session, guard)
        # The engine skips a step whose gradients overflowed, and keeps the weights that it trains in parts of its own.
        self._scales, self._adds_up = False, True
        session.strategy.on_gradients = self.before_update

    def before_backward(self, loss: Tensor) -> None:
        """Note the loss: the engine steps before its backward pass ends."""
        self.window.after_backward(loss)

    def before_update(self, model: Module) -> None:
        """Judge the gradients that the engine is about to use.

        Raises:
            NonFiniteStep, SpikeStep: the step is bad.
        """
        sums = self._numbers(self.histories)
        # In fp16 the gradients are scaled.
        gradients = [] if self._precision.dtype is torch.float16 else [*self._strategy.gradients(model).values()]
        sums[-1] = norm = torch.nn.utils.get_total_norm(gradients)
        self._process.transport.all_reduce(sums).wait()
        self.judge(self.histories[0], _Measure(self.window.backwards, sums, norm))

    def _shown_parameters(self, history: StepHistory) -> list[Tensor]:
        return []


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
    judge: StepJudge
    if capabilities.own_precision:
        if guard.actions != {"raise"} or not session.strategy.overrides("gradients"):
            raise NotOffered(
                _FAILED,
                f"The engine of the backend {session.backend.name!r} makes the steps itself, within backward.",
                "With DeepSpeed use StepGuard(nonfinite='raise'), which raises before the step; else another backend.",
            )
        judge = EngineJudge(session, guard)
    else:
        judge = StepJudge(session, guard)
        session.hooks.enter(judge.window)
    session.guard = session.prepared.guard = judge
    session.hooks.enter(SampleRecorder())
    session.hooks.enter(judge)
    if judge.rollback is not None:
        session.hooks.enter(judge.rollback)
        session.pauses.used = True
