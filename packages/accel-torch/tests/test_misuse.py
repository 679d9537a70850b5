"""Mistakes of a training loop that train something else are warned about once, with what to change."""

from __future__ import annotations

import copy
import gc
import pickle
import sys
import warnings
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.optimizer import (
    _global_optimizer_post_hooks,
    _global_optimizer_pre_hooks,
    register_optimizer_step_post_hook,
)
from torch.utils.data import DataLoader, TensorDataset

from accel_state import PartialState
from accel_state.errors import Conflict
from accel_testing.processes import Processes
from accel_torch import Accelerator, LocalSGD, MisuseWarning, ParallelismConfig

pytestmark = pytest.mark.usefixtures("fresh_state")


def parts() -> tuple[Any, Any, Any]:
    torch.manual_seed(0)
    model = nn.Linear(2, 1)
    data = TensorDataset(torch.arange(64.0).reshape(-1, 2) / 64)
    return model, torch.optim.SGD(model.parameters(), lr=0.1), DataLoader(data, batch_size=2)


@pytest.fixture
def no_search_of_the_heap(monkeypatch: pytest.MonkeyPatch) -> None:
    """A search of the heap is an error: it takes seconds with millions of objects."""

    def refuse(*_: Any) -> Any:
        raise AssertionError("The guard searches the heap.")

    for name in ("get_objects", "get_referrers", "get_referents"):
        monkeypatch.setattr(gc, name, refuse)


def warned(loop: Callable[..., None], **options: Any) -> list[str]:
    """The misuse that a training loop is warned about, by its first sentence; errors by their type."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            loop(Accelerator(cpu=True, **options))
        except Conflict as error:
            return [f"Conflict: {error.obstacle}"]
    found = [str(one.message) for one in caught if issubclass(one.category, MisuseWarning)]
    assert all(one.filename == __file__ for one in caught if issubclass(one.category, MisuseWarning))
    return found


def right(accelerator: Any) -> None:
    model, optimizer, loader = parts()
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
    for (inputs,) in loader:
        with accelerator.accumulate(model):
            accelerator.backward(model(inputs).square().mean())
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
    model.eval()
    with torch.no_grad():
        model(inputs)


def right_with_scheduler_of_optimizer_steps(accelerator: Any) -> None:
    model, optimizer, loader = parts()
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for (inputs,) in loader:
        with accelerator.accumulate(model):
            accelerator.backward(model(inputs).square().mean())
            optimizer.step()
            if accelerator.sync_gradients:
                scheduler.step()
            optimizer.zero_grad()


def right_with_two_models(accelerator: Any) -> None:
    """A generator and a discriminator, whose losses lead through each other, and one that is averaged by hand."""
    (made, first, loader), (judge, second, _) = parts(), parts()
    judge = nn.Linear(1, 1)
    second = torch.optim.SGD(judge.parameters(), lr=0.1)
    made, judge, first, second, loader = accelerator.prepare(made, judge, first, second, loader)
    average = copy.deepcopy(accelerator.unwrap_model(made))
    for (inputs,) in loader:
        accelerator.backward(judge(made(inputs).detach()).square().mean())
        second.step()
        second.zero_grad()
        accelerator.backward(judge(made(inputs)).mean())
        first.step()
        first.zero_grad()
        second.zero_grad()
        with torch.no_grad():
            for kept, new in zip(average.parameters(), accelerator.unwrap_model(made).parameters(), strict=True):
                kept.lerp_(new, 0.1)


def right_with_two_optimizers(accelerator: Any) -> None:
    """One loss, two optimizers."""
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
    first = torch.optim.SGD(model[0].parameters(), lr=0.1)
    second = torch.optim.SGD(model[1].parameters(), lr=0.1)
    model, first, second, loader = accelerator.prepare(model, first, second, parts()[2])
    for (inputs,) in loader:
        with accelerator.accumulate(model):
            accelerator.backward(model(inputs).square().mean())
            for optimizer in (first, second):
                optimizer.step()
                optimizer.zero_grad()


@pytest.mark.parametrize("steps", [1, 2])
@pytest.mark.parametrize(
    "loop", [right, right_with_scheduler_of_optimizer_steps, right_with_two_models, right_with_two_optimizers]
)
def test_no_warning_for_a_right_loop(no_search_of_the_heap: None, loop: Callable[..., None], steps: int) -> None:
    assert warned(loop, gradient_accumulation_steps=steps) == []


class Wrapping(torch.optim.Optimizer):
    """Steps by another optimizer, as engines and optimizers that average weights do."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        super().__init__(optimizer.param_groups, {})
        self.optimizer, self.param_groups = optimizer, optimizer.param_groups

    def step(self, closure: Any = None) -> Any:
        return self.optimizer.step(closure)


def right_with_an_optimizer_that_wraps_another(accelerator: Any) -> None:
    model, optimizer, loader = parts()
    model, optimizer, loader = accelerator.prepare(model, Wrapping(optimizer), loader)
    for (inputs,) in loader:
        with accelerator.accumulate(model):
            accelerator.backward(model(inputs).square().mean())
            optimizer.step()
            optimizer.zero_grad()


@pytest.mark.parametrize("precision", ["no", "fp16"])
def test_no_warning_for_an_optimizer_that_wraps_another(precision: str) -> None:
    assert warned(right_with_an_optimizer_that_wraps_another, mixed_precision=precision) == []


def optimizer_outside_of_prepare(accelerator: Any) -> None:
    model, optimizer, loader = parts()
    model, loader = accelerator.prepare(model, loader)
    for (inputs,) in loader:
        with accelerator.accumulate(model):
            accelerator.backward(model(inputs).square().mean())
            optimizer.step()
            optimizer.zero_grad()


def result_of_prepare_thrown_away(accelerator: Any) -> None:
    model, optimizer, loader = parts()
    accelerator.prepare(model, optimizer, loader)
    for (inputs,) in loader:
        with accelerator.accumulate(model):
            accelerator.backward(model(inputs).square().mean())
            optimizer.step()
            optimizer.zero_grad()


def plain_backward(accelerator: Any) -> None:
    model, optimizer, loader = accelerator.prepare(*parts())
    for (inputs,) in loader:
        with accelerator.accumulate(model):
            model(inputs).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()


def scheduler_outside_of_prepare(accelerator: Any) -> None:
    model, optimizer, loader = parts()
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=100)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for (inputs,) in loader:
        with accelerator.accumulate(model):
            accelerator.backward(model(inputs).square().mean())
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()


def scheduler_of_a_wrapped_optimizer_outside_of_prepare(accelerator: Any) -> None:
    model, optimizer, loader = parts()
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=100)
    model, optimizer, loader = accelerator.prepare(model, Wrapping(optimizer), loader)
    for (inputs,) in loader:
        with accelerator.accumulate(model):
            accelerator.backward(model(inputs).square().mean())
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()


def optimizer_instead_of_the_model(accelerator: Any) -> None:
    model, optimizer, loader = accelerator.prepare(*parts())
    for (inputs,) in loader:
        with accelerator.accumulate(optimizer):
            accelerator.backward(model(inputs).square().mean())
            optimizer.step()
            optimizer.zero_grad()


@pytest.mark.parametrize(
    ("loop", "sentence"),
    [
        (
            optimizer_instead_of_the_model,
            "accelerator.accumulate() was called with AcceleratedOptimizer, which is not a model.",
        ),
        (
            optimizer_outside_of_prepare,
            "An optimizer that was not prepared steps within an accumulation",
        ),
        (
            result_of_prepare_thrown_away,
            "The optimizer that was passed to prepare() steps within an accumulation",
        ),
        (plain_backward, "The optimizer steps with gradients that accelerator.backward() did not compute."),
        (scheduler_outside_of_prepare, "A learning-rate scheduler steps within an accumulation window."),
        (
            scheduler_of_a_wrapped_optimizer_outside_of_prepare,
            "A learning-rate scheduler steps within an accumulation window.",
        ),
    ],
)
def test_misuse_of_accumulation_is_warned_about_once(loop: Callable[..., None], sentence: str) -> None:
    (message,) = warned(loop, gradient_accumulation_steps=2)
    assert message.startswith(sentence)
    assert "prepare()" in message or "accelerator.backward" in message


def step_at_each_micro_batch(accelerator: Any, model: Any, optimizer: Any, loader: Any, scheduler: Any) -> None:
    for (inputs,) in loader:
        with accelerator.accumulate(model):
            accelerator.backward(model(inputs).square().mean())
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()


class Trainer:
    """Holds the scheduler as trainers do, beside many other objects."""

    def __init__(self, accelerator: Any, objects: int) -> None:
        model, optimizer, loader = parts()
        self.accelerator = accelerator
        self.samples = [{"sample": [index]} for index in range(objects)]
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=100)
        self.schedules = {"main": [scheduler]}
        self.model, self.optimizer, self.loader = accelerator.prepare(model, optimizer, loader)

    def train(self) -> None:
        for (inputs,) in self.loader:
            with self.accelerator.accumulate(self.model):
                self.accelerator.backward(self.model(inputs).square().mean())
                self.optimizer.step()
                self.schedules["main"][0].step()
                self.optimizer.zero_grad()


def scheduler_of_a_trainer(accelerator: Any) -> None:
    Trainer(accelerator, 3).train()


def scheduler_of_a_calling_function(accelerator: Any) -> None:
    model, optimizer, loader = parts()
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=100)
    prepared = accelerator.prepare(model, optimizer, loader)
    stepping = [scheduler.step]

    def train_with(model: Any, optimizer: Any, loader: Any) -> None:
        for (inputs,) in loader:
            with accelerator.accumulate(model):
                accelerator.backward(model(inputs).square().mean())
                optimizer.step()
                stepping[0]()
                optimizer.zero_grad()

    train_with(*prepared)


def second_scheduler_outside_of_prepare(accelerator: Any) -> None:
    model, optimizer, loader = parts()
    first = torch.optim.lr_scheduler.StepLR(optimizer, step_size=100)
    second = torch.optim.lr_scheduler.StepLR(optimizer, step_size=100)
    model, optimizer, loader, first = accelerator.prepare(model, optimizer, loader, first)
    step_at_each_micro_batch(accelerator, model, optimizer, loader, second)
    first.step()


def scheduler_of_the_prepared_optimizer(accelerator: Any) -> None:
    model, optimizer, loader = accelerator.prepare(*parts())
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=100)
    step_at_each_micro_batch(accelerator, model, optimizer, loader, scheduler)


@pytest.mark.parametrize(
    "loop",
    [
        scheduler_of_a_trainer,
        scheduler_of_a_calling_function,
        second_scheduler_outside_of_prepare,
        scheduler_of_the_prepared_optimizer,
    ],
)
def test_a_scheduler_is_found_wherever_the_script_has_it(
    no_search_of_the_heap: None, loop: Callable[..., None]
) -> None:
    (message,) = warned(loop, gradient_accumulation_steps=2)
    assert message.startswith("A learning-rate scheduler steps within an accumulation window.")


def calls_of_the_first_micro_batch(objects: int) -> int:
    trainer = Trainer(Accelerator(cpu=True, gradient_accumulation_steps=2), objects)
    calls = 0

    def count(frame: Any, event: str, argument: Any) -> None:
        nonlocal calls
        calls += 1

    block = trainer.accelerator.accumulate(trainer.model)
    before = sys.getprofile()
    sys.setprofile(count)
    block.__enter__()
    sys.setprofile(before)
    block.__exit__(None, None, None)
    return calls


def test_the_first_micro_batch_looks_at_few_of_many_objects() -> None:
    assert calls_of_the_first_micro_batch(200_000) < 100_000


@pytest.mark.parametrize("loop", [optimizer_outside_of_prepare, plain_backward, scheduler_outside_of_prepare])
def test_no_warning_where_it_makes_no_difference(loop: Callable[..., None]) -> None:
    assert warned(loop) == []


def test_plain_backward_in_fp16_is_refused_with_the_remedy() -> None:
    (message,) = warned(plain_backward, mixed_precision="fp16")
    assert message.startswith("Conflict: Its gradients come from loss.backward()")


def test_a_direct_step_with_scaled_gradients_is_warned_about() -> None:
    (message,) = warned(result_of_prepare_thrown_away, mixed_precision="fp16")
    assert message.startswith(
        "The optimizer that was passed to prepare() steps with gradients that are scaled for fp16."
    )


def step_hooks() -> set[Any]:
    return {*_global_optimizer_pre_hooks.values(), *_global_optimizer_post_hooks.values()}


def test_the_guard_leaves_nothing_behind_after_two_steps() -> None:
    accelerator = Accelerator(cpu=True)
    before = step_hooks()
    model, optimizer, loader = accelerator.prepare(*parts())
    mine = step_hooks() - before
    assert len(mine) == 2
    batches = iter(loader)
    for _ in range(2):
        accelerator.backward(model(next(batches)[0]).square().mean())
        optimizer.step()
        optimizer.zero_grad()
    assert not mine & step_hooks()
    assert not model._forward_pre_hooks


def test_the_hooks_of_a_dropped_accelerator_go_with_the_next_one() -> None:
    before = step_hooks()
    accelerator = Accelerator(cpu=True)
    model, _, _ = accelerator.prepare(*parts())
    mine = step_hooks() - before
    freed = weakref.ref(model)
    del accelerator, model, _
    gc.collect()
    assert freed() is None
    Accelerator(cpu=True).prepare(*parts())
    assert len(mine) == 2
    assert not mine & step_hooks()


def test_an_accelerator_that_is_dropped_during_a_step_of_another_does_not_disturb_it() -> None:
    dropped = [Accelerator(cpu=True)]
    dropped[0].prepare(*parts())
    accelerator = Accelerator(cpu=True)
    model, optimizer, loader = accelerator.prepare(*parts())

    def drop(*_: Any) -> None:
        dropped.clear()
        gc.collect()

    hooks = [register_optimizer_step_post_hook(drop), register_optimizer_step_post_hook(lambda *_: None)]
    for (batch,), _ in zip(loader, range(3), strict=False):
        accelerator.backward(model(batch).square().mean())
        optimizer.step()
        optimizer.zero_grad()
    for hook in hooks:
        hook.remove()
    assert not dropped


def test_guards_of_two_accelerators_end_in_one_step_each() -> None:
    runs = []
    before = step_hooks()
    for _ in range(2):
        accelerator = Accelerator(cpu=True)
        runs.append((accelerator, *accelerator.prepare(*parts())))
    mine = step_hooks() - before
    assert mine
    for _ in range(3):
        for accelerator, model, optimizer, loader in runs:
            accelerator.backward(model(next(iter(loader))[0]).square().mean())
            optimizer.step()
            optimizer.zero_grad()
    assert not mine & step_hooks()
    assert not any(model._forward_pre_hooks for _, model, _, _ in runs)


# ---------------------------------------------------------------------------------------------- two processes


def unprepared_model_called(accelerator: Any) -> None:
    model, optimizer, loader = parts()
    _, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for (inputs,) in loader:
        accelerator.backward(model(inputs).square().mean())
        optimizer.step()
        optimizer.zero_grad()


def on_two(loop: Callable[..., None], options: dict[str, Any]) -> list[str]:
    assert PartialState(cpu=True).num_processes == 2
    return warned(loop, check_replicas_every=0, **options)


@pytest.mark.parametrize(
    "loop", [right, right_with_scheduler_of_optimizer_steps, right_with_two_models, right_with_two_optimizers]
)
def test_no_warning_for_a_right_loop_on_two_processes(two: Processes, loop: Callable[..., None]) -> None:
    assert two.run(on_two, loop, {"gradient_accumulation_steps": 2}) == [[], []]


def test_a_forward_through_the_unprepared_model_is_warned_about(two: Processes) -> None:
    for found in two.run(on_two, unprepared_model_called, {}):
        assert len(found) == 1
        assert found[0].startswith("An optimizer steps with gradients of Linear, but the model that prepare() returned")
        assert "model = accelerator.prepare(model)" in found[0]


def sharded_with_optimizer_outside(accelerator: Any) -> None:
    model, optimizer, loader = parts()
    model, loader = accelerator.prepare(model, loader)
    for (inputs,) in loader:
        accelerator.backward(model(inputs).square().mean())
        optimizer.step()


def test_an_optimizer_with_replaced_parameters_is_refused(two: Processes) -> None:
    for found in two.run(on_two, sharded_with_optimizer_outside, {"backend": "fsdp2"}):
        assert found[0].startswith("Conflict: prepare() replaced the parameters of the model")


def copied_and_pickled() -> list[int]:
    """Forward hooks of copies of a prepared model do nothing and can be pickled."""
    accelerator = Accelerator(cpu=True)
    model, _, _ = accelerator.prepare(*parts())
    inner = accelerator.unwrap_model(model)
    pickle.dumps([copy.deepcopy(inner), list(model._forward_pre_hooks.values())])
    hooks = pickle.loads(pickle.dumps(model._forward_pre_hooks)).values()
    for hook in hooks:
        hook(inner, (), {})
    return [len(hooks)]


def test_hooks_of_the_first_steps_can_be_copied_and_pickled(two: Processes) -> None:
    assert two.run(copied_and_pickled) == [[1], [1]]


def local_sgd(accelerator: Any) -> None:
    model, optimizer, loader = accelerator.prepare(*parts())
    with LocalSGD(accelerator=accelerator, model=model, local_sgd_steps=4) as averaging:
        for (inputs,) in loader:
            accelerator.backward(model(inputs).square().mean())
            optimizer.step()
            optimizer.zero_grad()
            averaging.step()


def test_local_sgd_is_not_warned_about(two: Processes) -> None:
    assert two.run(on_two, local_sgd, {}) == [[], []]


# ------------------------------------------------------------------- what is trained, but not synchronised


def pair() -> tuple[nn.Module, torch.optim.Optimizer]:
    model = nn.Linear(2, 1)
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


def train(accelerator: Any, loader: Any, loss_of: Callable[[Any], Any], *optimizers: Any) -> None:
    for (inputs,) in loader:
        accelerator.backward(loss_of(inputs))
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()


def model_not_prepared(accelerator: Any) -> None:
    model, optimizer, loader = parts()
    optimizer, loader = accelerator.prepare(optimizer, loader)
    train(accelerator, loader, lambda inputs: model(inputs).square().mean(), optimizer)


def nothing_prepared(accelerator: Any) -> None:
    model, optimizer, loader = parts()
    train(accelerator, loader, lambda inputs: model(inputs).square().mean(), optimizer)


def only_a_loader_prepared(accelerator: Any) -> None:
    model, optimizer, loader = parts()
    loader = accelerator.prepare(loader)
    train(accelerator, loader, lambda inputs: model(inputs).square().mean(), optimizer)


def part_of_a_model_prepared(accelerator: Any) -> None:
    body, head = nn.Linear(2, 3), nn.Linear(3, 1)
    model = nn.Sequential(body, head)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    body, optimizer, loader = accelerator.prepare(body, optimizer, parts()[2])
    train(accelerator, loader, lambda inputs: head(body(inputs)).square().mean(), optimizer)


def one_of_two_models_prepared(accelerator: Any) -> None:
    (first, one), (second, other) = pair(), pair()
    first, one, other, loader = accelerator.prepare(first, one, other, parts()[2])
    train(accelerator, loader, lambda inputs: (first(inputs) + second(inputs)).square().mean(), one, other)


def one_of_two_models_prepared_and_its_optimizer_only(accelerator: Any) -> None:
    (first, one), (second, other) = pair(), pair()
    first, one, loader = accelerator.prepare(first, one, parts()[2])
    train(accelerator, loader, lambda inputs: (first(inputs) + second(inputs)).square().mean(), one, other)


def optimizer_of_another_model(accelerator: Any) -> None:
    (first, _), (second, other) = pair(), pair()
    first, other, loader = accelerator.prepare(first, other, parts()[2])
    train(accelerator, loader, lambda inputs: (first(inputs) + second(inputs)).square().mean(), other)


def model_prepared_for_evaluation(accelerator: Any) -> None:
    model, optimizer, loader = parts()
    model = accelerator.prepare_model(model, evaluation_mode=True)
    optimizer, loader = accelerator.prepare(optimizer, loader)
    train(accelerator, loader, lambda inputs: model(inputs).square().mean(), optimizer)


def parameters_added_to_the_optimizer(accelerator: Any) -> None:
    model, optimizer, loader = accelerator.prepare(*parts())
    head = nn.Linear(1, 1)
    optimizer.add_param_group({"params": head.parameters()})
    train(accelerator, loader, lambda inputs: head(model(inputs)).square().mean(), optimizer)


def in_windows(accelerator: Any) -> None:
    model, optimizer, loader = parts()
    optimizer, loader = accelerator.prepare(optimizer, loader)
    for (inputs,) in loader:
        with accelerator.accumulate(model):
            accelerator.backward(model(inputs).square().mean())
            optimizer.step()
            optimizer.zero_grad()


UNSYNCHRONISED: dict[Callable[..., None], str] = {
    model_not_prepared: "2 of 2",
    nothing_prepared: "2 of 2",
    only_a_loader_prepared: "2 of 2",
    part_of_a_model_prepared: "2 of 4",
    one_of_two_models_prepared: "2 of 2",
    one_of_two_models_prepared_and_its_optimizer_only: "2 of 2",
    optimizer_of_another_model: "2 of 2",
    model_prepared_for_evaluation: "2 of 2",
    parameters_added_to_the_optimizer: "2 of 4",
    in_windows: "2 of 2",
}


def on_two_with(loops: list[Callable[..., None]], options: dict[str, Any]) -> list[list[str]]:
    assert PartialState(cpu=True).num_processes == 2
    return [warned(loop, **options) for loop in loops]


@pytest.mark.parametrize("options", [{}, {"mixed_precision": "fp16"}, {"backend": "fsdp2"}], ids=str)
def test_a_model_that_is_trained_but_not_prepared_is_warned_about(two: Processes, options: dict[str, Any]) -> None:
    # FSDP refuses an optimizer whose model it does not know.
    loops = [nothing_prepared, only_a_loader_prepared] if "backend" in options else list(UNSYNCHRONISED)
    for found in two.run(on_two_with, loops, options):
        for loop, messages in zip(loops, found, strict=True):
            assert len(messages) == 1, loop
            assert messages[0].startswith("An optimizer steps with gradients of a model that was not prepared")
            assert UNSYNCHRONISED[loop] in messages[0], loop
            assert "Pass the model to prepare()" in messages[0]


@pytest.mark.parametrize("loop", UNSYNCHRONISED)
def test_one_process_may_train_a_model_that_is_not_prepared(loop: Callable[..., None]) -> None:
    assert warned(loop) == []


def frozen_part(accelerator: Any) -> None:
    """An unprepared model with parameters that need no gradients."""
    model, optimizer, loader = parts()
    teacher = nn.Linear(2, 1).requires_grad_(requires_grad=False)
    optimizer.add_param_group({"params": teacher.parameters()})
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    train(accelerator, loader, lambda inputs: (model(inputs) - teacher(inputs)).square().mean(), optimizer)


def model_of_another_accelerator(accelerator: Any) -> None:
    (first, one), (second, other) = pair(), pair()
    further = Accelerator()
    first = accelerator.prepare(first)
    one, loader = further.prepare(one, parts()[2])
    second, other = further.prepare(second, other)
    train(accelerator, loader, lambda inputs: first(inputs).square().mean(), one)
    train(further, loader, lambda inputs: second(inputs).square().mean(), other)


def averaged_by_local_sgd(accelerator: Any) -> None:
    model, optimizer, loader = parts()
    with LocalSGD(accelerator=accelerator, model=model, local_sgd_steps=2) as averaging:
        for (inputs,) in loader:
            accelerator.backward(model(inputs).square().mean())
            optimizer.step()
            optimizer.zero_grad()
            averaging.step()


def own_training_beside_the_accelerator(accelerator: Any) -> None:
    """The script uses the Accelerator for its collectives only."""
    model, optimizer, loader = parts()
    for (inputs,) in loader:
        model(inputs).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    accelerator.gather(inputs)


def trained_in_evaluation_mode(accelerator: Any) -> None:
    model, optimizer, loader = accelerator.prepare(*parts())
    model.eval()
    train(accelerator, loader, lambda inputs: model(inputs).square().mean(), optimizer)


def prepared_after_its_optimizer(accelerator: Any) -> None:
    model, optimizer, loader = parts()
    optimizer, loader = accelerator.prepare(optimizer, loader)
    model = accelerator.prepare(model)
    train(accelerator, loader, lambda inputs: model(inputs).square().mean(), optimizer)


class StepsCopies(torch.optim.SGD):
    """Steps copies of its parameters with another optimizer, as optimizers do that keep their state on a CPU."""

    def step(self, closure: Any = None) -> Any:
        parameters = [one for group in self.param_groups for one in group["params"]]
        copies = [one.detach().clone().requires_grad_() for one in parameters]
        for one, other in zip(copies, parameters, strict=True):
            one.grad = other.grad
        torch.optim.SGD(copies, lr=0.1).step()
        with torch.no_grad():
            for one, other in zip(copies, parameters, strict=True):
                other.copy_(one)


def optimizer_that_steps_copies(accelerator: Any) -> None:
    model, _, loader = parts()
    model, optimizer, loader = accelerator.prepare(model, StepsCopies(model.parameters(), lr=0.1), loader)
    train(accelerator, loader, lambda inputs: model(inputs).square().mean(), optimizer)


def wrapped_by_the_script(accelerator: Any) -> None:
    """The script wraps its model in torch's class; the Accelerator prepares the rest."""
    model, optimizer, loader = parts()
    wrapped = nn.parallel.DistributedDataParallel(model)
    optimizer, loader = accelerator.prepare(optimizer, loader)
    train(accelerator, loader, lambda inputs: wrapped(inputs).square().mean(), optimizer)


def attacked_inputs(accelerator: Any) -> None:
    """An optimizer of each process changes inputs, beside the training of a prepared model."""
    model, optimizer, loader = accelerator.prepare(*parts())
    noise = torch.zeros(2, requires_grad=True)
    attack = torch.optim.SGD([noise], lr=0.1)
    for (inputs,) in loader:
        accelerator.backward(model(inputs + noise.detach()).square().mean())
        optimizer.step()
        optimizer.zero_grad()
        (-(inputs + noise).square().mean()).backward()
        attack.step()
        attack.zero_grad()


def test_no_warning_where_all_that_trains_is_synchronised(two: Processes) -> None:
    loops = [
        frozen_part,
        model_of_another_accelerator,
        averaged_by_local_sgd,
        own_training_beside_the_accelerator,
        trained_in_evaluation_mode,
        prepared_after_its_optimizer,
        optimizer_that_steps_copies,
        wrapped_by_the_script,
        attacked_inputs,
    ]
    for found in two.run(on_two_with, loops, {"check_replicas_every": 0}):
        assert dict(zip(loops, found, strict=True)) == {loop: [] for loop in loops}


def tensor_parallel() -> list[str]:
    return warned(nothing_prepared, parallelism_config=ParallelismConfig(tp_size=2))


def test_processes_with_the_same_data_may_train_a_model_that_is_not_prepared(two: Processes) -> None:
    assert two.run(tensor_parallel) == [[], []]


def hooks_left_after_many_steps() -> tuple[int, int]:
    before = step_hooks()
    accelerator = Accelerator(cpu=True)
    mine = step_hooks() - before
    model, optimizer, _ = parts()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for _ in range(100):
            accelerator.backward(model(torch.ones(1, 2)).square().mean())
            optimizer.step()
            optimizer.zero_grad()
    Accelerator()
    return len(mine), len(mine & step_hooks())


def test_the_guard_ends_where_nothing_is_prepared(two: Processes) -> None:
    assert two.run(hooks_left_after_many_steps) == [(2, 0), (2, 0)]
