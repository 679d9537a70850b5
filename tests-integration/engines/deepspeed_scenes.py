"""Scenes of training with DeepSpeed, played on every process: a name and its arguments as JSON; prints what came of it.

Several scenes make one run after another in the same processes, because starting processes takes longest.
"""

from __future__ import annotations

import gc
import itertools
import json
import os
import sys
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import deepspeed
import torch
from deepspeed.utils import safe_get_full_fp32_param
from torch import Tensor
from torch.nn import Linear, Module, ReLU, Sequential
from torch.nn.functional import cross_entropy
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from accel_ops import gather_object, set_seed
from accel_plugins.deepspeed.config import DeepSpeedPlugin, DummyOptim, DummyScheduler
from accel_plugins.deepspeed.engine import gathered
from accel_plugins.precision.config import AORecipeKwargs
from accel_state.errors import AccelError
from accel_state.run_state import AcceleratorState
from accel_torch import Accelerator, DataLoaderConfiguration, NonFiniteStep, StepGuard


def started(plugin: dict[str, Any] | None = None, **told: Any) -> Accelerator:
    """An Accelerator of a new run in these processes."""
    AcceleratorState._reset_state()
    plugins = None if plugin is None else DeepSpeedPlugin(**plugin)
    return Accelerator(cpu=True, deepspeed_plugin=plugins, **told)


def parts(stage: int = 3, **entries: Any) -> dict[str, Any]:
    """Settings under which DeepSpeed divides small models as well."""
    zero = {"stage": stage, "stage3_param_persistence_threshold": 0, **entries}
    return {"hf_ds_config": {"zero_optimization": zero, "gradient_clipping": 1.0}}


def layers(width: int = 16, dropout: float = 0.0) -> Module:
    torch.manual_seed(0)
    return Sequential(Linear(8, width), ReLU(), torch.nn.Dropout(dropout), Linear(width, 2))


def digits(samples: int = 32, shuffle: bool = False) -> DataLoader[Any]:
    inputs = torch.randn(samples, 8, generator=torch.Generator().manual_seed(3))
    return DataLoader(TensorDataset(inputs, (inputs.sum(1) > 0).long()), batch_size=4, shuffle=shuffle)


def adamw(parameters: Iterable[Tensor], lr: float = 1e-2) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=lr)


def steps(accelerator: Accelerator, model: Module, optimizer: Any, batches: Iterable[Any]) -> Iterator[float]:
    """The loss of each batch, which is trained with before the next is read."""
    for inputs, targets in batches:
        with accelerator.accumulate(model):
            loss = cross_entropy(model(inputs).float(), targets)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
        yield accelerator.reduce(loss.detach(), "mean").item()


def several_models(plain: bool = False) -> dict[str, Any]:
    """A student that a teacher in parts tells what to do, and a second model, trained at the same time."""
    AcceleratorState._reset_state()
    plugins = {
        "student": DeepSpeedPlugin(zero_stage=2, gradient_clipping=1e6),
        "teacher": DeepSpeedPlugin(**parts()),
    }
    accelerator = Accelerator(cpu=True, deepspeed_plugins=None if plain else plugins)
    student, teacher, other = layers(16), layers(32), layers(24)
    first, second = adamw(student.parameters()), adamw(other.parameters())
    student, first, loader = accelerator.prepare(student, first, digits())
    names = [_selected(plugins)]
    if not plain:
        accelerator.state.select_deepspeed_plugin("teacher")
        names.append(_selected(plugins))
    teacher = accelerator.prepare(teacher.eval())
    if not plain:
        accelerator.state.select_deepspeed_plugin("student")
    beside = Accelerator() if not plain else accelerator
    other, second = beside.prepare(other, second)
    losses = []
    for inputs, targets in loader:
        with torch.no_grad():
            told = teacher(inputs).softmax(1)
        one = cross_entropy(student(inputs), told)
        two = cross_entropy(other(inputs), targets)
        accelerator.backward(one)
        beside.backward(two)
        for optimizer in (first, second):
            optimizer.step()
            optimizer.zero_grad()
        losses.append([accelerator.reduce(loss.detach(), "mean").item() for loss in (one, two)])
    divided = [type(model).__name__ for model in (student, teacher, other)]
    stage = None if plain else teacher.zero_optimization_stage()
    return {"losses": losses, "types": divided, "selected": names, "stage of the teacher": stage}


def shared_accumulation(plain: bool = False) -> dict[str, Any]:
    """Two Accelerators over one run, each with a model that accumulates; one of them asked how often."""
    accelerator = started(None if plain else {"zero_stage": 2, "gradient_clipping": 1e6}, gradient_accumulation_steps=2)
    beside = Accelerator(gradient_accumulation_steps=2) if plain else Accelerator()
    one, two = layers(16), layers(24)
    first, second = adamw(one.parameters()), adamw(two.parameters())
    one, first, loader = accelerator.prepare(one, first, digits())
    two, second, others = beside.prepare(two, second, digits())
    pairs = zip(steps(accelerator, one, first, loader), steps(beside, two, second, others), strict=True)
    losses = [list(pair) for pair in pairs]
    refusal = "" if plain else _refusal(lambda: Accelerator(gradient_accumulation_steps=3))
    return {"losses": losses, "refusal": refusal}


def other_clipping() -> dict[str, Any]:
    """What is said to whoever clips otherwise than the engine, and what comes of clipping beside it."""
    accelerator = started({"zero_stage": 1, "gradient_clipping": 0.5})
    model, beside = layers(), layers(24)
    model, _, loader = accelerator.prepare(model, adamw(model.parameters()), digits())
    inputs, targets = next(iter(loader))
    accelerator.backward(cross_entropy(model(inputs), targets))
    norm = accelerator.clip_grad_norm_(model.parameters(), 0.5)
    cross_entropy(beside(inputs), targets).backward()
    plain = accelerator.clip_grad_norm_(beside.parameters(), 1e-3)
    clipped = torch.nn.utils.get_total_norm([p.grad for p in beside.parameters() if p.grad is not None])
    refusals = [
        _refusal(lambda: accelerator.clip_grad_norm_(model.parameters(), 0.25)),
        _refusal(lambda: accelerator.clip_grad_norm_(model.parameters(), 0.5, norm_type=1)),
    ]
    silent = started({"hf_ds_config": {"zero_optimization": {"stage": 2}, "gradient_clipping": 0.0}})
    other = layers()
    other, _, _ = silent.prepare(other, adamw(other.parameters()), digits())
    refusals.append(_refusal(lambda: silent.clip_grad_norm_(other.parameters(), 1.0)))
    norms = [float(found) for found in (norm, plain, clipped) if found is not None]
    return {"norms": norms, "refusals": refusals}


def in_8_bits(stage: int = 2, plain: bool = False) -> dict[str, Any]:
    """Training with layers that compute in 8 bits."""
    filters = AORecipeKwargs(module_filter_func=lambda module, name: name == "3")
    plugin = None if plain else parts(stage, stage3_gather_16bit_weights_on_model_save=True)
    accelerator = started(plugin, mixed_precision="fp8", kwargs_handlers=[filters])
    torch.manual_seed(0)
    model: Any = Sequential(Linear(8, 16), ReLU(), torch.nn.Dropout(0.0), Linear(16, 16), Linear(16, 2))
    model, optimizer, loader = accelerator.prepare(model, adamw(model.parameters()), digits(64))
    losses = list(steps(accelerator, model, optimizer, loader))
    return {"losses": losses, "layers": [type(layer).__name__ for layer in accelerator.unwrap_model(model)]}


def wide() -> Module:
    """Layers of which DeepSpeed writes to disks: it keeps what has less than a mebibyte."""
    torch.manual_seed(0)
    return Sequential(Linear(8, 1024), ReLU(), Linear(1024, 1024), ReLU(), Linear(1024, 2))


def on_disk(folder: str) -> dict[str, Any]:
    """Training whose optimizer states and parameters lie on a disk between uses."""
    disk = {"device": "nvme", "nvme_path": folder}
    accelerator = started(parts(offload_optimizer=disk, offload_param=disk, sub_group_size=600_000))
    model = wide()
    model, optimizer, loader = accelerator.prepare(model, adamw(model.parameters(), 1e-4), digits())
    losses = list(steps(accelerator, model, optimizer, loader))
    written = [path.stat().st_size for path in Path(folder).rglob("*") if path.is_file()]
    return {"losses": losses, "bytes": sum(written)}


def in_memory() -> list[float]:
    """The same by plain data parallelism."""
    accelerator = started()
    model = wide()
    model, optimizer, loader = accelerator.prepare(model, adamw(model.parameters(), 1e-4), digits())
    losses = []
    for inputs, targets in loader:
        loss = cross_entropy(model(inputs), targets)
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(accelerator.reduce(loss.detach(), "mean").item())
    return losses


def _selected(plugins: dict[str, DeepSpeedPlugin]) -> list[str]:
    return [name for name, plugin in plugins.items() if plugin.selected]


def options_of_checkpoints(folder: str) -> dict[str, Any]:
    """What is saved and loaded by DeepSpeed's own options."""
    accelerator = started({"zero_stage": 1, "gradient_clipping": 1.0})
    model = layers()
    model[0].weight.requires_grad_(False)  # type: ignore[index, union-attr]
    model, optimizer, loader = accelerator.prepare(
        model, adamw(p for p in model.parameters() if p.requires_grad), digits()
    )
    list(steps(accelerator, model, optimizer, loader))
    accelerator.save_state(folder, client_state={"seen": 8}, exclude_frozen_parameters=True)
    weights = torch.load(f"{folder}/pytorch_model/mp_rank_00_model_states.pt", weights_only=False)["module"]
    refusals = [
        _refusal(lambda: accelerator.save_state(folder, nonsense=1)),
        _refusal(lambda: accelerator.load_state(folder, nonsense=1)),
        _refusal(lambda: accelerator.save_state(folder, async_save=True)),
    ]
    rates = []
    for options in ({}, {"load_optimizer_states": False}):
        optimizer.param_groups[0]["lr"] = 0.5
        accelerator.load_state(folder, strict=False, **options)
        rates.append(optimizer.param_groups[0]["lr"])
    seen = accelerator.deepspeed_engine_wrapped.client_state["seen"]
    return {"weights": sorted(weights), "seen": seen, "rates": rates, "refusals": refusals}


def _refusal(call: Callable[[], Any]) -> str:
    try:
        call()
    except AccelError as error:
        return f"{type(error).__name__}: {error}"
    return "nothing was refused"


def other_stages(folder: str) -> dict[str, str]:
    """What is said to whoever loads a checkpoint of another stage."""

    def prepared(stage: int) -> tuple[Accelerator, Any, Any, Any]:
        accelerator = started(parts(stage), mixed_precision="bf16")
        model = layers()
        return (accelerator, *accelerator.prepare(model, adamw(model.parameters()), digits()))

    for stage in range(4):
        accelerator, model, optimizer, loader = prepared(stage)
        list(steps(accelerator, model, optimizer, loader))
        accelerator.save_state(f"{folder}/{stage}")
    said = {}
    for ours in range(4):
        accelerator = prepared(ours)[0]
        for theirs in set(range(4)) - {ours}:
            said[f"{theirs} -> {ours}"] = _refusal(partial(accelerator.load_state, f"{folder}/{theirs}"))
        accelerator.load_state(f"{folder}/{ours}")
    return said


def middle_of_an_epoch(folder: str, stage: int) -> dict[str, Any]:
    """An epoch with shuffling and dropout, and its second half once more, in both ways of going on."""

    def prepared(restore: bool = False) -> tuple[Accelerator, Any, Any, Any]:
        set_seed(5)
        accelerator = started(
            parts(stage),
            dataloader_config=DataLoaderConfiguration(restore_position=restore, use_seedable_sampler=True),
        )
        model = layers(dropout=0.3)
        return (accelerator, *accelerator.prepare(model, adamw(model.parameters()), digits(64, shuffle=True)))

    accelerator, model, optimizer, loader = prepared()
    losses = []
    for number, loss in enumerate(steps(accelerator, model, optimizer, loader), 1):
        losses.append(loss)
        if number == 3:
            accelerator.save_state(folder)
    again = []
    for restore in (False, True):
        accelerator, model, optimizer, loader = prepared(restore)
        accelerator.load_state(folder)
        rest = loader if restore else accelerator.skip_first_batches(loader, 3)
        again.append(list(steps(accelerator, model, optimizer, rest)))
    return {"whole": losses, "again": again}


def weights(folder: str) -> dict[str, Any]:
    """The weights of a model in parts: gathered in 16 bits, from a checkpoint in 32, and where gathering is off."""
    gathers = parts(stage3_gather_16bit_weights_on_model_save=True)
    accelerator = started(gathers, mixed_precision="bf16")
    plain = layers()
    model, optimizer, loader = accelerator.prepare(plain, adamw(plain.parameters()), digits())
    list(steps(accelerator, model, optimizer, loader))
    divided = [parameter.data.numel() for parameter in model.parameters()]
    held = {name: safe_get_full_fp32_param(parameter).clone() for name, parameter in model.module.named_parameters()}
    with gathered(model.parameters()):
        whole = {name: parameter.detach().clone() for name, parameter in model.module.named_parameters()}
    with gathered(model.module[0].bias, modifier_rank=0):
        if accelerator.is_main_process:
            model.module[0].bias.data.fill_(2.0)
    with gathered(model.module[0].bias, modifier_rank=0):
        changed = model.module[0].bias.unique().tolist()
        if accelerator.is_main_process:
            model.module[0].bias.data.copy_(whole["0.bias"])
    accelerator.save_state(f"{folder}/state")
    accelerator.save_model(model, f"{folder}/model")
    accelerator.wait_for_everyone()
    told: dict[str, Any] = {"divided": divided, "changed": changed}
    if accelerator.is_main_process:
        told |= _compared(folder, held, whole)
    off = started(parts(), mixed_precision="bf16")
    other = layers()
    other, _, _ = off.prepare(other, adamw(other.parameters()), digits())
    told["refusal"] = _refusal(lambda: off.get_state_dict(other))
    return told


def saved_models(folder: str) -> list[int]:
    """Save a model with a tied weight and a buffer under every stage, and as one process does; the sizes of shards."""
    torch.manual_seed(0)
    first = {name: value.clone() for name, value in tied().state_dict().items()}
    divided = []
    for stage in (None, 0, 1, 2, 3):
        accelerator = started(None if stage is None else parts(stage, stage3_gather_16bit_weights_on_model_save=True))
        model = tied()
        model.load_state_dict(first)
        model, _, _ = accelerator.prepare(model, adamw(model.parameters()), digits())
        divided += [parameter.numel() for parameter in model.parameters()] if stage == 3 else []
        for limit in ("10GB", 300):
            accelerator.save_model(model, f"{folder}/{stage}/{limit}", max_shard_size=limit)
    accelerator.wait_for_everyone()
    return divided


def tied() -> Module:
    model = Sequential(Linear(8, 8), ReLU(), Linear(8, 8), Linear(8, 2))
    model[2].weight = model[0].weight
    model.register_buffer("scale", torch.ones(3, dtype=torch.float16))
    return model


def _compared(folder: str, held: dict[str, Tensor], whole: dict[str, Tensor]) -> dict[str, Any]:
    from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

    from accel_bigmodel import load_checkpoint_in_model

    single = get_fp32_state_dict_from_zero_checkpoint(f"{folder}/state", "pytorch_model")
    fresh = layers().to(torch.bfloat16)
    load_checkpoint_in_model(fresh, f"{folder}/model")
    read = fresh.state_dict()
    return {
        "fp32": {name: str(value.dtype) for name, value in single.items()},
        "fp32 equal": all(torch.equal(single[name], held[name]) for name in held),
        "bf16 equal": all(torch.equal(read[name], whole[name]) for name in whole),
    }


def universal(folder: str, load: bool = False) -> list[float]:
    """The losses after a checkpoint that another number of processes wrote with another stage."""
    table = {"zero_optimization": {"stage": 2 if load else 1}, "gradient_clipping": 1.0}
    accelerator = started({"hf_ds_config": {**table, "checkpoint": {"load_universal": load}}})
    model = layers()
    model, optimizer, loader = accelerator.prepare(model, adamw(model.parameters()), digits(16))
    if load:
        accelerator.load_state(folder, allow_missing=("random_states",))
        return list(steps(accelerator, model, optimizer, loader))
    list(steps(accelerator, model, optimizer, loader))
    accelerator.save_state(folder)
    return list(steps(accelerator, model, optimizer, loader))


def own_schedule() -> dict[str, Any]:
    """An optimizer of DeepSpeed's with a schedule of torch, which is made once the optimizer is there."""
    accelerator = started(
        {"zero_stage": 1, "gradient_clipping": 1.0, "optimizer": {"type": "AdamW", "params": {"lr": "auto"}}}
    )
    model = layers()
    stand_in = DummyOptim(model.parameters(), lr=0.5)
    schedule = DummyScheduler(stand_in, lr_scheduler_callable=lambda made: LambdaLR(made, lambda step: 0.5**step))
    model, optimizer, schedule, loader = accelerator.prepare(model, stand_in, schedule, digits(16))
    rates = [schedule.get_last_lr()[0]]
    for _ in steps(accelerator, model, optimizer, loader):
        schedule.step()
        rates.append(schedule.get_last_lr()[0])
    return {"rates": rates, "optimizer": type(optimizer.optimizer).__name__}


def default_warm_up(named: int | str = "auto") -> dict[str, Any]:
    """A schedule of DeepSpeed's without a warm-up: its stand-in says nothing, or the table says 0."""
    params = {"warmup_min_lr": 0.25, "warmup_max_lr": 0.5, "warmup_num_steps": named}
    accelerator = started(
        {
            "zero_stage": 1,
            "gradient_clipping": 1.0,
            "optimizer": {"type": "AdamW", "params": {"lr": "auto"}},
            "scheduler": {"type": "WarmupLR", "params": params},
        }
    )
    model = layers()
    stand_in = DummyOptim(model.parameters(), lr=0.5)
    model, optimizer, schedule, loader = accelerator.prepare(model, stand_in, DummyScheduler(stand_in), digits(16))
    rates = []
    for _ in steps(accelerator, model, optimizer, loader):
        schedule.step()
        rates.append(schedule.get_last_lr()[0])
    return {"rates": rates}


def told_by_the_table() -> dict[str, Any]:
    """What a run takes from DeepSpeed's own table, and which schedules it refuses."""
    adam = {"type": "AdamW", "params": {"lr": 0.01}}
    zero = {"zero_optimization": {"stage": 2}, "gradient_clipping": 1.0, "gradient_accumulation_steps": 2}
    zero["train_batch_size"] = "auto"
    accelerator = started({"hf_ds_config": {**zero, "bf16": {"enabled": True}}})
    model = layers()
    model, optimizer, loader = accelerator.prepare(model, adamw(model.parameters()), digits(16))
    trained = steps(accelerator, model, optimizer, loader)
    norms = [accelerator.clip_grad_norm_(model.parameters(), 1.0) for _ in trained]
    told = {
        "precision": accelerator.mixed_precision,
        "dtypes": sorted({str(parameter.dtype) for parameter in model.parameters()}),
        "norms": norms,
        "batch": accelerator.deepspeed_config["train_batch_size"],
        "first engine": accelerator.deepspeed_engine_wrapped.engine is model,
        "environment": os.environ["ACCELERATE_USE_DEEPSPEED"],
    }
    scheduled = started({"hf_ds_config": {**zero, "optimizer": adam}})
    other = layers()
    schedule = LambdaLR(adamw(other.parameters()), lambda step: 0.5)
    refusal = _refusal(lambda: scheduled.prepare(other, DummyOptim(other.parameters()), schedule, digits(16)))
    second = _refusal(lambda: Accelerator(deepspeed_plugin=DeepSpeedPlugin(zero_stage=3)))
    return {**told, "refusals": [refusal, second]}


def freed(stage: int) -> dict[str, Any]:
    """Bytes of tensors before a model is prepared, while it trains, and after its memory was given back."""
    accelerator = started(parts(stage))
    found = [_bytes_of_tensors()]
    model: Any = layers(100_000)
    model, optimizer, loader = accelerator.prepare(model, adamw(model.parameters()), digits(16))
    list(steps(accelerator, model, optimizer, loader))
    found.append(_bytes_of_tensors())
    model, optimizer, loader = accelerator.free_memory(model, optimizer, loader)
    found.append(_bytes_of_tensors())
    model = layers()
    model, optimizer, loader = accelerator.prepare(model, adamw(model.parameters()), digits(16))
    return {"bytes": found, "losses": list(steps(accelerator, model, optimizer, loader))}


def _bytes_of_tensors() -> int:
    gc.collect()
    storages = [item.untyped_storage() for item in gc.get_objects() if isinstance(item, Tensor)]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


class Experts(Module):
    """A layer that sends inputs through one of two others, another one on each process."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = torch.nn.ModuleList([Linear(8, 8), Linear(8, 8)])

    def forward(self, inputs: Tensor) -> Tensor:
        chosen: Tensor = self.experts[torch.distributed.get_rank()](inputs)
        return chosen


def experts() -> dict[str, Any]:
    """A mixture of experts in parts, which are gathered as one piece whichever expert is asked."""
    torch.manual_seed(0)
    accelerator = started({**parts(), "transformer_moe_cls_names": "Experts"})
    model = Sequential(Linear(8, 8), Experts(), ReLU(), Linear(8, 2))
    model, optimizer, loader = accelerator.prepare(model, adamw(model.parameters()), digits())
    losses = list(steps(accelerator, model, optimizer, loader))
    pieces = [type(module).__name__ for module in deepspeed.utils.get_z3_leaf_modules(model)]
    wrong = started({**parts(), "transformer_moe_cls_names": "Specialists"})
    other = layers()
    refusal = _refusal(lambda: wrong.prepare(other, adamw(other.parameters()), digits()))
    return {"losses": losses, "pieces": pieces, "refusal": refusal}


class OwnStream(IterableDataset[Tensor]):
    """A stream of which each process has a shard of its own length."""

    def __init__(self, counts: list[int], rank: int = 0) -> None:
        self.counts, self.rank = counts, rank

    def split_by_node(self, rank: int, world: int) -> OwnStream:
        return OwnStream(self.counts, rank)

    def __iter__(self) -> Iterator[Tensor]:
        return iter(torch.arange(self.counts[self.rank]) + 100 * self.rank)


def exact_epochs(stage: int) -> dict[str, Any]:
    """Epochs whose last steps some processes have no data for, and one process that trains with the same samples."""
    plugin = parts(stage)
    plugin["hf_ds_config"] |= {"gradient_clipping": 0.0, "train_micro_batch_size_per_gpu": 2}
    accelerator = started(plugin, dataloader_config=DataLoaderConfiguration(exact_epochs=True))
    plain = layers()
    model, optimizer = accelerator.prepare(plain, adamw(plain.parameters()))
    data: list[Any] = [torch.arange(13), torch.arange(1), OwnStream([5, 9]), OwnStream([0, 3])]
    loaders: list[Any] = [accelerator.prepare(DataLoader(each, batch_size=2)) for each in data]
    samples: list[list[list[int]]] = []
    stand_ins = 0
    for loader in loaders:
        samples.append([])
        for indices in loader:
            accelerator.backward(_errors(model, indices).mean())
            optimizer.step()
            optimizer.zero_grad()
            stand_ins += loader.is_stand_in
            samples[-1].append(accelerator.gather_for_metrics(indices).tolist())
    alone = layers()
    other = adamw(alone.parameters())
    for batch in itertools.chain.from_iterable(samples):
        _errors(alone, torch.tensor(batch)).mean().backward()
        other.step()
        other.zero_grad()
    trained = [safe_get_full_fp32_param(parameter) for parameter in plain.parameters()]
    off = max((one - two).abs().max().item() for one, two in zip(trained, alone.parameters(), strict=True))
    refused = started(
        plugin, dataloader_config=DataLoaderConfiguration(exact_epochs=True), gradient_accumulation_steps=2
    )
    return {
        "samples": [sorted(itertools.chain.from_iterable(epoch)) for epoch in samples],
        "steps": [len(epoch) for epoch in samples],
        "stand-ins": gather_object([stand_ins]),
        "off": off,
        "refusal": _refusal(lambda: refused.prepare(layers(), DataLoader(range(4)))),
    }


def guarded(stage: int) -> dict[str, Any]:
    """A guard of steps, and a NaN in a batch of the second process; then two actions that an engine cannot do."""
    accelerator = started(parts(stage), kwargs_handlers=[StepGuard()])
    inputs = torch.randn(32, 8, generator=torch.Generator().manual_seed(3))
    # The second process reads the odd batches: its third one.
    inputs[21, 0] = float("nan")
    plain = layers()
    model, optimizer, loader = accelerator.prepare(
        plain, adamw(plain.parameters()), DataLoader(TensorDataset(inputs, inputs[:, :2]), batch_size=4)
    )

    def whole() -> list[float]:
        weights = [safe_get_full_fp32_param(parameter) for parameter in plain.parameters()]
        return torch.cat([weight.flatten() for weight in weights]).tolist()

    before, error, good = whole(), "", 0
    for features, targets in loader:
        before = whole()
        try:
            accelerator.backward((model(features) - targets).square().mean())
            optimizer.step()
            optimizer.zero_grad()
        except NonFiniteStep as bad:
            error = str(bad)
            break
        good += before != whole()
    (event,) = accelerator.guard.events
    everyones = gather_object([[error, whole() == before, event.step, event.ranks, event.action, good]])
    guards = [StepGuard(nonfinite="skip"), StepGuard(nonfinite="rollback", snapshot_every=2)]
    refusals = [_refusal(partial(started, parts(stage), kwargs_handlers=[guard])) for guard in guards]
    return {"everyones": everyones, "refusals": refusals}


def _errors(model: Module, indices: Tensor) -> Tensor:
    inputs = torch.stack([torch.randn(8, generator=torch.Generator().manual_seed(int(index))) for index in indices])
    errors: Tensor = (model(inputs) - inputs[:, :2]).square().sum(1)
    return errors


def main() -> None:
    name, told = sys.argv[1], json.loads(sys.argv[2])
    came = globals()[name](**told)
    if int(torch.distributed.get_rank()) == 0:
        print("RESULT " + json.dumps(came), flush=True)


if __name__ == "__main__":
    main()
