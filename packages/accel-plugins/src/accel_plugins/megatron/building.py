"""Building a model, its wrapping and its optimizer from settings under the names of Megatron-LM."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final

import torch
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.optimizer import (
    OptimizerConfig,
    ParamKey,
    get_megatron_optimizer,
    get_standard_config_overrides,
)
from megatron.core.optimizer.optimizer_config import ParamWithNamePredicate
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.transformer.enums import AttnBackend
from megatron.core.transformer.module import Float16Module
from megatron.core.transformer.transformer_config import TransformerConfig
from torch.nn import Module

from accel_plugins.megatron import deriving, models
from accel_plugins.megatron.config import MegatronLMPlugin
from accel_state.errors import Conflict, Missing, SettingError
from accel_state.settings.installed import importable
from accel_state.settings.schema import closest

__all__ = ("build_model", "build_optimizer", "build_schedule", "check_arguments", "transformer_config")

_ACTIVATIONS: Final[dict[str, Callable[..., Any]]] = {
    "gelu": torch.nn.functional.gelu,
    "gelu_tanh": lambda hidden: torch.nn.functional.gelu(hidden, approximate="tanh"),
    "relu": torch.nn.functional.relu,
    "silu": torch.nn.functional.silu,
}

_ELSEWHERE: Final = frozenset(
    {
        "activation",
        "bert_binary_head",
        "data_parallel_size",
        "data_cache_path",
        "data_path",
        "decoder_seq_length",
        "decoder_start_token_id",
        "distributed_timeout_minutes",
        "encoder_num_layers",
        "encoder_seq_length",
        "end_weight_decay",
        "eod_mask_loss",
        "global_batch_size",
        "log_all",
        "lr_decay_style",
        "make_vocab_size_divisible_by",
        "max_position_embeddings",
        "micro_batch_size",
        "model_type_name",
        "no_load_optim",
        "no_save_optim",
        "num_labels",
        "num_layers_per_virtual_pipeline_stage",
        "num_tokentypes",
        "position_embedding_type",
        "pretraining_flag",
        "reset_attention_mask",
        "reset_position_ids",
        "rotary_base",
        "rotary_percent",
        "seed",
        "seq_length",
        "share_embeddings_and_output_weights",
        "split",
        "start_weight_decay",
        "tensorboard_dir",
        "tokenizer",
        "use_rotary_position_embeddings",
        "vocab_size",
        "weight_decay_incr_style",
    }
)
"""Settings that neither of Megatron-LM's configuration classes has, and that something here reads."""

_CLASSES: Final = (TransformerConfig, OptimizerConfig, DistributedDataParallelConfig)


def _fields_of(kind: Any) -> frozenset[str]:
    return frozenset(field.name for field in dataclasses.fields(kind))


def check_arguments(plugin: MegatronLMPlugin) -> None:
    """Refuse settings that nothing reads.

    Raises:
        SettingError: Megatron-LM has no such setting.
    """
    known = _ELSEWHERE.union(*map(_fields_of, _CLASSES))
    for name in plugin.megatron_lm_default_args.keys() - known:
        near = closest(name, known)
        raise SettingError(
            f"Cannot use other_megatron_args={{{name!r}: ...}}.",
            "Neither Megatron-LM's configurations of models, optimizers and data parallelism nor ours have it.",
            f"Did you mean {near!r}?" if near else "Leave it out.",
        )


def _made(kind: Any, told: Mapping[str, Any], **more: Any) -> Any:
    """A configuration of Megatron-LM from those settings that it has."""
    return kind(**{**{name: told[name] for name in _fields_of(kind) & told.keys()}, **more})


def _dtype(told: Mapping[str, Any]) -> torch.dtype:
    if told.get("bf16"):
        return torch.bfloat16
    return torch.float16 if told.get("fp16") else torch.float32


def transformer_config(plugin: MegatronLMPlugin) -> Any:
    """Megatron-LM's configuration of a model."""
    if plugin.sequence_parallelism:
        _demand_divided_norms()
    told = plugin.megatron_lm_default_args
    more: dict[str, Any] = {"params_dtype": _dtype(told), "pipeline_dtype": _dtype(told)}
    more["attention_backend"] = AttnBackend[str(told["attention_backend"])]
    if "activation" in told:
        more["activation_func"] = _ACTIVATIONS[told["activation"]]
    part = plugin.num_layers_per_virtual_pipeline_stage
    if part is not None:
        more["virtual_pipeline_model_parallel_size"] = _virtual_stages(plugin, told["num_layers"], part)
    return _made(TransformerConfig, told, **more)


def _demand_divided_norms() -> None:
    """Norms of a divided sequence are brought by Transformer Engine or Apex; torch's compute on the whole one."""
    if not (importable("transformer_engine") or importable("apex")):
        raise Missing(
            "Cannot use MegatronLMPlugin(sequence_parallelism=True).",
            "Megatron-LM takes the norms of a divided sequence from Transformer Engine or from Apex; neither is here.",
            "Install transformer-engine for this machine's CUDA, or leave out sequence_parallelism.",
        )


def _virtual_stages(plugin: MegatronLMPlugin, layers: int, part: int) -> int:
    """Into how many parts each stage of the pipeline is cut."""
    stages, left = divmod(layers, plugin.pp_degree * part)
    if left or plugin.pp_degree == 1:
        raise Conflict(
            f"Cannot use num_layers_per_virtual_pipeline_stage={part}.",
            f"{layers} layers in {plugin.pp_degree} stages cannot be cut into parts of that size.",
            "Choose a divisor of the layers of a stage, and pp_degree of at least 2.",
        )
    return stages


# ---------------------------------------------------------------------------- the model


def build_model(plugin: MegatronLMPlugin, device: torch.device) -> list[Module]:
    """The parts of the model that this process holds, wrapped; more than one with an interleaved pipeline."""
    config = None if plugin.custom_model_provider_function is not None else transformer_config(plugin)
    if _parts(config) > 1:
        parallel_state.set_virtual_pipeline_model_parallel_world_size(_parts(config))
    parts = [_part(plugin, config, index).to(device) for index in range(_parts(config))]
    if plugin.custom_prepare_model_function is not None:
        made = plugin.custom_prepare_model_function(parts)
        return list(made) if isinstance(made, (list, tuple)) else [made]
    return _wrapped(plugin, parts)


def _parts(config: Any) -> int:
    return getattr(config, "virtual_pipeline_model_parallel_size", None) or 1


def _part(plugin: MegatronLMPlugin, config: Any, index: int) -> Module:
    stage = {"ignore_virtual": False, "vp_stage": index} if _parts(config) > 1 else {}
    first = parallel_state.is_pipeline_first_stage(**stage)
    last = parallel_state.is_pipeline_last_stage(**stage)
    made: Module
    if plugin.custom_model_provider_function is not None:
        made = plugin.custom_model_provider_function(first, last)
    else:
        made = models.provide(plugin, config, first, last, index if stage else None)
    return made


def _wrapped(plugin: MegatronLMPlugin, parts: Iterable[Any]) -> list[Module]:
    """Parts in their precision, with their gradients averaged."""
    told, wrapped = plugin.megatron_lm_default_args, list[Module]()
    for index, part in enumerate(parts):
        half = bool(told.get("fp16") or told.get("bf16"))
        inner = Float16Module(part.config, part) if half else part
        wrapping = _made(DistributedDataParallelConfig, {"grad_reduce_in_fp32": half, **told})
        # Only the first part's gradients have time to be reduced while others are computed.
        wrapped.append(_wrapper(told)(part.config, wrapping, inner, disable_bucketing=index > 0))
    return wrapped


def _wrapper(told: Mapping[str, Any]) -> Any:
    if told.get("use_megatron_fsdp"):
        from megatron.core.distributed.fsdp.mcore_fsdp_adapter import FullyShardedDataParallel

        return FullyShardedDataParallel
    return DistributedDataParallel


# ---------------------------------------------------------------------------- what optimizes it


def build_optimizer(plugin: MegatronLMPlugin, parts: list[Any]) -> Any:
    """Megatron-LM's optimizer for the parts of a model, which then scales their losses."""
    told = plugin.megatron_lm_default_args
    config = _made(OptimizerConfig, {**told, "params_dtype": _dtype(told)})
    optimizer = get_megatron_optimizer(config, parts, config_overrides=_overrides(plugin, config))
    for part in parts:
        part.config.grad_scale_func = optimizer.scale_loss
        part.config.finalize_model_grads_func = finalize_model_grads
    return optimizer


def _overrides(plugin: MegatronLMPlugin, config: Any) -> dict[Any, Any]:
    """Which parameters have another weight decay or learning rate than the others."""
    overrides: dict[Any, Any] = {}
    if plugin.no_wd_decay_cond is None:
        overrides.update(get_standard_config_overrides(config))
    else:
        overrides[_key("no_weight_decay", plugin.no_wd_decay_cond)] = {"wd_mult": 0.0}
    if plugin.scale_lr_cond is not None:
        factor = plugin.lr_mult
        rates = {"max_lr": config.lr * factor, "min_lr": (config.min_lr or 0.0) * factor}
        overrides[_key("scaled_learning_rate", plugin.scale_lr_cond)] = rates
    return overrides


def _key(name: str, condition: Callable[..., bool]) -> Any:
    def holds(parameter: Any, parameter_name: str) -> bool:
        return bool(condition(parameter_name, parameter))

    return ParamKey(with_name_predicate=ParamWithNamePredicate(name=name, fn=holds))


def build_schedule(plugin: MegatronLMPlugin, optimizer: Any) -> Any:
    """Megatron-LM's schedule, which counts samples.

    Raises:
        SettingError: nobody said how long training is.
    """
    told = plugin.megatron_lm_default_args
    warmup, decay, whole = deriving.schedule_samples(plugin)
    return OptimizerParamScheduler(
        optimizer,
        init_lr=0.0,
        max_lr=told["lr"],
        min_lr=told["min_lr"],
        lr_warmup_steps=warmup,
        lr_decay_steps=decay,
        lr_decay_style=told["lr_decay_style"],
        start_wd=told["start_weight_decay"],
        end_wd=told["end_weight_decay"],
        wd_incr_steps=whole,
        wd_incr_style=told["weight_decay_incr_style"],
    )
