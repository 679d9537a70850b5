"""Settings of sharding: names from launchers and users, objects of torch for those who read them."""

from __future__ import annotations

import copy
import dataclasses
import functools
import logging
import pickle
import subprocess
import sys
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed import fsdp
from torch.distributed.fsdp.wrap import (
    CustomPolicy,
    size_based_auto_wrap_policy,
    transformer_auto_wrap_policy,
)

from accel_plugins.fsdp.config import FullyShardedDataParallelPlugin
from accel_plugins.fsdp.sharding import blocks_to_shard
from accel_state.errors import Conflict, NotOffered, SettingError
from accel_state.settings.schema import plain_value
from accel_testing.backends.reference_loop import make_model

Plugin = FullyShardedDataParallelPlugin

BF16 = {"param_dtype": torch.bfloat16, "reduce_dtype": torch.bfloat16}


def test_settings_come_from_the_environment_of_a_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {
        "FSDP_VERSION": "2",
        "FSDP_RESHARD_AFTER_FORWARD": "false",
        "FSDP_AUTO_WRAP_POLICY": "TRANSFORMER_BASED_WRAP",
        "FSDP_TRANSFORMER_CLS_TO_WRAP": "A, B",
        "FSDP_OFFLOAD_PARAMS": "true",
        "FSDP_STATE_DICT_TYPE": "FULL_STATE_DICT",
        "FSDP_CPU_RAM_EFFICIENT_LOADING": "1",
    }.items():
        monkeypatch.setenv(name, value)
    found = Plugin()

    assert found.backend_name == "fsdp2"
    assert found.reshard_after_forward is False
    assert found.auto_wrap_policy is transformer_auto_wrap_policy
    assert found.transformer_cls_names_to_wrap == ["A", "B"]
    assert isinstance(found.cpu_offload, fsdp.CPUOffloadPolicy)
    assert found.state_dict_type is fsdp.StateDictType.FULL_STATE_DICT
    assert found.cpu_ram_efficient_loading
    assert Plugin(reshard_after_forward=True).reshard_after_forward is True


def test_defaults_depend_on_the_version() -> None:
    first, second = Plugin(), Plugin(2)

    assert (first.fsdp_version, first.reshard_after_forward, second.reshard_after_forward) == (1, None, True)
    assert (first.sharding_strategy, second.sharding_strategy) == (fsdp.ShardingStrategy.FULL_SHARD, None)
    assert first.state_dict_config == fsdp.FullStateDictConfig(offload_to_cpu=True, rank0_only=True)
    assert second.optim_state_dict_config == fsdp.ShardedOptimStateDictConfig(offload_to_cpu=True)
    second.set_state_dict_type("FULL_STATE_DICT")
    assert isinstance(second.state_dict_config, fsdp.FullStateDictConfig)


@pytest.mark.parametrize("given", [fsdp.ShardingStrategy.SHARD_GRAD_OP, "shard_grad_op", 2, "2"])
def test_a_strategy_is_given_as_member_name_or_number(given: Any) -> None:
    plugin = Plugin(sharding_strategy=given)
    assert plugin.sharding_strategy is fsdp.ShardingStrategy.SHARD_GRAD_OP
    assert plain_value(plugin, "sharding_strategy") == "SHARD_GRAD_OP"
    assert Plugin(fsdp.ShardingStrategy.NO_SHARD).sharding_strategy is fsdp.ShardingStrategy.NO_SHARD  # type: ignore[arg-type]
    plugin.sharding_strategy = "NO_SHARD"
    assert plugin.sharding_strategy is fsdp.ShardingStrategy.NO_SHARD


@pytest.mark.parametrize(("version", "entry"), [(1, "buffer_dtype"), (2, "output_dtype")])
@pytest.mark.parametrize("given", [torch.bfloat16, "bf16", "bfloat16", "fp8"])
def test_a_precision_that_overrides_is_taken(version: int, entry: str, given: Any) -> None:
    plugin = Plugin(version, mixed_precision_policy="fp16")
    plugin.set_mixed_precision(given)
    assert plugin.mixed_precision_policy.param_dtype is torch.float16
    plugin.set_mixed_precision(given, override=True)
    kind: Any = fsdp.MixedPrecision if version == 1 else fsdp.MixedPrecisionPolicy
    assert plugin.mixed_precision_policy == kind(**BF16, **{entry: torch.bfloat16})


@pytest.mark.parametrize("given", ["half", "no", "float7", torch.int8, torch.complex64])
@pytest.mark.parametrize("version", [1, 2])
def test_an_unknown_precision_is_refused_with_those_that_are_known(version: int, given: Any) -> None:
    plugin = Plugin(version, mixed_precision_policy="bf16")
    before = plugin.mixed_precision_policy
    with pytest.raises(SettingError, match=r"The known precisions are bf16, fp16, fp32"):
        plugin.set_mixed_precision(given, override=True)
    with pytest.raises(SettingError, match=r"The known precisions are bf16, fp16, fp32"):
        Plugin(version, mixed_precision_policy={"param_dtype": given})
    assert plugin.mixed_precision_policy is before


def test_buffers_may_stay_in_fp32() -> None:
    plugin = Plugin(1)
    plugin.set_mixed_precision("bf16", buffer_autocast=True)
    assert plugin.mixed_precision_policy == fsdp.MixedPrecision(**BF16, buffer_dtype=torch.float32)


def test_a_policy_follows_the_run_where_none_was_given() -> None:
    first, second = Plugin(1), Plugin(2, mixed_precision_policy="fp16")
    for plugin in (first, second):
        plugin.compute_in(torch.bfloat16)
    assert first.mixed_precision_policy == fsdp.MixedPrecision(torch.bfloat16, torch.float32)
    assert second.mixed_precision_policy.param_dtype is torch.float16
    assert first == Plugin(1)


def test_what_a_user_changes_in_an_object_counts() -> None:
    plugin = Plugin(1, cpu_offload=True)
    plugin.cpu_offload.offload_params = False
    assert plugin.cpu_offload == fsdp.CPUOffload(offload_params=False)
    plugin.state_dict_config.rank0_only = False
    assert not plugin.state_dict_config.rank0_only


@pytest.mark.parametrize("version", [1, 2])
def test_settings_are_compared_copied_replaced_and_pickled(version: int) -> None:
    plugin = Plugin(version, cpu_offload=True, auto_wrap_policy="SIZE_BASED_WRAP", min_num_params=5)
    read = {field.name: getattr(plugin, field.name) for field in dataclasses.fields(plugin)}
    for other in (
        copy.copy(plugin),
        copy.deepcopy(plugin),
        pickle.loads(pickle.dumps(plugin)),
    ):
        assert other == plugin
        assert {name: getattr(other, name) for name in read} == read
    assert dataclasses.replace(plugin, min_num_params=6).auto_wrap_policy is size_based_auto_wrap_policy
    assert plugin != Plugin(version)


def test_names_of_blocks_become_a_policy_for_a_model() -> None:
    model: Any = make_model()
    model._no_split_modules = ["Linear"]
    plugin = Plugin(2, auto_wrap_policy="transformer_based_wrap")
    named = blocks_to_shard(model, plugin.policy_for(model))
    plugin.set_auto_wrap_policy(model)

    assert isinstance(plugin.auto_wrap_policy, functools.partial)
    assert plugin.auto_wrap_policy.func is transformer_auto_wrap_policy
    assert plugin.auto_wrap_policy.keywords == {"transformer_layer_cls": {nn.Linear}}
    assert plugin.transformer_cls_names_to_wrap == ["Linear"]
    assert set(blocks_to_shard(model, plugin.policy_for(model))) == set(named)
    assert named


def test_a_size_becomes_a_policy_and_none_makes_no_blocks() -> None:
    model = make_model()
    plugin = Plugin(1, auto_wrap_policy="SIZE_BASED_WRAP", min_num_params=50)
    plugin.set_auto_wrap_policy(model)
    assert plugin.auto_wrap_policy.keywords == {"min_num_params": 50}
    assert blocks_to_shard(model, plugin.policy_for(model))
    nothing = Plugin(1, auto_wrap_policy="SIZE_BASED_WRAP", min_num_params=0)
    assert blocks_to_shard(model, nothing.policy_for(model)) == []
    nothing.set_auto_wrap_policy(model)
    assert nothing.auto_wrap_policy is None


def test_attention_is_never_taken_apart_by_size() -> None:
    model = nn.Sequential(nn.MultiheadAttention(8, 2), nn.Linear(8, 8))
    plugin = Plugin(2, auto_wrap_policy="SIZE_BASED_WRAP", min_num_params=60)
    blocks = blocks_to_shard(model, plugin.policy_for(model))
    assert blocks == [model[1]]


@pytest.mark.parametrize("version", [1, 2])
def test_a_custom_policy_with_settings_for_single_blocks_is_refused(version: int) -> None:
    policy = CustomPolicy(lambda module: {"forward_prefetch": True} if isinstance(module, nn.Linear) else False)
    plugin, model = Plugin(version, auto_wrap_policy=policy), make_model()
    with pytest.raises(NotOffered, match="CustomPolicy"):
        blocks_to_shard(model, plugin.policy_for(model))


@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize(
    "options",
    [
        {"auto_wrap_policy": "by_feeling"},
        {"auto_wrap_policy": 7},
        {"state_dict_type": "half"},
        {"state_dict_type": 4},
        {"state_dict_config": "full"},
        {"cpu_offload": "perhaps"},
        {"cpu_offload": 3.5},
        {"mixed_precision_policy": 7},
        {"mixed_precision_policy": {"parameters": "bf16"}},
        {"mixed_precision_policy": fsdp.MixedPrecision(), "fsdp_version": 2},
        {"mixed_precision_policy": fsdp.MixedPrecisionPolicy(), "fsdp_version": 1},
        {"sharding_strategy": "everything"},
        {"sharding_strategy": 6},
        {"sharding_strategy": True},
        {"backward_prefetch": "sideways"},
        {"backward_prefetch": 3},
        {"reshard_after_forward": "sometimes"},
    ],
)
def test_settings_that_do_not_exist_are_refused(version: int, options: dict[str, Any]) -> None:
    with pytest.raises(SettingError) as refused:
        Plugin(**{"fsdp_version": version, **options})
    assert refused.value.obstacle
    assert refused.value.remedy


def test_settings_that_fsdp_version_2_refuses(caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(Conflict, match="reshard_after_forward"):
        Plugin(2, sharding_strategy="SHARD_GRAD_OP")
    with pytest.raises(Conflict, match="SHARDED_STATE_DICT"):
        Plugin(2, state_dict_type="LOCAL_STATE_DICT")
    with pytest.raises(Conflict, match="SHARDED_STATE_DICT"):
        Plugin(2).set_state_dict_type("LOCAL_STATE_DICT")
    for given in (fsdp.ShardingStrategy.NO_SHARD, 2):
        with pytest.raises(Conflict, match="accepts only True or False"):
            Plugin(2, reshard_after_forward=given)
    with caplog.at_level(logging.WARNING):
        plugin = Plugin(2, backward_prefetch="BACKWARD_PRE", use_orig_params=True)
    assert "backward_prefetch, use_orig_params" in caplog.text
    assert (plugin.backward_prefetch, plugin.use_orig_params) == (None, None)


def test_settings_are_made_without_torch() -> None:
    program = (
        "import sys\n"
        "from accel_plugins.fsdp.config import FullyShardedDataParallelPlugin as Plugin\n"
        "from accel_state.settings.schema import plain_value\n"
        "one = Plugin(sharding_strategy='1', cpu_offload=True, mixed_precision_policy='bf16')\n"
        "assert plain_value(one, 'sharding_strategy') == 'FULL_SHARD'\n"
        "assert one == Plugin(sharding_strategy='FULL_SHARD', cpu_offload=True, mixed_precision_policy='bf16')\n"
        "assert 'torch' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=250)
