"""Models that a library has quantised and dispatched, and whether they can be trained."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from accel_bigmodel import trainable
from accel_bigmodel.trainable import check_trainable
from accel_state.errors import SettingError


def dispatched(device_map: dict[str, Any], **flags: bool) -> nn.Module:
    model: Any = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    model.hf_device_map = device_map
    for name, value in flags.items():
        setattr(model, name, value)
    return model  # type: ignore[no-any-return]


@pytest.mark.parametrize("flag", ["is_loaded_in_8bit", "is_loaded_in_4bit"])
@pytest.mark.parametrize("device_map", [{"0": 0, "1": "cpu"}, {"0": 0, "1": "disk"}, {"": "disk"}])
def test_offloaded_parts_of_a_quantised_model_are_refused(flag: str, device_map: dict[str, Any]) -> None:
    with pytest.raises(SettingError, match=r"(?s)Cannot train Sequential.*CPU or disk offload.*Load it whole"):
        check_trainable(dispatched(device_map, **{flag: True}))


@pytest.mark.parametrize("device_map", [{"": "cpu"}, {"0": "cpu", "1": "cpu"}])
def test_a_model_on_the_cpu_needs_a_bitsandbytes_that_computes_there(
    monkeypatch: pytest.MonkeyPatch, device_map: dict[str, Any]
) -> None:
    model = dispatched(device_map, is_loaded_in_8bit=True)
    monkeypatch.setattr(trainable, "trains_on_cpu", lambda: True)
    check_trainable(model)
    monkeypatch.setattr(trainable, "trains_on_cpu", lambda: False)
    with pytest.raises(SettingError, match="CPU or disk offload"):
        check_trainable(model)


def test_whole_models_and_those_that_are_not_quantised_are_trained() -> None:
    for whole in (0, "cuda:1", torch.device("cpu")):
        check_trainable(dispatched({"": whole}, is_loaded_in_4bit=True))
    check_trainable(dispatched({"0": 0, "1": 1}, is_loaded_in_8bit=True))
    check_trainable(dispatched({"0": 0, "1": "cpu"}, is_loaded_in_8bit=False))
    check_trainable(nn.Linear(1, 1))
