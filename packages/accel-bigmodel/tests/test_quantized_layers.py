from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from accel_bigmodel import (
    BnbQuantizationConfig,
    get_quantized_model_device_map,
    init_empty_weights,
    load_and_quantize_model,
    save_weights,
)
from accel_state.errors import CheckpointError, SettingError

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("bitsandbytes") is None, reason="bitsandbytes is not installed"),
    # What bitsandbytes and the torch it imports say of themselves.
    pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning"),
]

EIGHT = {"load_in_8bit": True, "torch_dtype": torch.float32}
FOUR = {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_compute_dtype": "fp32"}
NESTED = {**FOUR, "bnb_4bit_quant_type": "fp4", "bnb_4bit_use_double_quant": True}


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(16, 128)
        self.blocks = nn.ModuleList([nn.Sequential(nn.Linear(128, 128), nn.LayerNorm(128)) for _ in range(2)])
        self.head = nn.Linear(128, 16, bias=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        hidden = self.embed(ids)
        for block in self.blocks:
            hidden = hidden + block(hidden)
        return self.head(hidden)  # type: ignore[no-any-return]


def built() -> Model:
    torch.manual_seed(0)
    return Model()


def empty() -> Model:
    with init_empty_weights():
        return Model()


def close(model: nn.Module, error: float) -> bool:
    ids = torch.arange(16)
    with torch.no_grad():
        expected, found = built()(ids), model(ids).float()
    return float((found - expected).norm() / expected.norm()) < error


def bytes_of(model: nn.Module) -> int:
    return sum(parameter.nbytes for parameter in model.parameters())


@pytest.mark.parametrize(
    ("how", "error", "kind"), [(EIGHT, 0.02, "int8"), (FOUR, 0.15, "uint8"), (NESTED, 0.2, "uint8")]
)
@pytest.mark.parametrize("max_shard_size", ["10GB", "70KB"])
@pytest.mark.parametrize("device_map", [None, "auto", {"": "cpu"}])
def test_a_checkpoint_is_loaded_into_few_bits_and_computes_nearly_the_same(
    tmp_path: Path, how: dict[str, Any], error: float, kind: str, max_shard_size: str, device_map: Any
) -> None:
    save_weights(built().state_dict(), tmp_path, max_shard_size)
    model: Any = load_and_quantize_model(empty(), BnbQuantizationConfig(**how), tmp_path, device_map)
    assert model.blocks[0][0].weight.dtype == getattr(torch, kind)
    assert model.head.weight.dtype == torch.float32
    assert model.hf_device_map == {"": "cpu"}
    assert getattr(model, f"is_loaded_in_{8 if kind == 'int8' else 4}bit") is True
    assert bytes_of(model) < 0.6 * bytes_of(built())
    assert close(model, error)


@pytest.mark.parametrize(("how", "error"), [(EIGHT, 0.02), (FOUR, 0.15)])
def test_a_model_with_weights_is_quantised_where_it_is(how: dict[str, Any], error: float) -> None:
    model: Any = load_and_quantize_model(built(), BnbQuantizationConfig(**how))
    assert bytes_of(model) < 0.6 * bytes_of(built())
    assert close(model, error)
    assert not any(parameter.requires_grad for parameter in model.blocks[0][0].parameters())


def test_the_same_as_bitsandbytes_does_by_itself(tmp_path: Path) -> None:
    import bitsandbytes

    linear = nn.Linear(128, 128)
    alone = bitsandbytes.nn.Linear8bitLt(128, 128, has_fp16_weights=False, threshold=6.0)
    alone.load_state_dict(linear.state_dict())
    alone = alone.to("cpu")
    config = BnbQuantizationConfig(load_in_8bit=True, skip_modules=[])
    model: Any = load_and_quantize_model(nn.Sequential(linear), config)
    assert torch.equal(model[0].weight, alone.weight)
    assert torch.equal(model[0].weight.SCB, alone.weight.SCB)


def test_what_is_not_quantised_takes_its_dtype(tmp_path: Path) -> None:
    save_weights(built().state_dict(), tmp_path)
    config = BnbQuantizationConfig(
        load_in_4bit=True, bnb_4bit_compute_dtype="bf16", skip_modules=["blocks.0"], keep_in_fp32_modules=["head"]
    )
    model: Any = load_and_quantize_model(empty(), config, tmp_path)
    assert model.blocks[0][0].weight.dtype == model.embed.weight.dtype == torch.bfloat16
    assert model.blocks[1][0].weight.dtype == torch.uint8
    assert model.blocks[1][0].bias.dtype == torch.bfloat16
    assert model.head.weight.dtype == torch.float32


def test_parts_on_the_disk_are_not_quantised(tmp_path: Path) -> None:
    save_weights(built().state_dict(), tmp_path / "weights")
    where = {"embed": "cpu", "blocks.0": "disk", "blocks.1": "cpu", "head": "cpu"}
    model: Any = load_and_quantize_model(
        empty(), BnbQuantizationConfig(**EIGHT), tmp_path / "weights", where, offload_folder=tmp_path / "offload"
    )
    assert type(model.blocks[0][0]) is nn.Linear
    assert model.blocks[0][0].weight.is_meta
    assert model.blocks[1][0].weight.dtype == torch.int8
    assert close(model, 0.02)


def test_sizes_of_a_map_count_as_they_will_be(tmp_path: Path) -> None:
    config = BnbQuantizationConfig(load_in_8bit=True, torch_dtype=torch.float32)
    needed = 2 * (128 * 128 + 4 * 128 * 3) + 4 * 2 * 16 * 128
    assert get_quantized_model_device_map(empty(), config, "auto", {"cpu": needed}) == {"": "cpu"}
    with pytest.raises(SettingError, match="Parts for the CPU or the disk"):
        get_quantized_model_device_map(empty(), config, "sequential", {"cpu": needed - 2000, "disk": 10**6})
    allowed = BnbQuantizationConfig(**{**EIGHT, "llm_int8_enable_fp32_cpu_offload": True})
    found = get_quantized_model_device_map(empty(), allowed, "sequential", {"cpu": needed - 2000, "disk": 10**6})
    assert "disk" in found.values()
    with pytest.warns(UserWarning, match="do not match any .*: nowhere"):
        get_quantized_model_device_map(empty(), config, {"": "cpu", "nowhere": 0})


def test_names_of_a_map_that_the_model_lacks_place_nothing(tmp_path: Path) -> None:
    save_weights(built().state_dict(), tmp_path)
    with pytest.warns(UserWarning, match="do not match any .*: nowhere"):
        model = load_and_quantize_model(
            empty(), BnbQuantizationConfig(**EIGHT), tmp_path, device_map={"nowhere": 7, "": "cpu"}
        )
    assert model.blocks[0][0].weight.dtype == torch.int8
    assert close(model, 0.02)


def test_an_empty_model_needs_a_checkpoint_with_all_its_weights(tmp_path: Path) -> None:
    config = BnbQuantizationConfig(load_in_8bit=True)
    with pytest.raises(SettingError, match="weights_location= is missing"):
        load_and_quantize_model(empty(), config)
    state = built().state_dict()
    del state["blocks.1.0.weight"]
    save_weights(state, tmp_path)
    with pytest.raises(CheckpointError, match=r"stay on the meta device: blocks\.1\.0\.weight"):
        load_and_quantize_model(empty(), config, tmp_path)


def test_layers_that_are_trained_in_half_precision_keep_it() -> None:
    config = BnbQuantizationConfig(load_in_8bit=True, llm_int8_has_fp16_weight=True, skip_modules=[])
    model: Any = load_and_quantize_model(nn.Sequential(nn.Linear(8, 8)), config)
    assert model[0].weight.dtype == torch.float16
    assert model[0].weight.requires_grad


def test_a_layer_that_two_names_share_stays_shared() -> None:
    layer = nn.Linear(64, 64)
    model: Any = load_and_quantize_model(
        nn.Sequential(layer, nn.ReLU(), layer), BnbQuantizationConfig(**EIGHT, skip_modules=[])
    )
    assert model[0] is model[2]
    assert model[0].weight.dtype == torch.int8
