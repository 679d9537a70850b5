"""Training of quantised models: what `prepare_model` refuses."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
from torch import nn

from accelerate import Accelerator

pytestmark = pytest.mark.usefixtures("fresh_state")


def quantised(device_map: dict[str, Any]) -> nn.Module:
    model: Any = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    model.is_loaded_in_8bit = True
    model.hf_device_map = device_map
    return model  # type: ignore[no-any-return]


@pytest.mark.parametrize("call", ["prepare_model", "prepare"])
def test_parts_on_the_disk_are_refused(call: str) -> None:
    accelerator = Accelerator(cpu=True)
    with pytest.raises(ValueError, match="CPU or disk offload"):
        getattr(accelerator, call)(quantised({"0": 0, "1": "disk"}))


def test_a_model_that_is_only_evaluated_may_be_offloaded() -> None:
    model = quantised({"": "cpu"})
    assert Accelerator(cpu=True).prepare_model(model, evaluation_mode=True) is model


@pytest.mark.parametrize("computes", [True, False])
def test_whether_bitsandbytes_computes_on_the_cpu_can_be_patched(computes: bool) -> None:
    accelerator, model = Accelerator(cpu=True), quantised({"": "cpu"})
    with mock.patch("accelerate.accelerator.is_bitsandbytes_multi_backend_available", return_value=computes):
        if computes:
            accelerator.prepare_model(model)
        else:
            with pytest.raises(ValueError, match="CPU or disk offload"):
                accelerator.prepare_model(model)
