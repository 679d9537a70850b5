"""Tests of gradients: accumulated, held back, completed, clipped, and in mixed precision."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from accel_plugins.bundle import Bundle
from accel_plugins.layers import strategy_model
from accel_plugins.prepared import as_set_up
from accel_state.errors import AccelError
from accel_testing.backends.base import Answer, Run, SuiteBase, needs, train
from accel_testing.backends.reference_loop import Case, Plain, batches, loss_of

__all__ = (
    "GradientTests",
    "clipped_plain",
    "count_collectives",
    "overflow",
)


class GradientTests(SuiteBase):
    """Tests of gradients: accumulated, held back, completed, clipped, and in mixed precision."""

    @needs("exact_gradients")
    def test_gradients_are_those_of_one_process(self, run: Run) -> None:
        for gradients in run(gradients_of, self.case()):
            assert gradients == self.near(gradients_plain(self.case()))

    def test_completing_gradients_again_leaves_them_as_they_are(self, run: Run) -> None:
        for answer in run(complete_twice, self.case()):
            assert answer["again"] == self.near(answer["once"])

    @needs("exact_gradients")
    def test_backward_passes_its_arguments_on(self, run: Run) -> None:
        if self.capabilities.loss_in_forward:
            pytest.skip(f"forward of {self.manifest.name} computes the gradients")
        expected = {name: _doubled(value) for name, value in gradients_plain(self.case()).items()}
        for gradients in run(weighted_backward, self.case()):
            assert gradients == self.near(expected)

    @needs("exact_gradients")
    def test_a_closure_computes_the_gradients_of_a_step_or_is_refused(self, run: Run) -> None:
        case = self.case()
        for answer in run(step_with_closure, case):
            assert answer["refused"] in ("", "NotOffered")
            assert not answer["weights"] or answer["weights"] == self.near(Plain(case).run().weights())

    @needs("no_sync", "equal_replicas")
    def test_no_sync_reduces_nothing_and_is_over_afterwards(self, run: Run) -> None:
        for answer in run(count_collectives, self.case()):
            assert (answer["held"][1], answer["nested"][1]) == (0, 0)
            # The first forward under `no_sync` may still broadcast buffers before it computes anything.
            assert answer["nested"][0] == 0 or not self.capabilities.local_passes
            assert answer["again"][1] == answer["sync"][1]
            if self.processes > 1:
                assert answer["sync"][0] > answer["held"][0]
                assert 2 * answer["again"][0] > answer["nested"][0]

    @needs("no_sync", "several_models", "equal_replicas")
    def test_no_sync_holds_back_the_model_that_is_given(self, run: Run) -> None:
        for answer in run(no_sync_of_one, self.case()):
            assert answer["inside"][0] == answer["outside"][0]
            assert self.processes == 1 or answer["inside"][1] < answer["outside"][1]

    @needs("no_sync", "exact_gradients")
    def test_a_late_sync_gives_complete_gradients(self, run: Run) -> None:
        for gradients in run(gradients_of, self.case(), True):
            assert gradients == self.near(gradients_plain(self.case()))

    @needs("exact_gradients")
    @pytest.mark.parametrize(("limit", "norm_type"), [(0.05, 2.0), (0.05, 1.0), (0.01, float("inf")), (1e6, 2.0)])
    def test_clipping_to_a_norm_equals_that_of_one_process(self, run: Run, limit: float, norm_type: float) -> None:
        if self.capabilities.own_clipping:
            pytest.skip(f"the engine of {self.manifest.name} clips when it steps")
        case = self.case(clip_norm=limit, norm_type=norm_type)
        expected = clipped_plain(case)
        for answer in run(clipped_gradients, case):
            assert answer["gradients"] == self.near(expected["gradients"])
            assert answer["norm"] is None or answer["norm"] == self.near(expected["norm"])

    @needs("clip_value", "exact_gradients")
    def test_clipping_to_a_value_equals_that_of_one_process(self, run: Run) -> None:
        case = self.case(clip_value=0.01)
        for answer in run(clipped_gradients, case):
            assert answer["gradients"] == self.near(clipped_plain(case)["gradients"])

    def test_bf16_computes_narrow_and_answers_in_fp32(self, run: Run) -> None:
        for answer in run(compute_dtype, self.case(precision="bf16")):
            assert (answer["inside"], answer["outside"]) == ("torch.bfloat16", "torch.float32")

    @pytest.mark.parametrize("precision", ["bf16", "fp16"])
    def test_mixed_precision_stays_near_full_precision(self, run: Run, precision: str) -> None:
        if precision == "fp16" and not self.capabilities.fp16:
            pytest.skip(f"{self.manifest.name} declares that it lacks fp16")
        answers = run(train, self.case(precision=precision))
        for answer, expected in zip(answers, self.expected(run, self.case()), strict=True):
            assert answer["losses"] == pytest.approx(expected["losses"], rel=0.05)

    @needs("fp16", "equal_replicas")
    def test_an_overflow_anywhere_skips_the_step_everywhere(self, run: Run) -> None:
        for answer in run(overflow, self.case(precision="fp16")):
            assert answer == {"stepped": [False, True], "unchanged": True}

    @needs("fp16", "exact_gradients")
    def test_clipping_sees_unscaled_gradients(self, run: Run) -> None:
        if self.capabilities.own_clipping:
            pytest.skip(f"the engine of {self.manifest.name} clips when it steps")
        case = self.case(precision="fp16", clip_norm=0.05)
        expected = clipped_plain(case)["norm"]
        for answer in run(clipped_gradients, case):
            assert answer["norm"] is None or answer["norm"] == pytest.approx(expected, rel=0.05)


def gradients_of(case: Case, late: bool = False) -> Answer:
    """Gradients of one global batch; with `late`, forward runs under `no_sync` and backward synchronises."""
    training = case.open()
    batch = next(iter(batches(case)))
    if late:
        inputs, targets = training.slice(batch)
        with training.strategy.no_sync(training.wrapped):
            loss = training.loss(inputs, targets)
        with training.strategy.sync_in_next_backward(training.wrapped):
            training.strategy.backward(loss)
    else:
        training.backward(batch)
    training.complete_gradients()
    training.complete_gradients()
    return training.gradients()


def gradients_plain(case: Case) -> Answer:
    """The gradients that `gradients_of` must return, computed by plain torch in one process."""
    plain = Plain(case)
    inputs, targets = next(iter(batches(case)))
    loss_of(plain.model, inputs, targets).backward()  # type: ignore[no-untyped-call]
    return {name: p.grad.tolist() for name, p in plain.model.named_parameters() if p.grad is not None}


def complete_twice(case: Case) -> Answer:
    """Gradients after they were completed, and after they were completed again, in the second step of a run."""
    training = case.open()
    first, second = list(batches(case))[:2]
    training.train([first])
    training.backward(second)
    training.complete_gradients()
    once = training.gradients()
    training.complete_gradients()
    return {"once": once, "again": training.gradients()}


def weighted_backward(case: Case) -> Answer:
    """Gradients of a batch when backward starts from the gradient 2."""
    training = case.open()
    inputs, targets = training.slice(next(iter(batches(case))))
    loss = training.loss(inputs, targets)
    training.strategy.backward(loss, training.wrapped, gradient=torch.full_like(loss, 2.0))
    training.complete_gradients()
    return training.gradients()


def step_with_closure(case: Case) -> Answer:
    """Weights after steps with closures that compute the gradients, or the name of the raised error."""
    training = case.open()
    inner = training.optimizer.optimizer
    for batch in batches(case):
        inputs, targets = training.slice(batch)

        def compute(inputs: torch.Tensor = inputs, targets: torch.Tensor = targets) -> torch.Tensor:
            inner.zero_grad()
            loss = training.loss(inputs, targets)
            training.strategy.backward(loss, training.wrapped)
            return loss

        try:
            training.optimizer.step(compute)
        except AccelError as error:
            return {"refused": type(error).__name__ if error.remedy else "an error without a remedy", "weights": {}}
    return {"refused": "", "weights": training.weights()}


def count_collectives(case: Case) -> Answer:
    """(collectives, reductions): one backward, one under `no_sync`, two under nested `no_sync`, one afterwards.

    The gradients of the first and the last are completed, because a strategy may average them only then. Between the
    last two cases, a block of `no_sync` ends with an exception.
    """
    training = case.open()
    inputs, targets = training.slice(next(iter(batches(case))))

    def backward() -> None:
        training.strategy.backward(training.loss(inputs, targets), training.wrapped)

    def complete() -> None:
        backward()
        training.strategy.finalize_gradients(training.inner)

    def held() -> None:
        with training.strategy.no_sync(training.wrapped):
            backward()

    def nested() -> None:
        with training.strategy.no_sync(training.wrapped):
            with training.strategy.no_sync(training.wrapped):
                backward()
            backward()

    for _ in range(2):
        complete()  # The first backward pass may include work that a backend does once.
    actions = {"sync": complete, "held": held, "nested": nested}
    counted = {name: _collectives(action) for name, action in actions.items()}
    with suppress(LookupError), training.strategy.no_sync(training.wrapped):
        raise LookupError("the batch failed")
    return {**counted, "again": _collectives(complete)}


def no_sync_of_one(case: Case) -> Answer:
    """The number of collectives in a pass of each of two models, outside `no_sync` and inside the second model's."""
    training = case.open()
    other = case.make(1)
    bundle = training.prepare(Bundle.of([other, torch.optim.SGD(other.parameters(), lr=0.3)]))
    models, optimizers = [training.model, bundle.models[0]], [training.inner, as_set_up(bundle.optimizers[0])]
    inputs, targets = training.slice(next(iter(batches(case))))

    def backward(index: int, complete: bool = True) -> None:
        training.strategy.backward(case.loss(models[index], inputs, targets), strategy_model(models[index]))
        if complete:
            training.strategy.finalize_gradients(optimizers[index])

    for index in (0, 1, 0, 1):
        backward(index)  # The first backward pass may include work that a backend does once.
    outside = [_collectives(partial(backward, index))[0] for index in range(2)]
    with training.strategy.no_sync(strategy_model(models[1])):
        inside = [_collectives(partial(backward, index, complete=not index))[0] for index in range(2)]
    return {"outside": outside, "inside": inside}


class _Recorded(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """The names of the collectives of a block: torch's operators, and those that a group in Python reports.

    torch's profiler sees them too, but its end races with the threads of gloo that run a communication hook, which
    crashes the process.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.names: list[str] = []

    def __torch_dispatch__(
        self, operator: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        record = operator.name() == "profiler::_record_function_enter_new"
        name = str(args[0]) if record else operator.name()
        if name.startswith(("c10d::", "_c10d_functional::")) and "wait" not in name:
            self.names.append(name)
        return operator(*args, **(kwargs or {}))


def _collectives(action: Callable[[], None]) -> tuple[int, int]:
    with _Recorded() as recorded:
        action()
    return len(recorded.names), sum("reduce" in name for name in recorded.names)


def clipped_gradients(case: Case) -> Answer:
    """Gradients of one batch after clipping, and the norm before clipping."""
    training = case.open()
    training.backward(next(iter(batches(case))))
    return {"norm": training.clip(), "gradients": training.gradients()}


def clipped_plain(case: Case) -> Answer:
    """`clipped_gradients` in plain torch."""
    plain = Plain(case)
    inputs, targets = next(iter(batches(case)))
    loss_of(plain.model, inputs, targets).backward()  # type: ignore[no-untyped-call]
    norm = None
    if case.clip_norm is not None:
        norm = float(nn.utils.clip_grad_norm_(plain.model.parameters(), case.clip_norm, case.norm_type))
    if case.clip_value is not None:
        nn.utils.clip_grad_value_(plain.model.parameters(), case.clip_value)
    gradients = {name: p.grad.tolist() for name, p in plain.model.named_parameters() if p.grad is not None}
    return {"norm": norm, "gradients": gradients}


def compute_dtype(case: Case) -> Answer:
    """The dtype in which the first layer computes, and the dtype of the model's output."""
    training = case.open()
    seen: list[str] = []
    layer: nn.Module = training.strategy.unwrap(training.wrapped)
    for module in layer.modules():
        if isinstance(module, nn.Linear):
            module.register_forward_hook(lambda _m, _i, output: seen.append(str(output.dtype)))
    inputs = next(iter(batches(case)))[0].to(training.process.device)
    output = training.model(inputs)
    return {"inside": seen[0], "outside": str(output.dtype)}


def overflow(case: Case) -> Answer:
    """Whether a step is made when the last process has an infinite loss, and when no process has one."""
    training = case.open()
    before, stepped, unchanged = training.weights(), [], []
    for bad in (True, False):
        inputs, targets = training.slice(next(iter(batches(case))))
        last = training.process.rank == training.process.world_size - 1
        factor = float("inf") if bad and last else 1.0
        training.gradient.sync_gradients = True
        training.strategy.backward(training.loss(inputs, targets) * factor)
        stepped.append(training.step())
        unchanged.append(training.weights() == before)
    return {"stepped": stepped, "unchanged": unchanged[0]}


def _doubled(values: Any) -> Any:
    return [_doubled(value) for value in values] if isinstance(values, list) else 2 * values
