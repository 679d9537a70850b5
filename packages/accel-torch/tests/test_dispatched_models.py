"""Models that a device map or offloading has placed: prepared where they are, and saved as a whole."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from accel_bigmodel import cpu_offload, disk_offload, dispatch_model
from accel_state.errors import CheckpointError, NotOffered
from accel_torch import Accelerator

X = torch.randn(3, 4, generator=torch.Generator().manual_seed(1))
CPU = torch.device("cpu")


def build() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 2)).eval()


def by_map(folder: Path) -> Any:
    device_map = {"0": "cpu", "1": "cpu", "2": "disk"}
    return dispatch_model(build(), device_map, main_device="cpu", offload_dir=folder, force_hooks=True)


OFFLOADS: dict[str, Callable[[Path], Any]] = {
    "by a map": by_map,
    "to the disk": lambda folder: disk_offload(build(), folder, CPU),
    "to memory": lambda folder: cpu_offload(build(), CPU),
    "inside another": lambda folder: nn.Sequential(by_map(folder)),
}


@pytest.mark.parametrize("offload", OFFLOADS)
@pytest.mark.parametrize("evaluation_mode", [False, True])
def test_an_offloaded_model_is_prepared_where_it_is(offload: str, evaluation_mode: bool, tmp_path: Path) -> None:
    model = Accelerator(cpu=True).prepare_model(OFFLOADS[offload](tmp_path), evaluation_mode=evaluation_mode)
    with torch.no_grad():
        assert torch.equal(model(X), build()(X))
    with pytest.raises((NotOffered, NotImplementedError)):
        model.to("cpu", torch.float64)


class Counted(nn.Sequential):
    moves = 0

    def to(self, *args: Any, **kwargs: Any) -> Any:
        Counted.moves += 1
        return super().to(*args, **kwargs)


@pytest.mark.parametrize(("device_map", "moves"), [({"0": "cpu", "1": 1}, 0), ({"": "cpu"}, 1), ({"0": 0, "1": 0}, 1)])
def test_a_model_on_several_devices_is_not_moved(
    device_map: dict[str, Any], moves: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Counted, "moves", 0)
    model = Counted(nn.Linear(2, 2), nn.Linear(2, 2))
    model.hf_device_map = device_map  # type: ignore[assignment]
    Accelerator(cpu=True).prepare(model)
    assert Counted.moves == moves


@pytest.mark.parametrize("offload", [name for name in OFFLOADS if name != "inside another"])
def test_a_checkpoint_has_the_offloaded_weights(offload: str, tmp_path: Path) -> None:
    accelerator = Accelerator(cpu=True)
    model = accelerator.prepare(OFFLOADS[offload](tmp_path / "offloaded"))
    accelerator.save_model(model, tmp_path / "model")
    accelerator.save_state(tmp_path / "state")
    for folder in ("model", "state"):
        saved = load_file(tmp_path / folder / "model.safetensors")
        assert saved.keys() == build().state_dict().keys()
        assert all(torch.equal(saved[name], value) for name, value in build().state_dict().items())
    with pytest.raises(CheckpointError, match="is offloaded"):
        accelerator.load_state(tmp_path / "state")
