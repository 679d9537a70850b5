"""Examples of preparing, saving and configuring hold through both names of the library, on one process and on two."""

from __future__ import annotations

import importlib
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from accel_state.errors import Conflict, Missing
from accel_state.settings.installed import importable
from accel_testing.fresh import fresh
from accel_testing.processes import Processes

LIBRARIES = ("accelerate", "accel_torch")
SAMPLES = 12


def parts(samples: int = SAMPLES, batch_size: int = 2) -> tuple[Any, nn.Module, torch.optim.Optimizer, Any]:
    """A loader, a model, an optimizer and a scheduler."""
    torch.manual_seed(0)
    model = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    inputs = torch.arange(samples * 3.0).reshape(samples, 3) / 30
    data = TensorDataset(inputs, inputs.sum(1, keepdim=True))
    return DataLoader(data, batch_size=batch_size), model, optimizer, scheduler


loss_func = nn.functional.mse_loss


def trained(accelerator: Any, model: Any) -> list[float]:
    weights: list[float] = accelerator.unwrap_model(model).weight.detach().flatten().tolist()
    return [round(weight, 5) for weight in weights]


def placing(library: Any, folder: Path) -> Any:
    accelerator = library.Accelerator(cpu=True)
    dataloader, model, optimizer, scheduler = parts()
    model, optimizer, dataloader, scheduler = accelerator.prepare(
        model, optimizer, dataloader, scheduler, device_placement=[True, True, False, False]
    )
    wrapped, unwrapped = type(model).__name__, type(accelerator.unwrap_model(model)).__name__
    return wrapped, unwrapped, str(next(model.parameters()).device), isinstance(optimizer, torch.optim.Optimizer)


def skipping(library: Any, folder: Path) -> Any:
    accelerator = library.Accelerator(cpu=True)
    dataloader = accelerator.prepare(parts()[0])
    skipped = accelerator.skip_first_batches(dataloader, num_batches=2)
    return len(list(skipped)), len(list(dataloader))


def checkpoints(library: Any, folder: Path) -> Any:
    project = library.ProjectConfiguration(project_dir=str(folder), automatic_checkpoint_naming=True, total_limit=2)
    accelerator = library.Accelerator(cpu=True, project_config=project)
    dataloader, model, optimizer, scheduler = accelerator.prepare(*parts())
    accelerator.register_for_checkpointing(counter := Counter())
    states = []
    for inputs, targets in list(dataloader)[:3]:
        accelerator.backward(loss_func(model(inputs), targets))
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        counter.count += 1
        accelerator.save_state()
        states.append((trained(accelerator, model), counter.count))
    accelerator.wait_for_everyone()
    kept = sorted(path.name for path in (folder / "checkpoints").iterdir())
    accelerator.load_state(str(folder / "checkpoints" / "checkpoint_1"))
    return kept, (trained(accelerator, model), counter.count) == states[1]


class Counter:
    """Something of the script's own that is saved along."""

    def __init__(self) -> None:
        self.count = 0

    def state_dict(self) -> dict[str, int]:
        return {"count": self.count}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.count = state["count"]


def hooks(library: Any, folder: Path) -> Any:
    accelerator = library.Accelerator(cpu=True)
    model = accelerator.prepare(parts()[1])
    seen: list[Any] = []

    def on_save(models: list[Any], weights: list[dict[str, Any]], output_dir: str) -> None:
        seen.append(["saved", len(models), [sorted(one) for one in weights]])
        weights.pop()

    def on_load(models: list[Any], input_dir: str) -> None:
        seen.append(["loaded", len(models)])
        models.pop()

    saving = accelerator.register_save_state_pre_hook(on_save)
    loading = accelerator.register_load_state_pre_hook(on_load)
    accelerator.save_state(str(folder / "state"))
    accelerator.load_state(str(folder / "state"))
    without_weights = not list((folder / "state").glob("model*"))
    saving.remove()
    loading.remove()
    accelerator.save_state(str(folder / "again"))
    with_weights = bool(list((folder / "again").glob("model*")))
    return seen, without_weights, with_weights, len(accelerator._models) == 1 and accelerator._models[0] is model


def saved_models(library: Any, folder: Path) -> Any:
    accelerator = library.Accelerator(cpu=True)
    model = accelerator.prepare(nn.Sequential(nn.Linear(20, 20), nn.Linear(20, 20)))
    accelerator.save_model(model, folder / "model", max_shard_size="1KB")
    accelerator.save({"step": 3}, folder / "object.pt")
    accelerator.wait_for_everyone()
    with library.init_empty_weights():
        empty = nn.Sequential(nn.Linear(20, 20), nn.Linear(20, 20))
    assert {parameter.device.type for parameter in empty.parameters()} == {"meta"}
    with tempfile.TemporaryDirectory() as offload:
        loaded = library.load_checkpoint_and_dispatch(
            empty, checkpoint=folder / "model", device_map={"0": "cpu", "1": "disk"}, offload_folder=offload,
            no_split_module_classes=["Block"],
        )  # fmt: skip
        same = torch.equal(loaded(torch.ones(1, 20)), accelerator.unwrap_model(model)(torch.ones(1, 20)))
    files = sorted(path.name for path in (folder / "model").iterdir())
    return same, len(files) > 2, torch.load(folder / "object.pt", weights_only=True)


def much_configured(library: Any, folder: Path) -> Any:
    accelerator = library.Accelerator(
        cpu=True,
        mixed_precision="bf16",
        dataloader_config=library.DataLoaderConfiguration(
            split_batches=True, even_batches=True, use_seedable_sampler=True, dispatch_batches=False, non_blocking=True
        ),
        project_config=library.ProjectConfiguration(
            project_dir=str(folder), logging_dir="logs", automatic_checkpoint_naming=True, total_limit=5
        ),
        gradient_accumulation_plugin=library.GradientAccumulationPlugin(num_steps=4, adjust_scheduler=True),
    )
    return (
        accelerator.split_batches,
        accelerator.even_batches,
        accelerator.use_seedable_sampler,
        accelerator.non_blocking,
        accelerator.logging_dir,
        accelerator.gradient_accumulation_steps,
        accelerator.mixed_precision,
        accelerator.project_configuration.total_limit,
    )


def sharding_configured(library: Any, folder: Path) -> Any:
    from torch.distributed.fsdp import BackwardPrefetch, ShardingStrategy

    plugin = library.FullyShardedDataParallelPlugin(
        sharding_strategy=ShardingStrategy.FULL_SHARD,
        backward_prefetch=BackwardPrefetch.BACKWARD_PRE,
        cpu_offload=None,
        mixed_precision_policy=None,
        auto_wrap_policy=None,
        limit_all_gathers=True,
        use_orig_params=True,
        sync_module_states=True,
    )
    accelerator = library.Accelerator(cpu=True, fsdp_plugin=plugin)
    _, model, optimizer, _ = parts()
    if accelerator.num_processes == 1:
        with pytest.raises(Conflict, match="sharding needs a launcher"):
            accelerator.prepare(model, optimizer)
        return accelerator.distributed_type.value, accelerator.is_fsdp2
    model, optimizer = accelerator.prepare(model, optimizer)
    accelerator.backward(loss_func(model(torch.ones(2, 3)), torch.zeros(2, 1)))
    optimizer.step()
    return accelerator.distributed_type.value, accelerator.is_fsdp2


def quantised(library: Any, folder: Path) -> Any:
    config = library.BnbQuantizationConfig(
        load_in_4bit=True,
        bnb_4bit_compute_dtype=torch.bfloat16,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
    )
    return config.load_in_4bit, str(config.bnb_4bit_compute_dtype), config.bnb_4bit_quant_type


def engine_configured(library: Any, folder: Path) -> Any:
    table = {
        "train_batch_size": 16,
        "gradient_accumulation_steps": 4,
        "optimizer": {"type": "Adam", "params": {"lr": 1e-4}},
        "zero_optimization": {
            "stage": 2,
            "offload_optimizer": {"device": "cpu"},
            "overlap_comm": True,
            "contiguous_gradients": True,
        },
        "fp16": {"enabled": True},
    }
    plugin = library.DeepSpeedPlugin(
        hf_ds_config=table, zero_stage=2, gradient_accumulation_steps=4, gradient_clipping=1.0
    )
    if not importable("deepspeed"):
        with pytest.raises(Missing, match="deepspeed"):
            library.Accelerator(cpu=True, deepspeed_plugin=plugin)
    fp16 = plugin.deepspeed_config["fp16"]["enabled"]
    return plugin.zero_stage, plugin.gradient_accumulation_steps, plugin.gradient_clipping, fp16


CONFIGURED = {
    "checkpoints": (["checkpoint_1", "checkpoint_2"], True),
    "hooks": ([["saved", 1, [["bias", "weight"]]], ["loaded", 1]], True, True, True),
    "saved_models": (True, True, {"step": 3}),
    "much_configured": (True, True, True, True, "logs", 4, "bf16", 5),
    "quantised": (True, "torch.bfloat16", "nf4"),
    "engine_configured": (2, 4, 1.0, True),
    "sharding_configured": ("FSDP", False),
}
ALONE = {**CONFIGURED, "placing": ("Linear", "Linear", "cpu", True), "skipping": (4, 6)}
TOGETHER = {name: [value, value] for name, value in CONFIGURED.items()} | {
    "placing": [("DistributedDataParallel", "Linear", "cpu", True)] * 2,
    "skipping": [(1, 3)] * 2,
}


SCENES = {
    scene.__name__: scene
    for scene in (
        placing,
        skipping,
        checkpoints,
        hooks,
        saved_models,
        much_configured,
        sharding_configured,
        quantised,
        engine_configured,
    )
}


def play(library: str, scene: str, folder: str) -> Any:
    return SCENES[scene](importlib.import_module(library), Path(folder))


@pytest.mark.parametrize("library", LIBRARIES)
@pytest.mark.parametrize("scene", SCENES)
def test_saving_example_on_one_process(scene: str, library: str, tmp_path: Path) -> None:
    with fresh():
        assert play(library, scene, str(tmp_path)) == ALONE[scene]


@pytest.mark.parametrize("library", LIBRARIES)
@pytest.mark.parametrize("scene", SCENES)
def test_saving_example_on_two_processes(scene: str, library: str, two: Processes, tmp_path: Path) -> None:
    assert two.run(play, library, scene, str(tmp_path)) == TOGETHER[scene]
