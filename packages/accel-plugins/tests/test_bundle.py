from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from accel_plugins import Bundle
from accel_state.labels import PREPARED


class Foreign:
    """A scheduler that is not torch's."""

    def step(self, epoch: int = 0) -> None: ...

    def load_state_dict(self, state: dict[str, int]) -> None: ...


def parts() -> tuple[nn.Module, torch.optim.Optimizer, object, DataLoader[int]]:
    model = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    return model, optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 1), DataLoader([1, 2, 3])


def test_objects_are_sorted_by_kind_and_come_back_in_the_given_order() -> None:
    model, optimizer, scheduler, loader = parts()
    given = (loader, optimizer, None, scheduler, model)
    bundle = Bundle.of(given)

    assert bundle.models == [model]
    assert bundle.optimizers == [optimizer]
    assert bundle.schedulers == [scheduler]
    assert bundle.loaders == [loader]
    assert all(after is before for after, before in zip(bundle.in_given_order(), given, strict=True))


def test_what_a_strategy_makes_of_an_object_takes_its_place() -> None:
    model, optimizer, _, _ = parts()
    bundle = Bundle.of([optimizer, model])
    wrapped = nn.Sequential(model)
    bundle.models = [wrapped]
    bundle.models[0] = wrapped

    assert bundle.in_given_order() == (optimizer, wrapped)


def test_an_object_prepared_before_is_set_aside() -> None:
    model, _, _, _ = parts()
    other = nn.Linear(1, 1)
    setattr(model, PREPARED, True)
    bundle = Bundle.of([model, other])

    assert bundle.models == [other]
    assert bundle.in_given_order() == (model, other)


def test_a_scheduler_that_is_not_torchs_own_counts_as_one() -> None:
    foreign = Foreign()

    assert Bundle.of([foreign]).schedulers == [foreign]


@pytest.mark.parametrize("given", ["text", 3, torch.ones(1), nn.Linear, [1]])
def test_anything_else_comes_back_as_it_is_with_a_warning(given: object, caplog: pytest.LogCaptureFixture) -> None:
    model = nn.Linear(1, 1)
    bundle = Bundle.of([model, given, None])

    first, second, last = bundle.in_given_order()
    assert (first, last) == (model, None)
    assert second is given
    (record,) = caplog.records
    assert "argument 2 unchanged" in record.getMessage()
    assert type(given).__name__ in record.getMessage()


def test_parameters_are_named_as_in_the_users_model() -> None:
    model, _, _, _ = parts()
    compiled = torch.compile(model, backend="eager")

    assert set(Bundle.of([compiled]).parameter_names().values()) == set(Bundle.of([model]).parameter_names().values())


def test_optimizers_follow_replaced_parameters_with_their_state() -> None:
    model, optimizer, _, _ = parts()
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    bundle = Bundle.of([model, optimizer])
    before = bundle.parameter_names()
    old = next(iter(before))
    momentum = optimizer.state[old]["momentum_buffer"]
    for module in model:
        module.weight = nn.Parameter(module.weight.detach().clone())

    bundle.rebind_by_name(before)

    held = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    assert {id(parameter) for parameter in held} == {id(parameter) for parameter in model.parameters()}
    assert optimizer.state[model[0].weight]["momentum_buffer"] is momentum
    assert old not in optimizer.state
