"""Backends with one thing wrong each; the suite has to catch every one of them by the test that is named for it."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import nn

from accel_data import PreparedLoader
from accel_plugins import BatchShare, Bundle, Capabilities, Manifest, ModelPart, ObjectKind, Shards
from accel_plugins.ddp.manifest import MANIFEST
from accel_plugins.ddp.strategy import DDPStrategy
from accel_plugins.strategy import Strategy
from accel_state.settings.schema import INTEGER, ValueType, setting


def manifest(strategy: type[Strategy], **changes: Any) -> Manifest:
    """The manifest of ddp, leading to a broken strategy."""
    return dataclasses.replace(MANIFEST, strategy=f"broken_backends:{strategy.__name__}", **changes)


class LosesAGradient(DDPStrategy):
    def finalize_gradients(self, optimizer: Any) -> None:
        optimizer.param_groups[0]["params"][0].grad = None


class ForgetsToDivide(DDPStrategy):
    def backward(self, loss: Any, model: Any = None, **kwargs: Any) -> None:
        super().backward(loss * self.context.process.world_size, model, **kwargs)


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
    def load(self, kind: ObjectKind, item: Any, folder: Path, index: int, **options: Any) -> None:
        if kind is not ObjectKind.OPTIMIZER:
            super().load(kind, item, folder, index, **options)


class LoadsOnlyWhatAgrees(DDPStrategy):
    def load(self, kind: ObjectKind, item: Any, folder: Path, index: int, **options: Any) -> None:
        super().load(kind, item, folder, index, **{**options, "strict": True} if kind is ObjectKind.MODEL else options)


class LoadsTheSecondOptimizerNever(DDPStrategy):
    def load(self, kind: ObjectKind, item: Any, folder: Path, index: int, **options: Any) -> None:
        if (kind, index) != (ObjectKind.OPTIMIZER, 1):
            super().load(kind, item, folder, index, **options)


class AcceptsAllWeights(DDPStrategy):
    def load_weights(self, model: Any, weights: Any, strict: bool = True) -> None:
        super().load_weights(model, weights, strict=False)


class DriftsInEachStep(DDPStrategy):
    def after_step(self, model: Any, optimizer: Any) -> None:
        with torch.no_grad():
            for parameter in optimizer.param_groups[0]["params"]:
                parameter.add_(0.01)


class ClimbsTheLoss(DDPStrategy):
    def backward(self, loss: Any, model: Any = None, **kwargs: Any) -> None:
        super().backward(-loss, model, **kwargs)


class HalvesEverySecondStep(DDPStrategy):
    """Counts the steps of all optimizers by one counter."""

    steps = 0

    def step(self, optimizer: Any, closure: Any = None) -> bool:
        self.steps += 1
        if self.steps % 2 == 0:
            for parameter in optimizer.param_groups[0]["params"]:
                parameter.grad /= 2
        return super().step(optimizer, closure)


class HalvesWhatIsComplete(DDPStrategy):
    def finalize_gradients(self, optimizer: Any) -> None:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                parameter.grad /= 2


class CountsOneBatch(DDPStrategy):
    def batches_per_step(self) -> int:
        return 1


class LoadsAnythingFromNowhere(DDPStrategy):
    def load(self, kind: ObjectKind, item: Any, folder: Path, index: int, **options: Any) -> None:
        if any(folder.iterdir()):
            super().load(kind, item, folder, index, **options)


class TouchesWeightsWhileSaving(DDPStrategy):
    def collect(self, kind: ObjectKind, item: Any) -> Any:
        if kind is ObjectKind.MODEL:
            with torch.no_grad():
                next(item.parameters()).mul_(1.01)
        return super().collect(kind, item)


class UnwrapsNothing(DDPStrategy):
    def unwrap(self, model: Any) -> Any:
        return model


class Wrapper(nn.Module):
    """A wrapper that nobody but its backend knows."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.content = model

    def forward(self, inputs: torch.Tensor) -> Any:
        return self.content(inputs)


class LeavesItsOwnWrapperOn(DDPStrategy):
    """Wraps in a way of its own, and unwraps what others wrap in."""

    def setup(self, bundle: Bundle) -> Bundle:
        super().setup(bundle)
        bundle.models = [Wrapper(model) for model in bundle.models]
        return bundle

    def no_sync(self, model: Any) -> Any:
        return super().no_sync(model.content)

    def state_dict(self, model: Any) -> Any:
        return super().state_dict(model.content)


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


class RemembersTheFirstShape(DDPStrategy):
    """Computes nothing for a batch of another size than the first."""

    def setup(self, bundle: Bundle) -> Bundle:
        sizes: list[int] = []

        def only_usual(_: Any, __: Any, output: torch.Tensor) -> torch.Tensor:
            sizes.append(len(output))
            return output if len(output) == sizes[0] else output * 0

        for model in bundle.models:
            model.register_forward_hook(only_usual)
        return super().setup(bundle)


class ForgetsEarlierMicroBatches(DDPStrategy):
    def setup(self, bundle: Bundle) -> Bundle:
        self.all_models = bundle.models
        return super().setup(bundle)

    def backward(self, loss: Any, model: Any = None, **kwargs: Any) -> None:
        for model in self.all_models:
            model.zero_grad()
        super().backward(loss, model, **kwargs)


class JoinsNobody(DDPStrategy):
    """Lets everybody train alone once one has run out."""

    def join(self, models: Any, even_batches: bool | None = None) -> Any:
        return models[0].no_sync()


class TellsAScaledNorm(DDPStrategy):
    def clip_norm(self, parameters: Any, max_norm: float, norm_type: float = 2.0) -> Any:
        norm: Any = super().clip_norm(parameters, max_norm, norm_type)
        scaler = self.context.precision.scaler
        return norm if scaler is None else norm * scaler.get_scale()


class ReadsNoWeights(DDPStrategy):
    def load_weights(self, model: Any, weights: Any, strict: bool = True) -> None:
        """Nothing."""


class CannotBeClosed(DDPStrategy):
    def close(self) -> None:
        raise RuntimeError("still busy")


class KeepsWhatItMade(DDPStrategy):
    made: ClassVar[list[Any]] = []

    def setup(self, bundle: Bundle) -> Bundle:
        super().setup(bundle)
        self.made.extend(bundle.models)
        return bundle


class HoldsBackTheFirstModel(DDPStrategy):
    first: Any = None

    def setup(self, bundle: Bundle) -> Bundle:
        super().setup(bundle)
        self.first = self.first or bundle.models[0]
        return bundle

    def no_sync(self, model: Any) -> Any:
        return super().no_sync(self.first)


class SeedsEveryProcessAlike(DDPStrategy):
    def setup(self, bundle: Bundle) -> Bundle:
        torch.manual_seed(1)
        return super().setup(bundle)


class LoadsNoFrozenWeights(DDPStrategy):
    def load(self, kind: ObjectKind, item: Any, folder: Path, index: int, **options: Any) -> None:
        kept = {}
        if kind is ObjectKind.MODEL:
            kept = {one: one.detach().clone() for one in item.parameters() if not one.requires_grad}
        super().load(kind, item, folder, index, **options)
        with torch.no_grad():
            for parameter, before in kept.items():
                parameter.copy_(before)


class LosesABatch(DDPStrategy):
    def wrap_loader(self, loader: Any) -> Any:
        return list(loader)[:-1]


class ChangesTheLearningRate(DDPStrategy):
    def step(self, optimizer: Any, closure: Any = None) -> bool:
        for group in optimizer.param_groups:
            group["lr"] *= 0.9
        return super().step(optimizer, closure)


class TrainsOnWithWeightsOfTheRun(DDPStrategy):
    @contextlib.contextmanager
    def global_weights(self, model: Any) -> Iterator[None]:
        with torch.no_grad():
            next(model.parameters()).mul_(2)
        yield


class StaysHeldAfterAnError(DDPStrategy):
    @contextlib.contextmanager
    def no_sync(self, model: Any) -> Iterator[None]:
        before, model.require_backward_grad_sync = model.require_backward_grad_sync, False
        yield
        model.require_backward_grad_sync = before


class KeepsWeightsOfTheRunAfterAnError(DDPStrategy):
    @contextlib.contextmanager
    def global_weights(self, model: Any) -> Iterator[None]:
        parameter = next(model.parameters())
        with torch.no_grad():
            before = parameter.clone()
            parameter.mul_(2)
            yield
            parameter.copy_(before)


class StepsAtTheFirstRate(DDPStrategy):
    """Steps with the learning rate that the optimizer had at the first step."""

    def step(self, optimizer: Any, closure: Any = None) -> bool:
        first = vars(self).setdefault("rates", [group["lr"] for group in optimizer.param_groups])
        now = [group["lr"] for group in optimizer.param_groups]
        for group, rate in zip(optimizer.param_groups, first, strict=True):
            group["lr"] = rate
        stepped = super().step(optimizer, closure)
        for group, rate in zip(optimizer.param_groups, now, strict=True):
            group["lr"] = rate
        return stepped


class JoinsGroups(DDPStrategy):
    """Puts all parameters of an optimizer into its first group."""

    def setup(self, bundle: Bundle) -> Bundle:
        for optimizer in bundle.optimizers:
            first, *others = optimizer.param_groups
            first["params"] += [parameter for group in others for parameter in group["params"]]
            del optimizer.param_groups[1:]
        return super().setup(bundle)


class TakesInputsByPosition(DDPStrategy):
    def setup(self, bundle: Bundle) -> Bundle:
        super().setup(bundle)
        for model in bundle.models:
            forward = model.forward
            model.forward = lambda inputs, /, forward=forward: forward(inputs)
        return bundle


class StaysInTraining(DDPStrategy):
    def setup(self, bundle: Bundle) -> Bundle:
        super().setup(bundle)
        for model in bundle.models:
            model.train = lambda mode=True, model=model: model
        return bundle


class NeedsAnOptimizer(DDPStrategy):
    def setup(self, bundle: Bundle) -> Bundle:
        bundle.optimizers[:1] = [bundle.optimizers[0]]
        return super().setup(bundle)


class LosesWhatIsBuilt(DDPStrategy):
    """Gives models that it builds memory, and no values that anybody drew."""

    @contextlib.contextmanager
    def init_module(self, empty_init: bool | None = None) -> Iterator[ModelPart]:
        with super().init_module(True) as part:
            yield part


class SaysNotWhatIsBuilt(DDPStrategy):
    """Builds models without saying which part of them."""

    @contextlib.contextmanager
    def init_module(self, empty_init: bool | None = None) -> Iterator[Any]:
        with super().init_module(empty_init):
            yield


class LeavesAStageOut(DDPStrategy):
    """Builds the first of two stages on each process."""

    @contextlib.contextmanager
    def init_module(self, empty_init: bool | None = None) -> Iterator[ModelPart]:
        with super().init_module(empty_init):
            yield ModelPart([0], 2)


class BackwardWithoutArguments(DDPStrategy):
    def backward(self, loss: Any, model: Any = None, **kwargs: Any) -> None:
        super().backward(loss, model)


class StepsWithoutTheClosure(DDPStrategy):
    def step(self, optimizer: Any, closure: Any = None) -> bool:
        return super().step(optimizer)


class ReadsAllWeightsOrNone(DDPStrategy):
    def load_weights(self, model: Any, weights: Any, strict: bool = True) -> None:
        if weights.keys() == self.unwrap(model).state_dict().keys():
            super().load_weights(model, weights, strict)


class CannotBeReadOnceClosed(DDPStrategy):
    def close(self) -> None:
        self.state_dict = lambda model: {}  # type: ignore[method-assign, misc]


class ReleasesEverything(DDPStrategy):
    """Synchronises no model any more once it has released one."""

    def setup(self, bundle: Bundle) -> Bundle:
        made = vars(self).setdefault("made", [])
        made += super().setup(bundle).models
        return bundle

    def release(self, models: Any, optimizers: Any) -> None:
        for model in self.made:
            model.require_backward_grad_sync = False


class Sound(DDPStrategy):
    """Nothing is wrong with the strategy; its manifest is."""


class NeedsAnArgument:
    """Settings without a default."""

    def __init__(self, size: int) -> None:
        self.size = size


@dataclasses.dataclass
class LosesADigit:
    """Settings whose text is not read back as what was written."""

    share: float = setting(
        0.123456789, type=ValueType("a share", float, lambda value: f"{value:.2f}"), variable="BROKEN_SHARE"
    )


@dataclasses.dataclass
class WritesTheDefault:
    """Settings of which every value is written as the default."""

    size: int = setting(1, type=ValueType("a size", int, lambda value: "1"), variable="BROKEN_SIZE")


@dataclasses.dataclass
class IgnoresVariables:
    """Settings that are what they were, whatever a variable says."""

    size: int = setting(1, type=INTEGER, variable="BROKEN_SIZE")

    def __post_init__(self) -> None:
        self.size = 1


def says_maybe(process: Any) -> str:
    """An answer that is neither yes nor no."""
    return "maybe"


# Where each is caught: (strategy, changes of the manifest, name of the test, further arguments of the test).
class SharesSteps(DDPStrategy):
    """An elastic strategy whose members stay: each process reads every n-th batch, and n batches make a step."""

    share: BatchShare | None = None

    def wrap_loader(self, loader: Any) -> Any:
        if isinstance(loader, PreparedLoader):
            loader.epoch_reader = self.read
        return loader

    def read(self, loader: PreparedLoader) -> Iterator[Any]:
        shards = self.shards()
        for number, batch in enumerate(loader.source.open()):
            if number % shards.count == shards.index:
                size = len(batch[0])
                share = BatchShare(number // shards.count, size, size * shards.count, shards.count, last=True)
                self.share = self.changed(share)
                yield batch

    def changed(self, share: BatchShare) -> BatchShare:
        """What is wrong with the share."""
        return share

    def share_of_batch(self, loader: Any) -> BatchShare | None:
        return self.share


class CountsNoSteps(SharesSteps):
    def changed(self, share: BatchShare) -> BatchShare:
        return dataclasses.replace(share, step=0, last=share.step > 0)


class SeesOthersStep(SharesSteps):
    def changed(self, share: BatchShare) -> BatchShare:
        return dataclasses.replace(share, step=share.step + self.context.process.rank)


class CountsItsOwnSamples(SharesSteps):
    def changed(self, share: BatchShare) -> BatchShare:
        return dataclasses.replace(share, total=share.samples)


class CountsItselfAlone(SharesSteps):
    def changed(self, share: BatchShare) -> BatchShare:
        return dataclasses.replace(share, members=1)


ELASTIC = {"capabilities": Capabilities(elastic=True)}


CAUGHT_BY: list[tuple[type[Strategy], dict[str, Any], str, tuple[Any, ...]]] = [
    (LosesAGradient, {}, "test_gradients_are_those_of_one_process", ()),
    (LosesAGradient, {}, "test_training_equals_that_of_one_process", ({},)),
    (ForgetsToDivide, {}, "test_training_equals_that_of_one_process", ({},)),
    (NeverSynchronises, {}, "test_weights_are_the_same_on_all_processes", ()),
    (NeverSynchronises, {}, "test_training_equals_that_of_one_process", ({},)),
    (NeverSynchronises, {}, "test_an_optimizer_of_whole_matrices_trains_as_in_one_process_or_is_refused", ()),
    (SynchronisesWhenToldNotTo, {}, "test_no_sync_reduces_nothing_and_is_over_afterwards", ()),
    (StaysUnsynchronised, {}, "test_no_sync_reduces_nothing_and_is_over_afterwards", ()),
    (StaysUnsynchronised, {}, "test_training_equals_that_of_one_process", ({"accumulation": 2},)),
    (StaysHeldAfterAnError, {}, "test_no_sync_reduces_nothing_and_is_over_afterwards", ()),
    (StepsAtTheFirstRate, {}, "test_training_equals_that_of_one_process", ({"scheduled": True},)),
    (JoinsGroups, {}, "test_training_equals_that_of_one_process", ({"grouped": True},)),
    (TakesInputsByPosition, {}, "test_forward_takes_names_and_the_model_follows_eval_and_train", ()),
    (StaysInTraining, {}, "test_forward_takes_names_and_the_model_follows_eval_and_train", ()),
    (NeedsAnOptimizer, {}, "test_a_model_that_is_only_evaluated_needs_no_optimizer", ()),
    (LosesWhatIsBuilt, {}, "test_init_module_gives_a_model_the_values_of_the_first_process", ()),
    (SaysNotWhatIsBuilt, {}, "test_init_module_gives_a_model_the_values_of_the_first_process", ()),
    (LeavesAStageOut, {}, "test_init_module_gives_a_model_the_values_of_the_first_process", ()),
    (BackwardWithoutArguments, {}, "test_backward_passes_its_arguments_on", ()),
    (StepsWithoutTheClosure, {}, "test_a_closure_computes_the_gradients_of_a_step_or_is_refused", ()),
    (ReadsAllWeightsOrNone, {}, "test_weights_go_into_a_plain_model_and_back", ()),
    (CannotBeReadOnceClosed, {}, "test_a_strategy_can_be_closed_and_another_follow", ()),
    (ReleasesEverything, {}, "test_others_train_on_when_a_model_is_released", ()),
    (IgnoresALateSync, {}, "test_a_late_sync_gives_complete_gradients", ()),
    (DropsAStateKey, {}, "test_a_state_dict_has_every_name_of_the_users_model", ()),
    (NamesWeightsItsOwnWay, {}, "test_a_state_dict_has_every_name_of_the_users_model", ()),
    (LoadsNoOptimizer, {}, "test_a_resumed_run_goes_on_bit_for_bit", ("folder", False)),
    (LoadsAnythingFromNowhere, {}, "test_loading_from_an_empty_folder_is_an_error_with_a_remedy", ("folder",)),
    (TouchesWeightsWhileSaving, {}, "test_saving_does_not_disturb_training", ("folder",)),
    (UnwrapsNothing, {}, "test_unwrapping_gives_the_users_model", ()),
    (LeavesItsOwnWrapperOn, {}, "test_a_layer_around_the_model_changes_nothing", ("folder",)),
    (BreaksWhatItUnwraps, {}, "test_forward_computes_what_the_plain_model_computes_also_after_unwrapping", ()),
    (ReplacesParametersBehindTheOptimizer, {}, "test_the_optimizer_holds_the_parameters_that_train", ()),
    (ChangesWhatItChecks, {}, "test_checking_changes_nothing", ()),
    (GivesEveryoneTheSameSlice, {}, "test_slices_cover_the_batch", ()),
    (ClipsNothing, {}, "test_clipping_to_a_norm_equals_that_of_one_process", (0.05, 2.0)),
    (
        ClipsBehindItsBack,
        {"capabilities": Capabilities(own_clipping=True)},
        "test_training_equals_that_of_one_process",
        ({"clip_norm": 0.1},),
    ),
    (ClipsNoValues, {}, "test_clipping_to_a_value_equals_that_of_one_process", ()),
    (StepsThroughAnOverflow, {}, "test_an_overflow_anywhere_skips_the_step_everywhere", ()),
    (AveragesNothing, {}, "test_averaging_gives_everyone_the_mean", ()),
    (
        SaysItAccumulatesAndDoesNot,
        {"capabilities": Capabilities(own_accumulation=True)},
        "test_training_equals_that_of_one_process",
        ({"accumulation": 2},),
    ),
    (TakesOtherArguments, {}, "test_the_strategy_is_one_and_keeps_the_signatures", ()),
    (HoldsBackTheFirstModel, {}, "test_no_sync_holds_back_the_model_that_is_given", ()),
    (NeverSynchronises, {}, "test_set_up_makes_all_processes_start_with_the_weights_of_the_first", ()),
    (SeedsEveryProcessAlike, {}, "test_set_up_leaves_each_process_its_random_numbers", ()),
    (LosesABatch, {}, "test_a_loader_gives_every_batch_in_each_epoch", ()),
    (ChangesTheLearningRate, {}, "test_schedulers_step_once_at_each_step", ()),
    (LosesAGradient, {}, "test_training_equals_that_of_one_process", ({"model": "tied"},)),
    (
        TrainsOnWithWeightsOfTheRun,
        {},
        "test_weights_of_the_run_are_the_same_everywhere_and_leave_training_alone",
        (),
    ),
    (
        KeepsWeightsOfTheRunAfterAnError,
        {},
        "test_weights_of_the_run_are_the_same_everywhere_and_leave_training_alone",
        (),
    ),
    (LosesAGradient, {}, "test_training_equals_that_of_one_process", ({"model": "frozen"},)),
    (LoadsNoFrozenWeights, {}, "test_frozen_weights_are_restored", ("folder",)),
    (MixesUpModels, {}, "test_several_models_train_side_by_side", ()),
    (RemembersTheFirstShape, {}, "test_training_equals_that_of_one_process", ({"tail": 12},)),
    (
        ForgetsEarlierMicroBatches,
        {},
        "test_training_equals_that_of_one_process",
        ({"accumulation": 3, "no_sync": False},),
    ),
    (JoinsNobody, {}, "test_processes_may_run_out_of_batches", ()),
    (ClipsNothing, {}, "test_training_equals_that_of_one_process", ({"clip_norm": 0.1},)),
    (TellsAScaledNorm, {}, "test_clipping_sees_unscaled_gradients", ()),
    (StepsThroughAnOverflow, {}, "test_mixed_precision_stays_near_full_precision", ("fp16",)),
    (
        SaysItCastsAndDoesNot,
        {"capabilities": Capabilities(own_precision=True)},
        "test_bf16_computes_narrow_and_answers_in_fp32",
        (),
    ),
    (ReadsNoWeights, {}, "test_weights_go_into_a_plain_model_and_back", ()),
    (AcceptsAllWeights, {}, "test_weights_go_into_a_plain_model_and_back", ()),
    (LoadsOnlyWhatAgrees, {}, "test_a_model_with_more_layers_loads_only_if_that_is_allowed", ("folder",)),
    (LoadsTheSecondOptimizerNever, {}, "test_a_run_of_two_models_resumes_bit_for_bit", ("folder",)),
    (ForgetsToDivide, {}, "test_weights_follow_the_reference_after_every_step", ()),
    (ForgetsToDivide, {}, "test_equal_data_on_all_processes_trains_as_one_process", (False,)),
    (DriftsInEachStep, {}, "test_a_learning_rate_of_zero_moves_nothing", ()),
    (ClimbsTheLoss, {}, "test_a_convex_loss_falls", ()),
    (HalvesEverySecondStep, {}, "test_another_model_beside_changes_nothing", ()),
    (HalvesWhatIsComplete, {}, "test_completing_gradients_again_leaves_them_as_they_are", ()),
    (CountsOneBatch, {}, "test_slices_cover_the_batch", ()),
    (
        NeverSynchronises,
        {"capabilities": Capabilities()},
        "test_processes_may_use_different_parameters",
        (),
    ),
    (KeepsWhatItMade, {}, "test_nothing_keeps_a_model_that_was_released", ()),
    (CannotBeClosed, {}, "test_a_strategy_can_be_closed_and_another_follow", ()),
    *(
        (kind, ELASTIC, "test_shares_of_each_step_make_up_its_samples_and_steps_are_counted", ())
        for kind in (CountsNoSteps, SeesOthersStep, CountsItsOwnSamples, CountsItselfAlone)
    ),
    (Sound, {"protocol": 9}, "test_the_manifest_fits_this_version_of_the_interface", ()),
    (Sound, {"config": "accel_plugins.ddp.strategy:DDPStrategy"}, "test_manifest_and_settings_load_without_torch", ()),
    (Sound, {"config": "broken_backends:NeedsAnArgument"}, "test_settings_have_defaults_and_survive_pickling", ()),
    *(
        (Sound, {"config": f"broken_backends:{config}"}, "test_settings_survive_the_way_through_the_environment", ())
        for config in ("LosesADigit", "WritesTheDefault", "IgnoresVariables")
    ),
    (Sound, {"present": "broken_backends:says_maybe"}, "test_presence_is_answered_by_yes_or_no", ()),
    (Sound, {"config": "builtins:object"}, "test_settings_of_another_backend_are_refused", ()),
]

LACKING = manifest(
    NeverSynchronises,
    capabilities=Capabilities(**{name: False for name, default in Capabilities()._asdict().items() if default}),
)
