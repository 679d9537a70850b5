from __future__ import annotations

import torch
from torch import nn

from accel_plugins import Bundle, Context
from accel_plugins.precision import choose
from accel_state import PartialState, current
from accel_state.gradient import GradientState
from accel_testing.backends import FakeStrategy
from accel_testing.fresh import fresh


def test_it_answers_like_one_process_and_writes_down_what_it_was_asked() -> None:
    with fresh():
        PartialState(cpu=True)
        process = current.process()
        strategy = FakeStrategy(Context(process, GradientState(), choose("no", process.family)))
        model = nn.Linear(1, 1)
        bundle = strategy.setup(Bundle.of([model]))
        with strategy.no_sync(model):
            strategy.backward(model(torch.ones(1)))

        assert bundle.models == [model]
        assert model.weight.grad is not None
        assert strategy.calls == ["setup", "no_sync", "backward"]
