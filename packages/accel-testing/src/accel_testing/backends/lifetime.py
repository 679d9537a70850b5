"""Tests of the end of objects and strategies, and of members that may change."""

from __future__ import annotations

import gc
import time
import weakref
from contextlib import nullcontext
from dataclasses import asdict
from typing import Final

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from accel_data import prepare_data_loader
from accel_plugins.bundle import Bundle
from accel_plugins.prepared import as_set_up
from accel_testing.backends.base import Answer, Run, SuiteBase, needs, train
from accel_testing.backends.reference_loop import Case, Plain, batches

__all__ = ("LifetimeTests",)

_RELEASE_TIMEOUT_S: Final = 10.0
"""Seconds after which an object that still has references counts as kept."""


class LifetimeTests(SuiteBase):
    """Tests of the end of objects and strategies, and of members that may change."""

    def test_nothing_keeps_a_model_that_was_released(self, run: Run) -> None:
        for answer in run(release, self.case()):
            assert answer == {"model": False, "optimizer": False}

    @needs("several_models", "exact_gradients")
    def test_others_train_on_when_a_model_is_released(self, run: Run) -> None:
        case = self.case()
        for weights in self.written(run(release_another, case)):
            assert weights == self.near(Plain(case).run().weights())

    def test_a_strategy_can_be_closed_and_another_follow(self, run: Run) -> None:
        answers = run(close_at_the_end, self.case())
        for answer, expected in zip(answers, self.expected(run, self.case()), strict=True):
            assert answer["losses"] == self.near(expected["losses"])
            assert answer["read"]

    def test_shares_of_each_step_make_up_its_samples_and_steps_are_counted(self, run: Run) -> None:
        """As long as no process leaves, all make the same steps, and each step's samples are divided among them."""
        if not self.capabilities.elastic:
            pytest.skip(f"the processes of {self.manifest.name} do not change during a run")
        answers = run(read_steps, self.case())
        steps = list(dict.fromkeys(share["step"] for share in answers[0]))
        for step in steps:
            shares = [[share for share in answer if share["step"] == step] for answer in answers]
            assert [[share["last"] for share in own] for own in shares] == [
                [*[False] * (len(own) - 1), True] for own in shares
            ]
            totals = {(share["total"], share["members"]) for own in shares for share in own}
            assert totals == {(sum(share["samples"] for own in shares for share in own), len(answers))}
        if self.capabilities.equal_replicas:
            assert steps == [steps[0], steps[0] + 1]


def release(case: Case) -> Answer:
    """Whether a released model and optimizer still have references, and whether others can be prepared afterwards."""
    training = case.open()
    training.train()
    strategy = training.strategy
    kept = {"model": weakref.ref(training.user_model), "optimizer": weakref.ref(training.optimizer.optimizer)}
    strategy.release([training.wrapped], [training.inner])
    vars(training).clear()
    training = case.open()
    # A thread that reads the stacks of this one may hold its frames, and what they refer to, for a moment.
    deadline = time.monotonic() + _RELEASE_TIMEOUT_S
    while any(seen() is not None for seen in kept.values()) and time.monotonic() < deadline:
        gc.collect()
        time.sleep(0.01)
    return {name: seen() is not None for name, seen in kept.items()}


def release_another(case: Case) -> Answer:
    """Train after another model and optimizer were released."""
    training, other = case.open(), case.make(2)
    bundle = training.prepare(Bundle.of([other, torch.optim.SGD(other.parameters(), lr=0.3)]))
    training.strategy.release(*([as_set_up(one) for one in kind] for kind in (bundle.models, bundle.optimizers)))
    training.train()
    return {"weights": training.weights()}


def close_at_the_end(case: Case) -> Answer:
    """Whether weights can be read after `close`, and whether a new strategy can follow."""
    training = case.open()
    training.train()
    weights = training.weights()
    training.strategy.close()
    read = training.weights() == weights and isinstance(
        training.strategy.unwrap(training.wrapped), type(training.user_model)
    )
    return {**train(case), "read": read}


def read_steps(case: Case) -> list[Answer]:
    """The shares of this process's batches in the first two optimizer steps of a loader that trains."""
    training = case.open()
    inputs, targets = (torch.cat(tensors) for tensors in zip(*batches(case), strict=True))
    loader = prepare_data_loader(
        DataLoader(TensorDataset(inputs, targets), batch_size=2), order="global", num_processes=1, process_index=0
    )
    shares: list[Answer] = []
    for batch in training.strategy.wrap_loader(loader):
        share = training.strategy.share_of_batch(loader)
        assert share is not None
        shares.append(asdict(share))
        share.accumulated = True
        with nullcontext() if share.last else training.strategy.no_sync(training.wrapped):
            training.strategy.backward(training.loss(*batch) * share.factor, training.wrapped)
        if share.last:
            training.step()
            share.stepped = True
            if sum(one["last"] for one in shares) == 2:
                break
    return shares
