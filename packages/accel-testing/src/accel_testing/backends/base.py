"""What all tests of a backend use: the settings of a suite, its processes, and what results are compared with."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, ClassVar, TypeVar

import pytest
import torch
from torch import Tensor

from accel_plugins.manifest import Capabilities, Manifest
from accel_state.mesh import ParallelismConfig
from accel_testing.backends.reference_loop import Case, Plain, Training, near
from accel_testing.processes import Processes

__all__ = (
    "Answer",
    "SuiteBase",
    "as_lists",
    "needs",
    "shard_of",
    "train",
    "with_the_kits_models",
    "writes",
)

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


Run = Callable[..., list[Any]]
T = TypeVar("T", bound=Callable[..., Any])
MicroBatches = Sequence[tuple[Tensor, Tensor]]
"""The (inputs, targets) with which one process makes one step; more than one with accumulation."""


def needs(*capabilities: str) -> Callable[[T], T]:
    """Skip a test if the backend lacks one of the capabilities, given as names of fields of `Capabilities`."""

    def mark(test: T) -> T:
        test.needs = capabilities  # type: ignore[attr-defined]
        return test

    return mark


def with_the_kits_models(test: T) -> T:
    """Skip a test if the suite brings a model of its own, because the test changes the kit's."""
    test.with_the_kits_models = True  # type: ignore[attr-defined]
    return test


class SuiteBase:
    """The settings of a suite and its processes; `BackendSuite` describes the attributes."""

    target: ClassVar[str]
    config: ClassVar[Any] = None
    neutral: ClassVar[Any] = None
    lacks: ClassVar[frozenset[str]] = frozenset()
    model: ClassVar[str] = "usual"
    parallelism_config: ClassVar[ParallelismConfig | None] = None
    processes: ClassVar[int] = 2
    tolerance: ClassVar[float] = 2e-5
    _driver: str = Case.training

    @pytest.fixture(scope="class")
    @classmethod
    def group(cls) -> Iterator[Processes]:
        """The processes; override this fixture to start them in another way."""
        with Processes(cls.processes) as group:
            yield group

    @pytest.fixture
    def driver(self) -> str:
        """ "module:class" of the `Training` that calls the strategy; the default is the kit's short training loop."""
        return Case.training

    @pytest.fixture
    def run(self, group: Processes) -> Run:
        """Calls a function in every process, with arguments, and returns the results by rank."""
        return group.run

    @pytest.fixture(autouse=True)
    def _take_driver(self, driver: str) -> None:
        self._driver = driver

    @pytest.fixture(autouse=True)
    def _skip_what_is_declared_away(self, request: pytest.FixtureRequest) -> None:
        for capability in self.lacking(request.function):
            pytest.skip(f"{self.manifest.name} declares that it lacks {capability}")
        if hasattr(request.function, "with_the_kits_models") and self.model != "usual":
            pytest.skip(f"{self.manifest.name} brings a model of its own")

    def lacking(self, test: Any) -> list[str]:
        """The capabilities that a test needs and the backend lacks."""
        return [name for name in getattr(test, "needs", ()) if not getattr(self.capabilities, name)]

    @property
    def manifest(self) -> Manifest:
        """The manifest under test."""
        module, _, attribute = self.target.partition(":")
        manifest: Manifest = getattr(importlib.import_module(module), attribute)
        return manifest

    @property
    def capabilities(self) -> Capabilities:
        """What the backend can do with the settings of this suite."""
        declared = self.manifest.capabilities._replace(**dict.fromkeys(self.lacks, False))
        return declared._replace(exact_gradients=declared.exact_gradients and declared.equal_replicas)

    def settings(self, case: Case) -> Any:
        """The settings object of a case; the default is `config`.

        Override it where the engine needs in its settings what a script passes in calls, such as `case.clip_norm`.
        """
        return self.config

    def case(self, **changes: Any) -> Case:
        """The case of a training run with this backend."""
        usual = {"model": self.model, "parallelism_config": self.parallelism_config}
        case = Case(self.manifest, training=self._driver, **{**usual, **changes})
        return case.but(config=self.settings(case))

    def reference(self, case: Case, batches_of_ranks: Sequence[Sequence[MicroBatches]]) -> list[Mapping[str, Tensor]]:
        """Train by the algorithm of the backend, in plain PyTorch and one process; written by the author.

        The test compares it with the backend after every step, and calls it with the batches up to that step.

        Args:
            case: the run: `case.make()` creates the model, `make_optimizer(case, model)` its optimizer, `loss_of(model,
                inputs, targets)` computes the loss, all of `accel_testing.backends`; `case.config` has the settings.
            batches_of_ranks: for each process, for each step, its micro-batches.

        Returns:
            For each process, the weights of the model by name.

        Example:
            >>> def reference(self, case, batches_of_ranks):
            ...     model = case.make()
            ...     optimizer = make_optimizer(case, model)
            ...     for steps in zip(*batches_of_ranks):
            ...         for micro_batches in steps:
            ...             for inputs, targets in micro_batches:
            ...                 loss = loss_of(model, inputs, targets)
            ...                 (loss / len(micro_batches) / len(steps)).backward()
            ...         optimizer.step()
            ...         optimizer.zero_grad()
            ...     return [model.state_dict()] * len(batches_of_ranks)
        """
        raise NotImplementedError

    def expected(self, run: Run, case: Case) -> list[dict[str, Any]]:
        """The expected losses and weights of each process: those of plain PyTorch in one process.

        Backends that compute something else are compared with a second run of the same strategy.
        """
        if not self.capabilities.exact_gradients:
            return run(train, case)
        plain = Plain(case).run()
        return [{"losses": plain.losses, "weights": plain.weights()}] * self.processes

    def near(self, expected: Any) -> Any:
        """An object that equals `expected` within the tolerance, in nested lists and dicts."""
        return near(expected, rel=self.tolerance, abs=self.tolerance / 10)

    def written(self, answers: list[dict[str, Any]]) -> list[Any]:
        """The weights of processes that have complete ones; the first process must have them."""
        assert answers[0]["weights"], "the first process has no complete weights to write"
        return [answer["weights"] for answer in answers if answer["weights"]]

    # ------------------------------------------------------------------- the manifest
