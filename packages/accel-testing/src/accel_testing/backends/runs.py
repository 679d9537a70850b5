"""Functions that tests of several kinds call inside the processes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from accel_testing.backends.reference_loop import Case, Training

__all__ = ("Answer", "as_lists", "shard_of", "train", "writes")

Answer = dict[str, Any]
"""What a process answers, to be compared in the process of the tests."""


def train(case: Case) -> Answer:
    """Train, and return everything that can be compared."""
    training = case.open()
    losses, norms = training.train()
    return {
        "losses": losses,
        "norms": norms,
        "rates": training.rates,
        "weights": training.weights(),
        "beside": [training.weights(model) for model, _ in training.others],
        "shards": shard_of(training),
        "batches_per_step": training.strategy.batches_per_step(),
    }


def writes(training: Training) -> bool:
    """Whether this process has complete weights."""
    return training.strategy.writes_weights()


def shard_of(training: Training) -> tuple[int, int]:
    """The number of shards of each batch, and the index of this process's shard."""
    shards = training.strategy.shards()
    return shards.count, shards.index


def as_lists(state: Mapping[str, torch.Tensor]) -> dict[str, Any]:
    """A state dict as plain lists."""
    return {name: value.tolist() for name, value in state.items()}
