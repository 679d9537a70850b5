"""The tests of a backend through an Accelerator, and the functions that they run in the processes."""

from __future__ import annotations

import gc
import os
import weakref
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch.nn import Module
from torch.utils.data import DataLoader, TensorDataset

from accel_bigmodel.weight_files import load_weights_file
from accel_plugins.bundle import Bundle
from accel_plugins.manifest import ObjectKind
from accel_plugins.resolve import BACKENDS, config_among
from accel_state import current
from accel_state.choices import DynamoBackend
from accel_state.errors import AccelError
from accel_state.kwargs import KwargsHandler
from accel_state.settings.environ import to_environment
from accel_state.settings.schema import settings_of
from accel_testing.backends import BackendSuite
from accel_testing.backends.base import Run, needs
from accel_testing.backends.reference_loop import BATCH, Case, Plain, Training, batches
from accel_torch import (
    Accelerator,
    DataLoaderConfiguration,
    GradientAccumulationPlugin,
    StepGuard,
    TorchDynamoPlugin,
)

__all__ = ("AcceleratorSuite", "AcceleratorTraining", "CompilingTraining", "GuardedTraining")


class AcceleratorTraining(Training):
    """The code that users write, with the backend of a test case."""

    def make_strategy(self, handlers: Sequence[Any]) -> None:
        """Construct an Accelerator and return its strategy."""
        case = self.case
        given: dict[str, Any] = {}
        if isinstance(case.config, KwargsHandler):
            handlers = [*handlers, case.config]
        elif case.config is not None:
            # Settings of another backend are given through that backend's argument.
            theirs = (one for one in BACKENDS.values() if config_among(one, [case.config]) is not None)
            given = {next(theirs, case.manifest).parameter or "fsdp_plugin": case.config}
        self.accelerator = Accelerator(
            cpu=current.process().device.type == "cpu",
            mixed_precision=case.precision,
            backend=case.manifest.name,
            kwargs_handlers=list(handlers),
            dataloader_config=DataLoaderConfiguration(split_batches=True),
            gradient_accumulation_plugin=GradientAccumulationPlugin(
                num_steps=case.accumulation, sync_each_batch=not case.no_sync
            ),
            parallelism_config=case.parallelism_config,
            **given,
            **self.arguments(),
        )
        self.process = current.process()
        self.gradient = self.accelerator.gradient_state
        self.strategy = self.accelerator.session.strategy

    def arguments(self) -> dict[str, Any]:
        """Further arguments for the Accelerator."""
        return {}

    def prepare(self, bundle: Bundle) -> Bundle:
        """The method of the Accelerator."""
        given: list[list[Any]] = [bundle.models, bundle.optimizers, bundle.schedulers]
        prepared: Any = self.accelerator.prepare(*(item for items in given for item in items))
        made = list(prepared) if isinstance(prepared, (list, tuple)) else [prepared]
        for items in given:
            items[:], made = made[: len(items)], made[len(items) :]
        return bundle

    def prepare_to_evaluate(self, model: Module) -> Module:
        """The method of the Accelerator."""
        if self.manifest.together <= {ObjectKind.MODEL}:
            evaluated: Module = self.accelerator.prepare(model)
            return evaluated
        return self.accelerator.prepare_model(model, evaluation_mode=True)

    def loader(self, data: Sequence[tuple[Tensor, Tensor]]) -> Iterable[Any]:
        """A prepared loader of the global batches, which are read without training."""
        if self.manifest.capabilities.elastic:
            # In training mode, loaders would wait for optimizer steps.
            self.model.eval()
        inputs, targets = (torch.cat(tensors) for tensors in zip(*data, strict=True))
        loader: Iterable[Any] = self.accelerator.prepare(DataLoader(TensorDataset(inputs, targets), batch_size=BATCH))
        return loader

    def save(self, folder: Path, step: int = 0) -> None:
        """The method of the Accelerator, which counts the steps."""
        self.accelerator.save_state(folder)

    def load(self, folder: Path) -> int:
        """The method of the Accelerator."""
        self.accelerator.load_state(folder)
        return self.accelerator.step

    def backward(self, batch: tuple[Tensor, Tensor]) -> float:
        """Each micro-batch under `accumulate`."""
        parts, total = self.micro_batches(batch), 0.0
        for inputs, targets in parts:
            with self.accelerator.accumulate(self.model):
                loss = self.loss(inputs, targets)
                self.accelerator.backward(loss)
            total += loss.item()
        return total / len(parts)

    def complete_gradients(self) -> None:
        """The method of the Accelerator."""
        self.accelerator.unscale_gradients(self.optimizer)

    def clip(self) -> float | None:
        """The methods of the Accelerator."""
        norm: Any = None
        if self.case.clip_norm is not None:
            norm = self.accelerator.clip_grad_norm_(self.model.parameters(), self.case.clip_norm, self.case.norm_type)
        if self.case.clip_value is not None:
            self.accelerator.clip_grad_value_(self.model.parameters(), self.case.clip_value)
        return None if norm is None else float(norm)

    def step(self) -> bool:
        """The methods of the optimizer."""
        self.optimizer.step()
        self.optimizer.zero_grad()
        return not self.accelerator.optimizer_step_was_skipped

    def mean(self, value: float) -> float:
        """The method of the Accelerator."""
        return float(self.accelerator.reduce(torch.tensor(value, dtype=torch.float64), "mean"))

    def weights(self, model: Module | None = None) -> dict[str, list[Any]]:
        """The state dict of the Accelerator."""
        state = self.accelerator.get_state_dict(self.model if model is None else model)
        return {name: value.tolist() for name, value in state.items()} if self.strategy.writes_weights() else {}


class CompilingTraining(AcceleratorTraining):
    """Compiles the model without generating code, so that it takes little time."""

    def arguments(self) -> dict[str, Any]:
        """`torch.compile` with the backend "eager"."""
        return {"dynamo_plugin": TorchDynamoPlugin(backend=DynamoBackend.EAGER)}


class GuardedTraining(AcceleratorTraining):
    """Has a NaN in the loss of the last process at the second step, which a guard leaves out."""

    forwards = 0

    def make_strategy(self, handlers: Sequence[Any]) -> None:
        """With a guard."""
        super().make_strategy([*handlers, StepGuard(nonfinite="skip")])

    def loss(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """NaN at the second step."""
        self.forwards += 1
        loss = super().loss(inputs, targets)
        is_bad = self.forwards == 1 + self.case.accumulation and self.accelerator.is_last_process
        return loss * float("nan") if is_bad else loss


class AcceleratorSuite(BackendSuite):
    """The tests of every backend through an Accelerator, and tests of what only an Accelerator does."""

    @pytest.fixture
    def driver(self) -> str:
        """The Accelerator."""
        return "accel_testing.accelerator:AcceleratorTraining"

    def test_unwrap_model_gives_the_users_model_or_is_refused(self, run: Run) -> None:
        expected = "the user's model" if self.capabilities.whole_model else "NotOffered"
        assert set(run(unwrapped_model, self.case())) == {expected}

    def test_a_checkpoint_contains_what_one_accelerator_prepared(self, run: Run, tmp_path: Path) -> None:
        """Of two Accelerators of a run, as a notebook has when a cell runs twice, the second writes a checkpoint."""
        if not self.capabilities.several_models:
            pytest.skip(f"{self.manifest.name} trains one model in a run")
        run(save_the_second_of_two, self.case(), str(tmp_path))
        for answer in run(load_alone, self.case(), str(tmp_path)):
            assert answer == ""

    def test_free_memory_keeps_nothing_and_another_run_can_follow(self, run: Run) -> None:
        case = self.case()
        answers = run(free_and_train_again, case)
        for answer, expected in zip(answers, self.expected(run, case), strict=True):
            assert answer["kept"] == []
            assert answer["losses"] == self.near(expected["losses"])

    def test_a_compiled_model_trains_alike(self, run: Run) -> None:
        case = self.case(accumulation=2)
        compiled = case.but(training="accel_testing.accelerator:CompilingTraining")
        for answer, expected in zip(run(train_compiled, compiled), self.expected(run, case), strict=True):
            assert answer["compiled"]
            assert answer["is_users_class"]
            assert answer["losses"] == self.near(expected["losses"])
            assert not answer["weights"] or answer["weights"] == self.near(expected["weights"])

    @needs("equal_replicas", "exact_gradients")
    @pytest.mark.parametrize("changes", [{}, {"clip_norm": 0.1, "accumulation": 2}], ids=["plain", "clipped windows"])
    def test_a_step_that_a_guard_leaves_out_changes_nothing(self, run: Run, changes: dict[str, Any]) -> None:
        """A NaN of one process: all processes leave out the step, and train on as if it had not been."""
        if self.capabilities.own_precision or self.capabilities.elastic:
            pytest.skip(f"{self.manifest.name} makes its steps itself, or with a changing number of processes")
        case = self.case(**changes)
        plain = Plain(case).run([batch for number, batch in enumerate(batches(case)) if number != 1])
        guarded = case.but(training="accel_testing.accelerator:GuardedTraining")
        for answer in run(train_guarded, guarded):
            assert answer["events"] == [[2, "nonfinite", "skip"]]
            assert not answer["weights"] or answer["weights"] == self.near(plain.weights())

    @needs("exact_gradients")
    def test_the_norm_comes_with_sums_over_all_processes(self, run: Run) -> None:
        """`norm_with_sums` returns what `clip_norm` returns, clips alike, and adds up numbers over the processes."""
        if self.capabilities.own_precision or self.capabilities.elastic:
            pytest.skip(f"{self.manifest.name} clips itself, or has a changing number of processes")
        answers = run(norms_with_sums, self.case())
        for answer in answers:
            assert answer["norms"] == self.near([answer["expected"]] * 2)
            assert answer["clipped"] == self.near(min(answer["expected"], 0.01))
            total = sum(range(1, len(answers) + 1))
            assert answer["sums"] == self.near([total, len(answers), answer["expected"] * len(answers)])

    def test_settings_reach_the_strategy_through_the_environment(self, run: Run) -> None:
        """Values for `config`, preferably not the defaults."""
        if self.config is not None and settings_of(type(self.config)):
            variables = to_environment(self.config)
            for found in run(settings_from_environment, self.case(), variables):
                assert found == variables

    @needs("state_dict", "exact_gradients")
    def test_save_model_writes_the_weights_of_one_process(self, run: Run, tmp_path: Path) -> None:
        run(train_and_save_model, self.case(), str(tmp_path))
        written = {name: value.tolist() for name, value in load_weights_file(tmp_path / "model.safetensors").items()}
        assert written == self.near(Plain(self.case()).run().weights())


def unwrapped_model(case: Case) -> str:
    """What `unwrap_model` returns, or the name of its error."""
    training: Any = case.open()
    try:
        bare = training.accelerator.unwrap_model(training.model)
    except AccelError as error:
        return type(error).__name__ if error.remedy else "an error without a remedy"
    return "the user's model" if isinstance(bare, type(training.user_model)) else type(bare).__name__


def save_the_second_of_two(case: Case, folder: str) -> None:
    """Train with one Accelerator, then with another one, which saves."""
    case.open().train()
    training = case.open()
    training.train()
    training.save(Path(folder))


def load_alone(case: Case, folder: str) -> str:
    """The error of loading a checkpoint in a run with one Accelerator, and of training on; empty without one."""
    training = case.open(case.make(9))
    try:
        training.load(Path(folder))
    except AccelError as error:
        return str(error)
    training.train()
    return ""


def free_and_train_again(case: Case) -> dict[str, Any]:
    """What `free_memory` left in memory after training, and the losses of another run in the same process."""
    training: Any = case.open()
    training.train()
    kept = {"model": weakref.ref(training.user_model), "optimizer": weakref.ref(training.optimizer.optimizer)}
    accelerator = training.accelerator
    prepared = [vars(training).pop("model"), vars(training).pop("optimizer")]
    vars(training).clear()
    prepared[:] = accelerator.free_memory(*prepared)
    gc.collect()
    alive = [name for name, seen in kept.items() if seen() is not None]
    return {"kept": alive, "losses": case.open().train()[0]}


def train_compiled(case: Case) -> dict[str, Any]:
    """Losses and weights of a compiled model, and the type of the unwrapped model."""
    training: Any = case.open()
    losses, _ = training.train()
    whole = training.manifest.capabilities.whole_model
    bare = training.accelerator.unwrap_model(training.model, keep_torch_compile=False) if whole else training.user_model
    return {
        "compiled": any(hasattr(module, "_orig_mod") for module in training.model.modules()),
        "is_users_class": isinstance(bare, type(training.user_model)),
        "losses": losses,
        "weights": training.weights(),
    }


def train_guarded(case: Case) -> dict[str, Any]:
    """The events of a guarded run, and its weights."""
    training: Any = case.open()
    training.train()
    events = [[event.step, event.kind, event.action] for event in training.accelerator.guard.events]
    return {"events": events, "weights": training.weights()}


def norms_with_sums(case: Case) -> dict[str, Any]:
    """Norms of the same gradients, by `clip_norm` and by `norm_with_sums`, before and after they are clipped."""
    training: Any = case.open()
    training.backward(next(iter(batches(case))))
    training.complete_gradients()
    strategy, parameters = training.strategy, list(training.model.parameters())
    device = training.process.device
    sums = torch.tensor([training.process.rank + 1.0, 1.0, 0.0], device=device)
    norms = [strategy.norm_with_sums(parameters, sums)]
    expected = float(strategy.clip_norm(parameters, float("inf")))
    again = torch.zeros(1, device=device)
    norms.append(strategy.norm_with_sums(parameters, again, 0.01))
    clipped = float(strategy.norm_with_sums(parameters, torch.zeros(1, device=device)))
    return {"norms": [float(norm) for norm in norms], "expected": expected, "clipped": clipped, "sums": sums.tolist()}


def settings_from_environment(case: Case, variables: dict[str, str]) -> dict[str, str]:
    """Environment variables of the strategy's settings that the launcher set."""
    with mock.patch.dict(os.environ, variables):
        training = case.but(config=None).open()
        return to_environment(training.strategy.config)


def train_and_save_model(case: Case, folder: str) -> None:
    """Train, and write only the weights."""
    training: Any = case.open()
    training.train()
    training.accelerator.save_model(training.model, folder)
    training.accelerator.wait_for_everyone()
