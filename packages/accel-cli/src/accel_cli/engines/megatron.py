"""Options of Megatron-LM, which its processes read."""

from __future__ import annotations

from typing import Any, Final

from accel_state.settings.schema import BOOLEAN, FLOAT, TEXT, Kind, setting, table, whole

__all__ = ("MegatronSettings",)

_COUNT: Final = whole(1)


def _megatron(name: str, said: str, kind: Kind = TEXT, question: str | None = None) -> Any:
    return setting(
        None,
        kind=kind,
        variable=f"MEGATRON_LM_{name.upper()}",
        flag=f"--megatron_lm_{name}",
        key=f"megatron_lm_config.megatron_lm_{name}",
        question=question,
        help=said,
        group="Megatron-LM",
    )


def _switch(name: str, said: str) -> Any:
    return _megatron(name, said, BOOLEAN)


@table
class MegatronSettings:
    """How a model is cut, recomputed and optimised."""

    tp_degree: int | None = _megatron(
        "tp_degree",
        "Processes that divide a tensor.",
        _COUNT,
        "How many processes divide a tensor?",
    )
    pp_degree: int | None = _megatron(
        "pp_degree", "Stages of the pipeline.", _COUNT, "How many stages does the pipeline have?"
    )
    num_micro_batches: int | None = _megatron("num_micro_batches", "Micro-batches in the pipeline.", _COUNT)
    expert_model_parallel_size: int | None = _megatron(
        "expert_model_parallel_size", "Processes among which experts are divided.", _COUNT
    )
    expert_tensor_parallel_size: int | None = _megatron(
        "expert_tensor_parallel_size", "Processes among which tensors of experts are divided.", _COUNT
    )
    context_parallel_size: int | None = _megatron(
        "context_parallel_size", "Processes among which the sequence is divided.", _COUNT
    )
    decoder_last_pipeline_num_layers: int | None = _megatron(
        "decoder_last_pipeline_num_layers", "Layers of the last stage of the decoder.", _COUNT
    )
    sequence_parallelism: bool | None = _switch("sequence_parallelism", "Divide the sequence where tensors are not.")
    recompute_activations: bool | None = _switch("recompute_activations", "Recompute activations in backward.")
    recompute_granularity: str | None = _megatron("recompute_granularity", "What is recomputed: full or selective.")
    recompute_method: str | None = _megatron("recompute_method", "Which layers are recomputed: uniform or block.")
    recompute_num_layers: int | None = _megatron("recompute_num_layers", "Layers that are recomputed at once.", _COUNT)
    use_distributed_optimizer: bool | None = _switch("use_distributed_optimizer", "Divide optimizer states.")
    use_precision_aware_optimizer: bool | None = _switch(
        "use_precision_aware_optimizer", "Let the optimizer keep its states in lower precision."
    )
    optimizer_cpu_offload: bool | None = _switch("optimizer_cpu_offload", "Keep optimizer states on the host.")
    overlap_cpu_optimizer_d2h_h2d: bool | None = _switch(
        "overlap_cpu_optimizer_d2h_h2d", "Copy optimizer states while the device computes."
    )
    use_custom_fsdp: bool | None = _switch("use_custom_fsdp", "Divide parameters as Megatron's own FSDP does.")
    no_load_optim: bool | None = _switch("no_load_optim", "Do not load optimizer states.")
    no_save_optim: bool | None = _switch("no_save_optim", "Do not save optimizer states.")
    eod_mask_loss: bool | None = _switch("eod_mask_loss", "Leave ends of documents out of the loss.")
    calculate_per_token_loss: bool | None = _switch("calculate_per_token_loss", "Average the loss over tokens.")
    gradient_clipping: float | None = _megatron("gradient_clipping", "Largest norm of the gradients.", FLOAT)
    attention_backend: str | None = _megatron("attention_backend", "Implementation of attention.")
    attention_dropout: float | None = _megatron("attention_dropout", "Dropout in attention.", FLOAT)
    hidden_dropout: float | None = _megatron("hidden_dropout", "Dropout in hidden states.", FLOAT)
    attention_softmax_in_fp32: bool | None = _switch("attention_softmax_in_fp32", "Compute its softmax in 32 bits.")
    use_rotary_position_embeddings: bool | None = _switch("use_rotary_position_embeddings", "Use rotary positions.")
