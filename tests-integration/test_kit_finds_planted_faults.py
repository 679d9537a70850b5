"""The test kit finds the planted faults of the catalogue of broken backends, and lets their originals pass."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

import pytest
from catalogues.broken_backends import CATALOGUE

from accel_testing.backends import BackendSuite
from accel_testing.processes import Processes

HERE = str(Path(__file__).parent)

FOUND_BY: Final[dict[str, tuple[str, dict[str, Any]]]] = {
    "buffers_never_shared": ("set_up_makes_all_processes_start_with_the_weights_of_the_first", {}),
    "divided_by_passes": ("accumulation_equals_the_big_batch", {"accumulation": 2}),
    "no_sync_of_the_first_model": ("no_sync_holds_back_the_model_that_is_given", {}),
    "reduced_in_step": ("gradients_are_those_of_one_process", {}),
    "scheduler_of_each_process": ("schedulers_step_once_at_each_step", {}),
    "prefixed_weights": ("a_state_dict_has_every_name_of_the_users_model", {}),
    "learning_rate_not_loaded": ("a_resumed_run_goes_on_bit_for_bit", {"adam": False}),
    "same_dropout_everywhere": ("set_up_leaves_each_process_its_random_numbers", {}),
    "frozen_weights_not_loaded": ("frozen_weights_are_restored", {}),
    "tied_weight_divided_twice": ("tied_weights_train_as_in_one_process", {}),
    "second_optimizer_left_behind": ("several_models_train_side_by_side", {}),
    "last_batch_lost": ("a_loader_gives_every_batch_in_each_epoch", {}),
    "unscaled_twice": ("clipping_sees_unscaled_gradients", {}),
    "skips_alone": ("an_overflow_anywhere_skips_the_step_everywhere", {}),
    "keeps_models": ("nothing_keeps_a_model_that_was_released", {}),
    "unsynchronised_start": ("set_up_makes_all_processes_start_with_the_weights_of_the_first", {}),
    "outer_momentum_forgotten": ("a_resumed_run_goes_on_bit_for_bit", {"adam": False}),
    "outer_counter_forgotten": ("a_resumed_run_goes_on_bit_for_bit", {"adam": False}),
}
"""By name of an entry: the test of the kit whose failure is the entry's finding, and arguments of the test."""

UNSEEN: Final[frozenset[str]] = frozenset()
"""Entries that every test of the kit passes."""


@pytest.fixture(scope="module")
def importable() -> Iterator[None]:
    """The processes import the catalogue from this folder."""
    sys.path.insert(0, HERE)
    yield
    sys.path.remove(HERE)


@pytest.fixture(scope="module")
def two(importable: None, processes: Callable[[int], Processes]) -> Processes:
    return processes(2)


def test_every_entry_is_found_or_listed_as_unseen() -> None:
    assert FOUND_BY.keys() | UNSEEN == CATALOGUE.keys()
    assert not FOUND_BY.keys() & UNSEEN


@pytest.mark.parametrize("name", FOUND_BY)
def test_the_kit_finds_a_planted_fault(two: Processes, tmp_path: Path, name: str) -> None:
    class Suite(BackendSuite):
        target = CATALOGUE[name].target

    test, arguments = FOUND_BY[name]
    method = getattr(Suite(), f"test_{test}")
    assert all(getattr(CATALOGUE[name].capabilities, need) for need in getattr(method, "needs", ()))
    if "tmp_path" in inspect.signature(method).parameters:
        arguments = {**arguments, "tmp_path": tmp_path}
    with pytest.raises(AssertionError) as found:
        method(two.run, **arguments)
    assert type(found.value) is AssertionError, "the processes failed in place of a comparison"


@pytest.mark.slow
class OfTheCatalogue(BackendSuite):
    """A control of the catalogue."""

    @pytest.fixture(scope="class")
    @classmethod
    def group(cls, importable: None) -> Iterator[Processes]:
        with Processes(cls.processes) as group:
            yield group

    @pytest.mark.xfail(strict=True, reason="the manifests of the catalogue are in one module with the strategies")
    def test_manifest_and_settings_load_without_torch(self) -> None:
        super().test_manifest_and_settings_load_without_torch()


class TestAveraging(OfTheCatalogue):
    target = "catalogues.broken_backends:averaging"


class TestLocalSteps(OfTheCatalogue):
    target = "catalogues.broken_backends:local_steps"
