from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from accel_bigmodel import load_checkpoint_in_model, loading, save_weights

# Whoever ran before in this process may have started the run of one process.
pytestmark = pytest.mark.usefixtures("fresh_state")


def loaded(folder: Path) -> None:
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(8)))
    save_weights(model.state_dict(), folder, "20KB")
    load_checkpoint_in_model(model, folder)
    assert all(torch.isfinite(parameter).all() for parameter in model.parameters())


def test_a_long_load_draws_a_bar_up_to_its_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("tqdm", reason="bars are drawn by tqdm")
    monkeypatch.setattr(loading, "PATIENCE", 0.0)
    loaded(tmp_path)
    shown = capsys.readouterr().err
    assert "Loading Sequential: 100%" in shown
    assert "133k/133k" in shown


def test_a_quick_load_draws_none_and_needs_no_library(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    # On a busy machine even this load may take long.
    assert loading.PATIENCE > 0
    monkeypatch.setattr(loading, "PATIENCE", 100.0)
    loaded(tmp_path)
    assert capsys.readouterr().err == ""
    monkeypatch.setattr(loading, "PATIENCE", 0.0)
    monkeypatch.setitem(sys.modules, "tqdm", None)
    loaded(tmp_path)
    assert capsys.readouterr().err == ""


def test_only_the_first_process_of_a_node_draws(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("tqdm", reason="bars are drawn by tqdm")
    monkeypatch.setattr(loading, "PATIENCE", 0.0)
    for name, value in {"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    loaded(tmp_path)
    assert capsys.readouterr().err == ""
