"""Backends with one thing wrong each; the suite has to catch every one of them by the test that is named for it."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import torch
from torch import nn

from accel_plugins import Ability, Bundle, Duty, Manifest, Part, Shards
from accel_plugins.ddp.manifest import MANIFEST
from accel_plugins.ddp.strategy import DDPStrategy
from accel_plugins.strategy import Strategy


def manifest(strategy: type[Strategy], **changes: Any) -> Manifest:
    """The manifest of ddp, leading to a broken strategy."""
    return dataclasses.replace(MANIFEST, strategy=f"broken_backends:{strategy.__name__}", **changes)


class LosesAGradient(DDPStrategy):
    def before_gradients_are_read(self, optimizer: Any) -> None:
        optimizer.param_groups[0]["params"][0].grad = None


class ForgetsToDivide(DDPStrategy):
    def backward(self, loss: Any, **kwargs: Any) -> None:
        super().backward(loss * self.context.process.world_size, **kwargs)


class NeverSynchronises(DDPStrategy):
    def setup(self, bundle: Bundle) -> Bundle:
        return bundle


class SynchronisesWhenToldNotTo(DDPStrategy):
    def no_sync(self, model: Any) -> Any:
        return Strategy.no_sync(self, model)


class StaysUnsynchronised(DDPStrategy):
    """Forgets to come back from `no_sync`."""

    def no_sync(self, model: Any) -> Any:
        model.require_backward_grad_sync = False
        return Strategy.no_sync(self, model)


class IgnoresALateSync(DDPStrategy):
    def sync_in_next_backward(self, model: Any) -> Any:
        return Strategy.sync_in_next_backward(self, model)


class DropsAStateKey(DDPStrategy):
    def state_dict(self, model: Any) -> Any:
        state = super().state_dict(model)
        state.pop("factor")
        return state


class NamesWeightsItsOwnWay(DDPStrategy):
    def state_dict(self, model: Any) -> Any:
        return {f"module.{name}": value for name, value in super().state_dict(model).items()}


class LoadsNoOptimizer(DDPStrategy):
    def load(self, part: Part, item: Any, folder: Path, index: int, **options: Any) -> None:
        if part is not Part.OPTIMIZER:
            super().load(part, item, folder, index, **options)


class LoadsAnythingFromNowhere(DDPStrategy):
    def load(self, part: Part, item: Any, folder: Path, index: int, **options: Any) -> None:
        if any(folder.iterdir()):
            super().load(part, item, folder, index, **options)


class TouchesWeightsWhileSaving(DDPStrategy):
    def collect(self, part: Part, item: Any) -> Any:
        if part is Part.MODEL:
            with torch.no_grad():
                next(item.parameters()).mul_(1.01)
        return super().collect(part, item)


class UnwrapsNothing(DDPStrategy):
    def unwrap(self, model: Any) -> Any:
        return model


class BreaksWhatItUnwraps(DDPStrategy):
    def unwrap(self, model: Any) -> Any:
        bare = super().unwrap(model)
        with torch.no_grad():
            bare.head.bias.add_(1)
        return bare


class ReplacesParametersBehindTheOptimizer(DDPStrategy):
    def setup(self, bundle: Bundle) -> Bundle:
        for model in bundle.models:
            model.head = nn.Linear(model.head.in_features, model.head.out_features)  # type: ignore[assignment]
        return super().setup(bundle)


class ChangesWhatItChecks(DDPStrategy):
    def check(self, bundle: Bundle) -> None:
        for model in bundle.models:
            model.double()


class GivesEveryoneTheSameSlice(DDPStrategy):
    def shards(self) -> Shards:
        return Shards(self.context.process.world_size, 0)


class ClipsNothing(DDPStrategy):
    def clip_norm(self, parameters: Any, max_norm: float, norm_type: float = 2.0) -> Any:
        return super().clip_norm(parameters, float("inf"), norm_type)


class ClipsBehindItsBack(DDPStrategy):
    """Says that it clips by itself, and does not."""

    def clip_norm(self, parameters: Any, max_norm: float, norm_type: float = 2.0) -> Any:
        return None


class ClipsNoValues(DDPStrategy):
    def clip_value(self, parameters: Any, value: float) -> None:
        """Nothing."""


class StepsThroughAnOverflow(DDPStrategy):
    def step(self, optimizer: Any, closure: Any = None) -> bool:
        optimizer.step()
        return True


class AveragesNothing(DDPStrategy):
    def average_parameters(self, model: Any) -> None:
        """Nothing."""


class SaysItCastsAndDoesNot(DDPStrategy):
    """Declares the duty PRECISION."""


class SaysItAccumulatesAndDoesNot(DDPStrategy):
    """Declares the duty ACCUMULATION."""


class TakesOtherArguments(DDPStrategy):
    def clip_value(self, value: float) -> None:  # type: ignore[override]
        """Another signature."""


class MixesUpModels(DDPStrategy):
    def setup(self, bundle: Bundle) -> Bundle:
        super().setup(bundle)
        bundle.models.reverse()
        return bundle


# Where each is caught: (strategy, changes of the manifest, name of the test, further arguments of the test).
CAUGHT_BY: list[tuple[type[Strategy], dict[str, Any], str, tuple[Any, ...]]] = [
    (LosesAGradient, {}, "test_gradients_are_those_of_one_process", ()),
    (LosesAGradient, {}, "test_losses_equal_those_of_one_process", (False,)),
    (ForgetsToDivide, {}, "test_losses_equal_those_of_one_process", (False,)),
    (NeverSynchronises, {}, "test_weights_are_the_same_on_all_processes", ()),
    (NeverSynchronises, {}, "test_weights_equal_those_of_one_process", (False,)),
    (SynchronisesWhenToldNotTo, {}, "test_no_sync_reduces_nothing_and_is_over_afterwards", ()),
    (StaysUnsynchronised, {}, "test_no_sync_reduces_nothing_and_is_over_afterwards", ()),
    (StaysUnsynchronised, {}, "test_accumulation_equals_the_big_batch", (2,)),
    (IgnoresALateSync, {}, "test_a_late_sync_gives_complete_gradients", ()),
    (DropsAStateKey, {}, "test_a_state_dict_has_every_name_of_the_users_model", ()),
    (NamesWeightsItsOwnWay, {}, "test_a_state_dict_has_every_name_of_the_users_model", ()),
    (LoadsNoOptimizer, {}, "test_a_resumed_run_goes_on_bit_for_bit", ("folder", False)),
    (LoadsAnythingFromNowhere, {}, "test_loading_from_an_empty_folder_is_an_error_with_a_remedy", ("folder",)),
    (TouchesWeightsWhileSaving, {}, "test_saving_does_not_disturb_training", ("folder",)),
    (UnwrapsNothing, {}, "test_unwrapping_gives_the_users_model", ()),
    (BreaksWhatItUnwraps, {}, "test_forward_computes_what_the_plain_model_computes_also_after_unwrapping", ()),
    (ReplacesParametersBehindTheOptimizer, {}, "test_the_optimizer_holds_the_parameters_that_train", ()),
    (ChangesWhatItChecks, {}, "test_checking_changes_nothing", ()),
    (GivesEveryoneTheSameSlice, {}, "test_slices_cover_the_batch", ()),
    (ClipsNothing, {}, "test_clipping_to_a_norm_equals_that_of_one_process", (0.05, 2.0)),
    (ClipsBehindItsBack, {"owns": frozenset({Duty.CLIPPING})}, "test_a_declared_duty_is_really_taken", ()),
    (ClipsNoValues, {}, "test_clipping_to_a_value_equals_that_of_one_process", ()),
    (StepsThroughAnOverflow, {}, "test_an_overflow_anywhere_skips_the_step_everywhere", ()),
    (AveragesNothing, {}, "test_averaging_gives_everyone_the_mean", ()),
    (SaysItCastsAndDoesNot, {"owns": frozenset({Duty.PRECISION})}, "test_a_declared_duty_is_really_taken", ()),
    (SaysItAccumulatesAndDoesNot, {"owns": frozenset({Duty.ACCUMULATION})}, "test_a_declared_duty_is_really_taken", ()),
    (TakesOtherArguments, {}, "test_the_strategy_is_one_and_keeps_the_signatures", ()),
    (MixesUpModels, {}, "test_several_models_train_side_by_side", ()),
]

LACKING = manifest(NeverSynchronises, lacks=frozenset(Ability))
