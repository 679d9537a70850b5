"""Gradients of an unfinished accumulation window: what loading them restores, and what it refuses."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from accel_plugins.checkpoint.files import gradients_name
from accel_plugins.checkpoint.state import held_gradients, load_gradients
from accel_state.errors import CheckpointError


def test_gradients_are_restored_and_others_forgotten(tmp_path: Path) -> None:
    first, second = nn.Linear(2, 1), nn.Linear(2, 1)
    first.weight.grad = torch.tensor([[1.0, 2.0]])
    save_file(held_gradients([first, second]), tmp_path / gradients_name(0))
    first.weight.grad = None
    second.weight.grad = torch.ones(1, 2)
    load_gradients([first, second], tmp_path, 0)
    assert first.weight.grad is not None
    assert first.weight.grad.tolist() == [[1.0, 2.0]]
    assert second.weight.grad is None


def test_without_files_there_are_no_gradients_afterwards(tmp_path: Path) -> None:
    model = nn.Linear(2, 1)
    model.weight.grad = torch.ones(1, 2)
    load_gradients([model], tmp_path, 0)
    assert model.weight.grad is None


@pytest.mark.parametrize(("name", "size"), [("0.other", (1, 2)), ("0.weight", (1, 3)), ("1.weight", (1, 2))])
def test_gradients_of_other_parameters_are_refused(tmp_path: Path, name: str, size: tuple[int, ...]) -> None:
    save_file({name: torch.ones(size)}, tmp_path / gradients_name(0))
    model = nn.Linear(2, 1)
    with pytest.raises(CheckpointError, match=f"no parameter of that name and shape: {name}"):
        load_gradients([model], tmp_path, 0)
    assert model.weight.grad is None


def test_a_process_without_a_file_beside_others_that_have_one_is_refused(tmp_path: Path) -> None:
    save_file({"0.weight": torch.ones(1, 2)}, tmp_path / gradients_name(0))
    with pytest.raises(CheckpointError, match="other processes have such a file"):
        load_gradients([nn.Linear(2, 1)], tmp_path, 1)
