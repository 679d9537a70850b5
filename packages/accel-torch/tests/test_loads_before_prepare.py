"""`load_state` refuses to load nothing, after which training would begin from scratch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from accel_state.errors import CheckpointError
from accel_testing.processes import Processes
from accel_torch import Accelerator, FullyShardedDataParallelPlugin, ProjectConfiguration

pytestmark = pytest.mark.usefixtures("fresh_state")


def parts() -> tuple[Any, ...]:
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return model, optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 1), DataLoader(torch.ones(4, 1))


class Counter:
    def __init__(self) -> None:
        self.count = 0

    def state_dict(self) -> dict[str, Any]:
        return {"count": self.count}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.count = state["count"]


def saved(folder: Path, *kept: int) -> str:
    """A checkpoint of some of the parts."""
    accelerator = Accelerator(cpu=True)
    accelerator.prepare(*(parts()[index] for index in kept))
    accelerator.save_state(str(folder))
    return str(folder)


@pytest.mark.parametrize("kept", [(0,), (1,), (2,), (3,), (0, 1, 2, 3)])
def test_a_load_before_anything_is_prepared_is_refused(tmp_path: Path, kept: tuple[int, ...]) -> None:
    folder = saved(tmp_path / "checkpoint", *kept)
    with pytest.raises(CheckpointError, match=r"has prepared no objects(?s:.*)Call load_state\(\) after prepare\(\)"):
        Accelerator(cpu=True).load_state(folder)


@pytest.mark.parametrize("kept", [(1,), (2,), (3,), (1, 2, 3)])
def test_a_load_before_the_model_is_prepared_is_refused(tmp_path: Path, kept: tuple[int, ...]) -> None:
    folder = saved(tmp_path / "checkpoint", 0, 1, 2, 3)
    accelerator = Accelerator(cpu=True)
    accelerator.prepare(*(parts()[index] for index in kept))
    with pytest.raises(CheckpointError, match=r"has prepared no model, so it would not read model\.safetensors"):
        accelerator.load_state(folder)


def test_the_newest_checkpoint_is_not_loaded_into_nothing_either(tmp_path: Path) -> None:
    project = ProjectConfiguration(str(tmp_path), automatic_checkpoint_naming=True)
    accelerator = Accelerator(cpu=True, project_config=project)
    assert accelerator.load_state(missing_ok=True) is None
    accelerator.prepare(*parts())
    accelerator.save_state()
    with pytest.raises(CheckpointError, match="has prepared no objects"):
        Accelerator(cpu=True, project_config=project).load_state(missing_ok=True)


@pytest.mark.parametrize("name", ["model_args.json", "model_card.md", "model.pt", "optimizer_settings.yaml"])
def test_files_of_the_script_do_not_count_as_states(tmp_path: Path, name: str) -> None:
    counter = Counter()
    accelerator = Accelerator(cpu=True)
    accelerator.register_for_checkpointing(counter)
    counter.count = 3
    accelerator.save_state(str(tmp_path / "checkpoint"))
    (tmp_path / "checkpoint" / name).write_text("{}")
    counter.count = 0
    accelerator.load_state(str(tmp_path / "checkpoint"))
    assert counter.count == 3


def test_objects_that_are_no_models_can_be_loaded_alone(tmp_path: Path) -> None:
    counter = Counter()
    accelerator = Accelerator(cpu=True)
    accelerator.register_for_checkpointing(counter)
    counter.count = 3
    accelerator.save_state(str(tmp_path / "checkpoint"))
    counter.count = 0
    accelerator.load_state(str(tmp_path / "checkpoint"))
    assert counter.count == 3


def test_random_states_can_be_loaded_alone(tmp_path: Path) -> None:
    accelerator = Accelerator(cpu=True)
    accelerator.save_state(str(tmp_path / "checkpoint"))
    expected = torch.rand(1)
    accelerator.load_state(str(tmp_path / "checkpoint"))
    assert torch.equal(torch.rand(1), expected)


def test_a_model_without_its_optimizer_can_be_loaded(tmp_path: Path) -> None:
    folder = saved(tmp_path / "checkpoint", 0, 1)
    accelerator = Accelerator(cpu=True)
    accelerator.prepare(nn.Linear(1, 1))
    accelerator.load_state(folder)


def test_a_hook_may_load_the_weights(tmp_path: Path) -> None:
    folder = saved(tmp_path / "checkpoint", 0)
    accelerator = Accelerator(cpu=True)
    loaded: list[str] = []
    accelerator.register_load_state_pre_hook(lambda models, path: loaded.append(path))
    accelerator.load_state(folder)
    assert loaded == [folder]


def refusal(folder: str, options: dict[str, Any]) -> str:
    accelerator = Accelerator(cpu=True, **options)
    accelerator.prepare(*parts())
    accelerator.save_state(folder)
    with pytest.raises(CheckpointError) as caught:
        Accelerator().load_state(folder)
    return caught.value.obstacle


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({}, "model.safetensors"),
        (
            {"fsdp_plugin": FullyShardedDataParallelPlugin(2, state_dict_type="SHARDED_STATE_DICT")},
            "pytorch_model_fsdp_0",
        ),
        ({"fsdp_plugin": FullyShardedDataParallelPlugin(2, state_dict_type="FULL_STATE_DICT")}, "pytorch_model_fsdp"),
    ],
    ids=["ddp", "shards", "full tensors"],
)
def test_all_processes_refuse(two: Processes, tmp_path: Path, options: dict[str, Any], name: str) -> None:
    for obstacle in two.run(refusal, str(tmp_path / "checkpoint"), options):
        assert obstacle.startswith("This Accelerator has prepared no objects, so it would not read")
        assert name in obstacle
