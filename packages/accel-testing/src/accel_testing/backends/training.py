"""Tests of whole runs: their losses and weights are those of one process, or of the author's reference."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

import pytest
import torch
from torch import Tensor

from accel_plugins.bundle import Bundle
from accel_state.errors import AccelError
from accel_testing.backends.base import (
    Answer,
    Run,
    SuiteBase,
    as_lists,
    needs,
    shard_of,
    train,
    with_the_kits_models,
    writes,
)
from accel_testing.backends.reference_loop import Case, Plain, batches, loss_of, make_optimizer

__all__ = ("TrainingTests",)


FOLLOWED = 13
"""Steps of runs that are compared step by step: at least two periods of up to six steps, and not a multiple of any."""

_FOLLOWED_CASES: Final[tuple[dict[str, Any], ...]] = ({}, {"adam": True}, {"grouped": True}, {"accumulation": 2})
"""The runs that the author's reference follows."""


_COMPARED_OPTIMIZERS: Final[dict[str, dict[str, Any]]] = {
    "SGD": {},
    "Adam": {"adam": True},
    "groups with options": {"grouped": True},
    "schedule": {"scheduled": True},
    "smaller last batch": {"tail": 12},
    "2 micro-batches": {"accumulation": 2},
    "3 micro-batches": {"accumulation": 3},
    "3 micro-batches that synchronise": {"accumulation": 3, "no_sync": False},
    "clipping": {"clip_norm": 0.1},
    "tied weights": {"model": "tied"},
    "frozen weights": {"model": "frozen"},
}
"""The runs that are compared with one process."""


class TrainingTests(SuiteBase):
    """Tests of whole runs: their losses and weights are those of one process, or of the author's reference."""

    @needs("exact_gradients")
    @pytest.mark.parametrize("changes", _COMPARED_OPTIMIZERS.values(), ids=_COMPARED_OPTIMIZERS)
    def test_training_equals_that_of_one_process(self, run: Run, changes: dict[str, Any]) -> None:
        """Losses, norms before clipping, and weights; also of what an engine declares as its own."""
        if "model" in changes and self.model != "usual":
            pytest.skip(f"{self.manifest.name} brings a model of its own")
        case = self.case(**changes)
        plain, answers = Plain(case).run(), run(train, case)
        for answer in answers:
            assert answer["losses"] == self.near(plain.losses)
            if None not in answer["norms"]:
                assert answer["norms"] == self.near(plain.norms)
        for weights in self.written(answers):
            assert weights == self.near(plain.weights())

    def test_weights_follow_the_reference_after_every_step(self, run: Run) -> None:
        """The author's `reference`, with other optimizers and accumulation."""
        if type(self).reference is SuiteBase.reference:
            pytest.skip(f"the suite of {self.manifest.name} has no reference()")
        for changes in _FOLLOWED_CASES:
            case = self.case(steps=FOLLOWED, **changes)
            answers = run(follow, case)
            batches = [answer["batches"] for answer in answers]
            for step in range(1, case.steps + 1):
                expected = self.reference(case, [steps[:step] for steps in batches])
                for answer, weights in zip(answers, expected, strict=True):
                    actual = answer["weights"][step - 1]
                    assert not actual or actual == self.near(as_lists(weights)), f"after step {step} with {changes}"

    @pytest.mark.parametrize("adam", [False, True])
    def test_equal_data_on_all_processes_trains_as_one_process(self, run: Run, adam: bool) -> None:
        """With the settings `neutral`."""
        if self.neutral is None and not self.capabilities.exact_gradients:
            pytest.skip(f"the suite of {self.manifest.name} has no neutral settings")
        case = self.case(adam=adam, steps=FOLLOWED)
        if self.neutral is not None:
            case = case.but(config=self.neutral)
        plain = Plain(case).run(equal_parts(case))
        for answer in run(train_on_equal_data, case):
            assert answer["losses"] == self.near(plain.losses)
            assert not answer["weights"] or answer["weights"] == self.near(plain.weights())

    def test_a_learning_rate_of_zero_moves_nothing(self, run: Run) -> None:
        for answer in run(train_at_rate_zero, self.case(steps=FOLLOWED)):
            assert answer["after"] == self.near(answer["before"])

    @with_the_kits_models
    def test_a_convex_loss_falls(self, run: Run) -> None:
        """Softmax regression on the same samples in every step, at a small learning rate."""
        answers = run(train_on_a_convex_loss, self.case(model="convex", steps=FOLLOWED))
        for answer in answers:
            assert not answer["weights_written"] or answer["after"] < answer["before"]
        assert answers[0]["weights_written"]

    @needs("several_models")
    def test_another_model_beside_changes_nothing(self, run: Run) -> None:
        """Two models with an optimizer each train in turn, as each of them trains alone."""
        answers = run(train, self.case(beside=True))
        alone = [run(train_alone, self.case(), seed) for seed in (0, 2)]
        for rank, answer in enumerate(answers):
            assert answer["weights"] == self.near(alone[0][rank]["weights"])
            assert answer["beside"] == self.near([alone[1][rank]["weights"]])

    @with_the_kits_models
    @needs("unused_parameters", "equal_replicas")
    def test_processes_may_use_different_parameters(self, run: Run) -> None:
        """Each process trains another head, so no head has a gradient everywhere."""
        case = self.case(model="branching", steps=3)
        answers = run(train_branches, case)
        written = self.written(answers)
        assert all(weights == written[0] for weights in written), (
            "the replicas differ when a parameter has a gradient on some processes only: average it with zeros for the "
            "others, or declare Capabilities(unused_parameters=False)"
        )
        if self.capabilities.exact_gradients:
            assert written[0] == self.near(train_branches_plain(case, [answer["shard"] for answer in answers]))

    def test_schedulers_step_once_at_each_step(self, run: Run) -> None:
        case = self.case(scheduled=True)
        for answer in run(train, case):
            assert answer["rates"] == self.near(Plain(case).run().rates)

    @needs("equal_replicas")
    def test_weights_are_the_same_on_all_processes(self, run: Run) -> None:
        written = self.written(run(train, self.case()))
        assert all(weights == written[0] for weights in written)

    @needs("exact_gradients", "state_dict")
    def test_an_optimizer_of_whole_matrices_trains_as_in_one_process_or_is_refused(self, run: Run) -> None:
        """Muon computes in bfloat16, so its updates agree to two digits."""
        answers = run(train_or_refuse, self.case(muon=True))
        if not any("refused" in answer for answer in answers):
            expected = Plain(self.case(muon=True)).run().weights()
            for weights in self.written(answers):
                for name, values in expected.items():
                    assert torch.allclose(torch.tensor(weights[name]), torch.tensor(values), atol=0.01), name
        else:
            assert all("refused" in answer for answer in answers), "only some processes refuse it"

    @needs("several_models", "exact_gradients")
    def test_several_models_train_side_by_side(self, run: Run) -> None:
        expected = several_models_plain(self.case())
        for weights in self.written(run(several_models, self.case())):
            assert weights == self.near(expected)

    @needs("join")
    def test_processes_may_run_out_of_batches(self, run: Run) -> None:
        written = self.written(run(join_uneven, self.case()))
        assert all(weights == written[0] for weights in written)

    @needs("average_parameters")
    def test_averaging_gives_everyone_the_mean(self, run: Run) -> None:
        answers = run(average, self.case())
        for weights in self.written(answers):
            for name, _ in self.case().make().named_parameters():
                assert set(_flat(weights[name])) == {answers[0]["mean"]}


def train_or_refuse(case: Case) -> Answer:
    """Train, or return the error with which the backend refuses the objects."""
    try:
        return train(case)
    except AccelError as error:
        return {"refused": str(error)}


def train_alone(case: Case, seed: int) -> Answer:
    """Weights of a model that trains without another one beside."""
    training = case.open(case.make(seed))
    training.train()
    return {"weights": training.weights()}


def follow(case: Case) -> Answer:
    """The micro-batches of this process, and the weights after each step."""
    training, taken, weights = case.open(), [], []
    for batch in batches(case):
        taken.append([(inputs.cpu(), targets.cpu()) for inputs, targets in training.micro_batches(batch)])
        training.train([batch])
        weights.append(training.weights())
    return {"batches": taken, "weights": weights}


def equal_parts(case: Case) -> list[tuple[Tensor, Tensor]]:
    """Half of each global batch."""
    return [(inputs[: len(inputs) // 2], targets[: len(targets) // 2]) for inputs, targets in batches(case)]


def train_on_equal_data(case: Case) -> Answer:
    """Losses and weights of a run in which all processes have equal batches: those of `equal_parts`."""
    training = case.open()
    count = training.strategy.shards().count
    losses, _ = training.train([(torch.cat([i] * count), torch.cat([t] * count)) for i, t in equal_parts(case)])
    return {"losses": losses, "weights": training.weights()}


def train_at_rate_zero(case: Case) -> Answer:
    """Weights before and after training with a learning rate of 0."""
    training = case.open()
    for group in training.optimizer.param_groups:
        group["lr"] = 0.0
    before = training.weights()
    training.train()
    return {"before": before, "after": training.weights()}


def train_on_a_convex_loss(case: Case) -> Answer:
    """The loss of one global batch with the weights of the run, before and after training on that batch."""
    training, batch = case.open(), next(iter(batches(case)))
    for group in training.optimizer.param_groups:
        group["lr"], group["momentum"] = 0.1, 0.0

    def loss() -> float:
        with training.strategy.global_weights(training.wrapped):
            weights = training.strategy.state_dict(training.wrapped)
            if not writes(training):
                return 0.0
            plain = case.make()
            plain.load_state_dict({name: value.cpu() for name, value in weights.items()})
        return float(loss_of(plain, *batch))

    before = loss()
    training.train([batch] * case.steps)
    return {"weights_written": writes(training), "before": before, "after": loss()}


def train_branches(case: Case) -> Answer:
    """Weights after steps in which each process uses the branch of its shard."""
    training = case.open()
    index = shard_of(training)[1]
    branching: Any = training.strategy.unwrap(training.wrapped)
    branching.branch = index % 2
    training.train()
    return {"weights": training.weights(), "shard": index}


def train_branches_plain(case: Case, shards: list[int]) -> Answer:
    """The weights that `train_branches` must return, trained by plain torch in one process."""
    model: Any = case.make()
    optimizer, count = make_optimizer(case, model), max(shards) + 1
    for inputs, targets in batches(case):
        for index, part in enumerate(zip(inputs.chunk(count), targets.chunk(count), strict=True)):
            model.branch = index % 2
            (loss_of(model, *part) / count).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()
    return as_lists(model.state_dict())


def several_models(case: Case) -> Answer:
    """Train two models, prepared in one call with an optimizer each, alternately."""
    training = case.open()
    models = [case.make(1), case.make(2)]
    bundle = training.prepare(Bundle.of([*models, *[torch.optim.SGD(m.parameters(), lr=0.3) for m in models]]))
    for number, batch in enumerate(batches(case)):
        chosen: int = number % 2
        inputs, targets = training.slice(batch)
        training.strategy.backward(case.loss(bundle.models[chosen], inputs, targets), bundle.models[chosen])
        bundle.optimizers[chosen].step()
        bundle.optimizers[chosen].zero_grad()
    states = [training.strategy.state_dict(model) for model in bundle.models]
    return {"weights": [{n: v.tolist() for n, v in state.items()} for state in states] if writes(training) else []}


def several_models_plain(case: Case) -> list[dict[str, Any]]:
    """The weights that `several_models` must return, trained by plain torch in one process."""
    models = [case.make(1), case.make(2)]
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.3) for model in models]
    for number, (inputs, targets) in enumerate(batches(case)):
        chosen = number % 2
        loss_of(models[chosen], inputs, targets).backward()  # type: ignore[no-untyped-call]
        optimizers[chosen].step()
        optimizers[chosen].zero_grad()
    return [{name: value.tolist() for name, value in model.state_dict().items()} for model in models]


def join_uneven(case: Case) -> Answer:
    """Train when the second process has three batches more than the first."""
    training = case.open()
    with training.strategy.join([training.wrapped]):
        for _ in range(2 + 3 * training.process.rank):
            training.backward(next(iter(batches(case))))
            training.step()
    return {"weights": training.weights()}


def average(case: Case) -> Answer:
    """Parameters after each process set them to its rank and all averaged them."""
    training = case.open()
    with torch.no_grad():
        for parameter in training.model.parameters():
            parameter.fill_(float(training.process.rank))
    training.strategy.average_parameters(training.wrapped)
    return {"weights": training.weights(), "mean": (training.process.world_size - 1) / 2}


def _flat(values: Any) -> Iterator[float]:
    if isinstance(values, list):
        for value in values:
            yield from _flat(value)
    else:
        yield values
