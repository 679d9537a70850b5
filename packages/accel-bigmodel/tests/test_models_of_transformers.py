"""Models as people have them, made tiny from configurations, where the library transformers is installed."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from accel_bigmodel import (
    BnbQuantizationConfig,
    compute_module_sizes,
    cpu_offload,
    disk_offload,
    dispatch_model,
    find_tied_parameters,
    get_state_dict_offloaded_model,
    infer_auto_device_map,
    init_empty_weights,
    load_and_quantize_model,
    load_checkpoint_and_dispatch,
    save_weights,
)
from accel_bigmodel.estimate import build_model, estimate_memory
from accel_testing.simulated_device import POSSIBLE, simulated_device

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("transformers") is None, reason="transformers is not installed"),
    # What the library and the torch under it say of themselves is not looked at here.
    pytest.mark.filterwarnings("default"),
]


def llama() -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    size = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2}
    return LlamaForCausalLM(LlamaConfig(vocab_size=64, num_hidden_layers=4, **size))


def gpt2() -> Any:
    from transformers import GPT2Config, GPT2LMHeadModel

    return GPT2LMHeadModel(GPT2Config(vocab_size=64, n_positions=32, n_embd=32, n_layer=4, n_head=4))


def t5() -> Any:
    from transformers import T5Config, T5ForConditionalGeneration

    size = {"d_model": 64, "d_kv": 16, "d_ff": 128, "num_heads": 4, "num_layers": 2}
    return T5ForConditionalGeneration(T5Config(vocab_size=64, decoder_start_token_id=0, **size))


MODELS: dict[str, Callable[[], Any]] = {"llama": llama, "gpt2": gpt2, "t5": t5}


@pytest.fixture(autouse=True)
def no_gradients() -> Iterator[None]:
    with torch.no_grad():
        yield


def made(name: str) -> Any:
    torch.manual_seed(0)
    return MODELS[name]().eval()


def empty(name: str) -> Any:
    with init_empty_weights():
        return MODELS[name]().eval()


def logits(model: Any, device: str = "cpu") -> torch.Tensor:
    ids = torch.arange(12, device=device).reshape(2, 6)
    inputs = {"decoder_input_ids": ids[:, :3]} if model.config.is_encoder_decoder else {}
    return model(input_ids=ids, **inputs).logits.cpu()  # type: ignore[no-any-return]


@pytest.mark.parametrize("name", MODELS)
def test_sizes_and_ties_of_an_empty_model_are_those_of_the_real_one(name: str) -> None:
    real, bare = made(name), empty(name)
    bare.tie_weights()
    assert dict(compute_module_sizes(bare)) == dict(compute_module_sizes(real))
    assert find_tied_parameters(bare) == find_tied_parameters(real)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("where", ["memory", "disk"])
def test_an_offloaded_model_gives_the_same_logits(tmp_path: Path, name: str, where: str) -> None:
    model, expected = made(name), logits(made(name))
    plain = {key: value.clone() for key, value in model.state_dict().items()}
    if where == "disk":
        disk_offload(model, tmp_path)
    else:
        cpu_offload(model)
    for _ in range(3):
        assert torch.equal(logits(model), expected)
    state = get_state_dict_offloaded_model(model)
    assert all(torch.equal(state[key], plain[key]) for key in plain)


@pytest.mark.skipif(not POSSIBLE, reason="this torch cannot have a device written in Python")
@pytest.mark.parametrize("name", MODELS)
def test_a_checkpoint_is_spread_over_devices_memory_and_disk(tmp_path: Path, name: str) -> None:
    real = made(name)
    expected, total = logits(real), compute_module_sizes(real)[""]
    save_weights(real.state_dict(), tmp_path / "weights", total // 3)
    with simulated_device(devices=2):
        bare = empty(name)
        bare.tie_weights()
        largest = compute_module_sizes(bare)
        room = max(size for key, size in largest.items() if key.endswith(("embed_tokens", "wte", "shared", ".0")))
        budget = {0: total // 4 + room, 1: total // 4, "cpu": total // 6 + room}
        device_map = infer_auto_device_map(bare, budget, bare._no_split_modules)
        assert {0, 1} <= set(device_map.values())
        assert {"cpu", "disk"} & set(device_map.values())
        loaded: Any = load_checkpoint_and_dispatch(
            bare, tmp_path / "weights", device_map, offload_folder=tmp_path / "off", offload_buffers=True
        )
        for _ in range(3):
            assert torch.allclose(logits(loaded), expected, atol=1e-5)


@pytest.mark.skipif(not POSSIBLE, reason="this torch cannot have a device written in Python")
def test_text_is_generated_by_a_model_over_two_devices() -> None:
    model = made("llama")
    ids = torch.arange(4).unsqueeze(0)
    options = {"max_new_tokens": 5, "do_sample": False, "pad_token_id": 0}
    expected = model.generate(ids, **options)
    with simulated_device(devices=2):
        half = {"model.layers.2": 1, "model.layers.3": 1}
        dispatch_model(model, {"": 0, **half}, skip_keys=model._skip_keys_device_placement)
        assert torch.equal(model.generate(ids, **options).cpu(), expected)


def test_memory_is_estimated_from_a_configuration(tmp_path: Path) -> None:
    config = made("llama").config
    config.save_pretrained(tmp_path)
    model = build_model(str(tmp_path))
    (estimate,) = estimate_memory(model, ["float32"])
    assert estimate.total == compute_module_sizes(made("llama").model)[""]
    assert estimate.layer.startswith("layers.")


@pytest.mark.skipif(importlib.util.find_spec("bitsandbytes") is None, reason="bitsandbytes is not installed")
@pytest.mark.parametrize("bits", ["load_in_8bit", "load_in_4bit"])
@pytest.mark.parametrize("name", ["llama", "t5"])
def test_a_checkpoint_is_quantised(tmp_path: Path, bits: str, name: str) -> None:
    real = made(name)
    expected = logits(real)
    save_weights(real.state_dict(), tmp_path)
    bare = empty(name)
    bare.tie_weights()
    # T5 looks at the dtype of the layers called "wo", and names them as ones to keep.
    kept = list(bare._keep_in_fp32_modules or ())
    options: dict[str, Any] = {bits: True, "torch_dtype": torch.float32, "bnb_4bit_compute_dtype": torch.float32}
    config = BnbQuantizationConfig(**options, keep_in_fp32_modules=kept)
    model = load_and_quantize_model(bare, config, tmp_path)
    assert compute_module_sizes(model)[""] < compute_module_sizes(real)[""]
    rounded = with_weights_of(model, real)
    assert (logits(model) - logits(rounded)).norm() / expected.norm() < 0.05


def with_weights_of(quantised: Any, plain: Any) -> Any:
    """The plain model with what the quantised one makes of its weights."""
    import bitsandbytes

    for name, module in quantised.named_modules():
        weight = getattr(module, "weight", None)
        if isinstance(module, bitsandbytes.nn.Linear4bit):
            value = bitsandbytes.functional.dequantize_4bit(weight.data, weight.quant_state)
        elif isinstance(module, bitsandbytes.nn.Linear8bitLt):
            value = weight.data.float() * weight.SCB.unsqueeze(1) / 127
        else:
            continue
        target = plain.get_submodule(name).weight
        assert (value - target).norm() / target.norm() < 0.2
        target.copy_(value)
    return plain
