"""Fields of public settings hold what those of the original hold, as `reference/settings_fields.json` has it."""

from __future__ import annotations

import importlib.util
import json
import logging
from pathlib import Path
from typing import Any, Final

import pytest

REFERENCE = Path(__file__).parent / "reference"
FACTS: dict[str, dict[str, dict[str, str]]] = json.loads((REFERENCE / "settings_fields.json").read_text("utf-8"))

# By the documents that this repository follows they are on, and the launcher of the original turns them on, too.
ON_BY_DEFAULT: Final = {"use_orig_params", "sync_module_states"}

# Types that differ: a class, a field, and why.
OTHER_TYPES: Final = {
    ("DeepSpeedPlugin", "msamp_opt_level"): "None says that MS-AMP is off",
    ("InitProcessGroupKwargs", "timeout"): "None leaves it to the device, which is not known yet",
    ("MegatronLMPlugin", "attention_backend"): "the name of a backend",
    ("MegatronLMPlugin", "consumed_samples"): "counted from the start",
    ("MegatronLMPlugin", "expert_tensor_parallel_size"): "None leaves it to Megatron",
    ("MegatronLMPlugin", "recompute_granularity"): "None leaves it to Megatron",
    ("MegatronLMPlugin", "recompute_method"): "None leaves it to Megatron",
    ("MegatronLMPlugin", "recompute_num_layers"): "None leaves it to Megatron",
    ("MegatronLMPlugin", "use_rotary_position_embeddings"): "None leaves it to Megatron",
}


@pytest.fixture(scope="module")
def describer() -> Any:
    spec = importlib.util.spec_from_file_location("settings_fields", REFERENCE / "settings_fields.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_sharding_settings_hold_what_those_of_the_original_hold(
    describer: Any, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.CRITICAL)
    ours, original = describer.of_fsdp(), FACTS["fsdp"]
    split = {label for label in original if "transformer_cls_names_to_wrap='A,B'" in label}
    assert len(original) > 80
    for label, held in original.items():
        names = (set(held) | set(ours[label])) - ON_BY_DEFAULT
        if label in split:
            names.discard("transformer_cls_names_to_wrap")
        assert {name: ours[label].get(name) for name in names} == {name: held.get(name) for name in names}, label


def test_an_unknown_precision_is_refused_as_by_the_original(describer: Any) -> None:
    refused = [label for label in describer.cases() if "'half'" in label]
    assert len(refused) == 2
    assert not set(refused) & (set(FACTS["fsdp"]) | set(describer.of_fsdp()))


def test_defaults_of_every_settings_class_have_the_types_of_the_original(describer: Any) -> None:
    ours = describer.of_defaults()
    differing = {
        (name, field)
        for name, fields in FACTS["defaults"].items()
        for field, kind in fields.items()
        if ours[name][field] != kind
    }
    assert differing == set(OTHER_TYPES)
