"""Rows 35 to 70 of reference/seeds_vs_peer.md: classes of settings, and the quicktour."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import ShardingStrategy
from torch.utils.data import DataLoader, TensorDataset

from accel_state.errors import Conflict, Missing
from accel_testing.processes import Processes
from accelerate import Accelerator, load_checkpoint_and_dispatch
from accelerate.utils import (
    BnbQuantizationConfig,
    DataLoaderConfiguration,
    DDPCommunicationHookType,
    DeepSpeedPlugin,
    DistributedDataParallelKwargs,
    DynamoBackend,
    FP8RecipeKwargs,
    FullyShardedDataParallelPlugin,
    GradientAccumulationPlugin,
    InitProcessGroupKwargs,
    ProjectConfiguration,
    TorchDynamoPlugin,
    TorchTensorParallelPlugin,
)

pytestmark = pytest.mark.usefixtures("fresh_state")


# ---------------------------------------------------------------- loaders, projects, accumulation
def test_row_35_the_loaders_own_sampler_stays() -> None:
    config = DataLoaderConfiguration(use_seedable_sampler=True, use_configured_sampler=True)
    loader: Any = DataLoader(TensorDataset(torch.arange(8)), shuffle=True)
    prepared: Any = Accelerator(cpu=True, dataloader_config=config).prepare(loader)
    assert type(prepared.get_sampler()) is type(loader.sampler)


def test_row_36_accumulation_beside_the_loaders() -> None:
    config = DataLoaderConfiguration(gradient_accumulation_kwargs={"num_steps": 3})
    assert Accelerator(cpu=True, dataloader_config=config).gradient_accumulation_steps == 3
    with pytest.raises(Conflict):
        Accelerator(
            cpu=True, dataloader_config=config, gradient_accumulation_plugin=GradientAccumulationPlugin(num_steps=2)
        )


def test_rows_37_and_41_fields_and_their_defaults() -> None:
    assert DataLoaderConfiguration().data_seed is None
    assert DataLoaderConfiguration().use_stateful_dataloader is False
    assert GradientAccumulationPlugin().sync_each_batch is False


def test_row_38_the_current_folder_where_one_is_needed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert ProjectConfiguration().project_dir is None
    accelerator = Accelerator(cpu=True, project_config=ProjectConfiguration(automatic_checkpoint_naming=True))
    accelerator.save_state()
    assert (tmp_path / "checkpoints" / "checkpoint_0").is_dir()


def test_row_39_the_folder_of_logs_is_taken_as_given() -> None:
    project = ProjectConfiguration(project_dir="runs", logging_dir="logs")
    assert project.logging_dir == "logs"
    assert ProjectConfiguration(project_dir="runs").logging_dir == "runs"


def test_row_40_another_word_for_automatic_names() -> None:
    assert ProjectConfiguration(iteration_checkpoints=True).automatic_checkpoint_naming
    assert ProjectConfiguration("runs", "logs", True, 3, 7).iteration == 7


# ---------------------------------------------------------------- backends
def test_row_42_a_policy_of_wrapping_has_no_effect() -> None:
    with pytest.warns(UserWarning, match="auto_wrap_policy"):
        plugin = DeepSpeedPlugin(auto_wrap_policy=lambda module: True)
    assert plugin.deepspeed_config == DeepSpeedPlugin().deepspeed_config


def test_row_43_further_entries_of_the_configuration() -> None:
    plugin = DeepSpeedPlugin(zero_stage=1, wall_clock_breakdown=True, fp16={"enabled": False})
    assert plugin.deepspeed_config["wall_clock_breakdown"] is True
    assert plugin.deepspeed_config["fp16"] == {"enabled": False}
    table = {"zero_optimization": {"stage": 1}, "wall_clock_breakdown": False}
    with pytest.raises(Conflict, match="wall_clock_breakdown"):
        DeepSpeedPlugin(hf_ds_config=table, wall_clock_breakdown=True)


def test_row_44_experts_and_8_bits() -> None:
    plugin = DeepSpeedPlugin(transformer_moe_cls_names="Experts", enable_msamp=True, msamp_opt_level="O2")
    assert plugin.transformer_moe_cls_names == "Experts"
    assert plugin.deepspeed_config["msamp"] == {"enabled": True, "opt_level": "O2"}
    assert DeepSpeedPlugin().transformer_moe_cls_names is None


@pytest.mark.filterwarnings("ignore:.*ShardingStrategy.*:FutureWarning")
def test_rows_45_to_48_settings_of_sharding(monkeypatch: pytest.MonkeyPatch) -> None:
    given = FullyShardedDataParallelPlugin(ShardingStrategy.SHARD_GRAD_OP)
    assert "SHARD_GRAD_OP" in str(given.sharding_strategy)
    assert FullyShardedDataParallelPlugin(2).fsdp_version == 2
    plain = FullyShardedDataParallelPlugin()
    assert plain.use_orig_params is True
    assert plain.sync_module_states is True
    assert plain.forward_prefetch is False
    assert plain.activation_checkpointing is False
    monkeypatch.setenv("FSDP_USE_ORIG_PARAMS", "false")
    assert FullyShardedDataParallelPlugin().use_orig_params is False
    for name in ("reshard_after_forward", "cpu_ram_efficient_loading", "transformer_cls_names_to_wrap"):
        assert hasattr(plain, name)


def test_rows_49_to_51_recipes_for_8_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    assert FP8RecipeKwargs("TE").backend == "TE"
    assert FP8RecipeKwargs("MSAMP").backend == "MSAMP"
    assert FP8RecipeKwargs("O1", backend="MSAMP").opt_level == "O1"
    monkeypatch.setenv("ACCELERATE_FP8_BACKEND", "MSAMP")
    assert FP8RecipeKwargs().backend == "MSAMP"
    assert FP8RecipeKwargs(use_autocast=True).autocasts
    assert not FP8RecipeKwargs(use_autocast=False).autocasts
    plain = FP8RecipeKwargs(backend="TE")
    assert (plain.fp8_format, plain.amax_history_len, plain.amax_compute_algo) == ("HYBRID", 1024, "most_recent")


def test_rows_52_and_53_nothing_is_compiled_by_default() -> None:
    plugin = TorchDynamoPlugin()
    assert plugin.backend is DynamoBackend.NO
    assert (plugin.mode, plugin.fullgraph, plugin.use_regional_compilation) == ("default", False, False)


def test_row_54_both_spellings_of_tensor_parallelism() -> None:
    assert TorchTensorParallelPlugin().tp_size == 1
    assert TorchTensorParallelPlugin(2).tp_size == 2
    assert TorchTensorParallelPlugin(tensor_parallel_degree=2).tp_size == 2
    assert TorchTensorParallelPlugin(parallelize_plan={"a": 1}).parallelize_plan == {"a": 1}


def test_rows_55_to_58_quantisation() -> None:
    assert BnbQuantizationConfig(False, True).load_in_4bit
    assert BnbQuantizationConfig(True, 5.0).llm_int8_threshold == 5.0
    more: Any = {"llm_int8_enable_fp32_cpu_offload": True, "llm_int8_has_fp16_weight": True}
    config = BnbQuantizationConfig(True, llm_int8_skip_modules=["head"], bnb_4bit_quant_storage=torch.uint8, **more)
    assert config.skip_modules == ["head"]
    half = BnbQuantizationConfig(load_in_4bit=True, bnb_4bit_compute_dtype=None)
    assert half.bnb_4bit_compute_dtype == torch.float16
    assert half.torch_dtype == torch.float16


def test_rows_59_to_61_the_process_group() -> None:
    assert InitProcessGroupKwargs("tcp://host:1").init_method == "tcp://host:1"
    assert InitProcessGroupKwargs("gloo").backend == "gloo"
    assert InitProcessGroupKwargs().backend == "nccl"
    assert InitProcessGroupKwargs().timeout is None
    for given in (60, 60.0, timedelta(minutes=1)):
        assert InitProcessGroupKwargs(timeout=given).timeout == timedelta(minutes=1)


def group_without_a_backend() -> str | None:
    return Accelerator(cpu=True, kwargs_handlers=[InitProcessGroupKwargs(backend=None, timeout=30)]).state.backend


def test_row_61_no_backend_is_that_of_the_device(two: Processes) -> None:
    assert two.run(group_without_a_backend) == ["gloo", "gloo"]


def test_rows_62_to_64_hooks_of_data_parallelism() -> None:
    plain = DistributedDataParallelKwargs(comm_hook=None, comm_state_option=None)  # type: ignore[arg-type]
    assert plain == DistributedDataParallelKwargs()
    assert plain.comm_hook is plain.comm_wrapper is DDPCommunicationHookType.NO
    assert plain.comm_state_option == {}


# ---------------------------------------------------------------- quicktour
def test_row_66_a_local_path_comes_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    model = nn.Linear(2, 2)
    Accelerator(cpu=True).save_model(model, "org/name")
    loaded = load_checkpoint_and_dispatch(nn.Linear(2, 2), checkpoint="org/name", device_map={"": "cpu"})
    assert torch.equal(loaded.weight, model.weight)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises((ValueError, Missing), match="org/other"):
        load_checkpoint_and_dispatch(nn.Linear(2, 2), checkpoint="org/other")


def test_row_68_copies_that_overlap_are_asked_for() -> None:
    assert not DataLoaderConfiguration().non_blocking
    assert Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(non_blocking=True)).non_blocking


def on_the_cpu() -> tuple[str, int, list[float]]:
    accelerator = Accelerator(cpu=True)
    own = torch.ones(1 + accelerator.process_index)
    padded = accelerator.pad_across_processes(own, dim=0)
    return accelerator.device.type, accelerator.num_processes, accelerator.gather(padded).tolist()


def test_rows_69_and_70_as_many_processes_as_were_launched_and_padding_before_gathering(two: Processes) -> None:
    assert two.run(on_the_cpu) == [("cpu", 2, [1.0, 0.0, 1.0, 1.0])] * 2
