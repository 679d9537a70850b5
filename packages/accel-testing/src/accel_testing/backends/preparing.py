"""Tests of preparing: models, optimizers and loaders before the first step."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from accel_plugins.bundle import Bundle
from accel_plugins.layers import strategy_model
from accel_plugins.model_part import ModelPart
from accel_testing.backends.base import Answer, Run, SuiteBase, as_lists, needs, shard_of, train, writes
from accel_testing.backends.reference_loop import Case, batches

__all__ = ("PreparationTests",)


class PreparationTests(SuiteBase):
    """Tests of preparing: models, optimizers and loaders before the first step."""

    def test_checking_changes_nothing(self, run: Run) -> None:
        for answer in run(check_twice, self.case()):
            assert all(answer.values()), answer

    def test_the_optimizer_holds_the_parameters_that_train(self, run: Run) -> None:
        for answer in run(look_at_prepared, self.case()):
            assert (answer["held_but_not_trained"], answer["trained_but_not_held"], answer["held_twice"]) == (0, 0, 0)

    def test_unwrapping_gives_the_users_model(self, run: Run) -> None:
        names = sorted(name for name, _ in self.case().make().named_parameters())
        for answer in run(look_at_prepared, self.case()):
            assert answer["is_users_class"]
            assert answer["names"] == names
            assert answer["same_again"]

    def test_forward_computes_what_the_plain_model_computes_also_after_unwrapping(self, run: Run) -> None:
        for answer in run(forward_and_unwrap, self.case()):
            assert answer["first"] == self.near(answer["plain"])
            assert answer["second"] == answer["first"]

    def test_forward_takes_names_and_the_model_follows_eval_and_train(self, run: Run) -> None:
        for answer in run(call_as_users_do, self.case()):
            assert answer["named"] == self.near(answer["plain"])
            assert answer["modes"] == [{False}, {True}]

    def test_slices_cover_the_batch(self, run: Run) -> None:
        answers = run(train, self.case(steps=1))
        shards = [answer["shards"] for answer in answers]
        counts, indices = {count for count, _ in shards}, {index for _, index in shards}
        assert len(counts) == 1
        count = counts.pop()
        assert indices == set(range(count))
        if not self.capabilities.elastic:
            assert {answer["batches_per_step"] for answer in answers} == {count}

    def test_a_model_that_is_only_evaluated_needs_no_optimizer(self, run: Run) -> None:
        for answer in run(prepare_without_optimizer, self.case()):
            assert answer["outputs"] == self.near(answer["plain"])

    @needs("state_dict")
    def test_init_module_gives_a_model_the_values_of_the_first_process(self, run: Run) -> None:
        answers = run(build_inside, self.case())
        for answer in answers:
            assert answer["weights"] == self.near(answer["expected"])
        (count,) = {answer["stages"][1] for answer in answers}
        assert {stage for answer in answers for stage in answer["stages"][0]} == set(range(count)) != set(), (
            "the processes build all stages of a model together; init_module returns a ModelPart"
        )

    def test_set_up_makes_all_processes_start_with_the_weights_of_the_first(self, run: Run) -> None:
        """Each process creates its model from a different seed; afterwards weights and buffers are equal."""
        answers = run(look_at_start, self.case())
        for weights in self.written(answers):
            assert weights == answers[0]["first"]
        for answer in answers:
            assert answer["buffers"] == answers[0]["buffers"]

    def test_set_up_leaves_each_process_its_random_numbers(self, run: Run) -> None:
        """Processes with different samples have different dropout masks."""
        draws = {answer["shard"]: answer["draws"] for answer in run(look_at_start, self.case())}
        assert len({tuple(numbers) for numbers in draws.values()}) == len(draws)

    def test_a_loader_gives_every_batch_in_each_epoch(self, run: Run) -> None:
        for answer in run(read_loader, self.case()):
            assert answer["epochs"] == [answer["expected"]] * 2
            assert answer["length"] == len(answer["expected"])


def check_twice(case: Case) -> Answer:
    """Whether `check` leaves the objects unchanged."""
    training = case.open()
    model = case.make(3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    bundle = Bundle.of([model, optimizer])
    before = [(id(p), p.detach().clone()) for p in model.parameters()], vars(model).keys() | set()
    training.strategy.check(bundle)
    training.strategy.check(bundle)
    after = [(id(p), p) for p in model.parameters()]
    return {
        "same_objects": bundle.models == [model] and bundle.optimizers == [optimizer],
        "same_parameters": [i for i, _ in before[0]] == [i for i, _ in after],
        "same_values": all(
            a.dtype is b.dtype and torch.equal(a, b) for (_, a), (_, b) in zip(before[0], after, strict=True)
        ),
        "same_attributes": vars(model).keys() == before[1],
    }


def look_at_prepared(case: Case) -> Answer:
    """Whether model and optimizer are wrapped, and have the parameters that train."""
    training = case.open()
    trained = {id(parameter) for parameter in training.model.parameters()}
    held = [id(parameter) for group in training.optimizer.param_groups for parameter in group["params"]]
    bare = training.strategy.unwrap(training.wrapped)
    return {
        "held_but_not_trained": len(set(held) - trained),
        "trained_but_not_held": len(trained - set(held)),
        "held_twice": len(held) - len(set(held)),
        "is_users_class": isinstance(bare, type(training.user_model)),
        "names": sorted(name for name, _ in bare.named_parameters()),
        "same_again": training.strategy.unwrap(bare) is bare,
    }


def forward_and_unwrap(case: Case) -> Answer:
    """Outputs of the prepared model before and after unwrapping, and of the plain model."""
    training = case.open()
    inputs = next(iter(batches(case)))[0].to(training.process.device)
    with torch.no_grad():
        first = training.model(inputs)
        training.strategy.unwrap(training.wrapped)
        training.strategy.state_dict(training.wrapped)
        second = training.model(inputs)
        plain = case.make().to(training.process.device)(inputs)
    return {"first": first.tolist(), "second": second.tolist(), "plain": plain.tolist(), "dtype": str(first.dtype)}


def call_as_users_do(case: Case) -> Answer:
    """Outputs for an input passed by name, those of the plain model, and modes after `eval` and `train`."""
    training = case.open()
    bare: nn.Module = training.strategy.unwrap(training.wrapped)
    inputs = next(iter(batches(case)))[0].to(training.process.device)
    with torch.no_grad():
        named = training.model(inputs=inputs)
        plain = case.make().to(training.process.device)(inputs)
    modes = []
    for switch in (training.model.eval, training.model.train):
        switch()
        modes.append({module.training for module in bare.modules()})
    return {"named": named.tolist(), "plain": plain.tolist(), "modes": modes}


def prepare_without_optimizer(case: Case) -> Answer:
    """Outputs of a model that is only evaluated, and of the plain model."""
    training = case.open()
    prepared = training.prepare_to_evaluate(case.make(2)).eval()
    inputs = next(iter(batches(case)))[0].to(training.process.device)
    with torch.no_grad():
        plain = case.make(2).eval().to(training.process.device)(inputs)
        return {"outputs": prepared(inputs).tolist(), "plain": plain.tolist()}


def build_inside(case: Case) -> Answer:
    """Weights of a prepared model that was built inside `init_module`, and the expected ones of the first process."""
    training = case.open()

    def build() -> nn.Module:
        if ":" in case.model:
            return case.make()
        return nn.Sequential(nn.Linear(6, 10), nn.Tanh(), nn.Linear(10, 3))

    torch.manual_seed(3)
    expected = as_lists(build().state_dict())
    torch.manual_seed(3 + training.process.rank)
    with training.strategy.init_module() as part:
        model = build()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    (prepared,) = training.prepare(Bundle.of([model, optimizer])).models
    weights = as_lists(training.strategy.state_dict(strategy_model(prepared)))
    # Other devices generate other random numbers.
    compared = training.process.device.type == "cpu" and writes(training)
    stages = (part.stages, part.count) if isinstance(part, ModelPart) else ((), 0)
    return {"weights": weights if compared else expected, "expected": expected, "stages": stages}


def look_at_start(case: Case) -> Answer:
    """Weights, buffers and random numbers after `prepare`, when each process has a different seed."""
    training = case.but(own_start=True).open()
    bare: nn.Module = training.strategy.unwrap(training.wrapped)
    return {
        "weights": training.weights(),
        "buffers": {name: buffer.tolist() for name, buffer in bare.named_buffers()},
        "first": as_lists(case.make(0).state_dict()),
        "shard": shard_of(training)[1],
        "draws": torch.rand(4).tolist(),
    }


def read_loader(case: Case) -> Answer:
    """The batches of two epochs of a prepared loader, its length, and the expected batches."""
    training, data = case.open(), list(batches(case))
    loader: Any = training.loader(data)
    epochs = [[[part.tolist() for part in batch] for batch in loader] for _ in range(2)]
    mine = [[part.tolist() for part in training.slice(batch)] for batch in data]
    return {"epochs": epochs, "length": len(loader), "expected": mine}
