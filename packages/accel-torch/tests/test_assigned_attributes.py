"""Attributes of an Accelerator that a script assigns after it was made, and Accelerators that are pickled."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from accel_data import DataLoaderConfiguration
from accel_plugins.ddp.config import DistributedDataParallelKwargs
from accel_plugins.precision.config import AutocastKwargs
from accel_state.errors import Conflict, SettingError, UnknownKind
from accel_testing.processes import Processes
from accel_torch import Accelerator
from accel_tracking import GeneralTracker

pytestmark = pytest.mark.usefixtures("fresh_state")


class Seeing(nn.Linear):
    seen: torch.dtype

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        outputs = super().forward(inputs)
        self.seen = outputs.dtype
        return outputs


def computed_in(accelerator: Accelerator) -> tuple[torch.dtype, torch.dtype]:
    """Of a model that is prepared now, and of a region."""
    model, outside = Seeing(1, 1), Seeing(1, 1)
    accelerator.prepare_model(model)(torch.ones(1, 1))
    with accelerator.autocast():
        outside(torch.ones(1, 1))
    return model.seen, outside.seen


def test_autocasting_is_switched_for_what_is_prepared_later() -> None:
    accelerator = Accelerator(cpu=True, mixed_precision="bf16")
    mixed, plain = (torch.bfloat16,) * 2, (torch.float32,) * 2
    assert computed_in(accelerator) == mixed
    accelerator.native_amp = False
    assert not accelerator.native_amp
    assert computed_in(accelerator) == plain
    accelerator.native_amp = True
    assert computed_in(accelerator) == mixed
    accelerator.autocast_handler = AutocastKwargs(enabled=False)
    assert accelerator.native_amp
    assert computed_in(accelerator) == plain
    accelerator.autocast_handler = None
    assert computed_in(accelerator) == mixed


def test_full_precision_has_nothing_to_autocast_to_and_nothing_to_scale() -> None:
    accelerator = Accelerator(cpu=True)
    accelerator.native_amp = False
    accelerator.scaler = None
    with pytest.raises(Conflict, match="mixed_precision='no'"):
        accelerator.native_amp = True
    with pytest.raises(Conflict, match="Only fp16 training scales the loss"):
        accelerator.scaler = torch.amp.GradScaler("cpu")


def test_a_scaler_that_is_assigned_scales_the_next_loss() -> None:
    accelerator = Accelerator(cpu=True, mixed_precision="fp16")
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    model, optimizer = accelerator.prepare(model, optimizer)
    accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    assert optimizer.scaler is accelerator.scaler
    accelerator.backward(model(torch.ones(1, 1)).sum())
    assert model.bias.grad.item() == 4.0
    before = model.bias.item()
    optimizer.step()
    assert model.bias.item() == before - 1.0
    optimizer.zero_grad()
    accelerator.scaler = None
    accelerator.backward(model(torch.ones(1, 1)).sum())
    assert model.bias.grad.item() == 1.0


def test_what_loaders_and_schedulers_are_prepared_by() -> None:
    accelerator = Accelerator(cpu=True)
    accelerator.dataloader_config = DataLoaderConfiguration(use_seedable_sampler=True, data_seed=3)
    accelerator.rng_types = ["torch"]
    accelerator.step_scheduler_with_optimizer = False
    accelerator.device_placement = False
    optimizer = torch.optim.SGD(nn.Linear(1, 1).parameters(), lr=1.0)
    loader, scheduler = accelerator.prepare(
        DataLoader(range(4), shuffle=True), torch.optim.lr_scheduler.StepLR(optimizer, 1)
    )
    assert accelerator.use_seedable_sampler
    assert loader.get_sampler().initial_seed == 3
    assert loader.rng_types == ["torch"]
    assert loader.device is None
    assert not scheduler.step_with_optimizer
    accelerator.rng_types = None
    assert accelerator.rng_types == ["generator"]
    with pytest.raises(SettingError, match="There is no generator"):
        accelerator.rng_types = ["dice"]
    with pytest.raises(SettingError, match="must be a DataLoaderConfiguration"):
        accelerator.dataloader_config = None  # type: ignore[assignment]


class Kept(GeneralTracker):
    name = "kept"
    requires_logging_directory = False

    def __init__(self) -> None:
        super().__init__()
        self.values: list[Any] = []

    @property
    def tracker(self) -> list[Any]:
        return self.values

    def store_init_configuration(self, values: Any) -> None:
        self.values.append(values)

    def log(self, values: Any, step: int | None = None, **kwargs: Any) -> None:
        self.values.append((values, step))


def test_assigned_trackers_are_logged_to() -> None:
    accelerator, first, second = Accelerator(cpu=True), Kept(), Kept()
    accelerator.log_with = first
    assert accelerator.log_with == [first]
    accelerator.init_trackers("run", {"a": 1})
    accelerator.trackers = [second]
    accelerator.log({"loss": 1.0}, step=2)
    accelerator.trackers.append(first)
    accelerator.log({"loss": 0.0}, step=3)
    assert first.values == [{"a": 1}, ({"loss": 0.0}, 3)]
    assert second.values == [({"loss": 1.0}, 2), ({"loss": 0.0}, 3)]


def test_a_settings_object_of_another_kind_is_refused() -> None:
    accelerator = Accelerator(cpu=True)
    with pytest.raises(UnknownKind, match="It must be None or of type AutocastKwargs"):
        accelerator.autocast_handler = DistributedDataParallelKwargs()  # type: ignore[assignment]
    assert accelerator.autocast_handler is None


def test_an_accelerator_that_was_pickled_takes_part_in_the_run() -> None:
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    model, loader = accelerator.prepare(nn.Linear(1, 1), DataLoader(range(6), batch_size=2))
    other = pickle.loads(pickle.dumps(accelerator))
    assert other.state.__dict__ == accelerator.state.__dict__
    assert other.gradient_accumulation_steps == 2
    assert torch.equal(other._models[0].weight, model.weight)
    ends = []
    for batch in other._dataloaders[0]:
        with other.accumulate(other._models[0]):
            other.backward(other._models[0](batch.float()[:, None]).sum())
            ends.append(other.sync_gradients)
    assert ends == [False, True, True]
    assert len(list(loader)) == 3


def finds_unused() -> bool:
    accelerator = Accelerator(cpu=True)
    accelerator.ddp_handler = DistributedDataParallelKwargs(find_unused_parameters=True)
    return bool(accelerator.prepare_model(nn.Linear(1, 1)).find_unused_parameters)


def test_how_models_are_made_parallel(two: Processes) -> None:
    assert two.run(finds_unused) == [True, True]


def joins_nothing() -> None:
    accelerator = Accelerator(cpu=True)
    with (
        pytest.warns(UserWarning, match="only supported for multi-GPU and multi-CPU"),
        accelerator.join_uneven_inputs([nn.Linear(1, 1)]),
    ):
        pass


def test_joining_what_cannot_be_joined_is_a_warning(two: Processes) -> None:
    two.run(joins_nothing)


def into_own_folder(folder: str) -> tuple[str, list[float]]:
    accelerator = Accelerator(cpu=True)
    own = f"{folder}/{accelerator.process_index}"
    Path(own).mkdir()
    model = accelerator.prepare_model(nn.Linear(1, 1))
    saved = accelerator.save_state(own)
    weight = model.module.weight.item()
    with torch.no_grad():
        model.module.weight.zero_()
    accelerator.load_state(own)
    return saved, [weight - model.module.weight.item()]


def test_where_processes_name_different_folders_that_of_the_main_process_counts(two: Processes, tmp_path: Any) -> None:
    assert two.run(into_own_folder, str(tmp_path)) == [(str(tmp_path / "0"), [0.0])] * 2


def settings_of_two(first: Any, second: Any) -> str:
    """The error of a second Accelerator in a run of DistributedDataParallel, or what its models are wrapped with."""
    Accelerator(cpu=True, kwargs_handlers=first)
    try:
        accelerator = Accelerator(kwargs_handlers=second)
    except Conflict as error:
        return f"{error.failure} {error.remedy}"
    wrapped: Any = accelerator.prepare_model(nn.Linear(1, 1))
    return f"wrapped, searching: {wrapped.find_unused_parameters}"


SEARCHING = DistributedDataParallelKwargs(find_unused_parameters=True)


@pytest.mark.parametrize(
    ("first", "second", "expected"),
    [
        ([SEARCHING], [SEARCHING], "wrapped, searching: True"),
        ([SEARCHING], [], "wrapped, searching: True"),
        ([], [DistributedDataParallelKwargs()], "wrapped, searching: False"),
        ([], [SEARCHING], "only to the first one"),
        ([SEARCHING], [DistributedDataParallelKwargs()], "only to the first one"),
    ],
)
def test_settings_of_the_backend_act_or_are_refused_in_a_second_accelerator(
    first: Any, second: Any, expected: str
) -> None:
    with Processes(2) as group:
        answers = group.run(settings_of_two, first, second)
    assert all(expected in answer for answer in answers), answers
