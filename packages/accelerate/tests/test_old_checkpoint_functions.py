"""The functions of `accelerate.checkpointing` write and read the contents of one folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from accel_state.errors import CheckpointError

pytestmark = pytest.mark.usefixtures("fresh_state")


class Counter:
    def __init__(self, seen: int = 0) -> None:
        self.seen = seen

    def state_dict(self) -> dict[str, Any]:
        return {"seen": self.seen}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.seen = state["seen"]


def parts(seed: int) -> tuple[nn.Module, torch.optim.Optimizer, Any, torch.amp.GradScaler]:
    torch.manual_seed(seed)
    model = nn.Linear(3, 2)
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(1, 3)).sum().backward()
    return model, optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 1), torch.amp.GradScaler("cpu", 8.0 * seed)


@pytest.mark.parametrize("safe", [True, False])
def test_states_come_back(tmp_path: Path, safe: bool) -> None:
    from accelerate.checkpointing import load_accelerator_state, save_accelerator_state

    model, optimizer, scheduler, scaler = parts(1)
    optimizer.step()
    scheduler.step()
    saved = save_accelerator_state(
        str(tmp_path), [model.state_dict()], [optimizer], [scheduler], [], 0, 7, scaler, safe_serialization=safe
    )
    expected = torch.rand(2).tolist()
    other, optimizer_2, scheduler_2, scaler_2 = parts(2)
    told = load_accelerator_state(str(tmp_path), [other], [optimizer_2], [scheduler_2], [], 0, scaler_2, "cpu")

    assert saved == tmp_path
    assert told == {"step": 7}
    assert torch.rand(2).tolist() == expected
    assert torch.equal(other.weight, model.weight)
    assert scheduler_2.state_dict() == scheduler.state_dict()
    assert scaler_2.get_scale() == 8.0
    weights = "model.safetensors" if safe else "pytorch_model.bin"
    assert {entry.name for entry in tmp_path.iterdir()} == {
        *(weights, "optimizer.bin", "scheduler.bin", "scaler.pt", "random_states_0.pkl"),
    }


def test_a_registered_object_comes_back(tmp_path: Path) -> None:
    from accelerate.checkpointing import load_custom_state, save_custom_state

    save_custom_state(Counter(5), tmp_path, 3)
    counter = Counter()
    load_custom_state(counter, tmp_path, 3)
    assert counter.seen == 5
    assert [entry.name for entry in tmp_path.iterdir()] == ["custom_checkpoint_3.pkl"]
    with pytest.raises(CheckpointError, match="does not exist"):
        load_custom_state(counter, tmp_path)


def test_save_and_load_at_their_old_address(tmp_path: Path) -> None:
    from accelerate.utils import load, save

    save({"a": torch.ones(2)}, tmp_path / "a.bin")
    assert load(tmp_path / "a.bin", map_location="cpu")["a"].tolist() == [1, 1]
