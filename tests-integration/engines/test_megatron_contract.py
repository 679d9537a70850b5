"""The released megatron-core has what we call, with the arguments by which we call it; its text is read, not run."""

from __future__ import annotations

import ast
import importlib.util
from pathlib import Path

import pytest

from accel_state.settings.installed import importable

pytestmark = pytest.mark.skipif(not importable("megatron.core"), reason="needs megatron-core: nox -s engines-megatron")

PARALLEL = """
    tensor_model_parallel_size pipeline_model_parallel_size context_parallel_size expert_model_parallel_size
    expert_tensor_parallel_size distributed_timeout_minutes
"""
SCHEDULE = """
    optimizer init_lr max_lr min_lr lr_warmup_steps lr_decay_steps lr_decay_style start_wd end_wd wd_incr_steps
    wd_incr_style
"""
STEP = """
    forward_step_func data_iterator model num_microbatches seq_length micro_batch_size decoder_seq_length forward_only
"""
PIPELINE = ("no_pipelining", "pipelining_without_interleaving", "pipelining_with_interleaving")
DECODER = """
    config transformer_layer_spec rotary_base vp_stage vocab_size max_sequence_length parallel_output pre_process
    post_process share_embeddings_and_output_weights position_embedding_type rotary_percent
"""
BERT = DECODER.replace("rotary_base", "num_tokentypes add_binary_head")
T5 = """
    config encoder_config transformer_encoder_layer_spec transformer_decoder_layer_spec vocab_size max_sequence_length
    parallel_output pre_process post_process share_embeddings_and_output_weights position_embedding_type rotary_percent
"""
T5_STEP = """
    encoder_input_ids decoder_input_ids encoder_attn_mask decoder_attn_mask encoder_decoder_attn_mask lm_labels
"""
WRAPPING = "config ddp_config module disable_bucketing"
SHARDED = "model_sharded_state_dict is_loading metadata"

CALLED = [
    ("parallel_state", "initialize_model_parallel", PARALLEL),
    ("parallel_state", "is_pipeline_first_stage", "ignore_virtual vp_stage"),
    ("parallel_state", "is_pipeline_last_stage", "ignore_virtual vp_stage"),
    ("parallel_state", "get_data_parallel_rank", "with_context_parallel"),
    ("parallel_state", "get_data_parallel_group", ""),
    ("parallel_state", "get_pipeline_model_parallel_last_rank", ""),
    ("parallel_state", "set_virtual_pipeline_model_parallel_world_size", "world_size"),
    ("parallel_state", "destroy_model_parallel", ""),
    ("tensor_parallel.random", "model_parallel_cuda_manual_seed", "seed"),
    ("tensor_parallel.random", "CudaRNGStatesTracker.get_states", ""),
    ("tensor_parallel.random", "CudaRNGStatesTracker.set_states", "states"),
    ("tensor_parallel.mappings", "gather_from_tensor_model_parallel_region", "input_"),
    ("optimizer", "get_megatron_optimizer", "config model_chunks config_overrides"),
    ("optimizer", "get_standard_config_overrides", "config"),
    ("optimizer.optimizer", "MegatronOptimizer.scale_loss", "loss"),
    ("optimizer.optimizer", "MegatronOptimizer.reload_model_params", ""),
    ("optimizer.optimizer", "ChainedOptimizer.sharded_state_dict", "model_sharded_state_dict is_loading"),
    ("optimizer.optimizer", "Float16OptimizerWithFloat16Params.sharded_state_dict", SHARDED),
    ("optimizer.optimizer", "FP32Optimizer.sharded_state_dict", SHARDED),
    ("optimizer.distrib_optimizer", "DistributedOptimizer.sharded_state_dict", SHARDED),
    ("optimizer_param_scheduler", "OptimizerParamScheduler.__init__", SCHEDULE),
    ("optimizer_param_scheduler", "OptimizerParamScheduler.step", "increment"),
    ("distributed.distributed_data_parallel", "DistributedDataParallel.__init__", WRAPPING),
    ("distributed.distributed_data_parallel", "DistributedDataParallel.zero_grad_buffer", ""),
    ("distributed.fsdp.mcore_fsdp_adapter", "FullyShardedDataParallel.__init__", WRAPPING),
    ("distributed.finalize_model_grads", "finalize_model_grads", "model num_tokens"),
    ("transformer.module", "Float16Module.__init__", "config module"),
    ("transformer.module", "MegatronModule.sharded_state_dict", "prefix metadata"),
    ("transformer.utils", "get_linear_layer", "rows columns init_method perform_initialization"),
    ("models.gpt.gpt_model", "GPTModel.__init__", DECODER),
    ("models.gpt.gpt_model", "GPTModel.forward", "input_ids position_ids attention_mask labels"),
    ("models.bert.bert_model", "BertModel.__init__", BERT),
    ("models.bert.bert_model", "BertModel.forward", "input_ids attention_mask tokentype_ids lm_labels"),
    ("models.T5.t5_model", "T5Model.__init__", T5),
    ("models.T5.t5_model", "T5Model.forward", T5_STEP),
    ("models.T5.t5_spec", "get_t5_encoder_with_transformer_engine_block_spec", "num_layers"),
    ("models.T5.t5_spec", "get_t5_decoder_with_local_block_spec", "num_layers"),
    ("models.gpt.gpt_layer_specs", "get_gpt_layer_with_transformer_engine_spec", "qk_layernorm"),
    ("models.gpt.gpt_layer_specs", "get_gpt_layer_local_spec", "qk_layernorm normalization"),
    ("models.gpt.gpt_layer_specs", "get_gpt_decoder_block_spec", "config use_transformer_engine vp_stage"),
    ("models.bert.bert_layer_specs", "get_bert_layer_with_transformer_engine_spec", ""),
    ("pipeline_parallel.schedules", "get_forward_backward_func", ""),
    *(("pipeline_parallel.schedules", f"forward_backward_{kind}", STEP) for kind in PIPELINE),
    ("dist_checkpointing.serialization", "save", "sharded_state_dict checkpoint_dir"),
    ("dist_checkpointing.serialization", "load", "sharded_state_dict checkpoint_dir"),
    ("dist_checkpointing.serialization", "load_common_state_dict", "checkpoint_dir"),
    ("utils", "get_attr_wrapped_model", "model attr"),
    ("utils", "get_batch_on_this_cp_rank", "batch"),
    ("datasets.utils", "get_blend_from_list", "blend"),
    (
        "datasets.blended_megatron_dataset_builder",
        "BlendedMegatronDatasetBuilder.__init__",
        "cls sizes is_built_on_rank config",
    ),
]

FIELDS = [
    ("optimizer.optimizer_config", "ParamKey", "with_name_predicate"),
    ("optimizer.optimizer_config", "ParamWithNamePredicate", "name fn"),
    ("optimizer_param_scheduler", "ParamGroupOverride", "max_lr min_lr wd_mult"),
    ("dist_checkpointing.mapping", "ShardedObject", "key data global_shape global_offset replica_id"),
    ("optimizer.optimizer_config", "OptimizerConfig", "lr min_lr weight_decay adam_eps sgd_momentum clip_grad"),
    (
        "distributed.distributed_data_parallel_config",
        "DistributedDataParallelConfig",
        "grad_reduce_in_fp32 use_distributed_optimizer use_megatron_fsdp",
    ),
    (
        "datasets.blended_megatron_dataset_config",
        "BlendedMegatronDatasetConfig",
        "random_seed sequence_length blend split path_to_cache tokenizer",
    ),
    (
        "datasets.gpt_dataset",
        "GPTDatasetConfig",
        "reset_position_ids reset_attention_mask eod_mask_loss create_attention_mask",
    ),
    (
        "datasets.masked_dataset",
        "MaskedWordPieceDatasetConfig",
        "masking_probability short_sequence_probability masking_max_ngram masking_do_full_word masking_do_permutation",
    ),
    ("datasets.bert_dataset", "BERTMaskedWordPieceDatasetConfig", "classification_head"),
    ("datasets.t5_dataset", "T5MaskedWordPieceDatasetConfig", "sequence_length_decoder"),
]


def tree(module: str) -> ast.Module:
    """The text of a released module, parsed."""
    spec = importlib.util.find_spec("megatron.core")
    assert spec is not None and spec.origin is not None  # noqa: PT018 - both say that it was not found
    path = Path(spec.origin).parent.joinpath(*module.split("."))
    return ast.parse((path / "__init__.py" if path.is_dir() else path.with_suffix(".py")).read_text(encoding="utf-8"))


def found(module: str, name: str) -> ast.AST:
    """A function, a class, or a method of a class of the module or of a class that it derives from there."""
    owner, _, method = name.rpartition(".")
    classes = {node.name: node for node in tree(module).body if isinstance(node, ast.ClassDef)}
    if not owner:
        return next(node for node in ast.walk(tree(module)) if getattr(node, "name", None) == name)
    holder = classes[owner]
    while not any(getattr(node, "name", None) == method for node in holder.body):
        holder = next(classes[base.id] for base in holder.bases if isinstance(base, ast.Name) and base.id in classes)
    return next(node for node in holder.body if getattr(node, "name", None) == method)


@pytest.mark.parametrize(("module", "name", "arguments"), CALLED, ids=lambda value: str(value).split("\n")[0])
def test_a_function_takes_what_it_is_given(module: str, name: str, arguments: str) -> None:
    function = found(module, name)
    assert isinstance(function, ast.FunctionDef)
    told = function.args
    known = {argument.arg for argument in (*told.posonlyargs, *told.args, *told.kwonlyargs)}
    assert set(arguments.split()) <= known
    required = [argument.arg for argument in told.args[: len(told.args) - len(told.defaults)]]
    required += [
        argument.arg for argument, value in zip(told.kwonlyargs, told.kw_defaults, strict=True) if value is None
    ]
    assert set(required) - {"self"} <= set(arguments.split())


@pytest.mark.parametrize(("module", "name", "fields"), FIELDS, ids=lambda value: str(value).split("\n")[0])
def test_a_configuration_has_the_fields_that_are_filled(module: str, name: str, fields: str) -> None:
    kind = found(module, name)
    assert isinstance(kind, ast.ClassDef)
    known = {
        node.target.id for node in kind.body if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)
    }
    assert set(fields.split()) <= known
