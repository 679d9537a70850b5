"""Keys of config files written by Accelerate whose settings belong to parts that may not be installed.

A key that an installed settings class owns is read there. One that stands only in this table is accepted, so that
existing files can be used, and the launcher says when such a key asks for something that nothing here reads.
"""

from __future__ import annotations

from typing import Final

__all__ = ("KNOWN", "PREFIXES", "is_known", "says_nothing", "with_prefix")

PREFIXES: Final = {"dynamo_config": "dynamo_", "fp8_config": "fp8_", "fsdp_config": "fsdp_"}
"""Tables whose keys may be written without this prefix."""


def _table(name: str, keys: str, prefix: str = "") -> frozenset[str]:
    return frozenset(f"{name}.{prefix}{key}".lstrip(".") for key in keys.split())


_TOP_LEVEL: Final = _table(
    "",
    """
    additional_args base_job_name command_file commands deepspeed_config downcast_bf16 dynamo_backend dynamo_config
    ec2_instance_type fp16 fp8_config fsdp_config iam_role_name image_uri main_training_function
    megatron_lm_config mpirun_config parallelism_config profile py_version pytorch_version region sagemaker_inputs_file
    sagemaker_metrics_file same_network tpu_env tpu_name tpu_use_cluster tpu_use_sudo tpu_vm tpu_zone
    transformers_version
    """,
)

_DEEPSPEED: Final = _table(
    "deepspeed_config",
    """
    deepspeed_config_file deepspeed_exclusion_filter deepspeed_hostfile deepspeed_inclusion_filter
    deepspeed_moe_layer_cls_names deepspeed_multinode_launcher gradient_accumulation_steps gradient_clipping
    offload_optimizer_device offload_optimizer_nvme_path offload_param_device offload_param_nvme_path zero3_init_flag
    zero3_save_16bit_model zero_stage
    """,
)

_DYNAMO: Final = _table("dynamo_config", "backend mode use_dynamic use_fullgraph use_regional_compilation", "dynamo_")

_FP8: Final = _table(
    "fp8_config",
    """
    amax_compute_algo amax_compute_algorithm amax_history_len amax_history_length backend
    enable_fsdp_float8_all_gather format interval margin opt_level optimization_level
    override_linear_precision pad_inner_dim use_autocast_during_eval
    """,
    "fp8_",
)

_FSDP: Final = _table(
    "fsdp_config",
    """
    activation_checkpointing activation_checkpointing_offload auto_wrap_policy backward_prefetch
    cpu_ram_efficient_loading forward_prefetch ignored_modules min_num_params offload_params reshard_after_forward
    sharding_strategy state_dict_type sync_module_states transformer_layer_cls_to_wrap use_orig_params version
    """,
    "fsdp_",
)

_MEGATRON: Final = _table(
    "megatron_lm_config",
    """
    attention_backend attention_dropout attention_softmax_in_fp32 calculate_per_token_loss context_parallel_size
    decoder_last_pipeline_num_layers eod_mask_loss expert_model_parallel_size expert_tensor_parallel_size
    gradient_clipping hidden_dropout no_load_optim no_save_optim num_micro_batches optimizer_cpu_offload
    overlap_cpu_optimizer_d2h_h2d pp_degree recompute_activations recompute_granularity recompute_method
    recompute_num_layers sequence_parallelism tp_degree use_custom_fsdp use_distributed_optimizer
    use_precision_aware_optimizer use_rotary_position_embeddings
    """,
    "megatron_lm_",
)

_PARALLELISM: Final = _table(
    "parallelism_config",
    """
    cp_backend cp_comm_strategy cp_size dp_replicate_size dp_shard_size sp_attn_implementation sp_backend sp_seq_length
    sp_seq_length_is_variable sp_size tp_size
    """,
    "parallelism_config_",
)

KNOWN: Final = (
    _TOP_LEVEL | _DEEPSPEED | _DYNAMO | _FP8 | _FSDP | _MEGATRON | _PARALLELISM | {"mpirun_config.mpirun_hostfile"}
)

# Values that `accelerate config` writes into every file.
_USUAL: Final = {
    "downcast_bf16": ("no", "false"),
    "main_training_function": ("main",),
    "same_network": ("true", "false"),
    "tpu_use_cluster": ("false",),
    "tpu_use_sudo": ("false",),
    "dynamo_config.dynamo_backend": ("no", "NO"),
    "dynamo_backend": ("no", "NO"),
    "mpirun_config.mpirun_hostfile": ("",),
}


def with_prefix(key: str) -> str:
    """A key in its full form.

    Example:
        >>> with_prefix("fsdp_config.version")
        'fsdp_config.fsdp_version'
    """
    table, dot, name = key.partition(".")
    prefix = PREFIXES.get(table, "")
    return key if not dot or name.startswith(prefix) else f"{table}.{prefix}{name}"


def is_known(key: str) -> bool:
    """Whether files of Accelerate may hold a key; any key below `additional_args` is allowed."""
    return key in KNOWN or key.startswith("additional_args.")


def says_nothing(key: str, value: object) -> bool:
    """Whether an entry only repeats what holds anyway, so that nobody misses it."""
    return value in (None, []) or str(value) in _USUAL.get(key, ())
