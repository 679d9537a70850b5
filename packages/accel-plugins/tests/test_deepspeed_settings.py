"""The configuration of DeepSpeed: reading it, completing it, and refusing what contradicts it."""

from __future__ import annotations

import base64
import json
import sys
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from accel_plugins.deepspeed import config
from accel_plugins.deepspeed.config import (
    AutoValue,
    DeepSpeedPlugin,
    HfDeepSpeedConfig,
    contradictions,
    fill_auto,
    refuse_auto,
    transformers_view,
)
from accel_state.errors import AccelError, Conflict, NotOffered, SettingError
from accel_state.settings.environ import from_environment, to_environment

TABLE = {
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": "auto",
    "zero_optimization": {"stage": 3, "offload_param": {"device": "cpu"}, "reduce_bucket_size": "auto"},
}


def test_a_table_is_asked_by_dotted_keys() -> None:
    ds_config = HfDeepSpeedConfig(TABLE)
    assert ds_config.get_value("zero_optimization.offload_param.device") == "cpu"
    assert ds_config.get_value("zero_optimization.offload_optimizer.device", "none") == "none"
    assert ds_config.find_config_node("no.such.key") == (None, "key")
    assert (ds_config.is_zero3(), ds_config.is_zero2(), ds_config.is_offload()) == (True, False, True)
    assert ds_config.is_true("zero_optimization.stage")
    assert not ds_config.is_false("zero_optimization.stage")


def test_entries_are_removed() -> None:
    ds_config = HfDeepSpeedConfig(TABLE)
    ds_config.del_config_sub_tree("zero_optimization.offload_param")
    ds_config.del_config_sub_tree("zero_optimization.nothing")
    assert ds_config.get_value("zero_optimization.offload_param") is None
    with pytest.raises(SettingError, match="no such entry"):
        ds_config.del_config_sub_tree("zero_optimization.nothing", must_exist=True)


def test_the_table_that_was_given_is_not_changed() -> None:
    given_table: dict[str, Any] = {"zero_optimization": {"stage": "auto"}}
    DeepSpeedPlugin(hf_ds_config=given_table, zero_stage=1)
    assert given_table == {"zero_optimization": {"stage": "auto"}}


def test_a_file_and_a_text_in_base64_are_read(tmp_path: Path) -> None:
    path = tmp_path / "ds.json"
    path.write_text(json.dumps(TABLE))
    assert HfDeepSpeedConfig(path).config == TABLE
    text = base64.urlsafe_b64encode(json.dumps(TABLE).encode()).decode()
    assert HfDeepSpeedConfig(text).config == TABLE


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('{"a": 1,\n  "b": }', "line 2, column 8"),
        ('{"a": 1, "a": 2}', "'a' twice"),
        ('{"a": ' + "9" * 5000 + "}", "5000 digits"),
        ("[" * 5000, "deeper than 64"),
        ("[1, 2]", "a list"),
    ],
)
def test_a_broken_file_is_refused_with_the_place(tmp_path: Path, text: str, said: str) -> None:
    path = tmp_path / "ds.json"
    path.write_text(text)
    with pytest.raises(SettingError, match=said):
        HfDeepSpeedConfig(path)


def test_what_is_no_configuration_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SettingError, match="no such file"):
        HfDeepSpeedConfig(str(tmp_path / "missing.json"))
    with pytest.raises(SettingError, match="type int"):
        HfDeepSpeedConfig(7)  # type: ignore[arg-type]
    with pytest.raises(SettingError, match="IsADirectoryError"):
        HfDeepSpeedConfig(tmp_path)


@settings(deadline=None)
@given(st.text(max_size=60))
def test_a_configuration_of_any_text_is_refused_with_a_typed_error(text: str) -> None:
    with pytest.raises(AccelError):
        HfDeepSpeedConfig(text)


SCALARS = st.none() | st.booleans() | st.integers(-(2**63), 2**63) | st.floats(allow_nan=False, allow_infinity=False)
TABLES = st.recursive(
    SCALARS | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)


@settings(deadline=None)
@given(st.dictionaries(st.text(max_size=8), TABLES, max_size=4))
def test_any_table_of_json_in_base64_is_read_as_it_is(table: dict[str, Any]) -> None:
    text = base64.urlsafe_b64encode(json.dumps(table).encode()).decode()
    assert HfDeepSpeedConfig(text).config == table


def test_known_values_replace_auto() -> None:
    ds_config = HfDeepSpeedConfig(TABLE)
    known = [AutoValue("train_micro_batch_size_per_gpu", 4, "the loader"), AutoValue("absent", 1, "nobody")]
    fill_auto(ds_config, known)
    assert ds_config.get_value("train_micro_batch_size_per_gpu") == 4
    assert ds_config.get_value("absent") is None
    fill_auto(ds_config, [AutoValue("deep.er", 1, "need", needed=True)])
    assert ds_config.get_value("deep.er") == 1


def test_all_contradictions_are_named_with_both_sources() -> None:
    ds_config = HfDeepSpeedConfig({"a": 1, "b": {"c": 2}})
    known = [AutoValue("a", 5, "here"), AutoValue("b.c", 6, "there"), AutoValue("a", 7, "a guess", binding=False)]
    with pytest.raises(Conflict) as caught:
        fill_auto(ds_config, known)
    assert "a is 1 in the DeepSpeed configuration, and 5 by here" in str(caught.value)
    assert "b.c is 2 in the DeepSpeed configuration, and 6 by there" in str(caught.value)
    assert ds_config.config == {"a": 1, "b": {"c": 2}}


@pytest.mark.parametrize(("one", "other"), [("5e8", 500000000), (2, "2"), (1.0, 1), ("true", True), (False, "False")])
def test_a_text_and_a_number_that_say_the_same_are_no_contradiction(one: Any, other: Any) -> None:
    assert contradictions(HfDeepSpeedConfig({"a": one}), [AutoValue("a", other, "argument")]) == []


def test_what_nobody_knows_is_named() -> None:
    with pytest.raises(SettingError, match=r"train_micro_batch_size_per_gpu, zero_optimization\.reduce_bucket_size"):
        refuse_auto(HfDeepSpeedConfig({**TABLE, "gradient_accumulation_steps": 1}))


def test_settings_make_a_table() -> None:
    plugin = DeepSpeedPlugin(zero_stage=3, offload_param_device="cpu", gradient_clipping=0.5, steps_per_print=10)
    table = plugin.deepspeed_config
    assert table["zero_optimization"]["stage"] == 3
    assert table["zero_optimization"]["offload_param"]["device"] == "cpu"
    assert (table["gradient_clipping"], table["steps_per_print"]) == (0.5, 10)
    assert plugin.is_auto("train_micro_batch_size_per_gpu")
    assert (plugin.zero3_init_flag, plugin.zero3_save_16bit_model) == (True, False)


def test_the_default_is_stage_two() -> None:
    plugin = DeepSpeedPlugin()
    assert (plugin.zero_stage, plugin.offload_optimizer_device, plugin.zero3_init_flag) == (2, "none", False)


def test_settings_show_what_the_table_says() -> None:
    plugin = DeepSpeedPlugin(hf_ds_config={"zero_optimization": {"stage": 1}, "gradient_clipping": 2.0})
    assert (plugin.zero_stage, plugin.gradient_clipping) == (1, 2.0)
    assert DeepSpeedPlugin(hf_ds_config={"zero_optimization": {"stage": 1}}).gradient_clipping == "auto"


def test_a_setting_against_the_table_is_refused() -> None:
    with pytest.raises(Conflict, match=r"zero_optimization.stage is 3 .* and 2 by DeepSpeedPlugin\(zero_stage=2\)"):
        DeepSpeedPlugin(hf_ds_config=TABLE, zero_stage=2)


def test_variables_are_read_and_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    path = tmp_path / "ds.json"
    path.write_text(json.dumps(TABLE))
    monkeypatch.setenv("ACCELERATE_DEEPSPEED_CONFIG_FILE", str(path))
    monkeypatch.setenv("ACCELERATE_GRADIENT_CLIPPING", "0.25")
    assert DeepSpeedPlugin().gradient_clipping == 0.25
    monkeypatch.setenv("ACCELERATE_DEEPSPEED_ZERO_STAGE", "1")
    with pytest.raises(Conflict, match="ACCELERATE_DEEPSPEED_ZERO_STAGE"):
        DeepSpeedPlugin()
    monkeypatch.setenv("ACCELERATE_DEEPSPEED_ZERO_STAGE", "4")
    with pytest.raises(SettingError, match="ACCELERATE_DEEPSPEED_ZERO_STAGE"):
        DeepSpeedPlugin()


@pytest.mark.parametrize(
    "plugin",
    [
        DeepSpeedPlugin(),
        DeepSpeedPlugin(zero_stage=0, gradient_clipping=0.5, gradient_accumulation_steps=4),
        DeepSpeedPlugin(zero_stage=3, zero3_init_flag=False, zero3_save_16bit_model=True, offload_param_device="cpu"),
        DeepSpeedPlugin(zero_stage=3, offload_optimizer_device="nvme", offload_optimizer_nvme_path="/disk"),
        DeepSpeedPlugin(hf_ds_config=TABLE, transformer_moe_cls_names="Experts"),
        DeepSpeedPlugin(hf_ds_config={"zero_optimization": {"stage": "auto"}}),
        DeepSpeedPlugin(hf_ds_config=HfDeepSpeedConfig(TABLE), train_batch_size=8, steps_per_print=10),
    ],
)
def test_a_plugin_reaches_another_process_through_variables(plugin: DeepSpeedPlugin) -> None:
    found = from_environment(DeepSpeedPlugin, to_environment(plugin))
    # JSON has no infinity.
    if plugin.deepspeed_config.get("steps_per_print") == float("inf"):
        plugin.deepspeed_config["steps_per_print"] = sys.maxsize
    assert found == plugin
    assert found.deepspeed_config == plugin.deepspeed_config


def test_a_table_that_json_cannot_hold_is_refused_where_it_is_passed_on() -> None:
    plugin = DeepSpeedPlugin(hf_ds_config={"zero_optimization": {"stage": 1}, "tags": {"a"}})
    with pytest.raises(SettingError, match="JSON cannot represent"):
        to_environment(plugin)


def test_a_table_without_zero_is_refused() -> None:
    with pytest.raises(SettingError, match='"zero_optimization"'):
        DeepSpeedPlugin(hf_ds_config={"train_batch_size": 4})


def test_mixed_precision_switches_the_table() -> None:
    plugin = DeepSpeedPlugin()
    plugin.set_mixed_precision("bf16")
    assert plugin.deepspeed_config["bf16"] == {"enabled": True}
    with pytest.raises(Conflict, match=r"bf16\.enabled is True"):
        plugin.set_mixed_precision("no")
    half = DeepSpeedPlugin()
    half.set_mixed_precision("fp16")
    assert half.deepspeed_config["fp16"] == {"enabled": True, "auto_cast": True}


def test_the_old_functions_fill_and_collect_mismatches() -> None:
    plugin = DeepSpeedPlugin(hf_ds_config=TABLE)
    mismatches: list[str] = []
    plugin.fill_match("zero_optimization.stage", mismatches, **{"zero_optimization.stage": 2})
    assert len(mismatches) == 1
    plugin.deepspeed_config_process(**{"train_micro_batch_size_per_gpu": 2, "zero_optimization.reduce_bucket_size": 9})
    assert plugin.get_value("zero_optimization.reduce_bucket_size") == 9
    with pytest.raises(Conflict):
        plugin.deepspeed_config_process(**{"zero_optimization.stage": 2})
    plugin.deepspeed_config_process(must_match=False, **{"zero_optimization.stage": 2})


def test_only_the_state_selects() -> None:
    plugin = DeepSpeedPlugin()
    with pytest.raises(SettingError, match="select_deepspeed_plugin"):
        plugin.select()
    for value in (True, False):
        with pytest.raises(NotOffered, match="select_deepspeed_plugin"):
            plugin.selected = value
    plugin.select(_from_accelerator_state=True)
    assert plugin.selected
    plugin.deselect()
    assert not plugin.selected


@pytest.mark.parametrize(
    ("entries", "name"),
    [
        ({}, None),
        ({"bf16": {"enabled": True}}, "bf16"),
        ({"fp16": {"enabled": True}}, "fp16"),
        ({"bf16": {"enabled": True}, "fp16": {"enabled": "auto"}}, "bf16"),
        ({"bf16": {"enabled": "auto"}, "fp16": {"enabled": False}}, None),
    ],
)
def test_a_table_that_switches_a_precision_on_says_which(entries: dict[str, Any], name: str | None) -> None:
    plugin = DeepSpeedPlugin(hf_ds_config={"zero_optimization": {"stage": 2}, **entries})
    assert plugin.configured_precision == name
    plugin.set_mixed_precision(name or "no")
    assert [plugin.deepspeed_config[own]["enabled"] for own in ("bf16", "fp16")] == [name == "bf16", name == "fp16"]


def test_a_stage_may_be_called_by_its_name() -> None:
    assert DeepSpeedPlugin(zero_stage="zero3").deepspeed_config["zero_optimization"]["stage"] == 3  # type: ignore[arg-type]


def test_a_configuration_file_without_steps_accumulates_nothing(tmp_path: Path) -> None:
    (tmp_path / "ds.json").write_text('{"zero_optimization": {"stage": 2}}')
    plugin = DeepSpeedPlugin(hf_ds_config=str(tmp_path / "ds.json"))
    assert plugin.gradient_accumulation_steps == plugin.deepspeed_config["gradient_accumulation_steps"] == 1


def test_msamp_is_refused_as_argument_and_as_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(NotOffered, match="enable_msamp=True"):
        DeepSpeedPlugin(enable_msamp=True).set_mixed_precision("fp8")
    monkeypatch.setenv("ACCELERATE_FP8_BACKEND", "MSAMP")
    plugin = DeepSpeedPlugin()
    with pytest.raises(NotOffered, match="enable_msamp=True"):
        plugin.set_mixed_precision("fp8")


def test_the_table_enables_bf16_for_a_precision_of_8_bits() -> None:
    plugin = DeepSpeedPlugin()
    plugin.set_mixed_precision("fp8")
    assert (plugin.get_value("bf16.enabled"), plugin.enable_msamp) == (True, False)
    contradicting = DeepSpeedPlugin({"zero_optimization": {"stage": 2}, "bf16": {"enabled": False}})
    with pytest.raises(Conflict, match="mixed_precision='fp8'"):
        contradicting.set_mixed_precision("fp8")


@pytest.mark.parametrize("found", [None, "1.15.0"])
def test_models_are_built_in_parts_where_transformers_finds_what_it_looks_for(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, found: str | None
) -> None:
    library = ModuleType("transformers")
    library.__spec__ = ModuleSpec("transformers", None)
    integrations = ModuleType("transformers.integrations")
    integrations.HfDeepSpeedConfig = dict  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "transformers", library)
    monkeypatch.setitem(sys.modules, "transformers.integrations", integrations)
    monkeypatch.setattr(config, "importable", lambda module: True)
    monkeypatch.setattr(config, "installed_version", lambda distribution: found)
    table = DeepSpeedPlugin(zero_stage=3).deepspeed_config
    whole = transformers_view(table, sharded=False)
    assert caplog.text == ""
    view = transformers_view(table, sharded=True)

    assert (view is None) == (whole is None) == (found is None)
    assert ("creates unsharded models" in caplog.text) == (found is None)
    if found is not None:
        assert (view["zero_optimization"]["stage"], whole["zero_optimization"]["stage"]) == (3, 0)


def test_keywords_without_effect_are_told() -> None:
    with pytest.warns(UserWarning, match="auto_wrap_policy"):
        DeepSpeedPlugin(auto_wrap_policy=True)
    with pytest.warns(UserWarning, match="zero3_init_flag"):
        assert DeepSpeedPlugin(zero3_init_flag=True).zero3_init_flag is False


def test_dividing_while_models_are_built_is_switched_for_a_block() -> None:
    plugin = DeepSpeedPlugin(zero_stage=3)
    with plugin.zero3_init_context_manager(enable=False):
        assert not plugin.is_zero3_init_enabled()
    assert plugin.is_zero3_init_enabled()


def test_a_file_without_steps_means_one_unless_the_run_says_more(tmp_path: Path) -> None:
    path = tmp_path / "ds.json"
    path.write_text(json.dumps({"zero_optimization": {"stage": 2}}))
    for run, told in ((1, 1), (4, 4)):
        plugin = DeepSpeedPlugin(hf_ds_config=str(path))
        assert plugin.gradient_accumulation_steps == 1
        assert plugin.deepspeed_config["gradient_accumulation_steps"] == 1
        assert plugin.agree_on_steps(run) == told
        assert plugin.deepspeed_config["gradient_accumulation_steps"] == told


@pytest.mark.parametrize(("said", "agreed"), [(3, 3), ("auto", None)])
def test_what_the_table_says_about_steps_counts(said: Any, agreed: int | None) -> None:
    plugin = DeepSpeedPlugin(hf_ds_config={"zero_optimization": {"stage": 2}, "gradient_accumulation_steps": said})
    assert plugin.agree_on_steps(4) == agreed
    assert plugin.gradient_accumulation_steps == said
