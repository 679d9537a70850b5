"""Names and contents of checkpoints, and what comes back from them."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from accelerate import Accelerator
from accelerate.utils import ProjectConfiguration, broadcast_object_list, set_seed

ONLY_HERE = ("checkpoint_manifest.json", "dl_state_dict")
"""How files begin that only one library writes: the list that verifies a checkpoint, and places of plain loaders."""


def _folder() -> Path:
    """One new folder for all processes."""
    import tempfile

    Accelerator(cpu=True)
    return Path(broadcast_object_list([tempfile.mkdtemp()])[0])


def _names(where: Path) -> list[str]:
    Accelerator(cpu=True).wait_for_everyone()
    found = (path.relative_to(where) for path in where.rglob("*") if path.is_file())
    return sorted(str(path) for path in found if not path.name.startswith(ONLY_HERE))


def _prepared(accelerator: Any) -> Any:
    set_seed(0)
    model = nn.Linear(2, 1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    batches = DataLoader(TensorDataset(torch.ones(8, 2)), batch_size=2)
    return accelerator.prepare(model, optimizer, scheduler, batches)


def _step(accelerator: Any, model: Any, optimizer: Any, scheduler: Any) -> float:
    loss = model(torch.ones(1, 2)).square().sum()
    accelerator.backward(loss)
    optimizer.step()
    scheduler.step()
    optimizer.zero_grad()
    return float(loss.item())


def files_of_everything() -> Any:
    where, accelerator = _folder(), Accelerator(cpu=True)
    _prepared(accelerator)
    accelerator.save_state(str(where / "saved"))
    return _names(where)


def files_without_safetensors() -> Any:
    where, accelerator = _folder(), Accelerator(cpu=True)
    _prepared(accelerator)
    accelerator.save_state(str(where / "saved"), safe_serialization=False)
    return _names(where)


def files_of_several_models() -> Any:
    where, accelerator = _folder(), Accelerator(cpu=True)
    one, other = nn.Linear(1, 1), nn.Linear(1, 1)
    first, second = torch.optim.SGD(one.parameters(), lr=0.1), torch.optim.SGD(other.parameters(), lr=0.1)
    accelerator.prepare(one, other, first, second)
    accelerator.save_state(str(where / "saved"))
    return _names(where)


def files_of_a_seedable_sampler() -> Any:
    from accelerate import DataLoaderConfiguration

    where = _folder()
    accelerator = Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(use_seedable_sampler=True))
    accelerator.prepare(DataLoader(range(8), shuffle=True))  # type: ignore[arg-type]
    accelerator.save_state(str(where / "saved"))
    return _names(where)


def continued() -> Any:
    where, accelerator = _folder(), Accelerator(cpu=True)
    model, optimizer, scheduler, _ = _prepared(accelerator)
    for _ in range(2):
        _step(accelerator, model, optimizer, scheduler)
    accelerator.save_state(str(where / "saved"))
    first = [_step(accelerator, model, optimizer, scheduler) for _ in range(2)]
    draw = torch.rand(1).item()
    accelerator.wait_for_everyone()
    accelerator.load_state(str(where / "saved"))
    second = [_step(accelerator, model, optimizer, scheduler) for _ in range(2)]
    return [first, second, draw, torch.rand(1).item()]


def named_by_number() -> Any:
    where = _folder()
    project = ProjectConfiguration(project_dir=str(where), automatic_checkpoint_naming=True, total_limit=2)
    accelerator = Accelerator(cpu=True, project_config=project)
    _prepared(accelerator)
    told = [Path(accelerator.save_state()).name for _ in range(3)]
    accelerator.wait_for_everyone()
    return [told, sorted(os.listdir(where / "checkpoints")), accelerator.save_iteration]


def the_newest_is_loaded() -> Any:
    where = _folder()
    project = ProjectConfiguration(project_dir=str(where), automatic_checkpoint_naming=True)
    accelerator = Accelerator(cpu=True, project_config=project)
    model, optimizer, scheduler, _ = _prepared(accelerator)
    weight = accelerator.unwrap_model(model).weight
    seen = []
    for _ in range(2):
        _step(accelerator, model, optimizer, scheduler)
        seen.append(weight[0, 0].item())
        accelerator.save_state()
    _step(accelerator, model, optimizer, scheduler)
    accelerator.wait_for_everyone()
    accelerator.load_state()
    return [seen, weight[0, 0].item()]


def numbers_go_on_where_they_were_told() -> Any:
    where = _folder()
    project = ProjectConfiguration(project_dir=str(where), automatic_checkpoint_naming=True, iteration=5)
    accelerator = Accelerator(cpu=True, project_config=project)
    _prepared(accelerator)
    return Path(accelerator.save_state()).name


def saved_over_a_number_that_exists() -> Any:
    where = _folder()
    project = ProjectConfiguration(project_dir=str(where), automatic_checkpoint_naming=True)
    accelerator = Accelerator(cpu=True, project_config=project)
    _prepared(accelerator)
    accelerator.save_state()
    accelerator.project_configuration.iteration = 0
    return Path(accelerator.save_state()).name


class Counter:
    def __init__(self) -> None:
        self.count = 0

    def state_dict(self) -> dict[str, int]:
        return {"count": self.count}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.count = state["count"]


def registered_objects() -> Any:
    where, accelerator = _folder(), Accelerator(cpu=True)
    counter = Counter()
    accelerator.register_for_checkpointing(counter)
    counter.count = 3
    accelerator.save_state(str(where / "saved"))
    counter.count = 9
    accelerator.wait_for_everyone()
    accelerator.load_state(str(where / "saved"))
    return [counter.count, _names(where)]


def objects_that_cannot_be_registered() -> Any:
    return Accelerator(cpu=True).register_for_checkpointing("text")


def hooks() -> Any:
    where, accelerator = _folder(), Accelerator(cpu=True)
    _prepared(accelerator)
    told: list[Any] = []

    def before_saving(models: Any, weights: Any, path: str) -> None:
        told.append(["save", len(models), [sorted(one) for one in weights]])
        weights.clear()

    def before_loading(models: Any, path: str) -> None:
        told.append(["load", len(models)])
        models.clear()

    saving = accelerator.register_save_state_pre_hook(before_saving)
    accelerator.register_load_state_pre_hook(before_loading)
    accelerator.save_state(str(where / "saved"))
    accelerator.wait_for_everyone()
    accelerator.load_state(str(where / "saved"))
    saving.remove()
    accelerator.save_state(str(where / "again"))
    return [told, _names(where)]


def one_model_in_pieces() -> Any:
    where, accelerator = _folder(), Accelerator(cpu=True)
    model = accelerator.prepare(nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32), nn.Linear(32, 32)))
    accelerator.save_model(model, str(where / "whole"))
    accelerator.save_model(model, str(where / "pieces"), max_shard_size="5KB")
    accelerator.save_model(model, str(where / "pickled"), safe_serialization=False)
    found = _names(where)
    index = json.loads((where / "pieces" / "model.safetensors.index.json").read_text())
    return [found, index]


def a_single_object() -> Any:
    where, accelerator = _folder(), Accelerator(cpu=True)
    accelerator.save({"a": torch.ones(1)}, str(where / "object.bin"))
    accelerator.save({"a": torch.ones(1)}, str(where / "object.safetensors"), safe_serialization=True)
    return _names(where)


def keys_of_random_states() -> Any:
    where, accelerator = _folder(), Accelerator(cpu=True)
    accelerator.save_state(str(where / "saved"))
    found = torch.load(where / "saved" / f"random_states_{accelerator.process_index}.pkl", weights_only=False)
    return sorted(key for key in found if not key.startswith("accel"))


def loaded_from_nowhere() -> Any:
    where, accelerator = _folder(), Accelerator(cpu=True)
    _prepared(accelerator)
    return accelerator.load_state(str(where / "missing"))


def saved_to_nowhere() -> Any:
    return Accelerator(cpu=True).save_state()
