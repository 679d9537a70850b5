"""The test kit finds the planted faults of the catalogues of backends, and lets their originals pass."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

import pytest
from catalogues import broken_backends, compressing_backends, local_step_backends
from suites_of_the_catalogues import CompressedSuite, ExactSuite, LocalStepsSuite, SuiteOfACatalogue

from accel_testing.backends import BackendSuite
from accel_testing.processes import Processes

HERE = str(Path(__file__).parent)

TRAINING: Final = "training_equals_that_of_one_process"

FOUND_BY: Final[dict[str, tuple[str, dict[str, Any]]]] = {
    "buffers_never_shared": ("set_up_makes_all_processes_start_with_the_weights_of_the_first", {}),
    "divided_by_passes": (TRAINING, {"changes": {"accumulation": 2}}),
    "no_sync_of_the_first_model": ("no_sync_holds_back_the_model_that_is_given", {}),
    "reduced_in_step": ("gradients_are_those_of_one_process", {}),
    "scheduler_of_each_process": ("schedulers_step_once_at_each_step", {}),
    "prefixed_weights": ("a_state_dict_has_every_name_of_the_users_model", {}),
    "learning_rate_not_loaded": ("a_resumed_run_goes_on_bit_for_bit", {"adam": False}),
    "same_dropout_everywhere": ("set_up_leaves_each_process_its_random_numbers", {}),
    "frozen_weights_not_loaded": ("frozen_weights_are_restored", {}),
    "tied_weight_divided_twice": (TRAINING, {"changes": {"model": "tied"}}),
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

REFERENCE: Final = "weights_follow_the_reference_after_every_step"
RESUME: Final = "a_resumed_run_goes_on_bit_for_bit"

FOUND_IN_LOCAL_STEPS_BY: Final[dict[str, tuple[str, dict[str, Any]]]] = {
    "sum_of_the_differences": ("equal_data_on_all_processes_trains_as_one_process", {"adam": False}),
    "averaged_twice": ("equal_data_on_all_processes_trains_as_one_process", {"adam": False}),
    "wrong_sign": ("a_convex_loss_falls", {}),
    "anchor_never_moves": ("a_convex_loss_falls", {}),
    "nesterov_left_out": (REFERENCE, {}),
    "momentum_forgotten": (REFERENCE, {}),
    "outer_rate_ignored": (REFERENCE, {}),
    "outer_step_at_once": (REFERENCE, {}),
    "own_weights_as_global": ("weights_of_the_run_are_the_same_everywhere_and_leave_training_alone", {}),
    "global_weights_remain": ("weights_of_the_run_are_the_same_everywhere_and_leave_training_alone", {}),
    "biases_stay_local": (REFERENCE, {}),
    "counter_not_saved": (RESUME, {"adam": False}),
    "anchor_not_saved": (RESUME, {"adam": False}),
    "all_resume_from_the_first": (RESUME, {"adam": False}),
    "one_counter_for_all": ("another_model_beside_changes_nothing", {}),
}

FOUND_IN_COMPRESSION_BY: Final[dict[str, tuple[type[BackendSuite], str, dict[str, Any]]]] = {
    "sum_instead_of_mean": (ExactSuite, "gradients_are_those_of_one_process", {}),
    "error_left_out": (CompressedSuite, REFERENCE, {}),
    "error_subtracted": (CompressedSuite, REFERENCE, {}),
    "error_of_the_mean": (CompressedSuite, REFERENCE, {}),
    "scale_of_the_first_parameter": (CompressedSuite, REFERENCE, {}),
    "scale_without_the_error": (CompressedSuite, REFERENCE, {}),
    "message_in_bfloat16": (ExactSuite, "gradients_are_those_of_one_process", {}),
    "exchanged_again": (CompressedSuite, "completing_gradients_again_leaves_them_as_they_are", {}),
    "exchanged_in_each_pass": (ExactSuite, "no_sync_reduces_nothing_and_is_over_afterwards", {}),
    "first_group_only": (ExactSuite, TRAINING, {"changes": {"grouped": True}}),
    "small_parameters_stay_local": (ExactSuite, "gradients_are_those_of_one_process", {}),
    "missing_on_one_process": (ExactSuite, "processes_may_use_different_parameters", {}),
    "divided_by_passes": (ExactSuite, TRAINING, {"changes": {"accumulation": 2}}),
    "buffers_never_shared": (ExactSuite, "set_up_makes_all_processes_start_with_the_weights_of_the_first", {}),
    "residuals_not_saved": (CompressedSuite, RESUME, {"adam": False}),
    "residuals_of_the_first_process": (CompressedSuite, RESUME, {"adam": False}),
    "residuals_by_address": (CompressedSuite, RESUME, {"adam": False}),
    "residuals_of_models_collide": (CompressedSuite, "a_run_of_two_models_resumes_bit_for_bit", {}),
    "load_is_always_strict": (ExactSuite, "a_model_with_more_layers_loads_only_if_that_is_allowed", {}),
    "load_weights_is_never_strict": (ExactSuite, "weights_go_into_a_plain_model_and_back", {}),
    "one_batch_per_step": (ExactSuite, "slices_cover_the_batch", {}),
    "closure_ignored": (ExactSuite, "a_closure_computes_the_gradients_of_a_step_or_is_refused", {}),
    "keyword_arguments_dropped": (ExactSuite, "backward_passes_its_arguments_on", {}),
    "norm_after_clipping": (
        ExactSuite,
        "clipping_to_a_norm_equals_that_of_one_process",
        {"limit": 0.05, "norm_type": 2.0},
    ),
    "residuals_outlive_release": (ExactSuite, "nothing_keeps_a_model_that_was_released", {}),
}

Found = tuple[type[BackendSuite], Any, str, dict[str, Any]]

FINDINGS: Final[dict[str, Found]] = {
    **{name: (BackendSuite, broken_backends.CATALOGUE[name], *found) for name, found in FOUND_BY.items()},
    **{
        f"local steps: {name}": (LocalStepsSuite, local_step_backends.CATALOGUE[name], *found)
        for name, found in FOUND_IN_LOCAL_STEPS_BY.items()
    },
    **{
        f"compression: {name}": (suite, compressing_backends.CATALOGUE[name], *found)
        for name, (suite, *found) in FOUND_IN_COMPRESSION_BY.items()
    },
}


@pytest.fixture(scope="module")
def importable() -> Iterator[None]:
    """The processes import the catalogue from this folder."""
    sys.path.insert(0, HERE)
    yield
    sys.path.remove(HERE)


@pytest.fixture(scope="module")
def two(importable: None, processes: Callable[[int], Processes]) -> Processes:
    return processes(2)


def test_every_entry_is_found() -> None:
    assert FOUND_BY.keys() == broken_backends.CATALOGUE.keys()
    assert FOUND_IN_LOCAL_STEPS_BY.keys() == local_step_backends.CATALOGUE.keys()
    assert FOUND_IN_COMPRESSION_BY.keys() == compressing_backends.CATALOGUE.keys()


@pytest.mark.parametrize("name", FINDINGS)
def test_the_kit_finds_a_planted_fault(two: Processes, tmp_path: Path, name: str) -> None:
    base, entry, test, arguments = FINDINGS[name]
    suite = type("Suite", (base,), {"target": entry.target})()
    method = getattr(suite, f"test_{test}")
    assert suite.lacking(method) == []
    if "tmp_path" in inspect.signature(method).parameters:
        arguments = {**arguments, "tmp_path": tmp_path}
    with pytest.raises(AssertionError) as found:
        method(two.run, **arguments)
    assert type(found.value) is AssertionError, "the processes failed in place of a comparison"


@pytest.mark.slow
class TestAveraging(SuiteOfACatalogue):
    target = broken_backends.CONTROLS["averaging"].target


@pytest.mark.slow
class TestLocalSteps(SuiteOfACatalogue):
    target = broken_backends.CONTROLS["local_steps"].target


@pytest.mark.slow
class TestDiLoCo(LocalStepsSuite):
    target = local_step_backends.CATALOGUE.control.target


@pytest.mark.slow
class TestDiLoCoWithAnotherPeriod(LocalStepsSuite):
    target = local_step_backends.CATALOGUE.control.target
    config = local_step_backends.DiLoCoConfig(period=3, outer_rate=0.5, outer_momentum=0.8)


@pytest.mark.slow
class TestExactGradients(ExactSuite):
    target = compressing_backends.CATALOGUE.control.target


@pytest.mark.slow
class TestCompressedGradients(CompressedSuite):
    target = compressing_backends.CATALOGUE.control.target
