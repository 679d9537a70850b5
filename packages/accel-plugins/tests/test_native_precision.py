from __future__ import annotations

import copy
import pickle
import threading
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from accel_plugins.precision import AutocastKwargs, GradScalerKwargs, Precision, choose
from accel_plugins.precision.native import Float16, restore_forward
from accel_state.devices.select import family_of
from accel_state.errors import NotOffered, NotReady, SettingError

CPU = family_of("cpu")


class Inner(nn.Linear):
    """Reports what it computed in."""

    def forward(self, given: Tensor) -> dict[str, Any]:
        output = super().forward(given)
        return {"output": output, "dtype": output.dtype, "nested": [output, (output.long(), None)]}


def test_full_precision_changes_nothing() -> None:
    precision = choose("no", CPU)
    model = Inner(2, 2)

    assert precision.prepare(model) is model
    assert model(torch.ones(1, 2))["dtype"] is torch.float32
    assert precision.scaler is None
    with precision.autocast():
        assert not torch.is_autocast_enabled("cpu")


@pytest.mark.parametrize(("name", "dtype"), [("bf16", torch.bfloat16), ("fp16", torch.float16)])
def test_forward_autocasts_and_outputs_come_back_in_fp32(name: str, dtype: torch.dtype) -> None:
    model = choose(name, CPU).prepare(Inner(2, 2))
    made = model(torch.ones(1, 2))

    assert made["dtype"] is dtype
    assert made["output"].dtype is torch.float32
    assert made["nested"][0].dtype is torch.float32
    assert made["nested"][1][0].dtype is torch.int64
    assert not torch.is_autocast_enabled("cpu")


def test_disabling_autocast_computes_in_the_dtype_of_the_weights() -> None:
    model = choose("bf16", CPU, [AutocastKwargs(enabled=False)]).prepare(Inner(2, 2))

    assert model(torch.ones(1, 2))["dtype"] is torch.float32


def test_one_region_can_be_entered_inside_itself_and_overridden_between() -> None:
    precision = choose("bf16", CPU)
    seen = []
    region = precision.autocast()
    with region:
        with torch.autocast("cpu", enabled=False), region:
            seen.append(torch.is_autocast_enabled("cpu"))
        seen.append(torch.is_autocast_enabled("cpu"))
        with precision.autocast(AutocastKwargs(enabled=False)):
            seen.append(torch.is_autocast_enabled("cpu"))
    seen.append(torch.is_autocast_enabled("cpu"))

    assert seen == [True, True, False, False]


def test_prepared_models_inside_prepared_models() -> None:
    precision = choose("bf16", CPU)
    inner = precision.prepare(nn.Linear(2, 2))
    outer = precision.prepare(nn.Sequential(inner, nn.Linear(2, 2)))
    out = outer(torch.ones(1, 2))
    out.sum().backward()

    assert out.dtype is torch.float32
    assert inner.weight.grad is not None
    assert not torch.is_autocast_enabled("cpu")


def test_a_forward_that_raises_leaves_autocast() -> None:
    model = choose("bf16", CPU).prepare(nn.Linear(2, 2))
    with pytest.raises(RuntimeError, match="mat1 and mat2"):
        model(torch.ones(1, 3))

    assert not torch.is_autocast_enabled("cpu")
    assert model(torch.ones(1, 2)).dtype is torch.float32


def test_threads_do_not_share_what_they_entered() -> None:
    model = choose("bf16", CPU).prepare(nn.Linear(2, 2))
    inside, leave, failures = threading.Barrier(2), threading.Barrier(2), []

    class Meets(nn.Module):
        def forward(self, given: Tensor) -> Tensor:
            inside.wait(250)
            leave.wait(250)
            return model(given)

    both = choose("bf16", CPU).prepare(Meets())

    def call() -> None:
        try:
            assert both(torch.ones(1, 2)).dtype is torch.float32
            assert not torch.is_autocast_enabled("cpu")
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=call) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(250)

    assert not failures


def test_a_copy_autocasts_with_its_own_weights_and_a_pickle_has_its_classs_forward() -> None:
    model = choose("bf16", CPU).prepare(nn.Linear(2, 2))
    again = copy.deepcopy(model)
    with torch.no_grad():
        again.weight.zero_()
        again.bias.zero_()
    read = pickle.loads(pickle.dumps(model))

    assert again(torch.ones(1, 2)).abs().sum() == 0
    assert model(torch.ones(1, 2)).abs().sum() > 0
    assert torch.equal(read.weight, model.weight)
    assert read(torch.ones(1, 2)).dtype is torch.float32


def test_restoring_gives_back_the_very_forward_the_model_had() -> None:
    plain, hooked = nn.Linear(2, 2), nn.Linear(2, 2)
    own = lambda given: given  # noqa: E731 - an instance attribute, as hooks set it
    hooked.forward = own  # type: ignore[method-assign, assignment]
    precision = choose("bf16", CPU)
    for model in (plain, hooked):
        restore_forward(precision.prepare(model))

    assert "forward" not in vars(plain)
    assert vars(hooked)["forward"] is own
    assert restore_forward(plain) is plain


def test_an_autocasting_forward_compiles_as_one_graph() -> None:
    # After several others of a process torch compiles no more.
    torch.compiler.reset()
    model = choose("bf16", CPU).prepare(nn.Linear(2, 2))
    compiled = torch.compile(model, backend="eager", fullgraph=True)

    assert torch.equal(compiled(torch.ones(1, 2)), model(torch.ones(1, 2)))


# ------------------------------------------------------------------------------- fp16


def overflow(model: nn.Linear, precision: Precision) -> None:
    precision.backward_scale(model(torch.ones(1, 2)).sum()).backward()
    assert model.weight.grad is not None
    model.weight.grad[0, 0] = float("inf")


def scaled_pair() -> tuple[nn.Linear, torch.optim.Optimizer, Precision]:
    precision = choose("fp16", CPU, [GradScalerKwargs(init_scale=1024.0, growth_interval=2)])
    model = nn.Linear(2, 2)
    return model, torch.optim.SGD(model.parameters(), lr=0.1), precision


def test_a_step_in_fp16_equals_one_in_fp32_on_the_same_gradient() -> None:
    model, optimizer, precision = scaled_pair()
    plain = copy.deepcopy(model)
    plain(torch.ones(1, 2)).sum().backward()
    torch.optim.SGD(plain.parameters(), lr=0.1).step()
    precision.backward_scale(model(torch.ones(1, 2)).sum()).backward()

    assert model.weight.grad is not None
    assert model.weight.grad[0, 0] == 1024
    assert precision.step(optimizer)
    assert torch.equal(model.weight, plain.weight)


def test_an_overflow_skips_the_step_and_lowers_the_scale() -> None:
    model, optimizer, precision = scaled_pair()
    before = model.weight.detach().clone()
    overflow(model, precision)

    assert not precision.step(optimizer)
    assert torch.equal(model.weight, before)
    assert precision.scaler is not None
    assert precision.scaler.get_scale() == 512


def test_two_optimizers_are_unscaled_by_the_number_the_loss_was_multiplied_by() -> None:
    first, second = nn.Linear(2, 2), nn.Linear(2, 2)
    precision = choose("fp16", CPU, [GradScalerKwargs(init_scale=8.0, growth_interval=1)])
    optimizers = [torch.optim.SGD(model.parameters(), lr=1.0) for model in (first, second)]
    before = second.bias.detach().clone()
    precision.backward_scale(first(torch.ones(1, 2)).sum() + second(torch.ones(1, 2)).sum()).backward()
    for optimizer in optimizers:
        assert precision.step(optimizer)

    assert torch.equal(second.bias, before - 1)
    assert precision.scaler is not None
    assert precision.scaler.get_scale() == 16


def test_unscaling_twice_for_one_step_changes_nothing() -> None:
    model, optimizer, precision = scaled_pair()
    precision.backward_scale(model(torch.ones(1, 2)).sum()).backward()
    precision.unscale(optimizer)
    precision.unscale(optimizer)

    assert model.weight.grad is not None
    assert model.weight.grad[0, 0] == 1
    assert precision.step(optimizer)


def test_unscaling_in_the_middle_of_an_accumulation_is_refused() -> None:
    model, optimizer, precision = scaled_pair()
    precision.backward_scale(model(torch.ones(1, 2)).sum()).backward()
    precision.unscale(optimizer)
    precision.backward_scale(model(torch.ones(1, 2)).sum()).backward()

    with pytest.raises(NotReady, match="sync_gradients"):
        precision.unscale(optimizer)


def test_an_optimizer_without_gradients_is_left_alone() -> None:
    _, optimizer, precision = scaled_pair()
    precision.unscale(optimizer)

    assert precision.step(optimizer)


def test_a_scaler_that_is_switched_off_steps_plainly() -> None:
    precision = choose("fp16", CPU, [GradScalerKwargs(enabled=False)])
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    before = model.bias.detach().clone()
    precision.backward_scale(model(torch.ones(1, 2)).sum()).backward()

    assert precision.step(optimizer)
    assert torch.equal(model.bias, before - 1)


def test_the_scale_survives_a_checkpoint() -> None:
    model, optimizer, precision = scaled_pair()
    overflow(model, precision)
    precision.step(optimizer)
    state = precision.state_dict()
    other = choose("fp16", CPU)
    other.load_state_dict(state)

    assert state["scale"] == 512
    assert other.state_dict() == state
    assert choose("bf16", CPU).state_dict() == {}


def test_a_closure_cannot_be_stepped_in_fp16() -> None:
    _, optimizer, precision = scaled_pair()

    with pytest.raises(NotOffered, match="closure"):
        precision.step(optimizer, lambda: 0.0)


# -------------------------------------------------------------------------- bad input


def test_a_precision_nobody_offers_is_refused() -> None:
    with pytest.raises(NotOffered, match="fp4"):
        choose("fp4", CPU)


def test_a_family_that_cannot_autocast_is_named() -> None:
    class Old(type(CPU)):  # type: ignore[misc]
        name = "old"

        def supports(self, dtype: torch.dtype) -> bool:
            return False

    with pytest.raises(NotOffered, match="'old'"):
        choose("bf16", Old())


@pytest.mark.parametrize(
    ("field", "value"), [("init_scale", 0), ("growth_factor", 1), ("backoff_factor", 1.5), ("growth_interval", 0)]
)
def test_scaling_that_would_not_move_is_refused(field: str, value: float) -> None:
    with pytest.raises(SettingError, match=field):
        GradScalerKwargs(**{field: value})


def test_scaler_settings_are_those_of_torch() -> None:
    scaler = Float16(CPU).scaler

    assert scaler.get_scale() == GradScalerKwargs().init_scale
    assert scaler.get_growth_interval() == GradScalerKwargs().growth_interval
    assert GradScalerKwargs(init_scale=2.0).to_kwargs() == {"init_scale": 2.0}
