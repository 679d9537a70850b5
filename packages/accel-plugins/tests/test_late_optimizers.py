"""Optimizers made of a model that is sharded already, as the Trainer of transformers makes them for FSDP version 1."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from accel_plugins.bundle import Bundle
from accel_plugins.fsdp.config import FullyShardedDataParallelPlugin as Plugin
from accel_plugins.fsdp.manifest import FSDP1, FSDP2
from accel_state.errors import Conflict
from accel_testing.backends import Case, Training
from accel_testing.backends.reference_loop import Plain, make_model, make_optimizer, near
from accel_testing.processes import Processes as Group

pytestmark = pytest.mark.usefixtures("fresh_state")


IN_BLOCKS: dict[str, Any] = {"auto_wrap_policy": "SIZE_BASED_WRAP", "min_num_params": 50}
CASES = [Case(FSDP1, Plugin(1, use_orig_params=whole, **IN_BLOCKS)) for whole in (True, False)]
CASES += [Case(FSDP2, Plugin(2, **IN_BLOCKS))]


class Late(Training):
    """Prepares the model first, and then an optimizer made of the prepared model."""

    def prepare(self, bundle: Bundle) -> Bundle:
        made = super().prepare(Bundle.of(list(bundle.models)))
        optimizer = make_optimizer(self.case, made.models[0])
        # Two groups, such as those with and without weight decay.
        (group,) = optimizer.param_groups
        last = group["params"].pop()
        optimizer.add_param_group({"params": [last]})
        made.optimizers = super().prepare(Bundle.of([optimizer])).optimizers
        return made


def train(given: Case, folder: str) -> dict[str, Any]:
    training = Late(given)
    losses, norms = training.train()
    training.save(Path(folder))
    weights = training.weights()
    again = Late(given)
    again.load(Path(folder))
    return {"losses": losses, "norms": norms, "weights": weights, "further": [again.train(), training.train()]}


@pytest.mark.parametrize("adam", [True, False])
@pytest.mark.parametrize("given", CASES, ids=["version 1", "version 1 with joined parameters", "version 2"])
def test_they_train_like_one_process_and_are_saved(two: Group, given: Case, adam: bool, tmp_path: Path) -> None:
    given = given.but(adam=adam, clip_norm=0.2)
    plain = Plain(given).run()
    answers = two.run(train, given, str(tmp_path))
    for answer in answers:
        assert answer["losses"] == near(plain.losses)
        assert answer["norms"] == near(plain.norms)
        assert answer["further"][0] == answer["further"][1]
    assert answers[0]["weights"] == near(plain.weights())


def refused(given: Case, released: bool) -> str:
    training = Training(given)
    if released:
        training.strategy.release([training.wrapped], [training.optimizer])
    optimizer = make_optimizer(given, training.model if released else make_model())
    try:
        training.strategy.check(Bundle.of([optimizer]))
    except Conflict as error:
        return str(error)
    return "nothing was raised"


@pytest.mark.parametrize("released", [True, False])
@pytest.mark.parametrize("given", CASES, ids=["version 1", "version 1 with joined parameters", "version 2"])
def test_those_of_a_model_that_is_not_prepared_are_refused(two: Group, given: Case, released: bool) -> None:
    for answer in two.run(refused, given, released):
        assert "together with its model" in answer
