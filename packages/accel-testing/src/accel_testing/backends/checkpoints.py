"""Tests of checkpoints and weights: saved, loaded, resumed, and read for an evaluation."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn

from accel_plugins.context import Context
from accel_plugins.layers import extract_model_from_parallel, strategy_model
from accel_plugins.manifest import SAVED_KINDS, Manifest, ObjectKind
from accel_plugins.prepared import as_set_up
from accel_plugins.resolve import strategy_class
from accel_plugins.strategy import Strategy
from accel_plugins.transform import Stage, Transform
from accel_state.errors import CheckpointError
from accel_state.protocol.call import barrier
from accel_testing.backends.base import Answer, Run, SuiteBase, as_lists, needs, train, with_the_kits_models, writes
from accel_testing.backends.gradients import count_collectives
from accel_testing.backends.reference_loop import Case, Training, batches

__all__ = ("Around", "CheckpointTests", "save_and_resume")


SAVED, RESUMED = 7, 9
"""Steps before a save, and after it.

The number before the save is not a multiple of 2 to 6, and both are more than 6. A strategy that does something every
few steps (up to six) has thus done it before the save, is between two times at the save, and does it again later.
"""


class CheckpointTests(SuiteBase):
    """Tests of checkpoints and weights: saved, loaded, resumed, and read for an evaluation."""

    @needs("state_dict")
    def test_weights_go_into_a_plain_model_and_back(self, run: Run) -> None:
        answers = run(weights_out_and_in, self.case())
        assert answers[0]["writes"]
        for answer in answers:
            assert answer.get("into_plain", True)
            assert answer["read_back"]
            assert answer["computes"]
            assert answer["reads_some"]
            assert answer["refused"], "weights that lack a name were accepted with strict=True"

    @with_the_kits_models
    def test_a_model_with_more_layers_loads_only_if_that_is_allowed(self, run: Run, tmp_path: Path) -> None:
        """`load` passes `strict` on, and raises on every process."""
        for answer in run(load_into_a_longer_model, self.case(), str(tmp_path)):
            assert answer == {"refused": True, "loaded": True}

    @needs("state_dict")
    def test_a_state_dict_has_every_name_of_the_users_model(self, run: Run) -> None:
        for weights in self.written(run(train, self.case())):
            assert sorted(weights) == sorted(self.case().make().state_dict())

    @needs("exact_resume")
    @pytest.mark.parametrize("adam", [False, True])
    def test_a_resumed_run_goes_on_bit_for_bit(self, run: Run, tmp_path: Path, adam: bool) -> None:
        """Save inside an accumulation window, resume, and compare weights and all states after further steps."""
        for answer in run(save_and_resume, self.case(adam=adam), str(tmp_path)):
            assert answer["step"] == SAVED
            assert answer["same_weights"]
            assert answer["differs_after_loading"] == []
            assert answer["resumed"] == answer["expected"]
            assert answer["differs_at_the_end"] == []
            assert answer["rates"][0] == answer["rates"][1]

    @with_the_kits_models
    @needs("exact_resume")
    def test_frozen_weights_are_restored(self, run: Run, tmp_path: Path) -> None:
        for answer in run(save_and_resume, self.case(model="frozen"), str(tmp_path)):
            assert answer["same_weights"]
            assert answer["differs_at_the_end"] == []

    @needs("exact_resume", "several_models")
    def test_a_run_of_two_models_resumes_bit_for_bit(self, run: Run, tmp_path: Path) -> None:
        for answer in run(save_and_resume, self.case(beside=True), str(tmp_path)):
            assert answer["differs_after_loading"] == []
            assert answer["resumed"] == answer["expected"]
            assert answer["differs_at_the_end"] == []

    def test_weights_of_the_run_are_the_same_everywhere_and_leave_training_alone(self, run: Run) -> None:
        answers = run(weights_of_the_run, self.case())
        assert [answer["changed"] for answer in answers] == [[]] * len(answers)
        own = strategy_class(self.manifest).global_weights is Strategy.global_weights
        if not own or self.capabilities.equal_replicas:
            written = [answer["inside"] for answer in answers if answer["inside"]]
            assert all(weights == written[0] for weights in written)

    def test_saving_does_not_disturb_training(self, run: Run, tmp_path: Path) -> None:
        without = run(train_with_saves, self.case(), str(tmp_path), False)
        assert run(train_with_saves, self.case(), str(tmp_path), True) == without

    def test_loading_from_an_empty_folder_is_an_error_with_a_remedy(self, run: Run, tmp_path: Path) -> None:
        for answer in run(load_from_nothing, self.case(), str(tmp_path)):
            assert set(answer) <= {"CheckpointError"}

    def test_a_layer_around_the_model_changes_nothing(self, run: Run, tmp_path: Path) -> None:
        """The strategy does not receive the wrapper of `torch.compile`, and unwrapping removes it."""
        case = self.case(accumulation=2)
        answers = run(behind_a_layer, case, str(tmp_path))
        for answer, expected in zip(answers, self.expected(run, case), strict=True):
            assert answer["losses"] == self.near(expected["losses"])
            assert not answer["weights"] or answer["weights"] == self.near(expected["weights"])
            assert answer["is_users_class"]
            assert answer["loaded"]
            assert answer["held"][1] == 0 or not self.capabilities.no_sync
        self.written(answers)


def save_and_resume(case: Case, folder: str) -> Answer:
    """Save in the middle of a run and train further; then resume with objects that had other values."""
    case = case.but(steps=SAVED + RESUMED, scheduled=True)
    training, data = case.open(), list(batches(case))
    _train_on(training, data[:SAVED])
    training.save(Path(folder), step=SAVED)
    saved, weights = states(training), training.weights()
    expected = _train_on(training, data[SAVED:])
    resumed = case.open(case.make(9))
    for group in resumed.optimizer.param_groups:
        group["lr"] *= 2
    step = resumed.load(Path(folder))
    answer: Answer = {
        "step": step,
        "differs_after_loading": differences(saved, states(resumed)),
        "same_weights": resumed.weights() == weights,
    }
    answer["resumed"], answer["expected"] = _train_on(resumed, data[SAVED:]), expected
    answer["differs_at_the_end"] = differences(states(training), states(resumed))
    answer["rates"] = training.rates[-1], resumed.rates[-1]
    return answer


def _train_on(training: Training, data: list[Any]) -> list[float]:
    """Losses of batches with noise from each process's random-number generator."""
    return [training.train([(inputs + 0.01 * torch.randn(inputs.shape), targets)])[0][0] for inputs, targets in data]


def states(training: Training) -> Answer:
    """The complete state of a run on this process, as plain data."""
    models = [training.wrapped, *(strategy_model(model) for model, _ in training.others)]
    optimizers = [training.inner, *(as_set_up(optimizer) for _, optimizer in training.others)]
    return {
        "weights": [_plain(_tensors(training, model)) for model in models],
        "optimizers": [_optimizer_state(training, one) for one in optimizers],
        "schedulers": _plain([scheduler.state_dict() for scheduler in training.schedulers]),
        "extra_state": _plain(training.strategy.extra_state(models, optimizers)),
    }


def _tensors(training: Training, model: nn.Module) -> Mapping[str, Tensor]:
    """The parameters and buffers that this process trains."""
    if not training.manifest.capabilities.whole_model:
        # The user's model has old values of what other processes train.
        return training.strategy.state_dict(model)
    bare: nn.Module = training.strategy.unwrap(model)
    return {**dict(bare.named_parameters()), **dict(bare.named_buffers())}


def _optimizer_state(training: Training, optimizer: Any) -> Any:
    """The state of an optimizer as the strategy collects it; nothing where the engine collects when it writes."""
    state = training.strategy.collect(ObjectKind.OPTIMIZER, optimizer)
    return None if state is optimizer else _plain(state)


def _plain(value: Any) -> Any:
    """Tensors as lists; of sharded tensors, this process's shard."""
    if isinstance(value, torch.Tensor):
        return getattr(value, "to_local", lambda: value)().tolist()
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, (list, tuple)) else value


def differences(one: Any, other: Any, path: str = "") -> list[str]:
    """The paths of keys at which two nested states differ."""
    if isinstance(one, dict) and isinstance(other, dict) and one.keys() == other.keys():
        return [
            difference for key in one for difference in differences(one[key], other[key], f"{path}.{key}".lstrip("."))
        ]
    return [] if repr(one) == repr(other) else [path]


def weights_of_the_run(case: Case) -> Answer:
    """Weights inside `global_weights`, and whether the model has its training weights again afterwards."""
    training = case.open()
    training.train()
    before = states(training)
    with training.strategy.global_weights(training.wrapped):
        inside = training.weights()
    with suppress(LookupError), training.strategy.global_weights(training.wrapped):
        raise LookupError("the evaluation failed")
    return {"inside": inside, "changed": differences(before, states(training))}


def train_with_saves(case: Case, folder: str, saves: bool) -> Answer:
    """Losses of a run, with or without a save after every step."""
    training, losses = case.open(), []
    for number, batch in enumerate(batches(case)):
        losses += training.train([batch])[0]
        if saves:
            target = Path(folder, str(number))
            target.mkdir(exist_ok=True)
            barrier(training.process.transport, "wait_for_everyone")
            training.save(target)
    return {"losses": losses}


def load_from_nothing(case: Case, folder: str) -> list[str]:
    """For each kind of object, the name of the error when it is loaded from an empty folder."""
    training = case.but(scheduled=True).open()
    items = {
        ObjectKind.MODEL: training.wrapped,
        ObjectKind.OPTIMIZER: training.inner,
        ObjectKind.SCHEDULER: as_set_up(training.schedulers[0]),
    }
    return [_error_of(training, kind, items[kind], Path(folder)) for kind in SAVED_KINDS]


def _error_of(training: Training, kind: ObjectKind, item: Any, folder: Path) -> str:
    try:
        training.strategy.load(kind, item, folder, 0)
    except CheckpointError as error:
        return "CheckpointError" if error.remedy else f"CheckpointError without a remedy for the {kind.value}"
    except Exception as error:
        return f"{type(error).__name__} for the {kind.value}"
    return f"nothing was raised for the {kind.value}"


def weights_out_and_in(case: Case) -> Answer:
    """Weights after `state_dict` and `load_weights`, and those of a plain model that loaded them."""
    training = case.open()
    training.train()
    state = {name: value.detach().clone() for name, value in training.strategy.state_dict(training.wrapped).items()}
    other = case.make(4)
    source = {name: value.detach().clone() for name, value in other.state_dict().items()}
    answer: Answer = {"writes": writes(training)}
    training.strategy.load_weights(training.wrapped, source)
    answer["read_back"] = training.weights() == as_lists(source) or not writes(training)
    inputs = next(iter(batches(case)))[0].to(training.process.device)
    with torch.no_grad():
        expected = other.to(training.process.device)(inputs)
        answer["computes"] = torch.allclose(training.model(inputs), expected, atol=1e-5)
    absent = next(iter(source))
    some = {name: value.detach() for name, value in case.make(6).state_dict().items() if name != absent}
    training.strategy.load_weights(training.wrapped, some, strict=False)
    answer["reads_some"] = training.weights() == as_lists(source | some) or not writes(training)
    if writes(training):
        plain = case.make(5)
        plain.load_state_dict({name: value.cpu() for name, value in state.items()})
        answer["into_plain"] = {n: v.tolist() for n, v in plain.state_dict().items()} == as_lists(state)
    answer["refused"] = _raises(lambda: training.strategy.load_weights(training.wrapped, some))
    return answer


def load_into_a_longer_model(case: Case, folder: str) -> Answer:
    """Whether a checkpoint is refused by a model with a layer more, and what that model has after a load that is not
    strict."""
    training = case.open()
    training.train()
    training.save(Path(folder))
    saved = training.weights()
    training = case.but(model="longer").open()
    own = training.weights()

    def load(strict: bool) -> None:
        training.strategy.load(ObjectKind.MODEL, training.wrapped, Path(folder), 0, strict=strict)

    refused, raised = _raises(lambda: load(True)), _raises(lambda: load(False))
    return {"refused": refused, "loaded": not raised and training.weights() == own | saved}


def _raises(action: Callable[[], None]) -> bool:
    try:
        action()
    except Exception:
        return True
    return False


class Layer(nn.Module):
    """A wrapper that the strategy does not know, like that of `torch.compile`."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.inner = model

    def forward(self, *args: Any) -> Any:
        """The model's outputs."""
        return self.inner(*args)


class Around(Transform):
    """Wraps the strategy's model in a `Layer`, unless the strategy compiles models itself."""

    name: ClassVar[str] = "layer"
    stage: ClassVar[Stage] = Stage.COMPILE

    def takes_part(self, manifest: Manifest) -> bool:
        """Whether the backend leaves compiling to transforms."""
        return not manifest.capabilities.own_compile

    def before_wrap(self, manifest: Manifest) -> bool:
        """Always after the strategy."""
        return False

    def apply(self, model: nn.Module, context: Context) -> nn.Module:
        """Put a `Layer` around the model."""
        return Layer(model)


def behind_a_layer(case: Case, folder: str) -> Answer:
    """Accumulate, save and load with a layer around the strategy's model."""
    training = case.but(transforms=(Around(),)).open()
    losses, _ = training.train()
    counted = count_collectives(case.but(transforms=(Around(),)))
    weights = training.weights()
    training.save(Path(folder))
    with torch.no_grad():
        for parameter in training.model.parameters():
            parameter.zero_()
    training.load(Path(folder))
    return {
        "losses": losses,
        "is_users_class": isinstance(extract_model_from_parallel(training.model), type(training.user_model)),
        "held": counted["held"],
        "weights": weights,
        "loaded": training.weights() == weights,
    }
