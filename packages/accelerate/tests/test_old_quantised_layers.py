"""Functions for layers of bitsandbytes that only scripts for the original call."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from accel_bigmodel import BnbQuantizationConfig, OffloadedWeightsLoader, save_offload_index
from accelerate.utils.bnb import (
    get_parameter_device,
    has_4bit_bnb_layers,
    quantize_and_offload_8bit,
    replace_with_bnb_layers,
)

needs_bitsandbytes = pytest.mark.skipif(
    importlib.util.find_spec("bitsandbytes") is None, reason="bitsandbytes is not installed"
)
pytestmark = [
    # What bitsandbytes and the torch it imports say of themselves.
    pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning"),
]


def test_the_device_of_the_first_parameter() -> None:
    assert get_parameter_device(nn.Linear(2, 2, device="meta")) == torch.device("meta")
    assert get_parameter_device(nn.Identity()) == torch.device("cpu")


@needs_bitsandbytes
@pytest.mark.parametrize("bits", [4, 8])
def test_layers_with_4_bits_are_found(bits: int) -> None:
    config = BnbQuantizationConfig(**{f"load_in_{bits}bit": True})
    assert has_4bit_bnb_layers(replace_with_bnb_layers(nn.Sequential(nn.Linear(64, 64)), config)) == (bits == 4)


@needs_bitsandbytes
def test_names_between_dots_say_what_is_replaced() -> None:
    config = BnbQuantizationConfig(load_in_8bit=True)

    def replaced(skipped: list[str] | None) -> list[str]:
        model = replace_with_bnb_layers(
            nn.ModuleDict(
                {"blocks": nn.ModuleList([nn.Sequential(nn.Linear(8, 8)) for _ in range(2)]), "head": nn.Linear(8, 8)}
            ),
            config,
            skipped,
        )
        return [name for name, module in model.named_modules() if type(module).__name__ == "Linear8bitLt"]

    assert replaced(None) == ["blocks.0.0", "blocks.1.0", "head"]
    assert replaced(["blocks.0", "head"]) == ["blocks.1.0"]
    assert replaced(["block"]) == ["blocks.0.0", "blocks.1.0", "head"]
    assert replaced(["0", "head"]) == []


@needs_bitsandbytes
def test_a_weight_is_offloaded_in_8_bits_with_its_scales(tmp_path: Path) -> None:
    model, index = nn.Sequential(nn.Linear(64, 32)), dict[str, Any]()
    weight = model[0].weight.detach().clone()
    quantize_and_offload_8bit(model, model[0].weight, "0.weight", torch.float16, tmp_path, index, None)
    save_offload_index(index, tmp_path)
    assert model[0].weight.is_meta
    stored = OffloadedWeightsLoader(save_folder=tmp_path)
    assert stored["0.weight"].dtype == torch.int8
    restored = stored["0.weight"].float() * stored["0.SCB"].unsqueeze(1) / 127
    assert torch.allclose(restored, weight, atol=float(weight.abs().max()) / 100)
