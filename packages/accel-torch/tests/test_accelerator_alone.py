"""The Accelerator on one process: what it is told, what it refuses, and one step."""

from __future__ import annotations

import dataclasses
import itertools
import math
import os
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import accel_torch
from accel_plugins.fsdp.config import FullyShardedDataParallelPlugin
from accel_plugins.manifest import Capabilities
from accel_state import AcceleratorState, current
from accel_state.errors import CheckpointError, Conflict, SettingError, UnknownKind
from accel_state.gradient import GradientState
from accel_testing.processes import run_command
from accel_testing.public_names import check_public_names
from accel_torch import (
    Accelerator,
    AutocastKwargs,
    DataLoaderConfiguration,
    DistributedType,
    GradientAccumulationPlugin,
    GradScalerKwargs,
    ProfileKwargs,
    ProjectConfiguration,
)

pytestmark = pytest.mark.usefixtures("fresh_state")


def parts(samples: int = 8) -> tuple[nn.Module, torch.optim.Optimizer, DataLoader[Any], Any]:
    torch.manual_seed(0)
    model = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    data = TensorDataset(torch.randn(samples, 3), torch.randn(samples, 1))
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    return model, optimizer, DataLoader(data, batch_size=2), scheduler


def test_public_names_of_accel_torch() -> None:
    check_public_names("accel_torch")


def test_other_libraries_find_sharding_in_the_environment_while_the_run_lasts() -> None:
    asked = {"ACCELERATE_USE_FSDP": "true", "FSDP_CPU_RAM_EFFICIENT_LOADING": "true"}
    plugin = FullyShardedDataParallelPlugin(2, cpu_ram_efficient_loading=True)
    os.environ["FSDP_CPU_RAM_EFFICIENT_LOADING"] = "false"
    Accelerator(cpu=True, fsdp_plugin=plugin)
    assert {name: os.environ.get(name) for name in asked} == asked
    AcceleratorState._reset_state()
    assert "ACCELERATE_USE_FSDP" not in os.environ
    assert os.environ["FSDP_CPU_RAM_EFFICIENT_LOADING"] == "false"
    assert Accelerator(cpu=True).distributed_type is DistributedType.NO


def test_accelerators_share_the_count_of_a_backend_that_accumulates_by_itself() -> None:
    first = Accelerator(cpu=True, gradient_accumulation_steps=2)
    run = current.require_run()
    context = run.strategy.context
    manifest = dataclasses.replace(context.manifest, capabilities=Capabilities(own_accumulation=True))
    current.set_run(run._replace(strategy=type(run.strategy)(context._replace(manifest=manifest))))

    first.gradient_state.sync_gradients = False
    assert not Accelerator().gradient_state.sync_gradients
    assert not Accelerator(gradient_accumulation_steps=2).gradient_state.sync_gradients
    with pytest.raises(Conflict, match=r"(?s)num_steps=3.*accumulates gradients itself.*num_steps=2"):
        Accelerator(gradient_accumulation_steps=3)
    with pytest.raises(Conflict, match="sync_with_dataloader=False"):
        Accelerator(gradient_accumulation_plugin=GradientAccumulationPlugin(num_steps=2, sync_with_dataloader=False))
    assert not GradientState().sync_gradients


def test_accelerators_of_other_backends_count_for_themselves() -> None:
    first, second = Accelerator(cpu=True, gradient_accumulation_steps=2), Accelerator(gradient_accumulation_steps=3)

    assert (first.gradient_accumulation_steps, second.gradient_accumulation_steps) == (2, 3)


def test_device_rank_and_precision_of_one_process() -> None:
    accelerator = Accelerator(cpu=True)

    assert accelerator.device == torch.device("cpu")
    assert accelerator.distributed_type is DistributedType.NO
    assert (accelerator.num_processes, accelerator.process_index) == (1, 0)
    assert accelerator.is_main_process
    assert accelerator.mixed_precision == "no"
    assert accelerator.sync_gradients
    assert accelerator.gradient_accumulation_steps == 1
    assert "process 0 of 1" in repr(accelerator)


def test_prepare_keeps_the_order_and_a_single_object_comes_back_alone() -> None:
    accelerator = Accelerator(cpu=True)
    model, optimizer, loader, scheduler = parts()

    made = accelerator.prepare(scheduler, loader, None, optimizer, model)

    assert made[2] is None
    assert made[4] is model
    assert isinstance(made[3], torch.optim.Optimizer)
    assert isinstance(made[1], DataLoader)
    assert accelerator.prepare(made[3]) is made[3]
    assert isinstance(accelerator.prepare(nn.Linear(1, 1)), nn.Linear)


def test_prepare_returns_what_it_does_not_know() -> None:
    accelerator = Accelerator(cpu=True)
    model, optimizer, _, _ = parts()
    made, text, _ = accelerator.prepare(model, "text", optimizer)
    assert text == "text"
    assert accelerator._models == [made]
    assert accelerator.prepare([model]) == [model]


def test_placements_have_one_entry_for_each_object() -> None:
    accelerator = Accelerator(cpu=True)
    model, optimizer, _, _ = parts()
    with pytest.raises(SettingError, match="1 entries for 2 objects"):
        accelerator.prepare(model, optimizer, device_placement=[True])


def test_the_optimizer_steps_at_the_end_of_a_window_and_of_the_loader() -> None:
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=3)
    model, optimizer, loader, scheduler = accelerator.prepare(*parts(samples=10))
    weights, rates = [], []
    for inputs, targets in loader:
        with accelerator.accumulate(model):
            accelerator.backward((model(inputs) - targets).square().mean())
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        weights.append(model.weight.detach().clone())
        rates.append(scheduler.get_last_lr()[0])

    assert [bool(torch.equal(a, b)) for a, b in itertools.pairwise(weights)] == [True, False, True, False]
    assert rates == [0.1, 0.1, 0.05, 0.05, 0.025]


def test_the_gradient_of_a_window_is_that_of_the_big_batch() -> None:
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=4)
    model, _, loader, _ = accelerator.prepare(*parts())
    whole = parts()[0]
    data: Any = loader.dataset
    (whole(data.tensors[0]) - data.tensors[1]).square().mean().backward()
    for inputs, targets in loader:
        with accelerator.accumulate(model):
            accelerator.backward((model(inputs) - targets).square().mean())
    torch.testing.assert_close(model.weight.grad, whole.weight.grad)
    assert accelerator.sync_gradients


def test_blocks_may_be_nested_and_left_by_an_error() -> None:
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    model, _, _, _ = accelerator.prepare(*parts())
    with pytest.raises(RuntimeError, match="on purpose"), accelerator.accumulate(model):
        raise RuntimeError("on purpose")
    with accelerator.accumulate(model), accelerator.no_sync():
        assert accelerator.sync_gradients


def test_clipping_returns_the_norm_before() -> None:
    accelerator = Accelerator(cpu=True)
    model, _, _, _ = accelerator.prepare(*parts())
    accelerator.backward(model(torch.ones(1, 3)).sum() * 10)
    before = accelerator.clip_grad_norm_(model.parameters(), 1.0)

    assert before is not None
    assert before.item() == pytest.approx(20.0)
    after = math.sqrt(sum(parameter.grad.square().sum().item() for parameter in model.parameters()))
    assert after == pytest.approx(1.0, abs=1e-4)
    accelerator.clip_grad_value_(model.parameters(), 0.1)
    assert max(parameter.grad.abs().max().item() for parameter in model.parameters()) == pytest.approx(0.1)


def test_bf16_computes_narrow_and_answers_in_fp32() -> None:
    accelerator = Accelerator(cpu=True, mixed_precision="bf16")
    seen = []
    inner = nn.Linear(3, 1)
    inner.register_forward_hook(lambda module, inputs, output: seen.append(output.dtype))
    model = accelerator.prepare(nn.Sequential(inner))

    assert model(torch.ones(1, 3)).dtype is torch.float32
    assert seen == [torch.bfloat16]
    with accelerator.autocast():
        assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype is torch.bfloat16
    with accelerator.autocast(AutocastKwargs(enabled=False)):
        assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype is torch.float32
    with accelerator.autocast(cache_enabled=False):
        assert not torch.is_autocast_cache_enabled()


def test_an_overflow_skips_the_step_and_the_schedule() -> None:
    accelerator = Accelerator(cpu=True, mixed_precision="fp16", kwargs_handlers=[GradScalerKwargs(init_scale=4.0)])
    model, optimizer, _, scheduler = accelerator.prepare(*parts())
    before = model.weight.detach().clone()
    accelerator.backward(model(torch.ones(1, 3)).sum() * math.inf)
    optimizer.step()
    scheduler.step()

    assert accelerator.optimizer_step_was_skipped
    assert torch.equal(model.weight, before)
    assert scheduler.get_last_lr() == [0.1]
    assert accelerator.scaler is not None
    assert accelerator.scaler.get_scale() == 2.0


def test_unwrapping_gives_the_model_back_as_it_was() -> None:
    accelerator = Accelerator(cpu=True, mixed_precision="bf16")
    model = nn.Linear(3, 1)
    prepared = accelerator.prepare(model)
    assert accelerator.unwrap_model(prepared) is model
    assert "forward" in vars(model)
    assert accelerator.unwrap_model(prepared, keep_fp32_wrapper=False) is model
    assert "forward" not in vars(model)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"mixed_precision": "bf61"}, "Did you mean 'bf16'"),
        ({"gradient_accumulation_steps": 0}, "over 0 steps"),
        ({"backend": "singel"}, "Did you mean 'single'"),
        ({"rng_types": ["dice"]}, "no generator 'dice'"),
        (
            {"gradient_accumulation_steps": 2, "gradient_accumulation_plugin": GradientAccumulationPlugin(num_steps=3)},
            "Cannot combine",
        ),
        ({"kwargs_handlers": [AutocastKwargs(), AutocastKwargs()]}, "two AutocastKwargs"),
    ],
)
def test_arguments_that_cannot_be_used(options: dict[str, Any], message: str) -> None:
    with pytest.raises(SettingError, match=message):
        Accelerator(cpu=True, **options)


def test_a_handler_that_is_none() -> None:
    with pytest.raises(UnknownKind, match="not a KwargsHandler"):
        Accelerator(cpu=True, kwargs_handlers=["autocast"])  # type: ignore[list-item]


def test_a_second_accelerator_shares_the_run_and_counts_for_itself() -> None:
    first = Accelerator(cpu=True, mixed_precision="bf16", gradient_accumulation_steps=2)
    second = Accelerator(gradient_accumulation_steps=3)

    assert second.mixed_precision == "bf16"
    assert (first.gradient_accumulation_steps, second.gradient_accumulation_steps) == (2, 3)
    with pytest.raises(Conflict, match="mixed_precision='bf16'"):
        Accelerator(mixed_precision="fp16")


def test_variables_fill_in_for_arguments(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "bf16")
    monkeypatch.setenv("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "4")
    accelerator = Accelerator(cpu=True)
    assert accelerator.mixed_precision == "bf16"
    assert accelerator.gradient_accumulation_steps == 4


def test_keywords_that_moved_still_work_with_a_warning() -> None:
    with pytest.warns(FutureWarning, match="DataLoaderConfiguration"):
        accelerator = Accelerator(cpu=True, split_batches=True)
    assert accelerator.split_batches
    configuration = DataLoaderConfiguration(even_batches=False)
    with pytest.warns(FutureWarning), pytest.raises(Conflict, match="even_batches=False"):
        Accelerator(cpu=True, even_batches=True, dataloader_config=configuration)


class Counter:
    def __init__(self) -> None:
        self.count = 0

    def state_dict(self) -> dict[str, int]:
        return {"count": self.count}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.count = state["count"]


def train(accelerator: Accelerator, made: Any, batches: Any) -> list[float]:
    model, optimizer, _, scheduler = made
    losses = []
    for inputs, targets in batches:
        with accelerator.accumulate(model):
            loss = (nn.functional.dropout(model(inputs), 0.5) - targets).square().mean()
            accelerator.backward(loss)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def test_a_resume_in_the_middle_is_exact(tmp_path: Path) -> None:
    accelerator = Accelerator(cpu=True)
    made = accelerator.prepare(*parts())
    counter = Counter()
    accelerator.register_for_checkpointing(counter)
    batches = iter(made[2])
    train(accelerator, made, [next(batches), next(batches)])
    counter.count = 2
    assert accelerator.save_state(tmp_path / "middle") == str(tmp_path / "middle")
    expected = train(accelerator, made, batches)
    counter.count = 0

    accelerator.load_state(tmp_path / "middle")

    assert counter.count == 2
    rest = accelerator.skip_first_batches(made[2], 2)
    assert train(accelerator, made, rest) == expected


def test_saving_over_a_checkpoint_keeps_what_is_not_ours(tmp_path: Path) -> None:
    accelerator = Accelerator(cpu=True)
    accelerator.prepare(*parts())
    target = tmp_path / "state"
    accelerator.save_state(target)
    (target / "notes.txt").write_text("mine")
    accelerator.save_state(target)
    assert (target / "notes.txt").read_text() == "mine"
    assert [path.name for path in tmp_path.iterdir()] == ["state"]


def test_hooks_run_before_saving_and_loading_until_removed(tmp_path: Path) -> None:
    accelerator = Accelerator(cpu=True)
    model, _, _, _ = accelerator.prepare(*parts())
    seen: list[str] = []
    saving = accelerator.register_save_state_pre_hook(lambda models, weights, folder: seen.append("save"))
    loading = accelerator.register_load_state_pre_hook(lambda models, folder: seen.append("load"))
    accelerator.save_state(tmp_path / "state")
    accelerator.load_state(tmp_path / "state")
    saving.remove()
    loading.remove()
    accelerator.save_state(tmp_path / "state")
    assert seen == ["save", "load"]
    assert set(accelerator.get_state_dict(model)) == {"weight", "bias"}


def test_automatic_names_count_up_and_the_newest_is_loaded(tmp_path: Path) -> None:
    project = ProjectConfiguration(str(tmp_path), automatic_checkpoint_naming=True, total_limit=2)
    accelerator = Accelerator(cpu=True, project_config=project)
    model, _, _, _ = accelerator.prepare(*parts())
    for value in range(3):
        nn.init.constant_(model.weight, value)
        accelerator.save_state()
    names = sorted(path.name for path in (tmp_path / "checkpoints").iterdir())
    assert names == ["checkpoint_1", "checkpoint_2"]
    assert accelerator.save_iteration == 3
    nn.init.constant_(model.weight, 9)
    accelerator.load_state()
    assert model.weight.detach().unique().tolist() == [2.0]


def test_saving_and_loading_without_a_place(tmp_path: Path) -> None:
    accelerator = Accelerator(cpu=True)
    with pytest.raises(SettingError, match="automatic_checkpoint_naming"):
        accelerator.save_state()
    with pytest.raises(SettingError, match="automatic_checkpoint_naming"):
        accelerator.load_state()
    with pytest.raises(CheckpointError, match="nothing_here"):
        accelerator.load_state(tmp_path / "nothing_here")
    with pytest.raises(SettingError, match="Item at index 0 is a int"):
        accelerator.register_for_checkpointing(3)


def test_a_script_started_without_the_launcher_reads_no_config_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "accelerate" / "default_config.yaml"
    path.parent.mkdir()
    path.write_text("mixed_precision: bf16\n", encoding="utf-8")
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    assert Accelerator(cpu=True).mixed_precision == "no"


def test_what_is_logged_can_be_read_back(tmp_path: Path) -> None:
    accelerator = Accelerator(cpu=True, log_with="jsonl", project_dir=tmp_path)
    accelerator.init_trackers("run", config={"rate": 0.1})
    accelerator.log({"loss": torch.tensor(0.5)}, step=3)
    accelerator.end_training()
    (path,) = tmp_path.rglob("*.jsonl")
    run = accel_torch.read_run(path)
    assert "0.5" in path.read_text()
    assert run is not None


def test_freeing_forgets_what_was_prepared() -> None:
    accelerator = Accelerator(cpu=True)
    model, optimizer, _, _ = accelerator.prepare(*parts())
    assert accelerator.free_memory(model, optimizer) == [None, None]
    assert accelerator._models == []
    assert accelerator.clear() == []


def test_results_filled_up_to_the_batch_are_cut_to_the_samples() -> None:
    accelerator = Accelerator(cpu=True)
    loader = accelerator.prepare(DataLoader(list(range(6)), batch_size=4))
    filled = [len(accelerator.gather_for_metrics(torch.ones(4))) for _ in loader]
    assert filled == [4, 2]
    assert [len(accelerator.gather_for_metrics(batch)) for batch in loader] == [4, 2]
    assert [len(accelerator.gather_for_metrics(torch.ones(3))) for _ in loader] == [3, 3]


def test_a_library_that_counts_micro_batches_itself_says_when_to_step() -> None:
    accelerator = Accelerator(cpu=True)
    model, optimizer, _, _ = parts()
    model, optimizer = accelerator.prepare(model, optimizer)
    before = model.weight.detach().clone()
    for step in (False, True):
        accelerator.gradient_state._set_sync_gradients(step)
        accelerator.backward(model(torch.ones(1, model.in_features)).sum())
        optimizer.step()
        assert torch.equal(before, model.weight) is not step


def test_the_last_batch_is_known_until_another_iteration_begins() -> None:
    accelerator = Accelerator(cpu=True)
    loader = accelerator.prepare(DataLoader(list(range(3)), batch_size=4))
    next(iter(loader))
    assert len(accelerator.gather_for_metrics(torch.ones(4))) == 3
    assert not accelerator.gradient_state.in_dataloader
    assert [len(batch) for batch in loader] == [3]
    assert len(accelerator.gather_for_metrics(torch.ones(4))) == 4


@pytest.mark.parametrize("whole", [False, True])
def test_nothing_is_prepared_after_a_reset(whole: bool) -> None:
    accelerator = Accelerator(cpu=True)
    AcceleratorState._reset_state(whole)
    with pytest.raises(AttributeError, match=r"`AcceleratorState._reset_state\(\)` was called"):
        accelerator.prepare(torch.nn.Linear(1, 1))


def test_an_error_of_backward_reaches_the_script() -> None:
    accelerator = Accelerator(cpu=True)
    with pytest.raises(RuntimeError, match="scalar"):
        accelerator.backward(torch.ones(2, requires_grad=True) * 2)


def test_generators_and_placement_can_be_set_after_the_accelerator_was_made() -> None:
    accelerator = Accelerator(cpu=True)
    accelerator.rng_types = ["torch"]
    accelerator.device_placement = False
    assert (accelerator.rng_types, accelerator.device_placement) == (["torch"], False)


def test_a_second_accelerator_may_name_the_same_backend() -> None:
    first = Accelerator(cpu=True, backend="single")
    assert Accelerator(cpu=True, backend="single").session.strategy is first.session.strategy
    with pytest.raises(Conflict, match="created with backend='single'"):
        Accelerator(cpu=True, backend="ddp")


def test_a_second_accelerator_cannot_change_the_settings_of_the_precision() -> None:
    first = Accelerator(cpu=True, mixed_precision="bf16", kwargs_handlers=[AutocastKwargs(cache_enabled=False)])
    again = Accelerator(kwargs_handlers=[AutocastKwargs(cache_enabled=False), GradScalerKwargs(init_scale=2.0)])
    assert again.session.strategy is first.session.strategy
    with pytest.raises(Conflict, match="created with AutocastKwargs") as refusal:
        Accelerator(kwargs_handlers=[AutocastKwargs(enabled=False)])
    assert "first" in refusal.value.remedy


def test_a_second_accelerator_may_give_settings_that_say_nothing_new() -> None:
    first = Accelerator(cpu=True, mixed_precision="bf16")
    again = Accelerator(kwargs_handlers=[AutocastKwargs(), ProfileKwargs(record_shapes=True)])
    assert again.session.strategy is first.session.strategy


AFTER_THE_START = (
    *("accel_bigmodel", "accel_data.loader", "accel_ops", "accel_state.protocol", "accel_state.transport.control"),
    *("accel_plugins.checkpoint.save_policy", "accel_plugins.mesh", "accel_plugins.parameters", "accel_plugins.shards"),
    *("accel_plugins.precision.config", "accel_plugins.transforms", "accel_plugins.wrapped.optimizer"),
    *("accel_state.choices", "accel_state.watch.calls", "accel_state.watch.goodput"),
    *("accel_state.network", "accel_state.processors", "accel_state.transport.rendezvous", "accel_state.uncaught"),
    *("accel_torch.misuse", "accel_torch.prepare", "accel_torch.replicas", "accel_torch.saving", "accel_torch.step"),
)
"""What the first Accelerator of one process does without."""


def test_the_first_accelerator_of_one_process_imports_what_it_needs() -> None:
    code = "import sys; from accel_torch import Accelerator; Accelerator(); print(*sys.modules)"
    done = run_command([sys.executable, "-c", code])
    assert done.returncode == 0, done.stderr
    loaded = set(done.stdout.split())
    assert "accel_torch.accelerator" in loaded
    assert not loaded & set(AFTER_THE_START)


def test_a_log_without_a_tracker_is_told() -> None:
    with pytest.warns(UserWarning, match=r"logs nothing: no tracker runs.*init_trackers\(\) first"):
        Accelerator(cpu=True).log({"loss": 0.5})
