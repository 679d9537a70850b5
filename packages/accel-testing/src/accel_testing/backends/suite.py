"""The tests that every backend passes.

    class TestExample(BackendSuite):
        target = "accel_example.manifest:MANIFEST"

The suite runs the backend in real processes over gloo on the CPU and compares it with plain torch on the same global
batches. Tests of capabilities that the manifest lacks are skipped. A subclass may override a test only with the mark
`pytest.mark.xfail(strict=True, reason=...)`.

A backend that does not compute what one process computes is compared with the author's own `reference`, and with runs
whose result is known whatever the algorithm: all processes have equal data and settings that switch it off (`neutral`),
the learning rate is zero, the loss is convex, another model trains beside.
"""

from __future__ import annotations

import contextlib
import importlib
import inspect
import itertools
import pickle
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Final, TypeVar

import pytest
import torch
from torch import Tensor

from accel_plugins.manifest import OLDEST_PROTOCOL, PROTOCOL, Capabilities, Manifest
from accel_plugins.resolve import memory_plans, strategy_class
from accel_plugins.strategy import Strategy
from accel_state.errors import AccelError, PluginError
from accel_state.labels import DistributedType
from accel_state.mesh import ParallelismConfig
from accel_state.settings.environ import from_environment, to_environment
from accel_state.settings.schema import settings_of
from accel_testing.backends import tasks
from accel_testing.backends.reference_loop import Case, Plain
from accel_testing.processes import Processes

__all__ = ("BackendSuite",)

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


class BackendSuite:
    """The tests of a backend; subclass this in a test file and set `target`.

    Settings that change what is computed, such as a period, get a subclass each.

    Attributes:
        target: the manifest as "module:attribute".
        config: the settings object for the tests; None: read from the environment.
        neutral: settings with which processes that have equal data train as one process does; None: `config`, if the
            backend computes what one process computes.
        lacks: capabilities of the manifest that are missing with these settings, such as "exact_gradients".
        model: a class of a model as "module:class", for backends of certain models. It is created with a seed, which
            determines its weights, and maps inputs of shape (samples, 6) to logits of shape (samples, 3). "usual": the
            model of the kit.
        parallelism_config: the axes of the runs, for backends that have some; they are made of `processes` processes.
        processes: number of processes to start.
        tolerance: maximum relative difference between losses, weights and gradients of the backend and of plain
            PyTorch.
    """

    target: ClassVar[str]
    config: ClassVar[Any] = None
    neutral: ClassVar[Any] = None
    lacks: ClassVar[frozenset[str]] = frozenset()
    model: ClassVar[str] = "usual"
    parallelism_config: ClassVar[ParallelismConfig | None] = None
    processes: ClassVar[int] = 2
    tolerance: ClassVar[float] = 2e-5
    _driver: str = Case.training

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        for name, value in vars(cls).items():
            if name.startswith("test_") and hasattr(BackendSuite, name) and not _expected_to_fail(value):
                raise PluginError(
                    f"{cls.__name__} overrides {name}.",
                    "A test of the suite may only be overridden by a strict expected failure with a reason.",
                    "Mark it pytest.mark.xfail(strict=True, reason=...), or set the missing capability to False in the "
                    "manifest.",
                )

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
        """Calls a function of `backend_tasks` in every process and returns the results by rank."""
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
        found: Manifest = getattr(importlib.import_module(module), attribute)
        return found

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
            return run(tasks.train, case)
        plain = Plain(case).run()
        return [{"losses": plain.losses, "weights": plain.weights()}] * self.processes

    def near(self, expected: Any) -> Any:
        """An object that equals `expected` within the tolerance, in nested lists and dicts."""
        if isinstance(expected, dict):
            return {name: self.near(value) for name, value in expected.items()}
        if isinstance(expected, list) and expected and isinstance(expected[0], (list, dict)):
            return [self.near(value) for value in expected]
        return pytest.approx(expected, rel=self.tolerance, abs=self.tolerance / 10)

    def written(self, answers: list[dict[str, Any]]) -> list[Any]:
        """The weights of processes that have complete ones; the first process must have them."""
        assert answers[0]["weights"], "the first process has no complete weights to write"
        return [answer["weights"] for answer in answers if answer["weights"]]

    # ------------------------------------------------------------------- the manifest

    def test_the_manifest_fits_this_version_of_the_interface(self) -> None:
        assert isinstance(self.manifest, Manifest)
        oldest, newest = self.manifest.protocols
        assert oldest <= PROTOCOL
        assert newest >= OLDEST_PROTOCOL
        assert self.manifest.label is None or self.manifest.label in DistributedType

    def test_the_strategy_is_one_and_keeps_the_signatures(self) -> None:
        strategy = strategy_class(self.manifest)
        for name, value in inspect.getmembers(Strategy, inspect.isfunction):
            if name.startswith("_"):
                continue
            asked = inspect.signature(value).parameters
            offered = inspect.signature(getattr(strategy, name)).parameters
            open_ended = {parameter.kind for parameter in offered.values()}
            if not {inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL} <= open_ended:
                assert list(offered)[: len(asked)] == list(asked), (
                    f"{name} has the parameters {list(offered)}, expected {list(asked)}"
                )

    def test_manifest_and_settings_load_without_torch(self) -> None:
        modules = {self.target, self.manifest.config, self.manifest.present or ""}
        imports = ", ".join(sorted(target.partition(":")[0] for target in modules if target))
        code = f"import sys; sys.path[:] = {sys.path!r}; import {imports}; sys.exit('torch' in sys.modules)"
        done = subprocess.run([sys.executable, "-c", code], timeout=250, check=False, capture_output=True, text=True)
        assert done.returncode == 0, f"importing {imports} imports torch, or fails:\n{done.stderr}"

    def test_settings_have_defaults_and_survive_pickling(self) -> None:
        if self.manifest.config:
            settings = _imported(self.manifest.config)()
            assert pickle.loads(pickle.dumps(settings)) == settings

    def test_settings_survive_the_way_through_the_environment(self) -> None:
        if self.manifest.config and settings_of(_imported(self.manifest.config)):
            config = _imported(self.manifest.config)
            usual, changed = from_environment(config, {}), list(_changed_by_one_variable(config))
            for settings in (usual, *changed):
                assert from_environment(config, to_environment(settings)) == settings
            if any(known.variable for known in settings_of(config).values()):
                assert any(settings != usual for settings in changed), "no environment variable changes a setting"

    def test_memory_plans_set_fields_of_the_settings(self) -> None:
        if not self.manifest.memory_plans:
            pytest.skip(f"the memory of {self.manifest.name} is not estimated")
        plans = memory_plans(self.manifest)
        assert any(plans.trains_on(processes) for processes in (1, 2, 8)), (
            "there is no memory plan for 1, 2 or 8 processes"
        )
        known = settings_of(_imported(self.manifest.config)) if self.manifest.config else {}
        for variant, recompute in itertools.product(plans.variants, (False, True)):
            for name, value in plans.settings(variant, ("Block",), recompute).items():
                assert name in known, f"{name} is not a setting of the backend"
                assert known[name].flag, f"{name} has no launch flag"
                assert known[name].key, f"{name} has no key in the config file"
                assert known[name].parse(known[name].type.format(value), "plan") is not None

    def test_presence_is_answered_by_yes_or_no(self, run: Run) -> None:
        if self.manifest.present is not None:
            assert all(isinstance(answer, bool) for answer in run(tasks.is_present, self.case()))

    # ---------------------------------------------------------------------- preparing

    def test_checking_changes_nothing(self, run: Run) -> None:
        for answer in run(tasks.check_twice, self.case()):
            assert all(answer.values()), answer

    def test_the_optimizer_holds_the_parameters_that_train(self, run: Run) -> None:
        for answer in run(tasks.look_at_prepared, self.case()):
            assert (answer["held_but_not_trained"], answer["trained_but_not_held"], answer["held_twice"]) == (0, 0, 0)

    def test_unwrapping_gives_the_users_model(self, run: Run) -> None:
        names = sorted(name for name, _ in self.case().make().named_parameters())
        for answer in run(tasks.look_at_prepared, self.case()):
            assert answer["is_users_class"]
            assert answer["names"] == names
            assert answer["same_again"]

    def test_forward_computes_what_the_plain_model_computes_also_after_unwrapping(self, run: Run) -> None:
        for answer in run(tasks.forward_and_unwrap, self.case()):
            assert answer["first"] == self.near(answer["plain"])
            assert answer["second"] == answer["first"]

    def test_forward_takes_names_and_the_model_follows_eval_and_train(self, run: Run) -> None:
        for answer in run(tasks.call_as_users_do, self.case()):
            assert answer["named"] == self.near(answer["plain"])
            assert answer["modes"] == [{False}, {True}]

    def test_slices_cover_the_batch(self, run: Run) -> None:
        answers = run(tasks.train, self.case(steps=1))
        shards = [answer["shards"] for answer in answers]
        counts, indices = {count for count, _ in shards}, {index for _, index in shards}
        assert len(counts) == 1
        count = counts.pop()
        assert indices == set(range(count))
        if not self.capabilities.elastic:
            assert {answer["batches_per_step"] for answer in answers} == {count}

    def test_a_model_that_is_only_evaluated_needs_no_optimizer(self, run: Run) -> None:
        for answer in run(tasks.prepare_without_optimizer, self.case()):
            assert answer["outputs"] == self.near(answer["plain"])

    @needs("state_dict")
    def test_init_module_gives_a_model_the_values_of_the_first_process(self, run: Run) -> None:
        for answer in run(tasks.build_inside, self.case()):
            assert answer["weights"] == self.near(answer["expected"])

    @needs("exact_gradients", "state_dict")
    def test_an_optimizer_of_whole_matrices_trains_as_in_one_process_or_is_refused(self, run: Run) -> None:
        """Muon computes in bfloat16, so its updates agree to two digits."""
        answers = run(tasks.train_or_refuse, self.case(muon=True))
        if not any("refused" in answer for answer in answers):
            expected = Plain(self.case(muon=True)).run().weights()
            for weights in self.written(answers):
                for name, values in expected.items():
                    assert torch.allclose(torch.tensor(weights[name]), torch.tensor(values), atol=0.01), name
        else:
            assert all("refused" in answer for answer in answers), "only some processes refuse it"

    @needs("several_models", "exact_gradients")
    def test_several_models_train_side_by_side(self, run: Run) -> None:
        expected = tasks.several_models_plain(self.case())
        for weights in self.written(run(tasks.several_models, self.case())):
            assert weights == self.near(expected)

    @needs("no_sync", "several_models", "equal_replicas")
    def test_no_sync_holds_back_the_model_that_is_given(self, run: Run) -> None:
        for answer in run(tasks.no_sync_of_one, self.case()):
            assert answer["inside"][0] == answer["outside"][0]
            assert self.processes == 1 or answer["inside"][1] < answer["outside"][1]

    def test_set_up_makes_all_processes_start_with_the_weights_of_the_first(self, run: Run) -> None:
        """Each process creates its model from a different seed; afterwards weights and buffers are equal."""
        answers = run(tasks.look_at_start, self.case())
        for weights in self.written(answers):
            assert weights == answers[0]["first"]
        for answer in answers:
            assert answer["buffers"] == answers[0]["buffers"]

    def test_set_up_leaves_each_process_its_random_numbers(self, run: Run) -> None:
        """Processes with different samples have different dropout masks."""
        draws = {answer["shard"]: answer["draws"] for answer in run(tasks.look_at_start, self.case())}
        assert len({tuple(numbers) for numbers in draws.values()}) == len(draws)

    def test_a_loader_gives_every_batch_in_each_epoch(self, run: Run) -> None:
        for answer in run(tasks.read_loader, self.case()):
            assert answer["epochs"] == [answer["expected"]] * 2
            assert answer["length"] == len(answer["expected"])

    def test_settings_of_another_backend_are_refused(self, run: Run) -> None:
        if self.manifest.config:
            assert set(run(tasks.refuse_foreign_settings, self.case())) == {"Conflict"}

    # ----------------------------------------------------------------------- training

    @needs("exact_gradients")
    @pytest.mark.parametrize("adam", [False, True])
    def test_losses_equal_those_of_one_process(self, run: Run, adam: bool) -> None:
        case = self.case(adam=adam)
        for answer in run(tasks.train, case):
            assert answer["losses"] == self.near(Plain(case).run().losses)

    @needs("exact_gradients")
    @pytest.mark.parametrize("adam", [False, True])
    def test_weights_equal_those_of_one_process(self, run: Run, adam: bool) -> None:
        case = self.case(adam=adam)
        for weights in self.written(run(tasks.train, case)):
            assert weights == self.near(Plain(case).run().weights())

    def test_weights_follow_the_reference_after_every_step(self, run: Run) -> None:
        """The author's `reference`, with other optimizers and accumulation."""
        if type(self).reference is BackendSuite.reference:
            pytest.skip(f"the suite of {self.manifest.name} has no reference()")
        for changes in _FOLLOWED:
            case = self.case(steps=tasks.FOLLOWED, **changes)
            answers = run(tasks.follow, case)
            batches = [answer["batches"] for answer in answers]
            for step in range(1, case.steps + 1):
                expected = self.reference(case, [steps[:step] for steps in batches])
                for answer, weights in zip(answers, expected, strict=True):
                    found = answer["weights"][step - 1]
                    assert not found or found == self.near(_lists(weights)), f"after step {step} with {changes}"

    @pytest.mark.parametrize("adam", [False, True])
    def test_equal_data_on_all_processes_trains_as_one_process(self, run: Run, adam: bool) -> None:
        """With the settings `neutral`."""
        if self.neutral is None and not self.capabilities.exact_gradients:
            pytest.skip(f"the suite of {self.manifest.name} has no neutral settings")
        case = self.case(adam=adam, steps=tasks.FOLLOWED)
        if self.neutral is not None:
            case = case.but(config=self.neutral)
        plain = Plain(case).run(tasks.equal_parts(case))
        for answer in run(tasks.train_on_equal_data, case):
            assert answer["losses"] == self.near(plain.losses)
            assert not answer["weights"] or answer["weights"] == self.near(plain.weights())

    def test_a_learning_rate_of_zero_moves_nothing(self, run: Run) -> None:
        for answer in run(tasks.train_at_rate_zero, self.case(steps=tasks.FOLLOWED)):
            assert answer["after"] == self.near(answer["before"])

    @with_the_kits_models
    def test_a_convex_loss_falls(self, run: Run) -> None:
        """Softmax regression on the same samples in every step, at a small learning rate."""
        answers = run(tasks.train_on_a_convex_loss, self.case(model="convex", steps=tasks.FOLLOWED))
        for answer in answers:
            assert not answer["weights_written"] or answer["after"] < answer["before"]
        assert answers[0]["weights_written"]

    @needs("several_models")
    def test_another_model_beside_changes_nothing(self, run: Run) -> None:
        """Two models with an optimizer each train in turn, as each of them trains alone."""
        answers = run(tasks.train, self.case(beside=True))
        alone = [run(tasks.train_alone, self.case(), seed) for seed in (0, 2)]
        for rank, answer in enumerate(answers):
            assert answer["weights"] == self.near(alone[0][rank]["weights"])
            assert answer["beside"] == self.near([alone[1][rank]["weights"]])

    def test_completing_gradients_again_leaves_them_as_they_are(self, run: Run) -> None:
        for answer in run(tasks.complete_twice, self.case()):
            assert answer["again"] == self.near(answer["once"])

    @with_the_kits_models
    @needs("unused_parameters", "equal_replicas")
    def test_processes_may_use_different_parameters(self, run: Run) -> None:
        """Each process trains another head, so no head has a gradient everywhere."""
        case = self.case(model="branching", steps=3)
        answers = run(tasks.train_branches, case)
        written = self.written(answers)
        assert all(weights == written[0] for weights in written), (
            "the replicas differ when a parameter has a gradient on some processes only: average it with zeros for the "
            "others, or declare Capabilities(unused_parameters=False)"
        )
        if self.capabilities.exact_gradients:
            assert written[0] == self.near(tasks.train_branches_plain(case, [answer["shard"] for answer in answers]))

    def test_schedulers_step_once_at_each_step(self, run: Run) -> None:
        case = self.case(scheduled=True)
        for answer in run(tasks.train, case):
            assert answer["rates"] == self.near(Plain(case).run().rates)

    @needs("exact_gradients")
    def test_the_learning_rate_of_a_schedule_changes_weights_as_in_one_process(self, run: Run) -> None:
        case = self.case(scheduled=True)
        for weights in self.written(run(tasks.train, case)):
            assert weights == self.near(Plain(case).run().weights())

    @needs("exact_gradients")
    def test_groups_of_parameters_keep_their_options(self, run: Run) -> None:
        case = self.case(grouped=True)
        for weights in self.written(run(tasks.train, case)):
            assert weights == self.near(Plain(case).run().weights())

    @needs("equal_replicas")
    def test_weights_are_the_same_on_all_processes(self, run: Run) -> None:
        written = self.written(run(tasks.train, self.case()))
        assert all(weights == written[0] for weights in written)

    @needs("exact_gradients")
    def test_a_smaller_last_batch_trains_too(self, run: Run) -> None:
        case = self.case(tail=12)
        for answer in run(tasks.train, case):
            assert answer["losses"] == self.near(Plain(case).run().losses)

    @needs("exact_gradients")
    def test_gradients_are_those_of_one_process(self, run: Run) -> None:
        for gradients in run(tasks.gradients_of, self.case()):
            assert gradients == self.near(tasks.gradients_plain(self.case()))

    @needs("exact_gradients")
    def test_backward_passes_its_arguments_on(self, run: Run) -> None:
        if self.capabilities.loss_in_forward:
            pytest.skip(f"forward of {self.manifest.name} computes the gradients")
        expected = {name: _doubled(value) for name, value in tasks.gradients_plain(self.case()).items()}
        for gradients in run(tasks.weighted_backward, self.case()):
            assert gradients == self.near(expected)

    @needs("exact_gradients")
    def test_a_closure_computes_the_gradients_of_a_step_or_is_refused(self, run: Run) -> None:
        case = self.case()
        for answer in run(tasks.step_with_closure, case):
            assert answer["refused"] in ("", "NotOffered")
            assert not answer["weights"] or answer["weights"] == self.near(Plain(case).run().weights())

    @with_the_kits_models
    @needs("exact_gradients")
    def test_tied_weights_train_as_in_one_process(self, run: Run) -> None:
        case = self.case(model="tied")
        for gradients in run(tasks.gradients_of, case):
            assert gradients == self.near(tasks.gradients_plain(case))
        for weights in self.written(run(tasks.train, case)):
            assert weights == self.near(Plain(case).run().weights())

    @with_the_kits_models
    @needs("exact_gradients")
    def test_frozen_weights_stay_while_others_train_as_in_one_process(self, run: Run) -> None:
        case = self.case(model="frozen")
        for weights in self.written(run(tasks.train, case)):
            assert weights == self.near(Plain(case).run().weights())

    @needs("exact_gradients")
    @pytest.mark.parametrize("accumulation", [2, 3])
    def test_accumulation_equals_the_big_batch(self, run: Run, accumulation: int) -> None:
        case = self.case(accumulation=accumulation)
        for answer in run(tasks.train, case):
            assert answer["losses"] == self.near(Plain(case).run().losses)

    @needs("exact_gradients")
    def test_accumulation_without_holding_back_equals_the_big_batch(self, run: Run) -> None:
        case = self.case(accumulation=3, no_sync=False)
        for answer in run(tasks.train, case):
            assert answer["losses"] == self.near(Plain(case).run().losses)

    @needs("no_sync", "equal_replicas")
    def test_no_sync_reduces_nothing_and_is_over_afterwards(self, run: Run) -> None:
        for answer in run(tasks.count_collectives, self.case()):
            assert (answer["held"][1], answer["nested"][1]) == (0, 0)
            # The first forward under `no_sync` may still broadcast buffers before it computes anything.
            assert answer["nested"][0] == 0 or not self.capabilities.local_passes
            assert answer["again"][1] == answer["sync"][1]
            if self.processes > 1:
                assert answer["sync"][0] > answer["held"][0]
                assert 2 * answer["again"][0] > answer["nested"][0]

    @needs("no_sync", "exact_gradients")
    def test_a_late_sync_gives_complete_gradients(self, run: Run) -> None:
        for gradients in run(tasks.gradients_of, self.case(), True):
            assert gradients == self.near(tasks.gradients_plain(self.case()))

    @needs("join")
    def test_processes_may_run_out_of_batches(self, run: Run) -> None:
        written = self.written(run(tasks.join_uneven, self.case()))
        assert all(weights == written[0] for weights in written)

    @needs("average_parameters")
    def test_averaging_gives_everyone_the_mean(self, run: Run) -> None:
        answers = run(tasks.average, self.case())
        for weights in self.written(answers):
            for name, _ in self.case().make().named_parameters():
                assert set(_flat(weights[name])) == {answers[0]["mean"]}

    # ------------------------------------------------------------------------ clipping

    @needs("exact_gradients")
    @pytest.mark.parametrize(("limit", "norm_type"), [(0.05, 2.0), (0.05, 1.0), (0.01, float("inf")), (1e6, 2.0)])
    def test_clipping_to_a_norm_equals_that_of_one_process(self, run: Run, limit: float, norm_type: float) -> None:
        if self.capabilities.own_clipping:
            pytest.skip(f"the engine of {self.manifest.name} clips when it steps")
        case = self.case(clip_norm=limit, norm_type=norm_type)
        expected = tasks.clipped_plain(case)
        for answer in run(tasks.clipped_gradients, case):
            assert answer["gradients"] == self.near(expected["gradients"])
            assert answer["norm"] is None or answer["norm"] == self.near(expected["norm"])

    @needs("clip_value", "exact_gradients")
    def test_clipping_to_a_value_equals_that_of_one_process(self, run: Run) -> None:
        case = self.case(clip_value=0.01)
        for answer in run(tasks.clipped_gradients, case):
            assert answer["gradients"] == self.near(tasks.clipped_plain(case)["gradients"])

    @needs("exact_gradients")
    def test_training_with_clipping_equals_that_of_one_process(self, run: Run) -> None:
        case = self.case(clip_norm=0.1)
        plain = Plain(case).run()
        for answer in run(tasks.train, case):
            assert answer["losses"] == self.near(plain.losses)
            if None not in answer["norms"]:
                assert answer["norms"] == self.near(plain.norms)

    # ----------------------------------------------------------------------- precision

    def test_bf16_computes_narrow_and_answers_in_fp32(self, run: Run) -> None:
        for answer in run(tasks.compute_dtype, self.case(precision="bf16")):
            assert (answer["inside"], answer["outside"]) == ("torch.bfloat16", "torch.float32")

    @pytest.mark.parametrize("precision", ["bf16", "fp16"])
    def test_mixed_precision_stays_near_full_precision(self, run: Run, precision: str) -> None:
        if precision == "fp16" and not self.capabilities.fp16:
            pytest.skip(f"{self.manifest.name} declares that it lacks fp16")
        answers = run(tasks.train, self.case(precision=precision))
        for answer, expected in zip(answers, self.expected(run, self.case()), strict=True):
            assert answer["losses"] == pytest.approx(expected["losses"], rel=0.05)

    @needs("fp16", "equal_replicas")
    def test_an_overflow_anywhere_skips_the_step_everywhere(self, run: Run) -> None:
        for answer in run(tasks.overflow, self.case(precision="fp16")):
            assert answer == {"stepped": [False, True], "unchanged": True}

    @needs("fp16", "exact_gradients")
    def test_clipping_sees_unscaled_gradients(self, run: Run) -> None:
        if self.capabilities.own_clipping:
            pytest.skip(f"the engine of {self.manifest.name} clips when it steps")
        case = self.case(precision="fp16", clip_norm=0.05)
        expected = tasks.clipped_plain(case)["norm"]
        for answer in run(tasks.clipped_gradients, case):
            assert answer["norm"] is None or answer["norm"] == pytest.approx(expected, rel=0.05)

    # --------------------------------------------------------------------- checkpoints

    @needs("state_dict")
    def test_weights_go_into_a_plain_model_and_back(self, run: Run) -> None:
        answers = run(tasks.weights_out_and_in, self.case())
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
        for answer in run(tasks.load_into_a_longer_model, self.case(), str(tmp_path)):
            assert answer == {"refused": True, "loaded": True}

    @needs("state_dict")
    def test_a_state_dict_has_every_name_of_the_users_model(self, run: Run) -> None:
        for weights in self.written(run(tasks.train, self.case())):
            assert sorted(weights) == sorted(self.case().make().state_dict())

    @needs("exact_resume")
    @pytest.mark.parametrize("adam", [False, True])
    def test_a_resumed_run_goes_on_bit_for_bit(self, run: Run, tmp_path: Path, adam: bool) -> None:
        """Save inside an accumulation window, resume, and compare weights and all states after further steps."""
        for answer in run(tasks.save_and_resume, self.case(adam=adam), str(tmp_path)):
            assert answer["step"] == tasks.SAVED
            assert answer["same_weights"]
            assert answer["differs_after_loading"] == []
            assert answer["resumed"] == answer["expected"]
            assert answer["differs_at_the_end"] == []
            assert answer["rates"][0] == answer["rates"][1]

    @with_the_kits_models
    @needs("exact_resume")
    def test_frozen_weights_are_restored(self, run: Run, tmp_path: Path) -> None:
        for answer in run(tasks.save_and_resume, self.case(model="frozen"), str(tmp_path)):
            assert answer["same_weights"]
            assert answer["differs_at_the_end"] == []

    @needs("exact_resume", "several_models")
    def test_a_run_of_two_models_resumes_bit_for_bit(self, run: Run, tmp_path: Path) -> None:
        for answer in run(tasks.save_and_resume, self.case(beside=True), str(tmp_path)):
            assert answer["differs_after_loading"] == []
            assert answer["resumed"] == answer["expected"]
            assert answer["differs_at_the_end"] == []

    def test_weights_of_the_run_are_the_same_everywhere_and_leave_training_alone(self, run: Run) -> None:
        answers = run(tasks.weights_of_the_run, self.case())
        assert [answer["changed"] for answer in answers] == [[]] * len(answers)
        own = strategy_class(self.manifest).global_weights is Strategy.global_weights
        if not own or self.capabilities.equal_replicas:
            written = [answer["inside"] for answer in answers if answer["inside"]]
            assert all(weights == written[0] for weights in written)

    def test_saving_does_not_disturb_training(self, run: Run, tmp_path: Path) -> None:
        without = run(tasks.train_with_saves, self.case(), str(tmp_path), False)
        assert run(tasks.train_with_saves, self.case(), str(tmp_path), True) == without

    def test_loading_from_an_empty_folder_is_an_error_with_a_remedy(self, run: Run, tmp_path: Path) -> None:
        for answer in run(tasks.load_from_nothing, self.case(), str(tmp_path)):
            assert set(answer) <= {"CheckpointError"}

    def test_a_layer_around_the_model_changes_nothing(self, run: Run, tmp_path: Path) -> None:
        """The strategy does not receive the wrapper of `torch.compile`, and unwrapping removes it."""
        case = self.case(accumulation=2)
        answers = run(tasks.behind_a_layer, case, str(tmp_path))
        for answer, expected in zip(answers, self.expected(run, case), strict=True):
            assert answer["losses"] == self.near(expected["losses"])
            assert not answer["weights"] or answer["weights"] == self.near(expected["weights"])
            assert answer["is_users_class"]
            assert answer["loaded"]
            assert answer["held"][1] == 0 or not self.capabilities.no_sync
        self.written(answers)

    # ---------------------------------------------------------------- what the engine does

    def test_shares_of_each_step_make_up_its_samples_and_steps_are_counted(self, run: Run) -> None:
        """As long as no process leaves, all make the same steps, and each step's samples are divided among them."""
        if not self.capabilities.elastic:
            pytest.skip(f"the processes of {self.manifest.name} do not change during a run")
        answers = run(tasks.read_steps, self.case())
        steps = list(dict.fromkeys(share["step"] for share in answers[0]))
        for step in steps:
            shares = [[share for share in answer if share["step"] == step] for answer in answers]
            assert [[share["last"] for share in own] for own in shares] == [
                [*[False] * (len(own) - 1), True] for own in shares
            ]
            totals = {(share["total"], share["members"]) for own in shares for share in own}
            assert totals == {(sum(share["samples"] for own in shares for share in own), len(answers))}
        if self.capabilities.equal_replicas:
            assert steps == [steps[0], steps[0] + 1]

    def test_nothing_keeps_a_model_that_was_released(self, run: Run) -> None:
        for answer in run(tasks.release, self.case()):
            assert answer == {"model": False, "optimizer": False}

    def test_a_strategy_can_be_closed_and_another_follow(self, run: Run) -> None:
        answers = run(tasks.close_at_the_end, self.case())
        for answer, expected in zip(answers, self.expected(run, self.case()), strict=True):
            assert answer["losses"] == self.near(expected["losses"])
            assert answer["read"]

    @needs("several_models", "exact_gradients")
    def test_others_train_on_when_a_model_is_released(self, run: Run) -> None:
        case = self.case()
        for weights in self.written(run(tasks.release_another, case)):
            assert weights == self.near(Plain(case).run().weights())

    @needs("exact_gradients")
    def test_the_engine_does_what_is_declared_as_its_own(self, run: Run) -> None:
        """If a strategy owns accumulation, clipping or precision, no other code does it."""
        if self.capabilities.own_accumulation:
            self.test_accumulation_equals_the_big_batch(run, 2)
        if self.capabilities.own_clipping:
            self.test_training_with_clipping_equals_that_of_one_process(run)
        if self.capabilities.own_precision:
            self.test_bf16_computes_narrow_and_answers_in_fp32(run)


def _imported(target: str) -> Any:
    module, _, attribute = target.partition(":")
    return getattr(importlib.import_module(module), attribute)


def _changed_by_one_variable(config: type) -> Iterator[Any]:
    """Settings objects that differ from the default in one field, for each field that has an environment variable."""
    for known in settings_of(config).values():
        for text in (*reversed(known.type.choices), "3", "0.5", "true", "false", "text") if known.variable else ():
            with contextlib.suppress(AccelError, ValueError):
                if known.type.parse(text) != known.default:
                    yield from_environment(config, {str(known.variable): text})
                    break


_FOLLOWED: Final[tuple[dict[str, Any], ...]] = ({}, {"adam": True}, {"grouped": True}, {"accumulation": 2})
"""The runs that the author's reference follows."""


def _lists(weights: Mapping[str, Tensor]) -> dict[str, Any]:
    return {name: value.tolist() for name, value in weights.items()}


def _doubled(values: Any) -> Any:
    return [_doubled(value) for value in values] if isinstance(values, list) else 2 * values


def _flat(values: Any) -> Iterator[float]:
    if isinstance(values, list):
        for value in values:
            yield from _flat(value)
    else:
        yield values


def _expected_to_fail(test: Any) -> bool:
    marks = getattr(test, "pytestmark", ())
    return any(mark.name == "xfail" and mark.kwargs.get("strict") and mark.kwargs.get("reason") for mark in marks)
