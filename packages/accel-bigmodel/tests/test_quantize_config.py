from __future__ import annotations

import sys
from typing import Any

import pytest
import torch
from torch import nn

from accel_bigmodel import BnbQuantizationConfig, get_keys_to_not_convert, load_and_quantize_model
from accel_state.choices import CustomDtype
from accel_state.errors import Missing, SettingError


class Model(nn.Module):
    def __init__(self, tie: bool = False) -> None:
        super().__init__()
        self.body = nn.ModuleDict({"embed": nn.Embedding(10, 8), "layer": nn.Linear(8, 8)})
        self.head = nn.Linear(8, 10, bias=False)
        if tie:
            self.head.weight = self.body["embed"].weight  # type: ignore[assignment]


class Headless(nn.Module):
    base_model_prefix = "body"

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)


def test_defaults_depend_on_the_number_of_bits() -> None:
    eight = BnbQuantizationConfig(load_in_8bit=True)
    assert (eight.llm_int8_threshold, eight.torch_dtype, eight.target_dtype) == (6.0, torch.float16, torch.int8)
    four = BnbQuantizationConfig(load_in_4bit=True, bnb_4bit_compute_dtype="bf16")
    assert (four.bnb_4bit_compute_dtype, four.torch_dtype) == (torch.bfloat16, torch.bfloat16)
    assert four.target_dtype is CustomDtype.INT4
    assert four.bnb_4bit_quant_storage is torch.uint8
    assert BnbQuantizationConfig(load_in_4bit=True, bnb_4bit_compute_dtype=None).torch_dtype is torch.float16
    assert BnbQuantizationConfig(load_in_4bit=True, torch_dtype="fp32").torch_dtype is torch.float32
    assert BnbQuantizationConfig(load_in_8bit=True, torch_dtype=torch.bfloat16).torch_dtype is torch.bfloat16


def test_a_truth_value_in_second_place_asks_for_4_bits() -> None:
    config = BnbQuantizationConfig(False, True, bnb_4bit_quant_type="nf4")
    assert (config.load_in_4bit, config.llm_int8_threshold) == (True, 6.0)


def test_the_other_name_of_skipped_modules() -> None:
    assert BnbQuantizationConfig(True, llm_int8_skip_modules=["head"]).skip_modules == ["head"]
    with pytest.raises(SettingError, match="Use only skip_modules"):
        BnbQuantizationConfig(True, skip_modules=["a"], llm_int8_skip_modules=["b"])


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({}, "Neither of load_in_8bit and load_in_4bit"),
        ({"load_in_8bit": True, "load_in_4bit": True}, "Both of load_in_8bit and load_in_4bit"),
        ({"load_in_4bit": 1}, "load_in_4bit=1"),
        ({"load_in_8bit": True, "llm_int8_threshold": -1}, "llm_int8_threshold=-1"),
        ({"load_in_8bit": True, "llm_int8_threshold": "6"}, "llm_int8_threshold='6'"),
        ({"load_in_4bit": True, "bnb_4bit_quant_type": "int4"}, "Use one of fp4, nf4"),
        ({"load_in_4bit": True, "bnb_4bit_compute_dtype": "float16"}, "Use one of fp32, fp16, bf16"),
        ({"load_in_4bit": True, "bnb_4bit_compute_dtype": torch.int8}, "compute_dtype=torch.int8"),
        ({"load_in_8bit": True, "torch_dtype": "half"}, "torch_dtype='half'"),
        ({"load_in_4bit": True, "bnb_4bit_quant_storage": "uint8"}, "Give a torch dtype"),
        ({"load_in_8bit": True, "skip_modules": "head"}, "Give a list of names"),
        ({"load_in_8bit": True, "keep_in_fp32_modules": [1]}, "Give a list of names"),
    ],
)
def test_what_is_no_configuration_is_refused_by_name_and_value(given: dict[str, Any], words: str) -> None:
    with pytest.raises(SettingError, match=words):
        BnbQuantizationConfig(**given)


def test_the_head_and_tied_modules_are_better_not_quantised() -> None:
    assert get_keys_to_not_convert(Model()) == ["head"]
    assert get_keys_to_not_convert(Model(tie=True)) == ["body.embed", "head"]
    assert get_keys_to_not_convert(Headless()) == []
    assert get_keys_to_not_convert(nn.Linear(2, 2)) == []


def test_a_missing_library_is_named_with_the_line_that_installs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)
    model = Model()
    with pytest.raises(Missing, match=r'pip install "bitsandbytes>=0\.46"'):
        load_and_quantize_model(model, BnbQuantizationConfig(load_in_8bit=True))
    assert type(model.body["layer"]) is nn.Linear
