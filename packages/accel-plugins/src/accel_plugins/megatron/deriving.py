"""Settings under the names of Megatron-LM, from our own settings, an optimizer, a schedule and a precision."""

from __future__ import annotations

from typing import Any, Final

from accel_state.errors import Conflict, NotOffered, SettingError

__all__ = ("about_optimizer", "about_precision", "own_arguments", "schedule_samples", "take_schedule")

_OWN_NAMES: Final = {
    "tp_degree": "tensor_model_parallel_size",
    "pp_degree": "pipeline_model_parallel_size",
    "context_parallel_size": "context_parallel_size",
    "expert_model_parallel_size": "expert_model_parallel_size",
    "expert_tensor_parallel_size": "expert_tensor_parallel_size",
    "sequence_parallelism": "sequence_parallel",
    "gradient_clipping": "clip_grad",
    "recompute_granularity": "recompute_granularity",
    "recompute_method": "recompute_method",
    "recompute_num_layers": "recompute_num_layers",
    "decoder_last_pipeline_num_layers": "num_layers_in_last_pipeline_stage",
    "num_layers_per_virtual_pipeline_stage": "num_layers_per_virtual_pipeline_stage",
    "attention_backend": "attention_backend",
    "attention_dropout": "attention_dropout",
    "hidden_dropout": "hidden_dropout",
    "attention_softmax_in_fp32": "attention_softmax_in_fp32",
    "calculate_per_token_loss": "calculate_per_token_loss",
    "use_rotary_position_embeddings": "use_rotary_position_embeddings",
    "use_distributed_optimizer": "use_distributed_optimizer",
    "use_precision_aware_optimizer": "use_precision_aware_optimizer",
    "optimizer_cpu_offload": "optimizer_cpu_offload",
    "overlap_cpu_optimizer_d2h_h2d": "overlap_cpu_optimizer_d2h_h2d",
    "use_custom_fsdp": "use_megatron_fsdp",
    "eod_mask_loss": "eod_mask_loss",
    "no_load_optim": "no_load_optim",
    "no_save_optim": "no_save_optim",
    "seq_length": "seq_length",
    "encoder_seq_length": "encoder_seq_length",
    "decoder_seq_length": "decoder_seq_length",
    "min_lr": "min_lr",
    "lr_decay_style": "lr_decay_style",
    "weight_decay_incr_style": "weight_decay_incr_style",
}
"""By our name of a setting, that of Megatron-LM."""

_OPTIMIZERS: Final = {"adam": "adam", "adamw": "adam", "fusedadam": "adam", "sgd": "sgd", "fusedsgd": "sgd"}


def own_arguments(plugin: Any) -> dict[str, Any]:
    """What our settings say, with `other_megatron_args` after it; what is None is left to Megatron-LM."""
    found = {theirs: getattr(plugin, ours) for ours, theirs in _OWN_NAMES.items()}
    if plugin.recompute_activations and plugin.recompute_granularity is None:
        found["recompute_granularity"] = "selective"
    if found["recompute_granularity"] == "full":
        found["recompute_method"] = found["recompute_method"] or "uniform"
        found["recompute_num_layers"] = found["recompute_num_layers"] or 1
    # The optimizer with states in lower precision is a form of the one that divides them.
    found["use_distributed_optimizer"] = bool(plugin.use_distributed_optimizer or plugin.use_precision_aware_optimizer)
    told = {name: value for name, value in found.items() if value is not None}
    return {**told, **(plugin.other_megatron_args or {})}


def about_optimizer(plugin: Any, optimizer: Any) -> dict[str, Any]:
    """Kind, learning rate, weight decay and momenta of an optimizer.

    Raises:
        NotOffered: Megatron-LM has none of this kind.
    """
    name = type(optimizer).__name__
    kind = _OPTIMIZERS.get(name.lower())
    if kind is None:
        raise NotOffered(
            f"Cannot use {name} with Megatron-LM.",
            "Megatron-LM makes its own optimizer, which is Adam or SGD.",
            "Give torch.optim.AdamW, Adam or SGD.",
        )
    numbers = optimizer.defaults
    decay = numbers.get("weight_decay", 0.0)
    found = {"optimizer": kind, "lr": float(numbers["lr"]), "weight_decay": decay}
    found["start_weight_decay"] = decay if plugin.start_weight_decay is None else plugin.start_weight_decay
    found["end_weight_decay"] = decay if plugin.end_weight_decay is None else plugin.end_weight_decay
    if kind == "adam":
        found["adam_beta1"], found["adam_beta2"] = numbers["betas"]
        found["adam_eps"] = numbers["eps"]
        found["decoupled_weight_decay"] = name.lower() != "adam"
    else:
        found["sgd_momentum"] = numbers["momentum"]
    return found


def about_precision(name: str) -> dict[str, Any]:
    """Megatron's switches for a precision.

    Raises:
        NotOffered: it is none of those.
    """
    if name not in ("no", "fp16", "bf16"):
        raise NotOffered(
            f"Cannot use mixed_precision={name!r} with Megatron-LM.",
            "It takes no, fp16 or bf16; Megatron-LM has its own settings for 8 bits.",
            "Use mixed_precision='bf16', and other_megatron_args={'fp8': 'hybrid'} on devices that have it.",
        )
    return {"fp16": name == "fp16", "bf16": name == "bf16"}


def take_schedule(plugin: Any, scheduler: Any) -> None:
    """Take the length of a schedule, in steps of all processes, into the settings.

    Raises:
        Conflict: the settings say the length too.
    """
    shared = plugin.data_parallel_size or 1
    if scheduler.total_num_steps is not None:
        if plugin.train_samples is not None:
            raise Conflict(
                f"A schedule of {scheduler.total_num_steps} steps was given to prepare().",
                f"MegatronLMPlugin(train_samples={plugin.train_samples}) says how long training is too.",
                "Leave out one of the two.",
            )
        if plugin.train_iters is None:
            plugin.train_iters = max(1, scheduler.total_num_steps // shared)
    if plugin.lr_warmup_iters is None and plugin.lr_warmup_samples is None and plugin.lr_warmup_fraction is None:
        plugin.lr_warmup_iters = scheduler.warmup_num_steps // shared


def schedule_samples(plugin: Any) -> tuple[int, int, int]:
    """Samples over which the learning rate rises and decays, and those of the whole training.

    Raises:
        SettingError: nobody said how long training is.
    """
    batch = plugin.global_batch_size or 1
    whole = plugin.train_samples or (plugin.train_iters or 0) * batch
    decay = plugin.lr_decay_samples or (plugin.lr_decay_iters or 0) * batch or whole
    if not decay:
        raise SettingError(
            "Megatron-LM was to make a schedule.",
            "Neither the scheduler nor the settings say how many steps training has.",
            "Give MegatronLMDummyScheduler(optimizer, total_num_steps=...), or MegatronLMPlugin(train_iters=...).",
        )
    if plugin.lr_warmup_fraction is not None:
        warmup = int(plugin.lr_warmup_fraction * decay)
    else:
        warmup = plugin.lr_warmup_samples or (plugin.lr_warmup_iters or 0) * batch
    return warmup, decay, whole or decay
