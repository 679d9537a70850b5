"""Build the sharded model, its optimizer and its schedule from the objects of `prepare` and the settings."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import torch
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.models.bert.bert_model import BertModel
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_decoder_block_spec,
    get_gpt_layer_local_spec,
    get_gpt_layer_with_transformer_engine_spec,
)
from megatron.core.models.T5 import T5Model, t5_spec
from megatron.core.optimizer import OptimizerConfig, ParamKey, get_megatron_optimizer, get_standard_config_overrides
from megatron.core.optimizer.optimizer_config import ParamWithNamePredicate
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.transformer.enums import AttnBackend
from megatron.core.transformer.module import Float16Module
from megatron.core.transformer.transformer_config import TransformerConfig
from torch.nn import Module

from accel_megatron import config
from accel_megatron.config import MegatronLMPlugin
from accel_megatron.objects import MegatronLMDummyDataLoader, MegatronLMDummyScheduler
from accel_state.errors import Conflict, Missing, NotOffered, SettingError
from accel_state.settings.installed import importable
from accel_state.settings.schema import closest

if TYPE_CHECKING:
    from accel_plugins.bundle import Bundle

__all__ = (
    "PADDING",
    "MegatronParts",
    "build_optimizer",
    "build_parts",
    "build_schedule",
    "check_arguments",
    "check_batches",
    "iterators_of",
    "padded_vocabulary",
    "prepare_schedule",
    "provide_model",
    "start_megatron",
    "take_sizes",
    "transformer_config",
)


class MegatronParts(NamedTuple):
    """The objects of an engine.

    Args:
        model: the parts of the model on this process.
        optimizer: Megatron-LM's optimizer.
        scheduler: its learning-rate scheduler, or None.
    """

    model: list[Any]
    optimizer: Any
    scheduler: Any


def check_batches(plugin: MegatronLMPlugin, bundle: Bundle) -> None:
    """Raise if the size of a micro-batch is unknown.

    Raises:
        SettingError: it is unknown.
    """
    if plugin.micro_batch_size is None and not any(_micro_batch(loader, plugin, 1) for loader in bundle.loaders):
        raise SettingError(
            "Cannot train a model with Megatron-LM.",
            "The size of a micro-batch is not known: prepare() received no loader with a batch size.",
            "Prepare the training loader in the same call.",
        )


def _micro_batch(loader: Any, plugin: MegatronLMPlugin, shards: int) -> int | None:
    """Number of samples of a micro-batch on one process, from a loader that is prepared or not."""
    said = getattr(loader, "dataset_args", {}).get("micro_batch_size")
    if said is not None:
        return int(said)
    total = getattr(loader, "total_batch_size", None)
    if total is not None:
        joined = getattr(loader, "micro_batches", 1)
        return int(total) // shards // joined
    plain = getattr(loader, "batch_size", None)
    return None if plain is None else int(plain)


def take_sizes(plugin: MegatronLMPlugin, bundle: Bundle, shards: int) -> None:
    """Add the sizes of batches and model, and the kinds of optimizer and schedule, to the settings.

    Raises:
        SettingError, NotOffered, Conflict: Megatron-LM cannot train these objects.
    """
    sizes = [size for loader in bundle.loaders if (size := _micro_batch(loader, plugin, shards))]
    if sizes:
        plugin.set_training_args(min(sizes) if plugin.is_train_batch_min else max(sizes), shards)
    elif plugin.micro_batch_size is not None:
        plugin.set_training_args(plugin.micro_batch_size, shards)
    if plugin.custom_model_provider_function is None:
        plugin.set_network_size_args(bundle.models[0])
    plugin.set_optimizer_type(bundle.optimizers[0])
    for scheduler in bundle.schedulers:
        if isinstance(scheduler, MegatronLMDummyScheduler):
            plugin.set_scheduler_args(scheduler)
    check_arguments(plugin)


def start_megatron(accelerator: Any, model: Any, optimizer: Any, scheduler: Any) -> MegatronParts:
    """Build the sharded model, its optimizer and its schedule; the settings must have all sizes.

    Args:
        accelerator: has `device` and `state.megatron_lm_plugin`.
        model: the user's model; only its configuration was used.
        optimizer: the user's optimizer; only its options were used.
        scheduler: a placeholder, a torch scheduler, or None.
    """
    plugin = accelerator.state.megatron_lm_plugin
    parts = build_parts(plugin, accelerator.device)
    megatron_optimizer = build_optimizer(plugin, parts)
    return MegatronParts(
        parts,
        megatron_optimizer,
        None if scheduler is None else prepare_schedule(plugin, megatron_optimizer, scheduler),
    )


def prepare_schedule(plugin: MegatronLMPlugin, optimizer: Any, scheduler: Any) -> Any:
    """The scheduler of Megatron-LM's optimizer: Megatron-LM's for a placeholder, else `scheduler`, attached to it.

    Raises:
        Conflict: `scheduler` has other groups of parameters.
    """
    if isinstance(scheduler, MegatronLMDummyScheduler):
        return build_schedule(plugin, optimizer)
    rates = list(scheduler.base_lrs)
    if len(set(rates)) > 1 or len({id(f) for f in getattr(scheduler, "lr_lambdas", ())}) > 1:
        raise Conflict(
            f"Cannot prepare {type(scheduler).__name__} with several learning rates.",
            "Megatron-LM forms the parameter groups itself.",
            "Use one learning rate, or MegatronLMPlugin(scale_lr_cond=..., lr_mult=...).",
        )
    groups = optimizer.param_groups
    scheduler.optimizer = optimizer
    scheduler.base_lrs = [rates[0]] * len(groups)
    if hasattr(scheduler, "lr_lambdas"):
        scheduler.lr_lambdas = [scheduler.lr_lambdas[0]] * len(groups)
    for group in groups:
        group["initial_lr"], group["lr"] = rates[0], scheduler.get_last_lr()[0]
    return scheduler


def iterators_of(accelerator: Any, loader: MegatronLMDummyDataLoader) -> Callable[[], tuple[Any, Any, Any]]:
    """The function that returns the iterators of a placeholder for data; every call returns the same ones."""
    plugin = accelerator.state.megatron_lm_plugin
    loader.set_megatron_data_args(plugin)

    def cached_iterators() -> tuple[Any, Any, Any]:
        kept = getattr(loader, "_iterators", None)
        if kept is None:
            kept = loader.build_train_valid_test_data_iterators(accelerator)
            vars(loader)["_iterators"] = kept
        iterators: tuple[Any, Any, Any] = kept
        return iterators

    return cached_iterators


# ---------------------------------------------------------------------------- settings

_ACTIVATIONS: Final[dict[str, Callable[..., Any]]] = {
    "gelu": torch.nn.functional.gelu,
    "gelu_tanh": lambda hidden: torch.nn.functional.gelu(hidden, approximate="tanh"),
    "relu": torch.nn.functional.relu,
    "silu": torch.nn.functional.silu,
}

_ARGUMENTS_READ_ELSEWHERE: Final = frozenset(
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
"""Settings that only this package reads, not Megatron-LM's configuration classes."""

_CONFIG_CLASSES: Final = (TransformerConfig, OptimizerConfig, DistributedDataParallelConfig)


def _fields_of(kind: Any) -> frozenset[str]:
    return frozenset(field.name for field in dataclasses.fields(kind))


def check_arguments(plugin: MegatronLMPlugin) -> None:
    """Raise for unknown settings.

    Raises:
        SettingError: Megatron-LM has no such setting.
    """
    setting_names = _ARGUMENTS_READ_ELSEWHERE.union(*map(_fields_of, _CONFIG_CLASSES))
    for name in plugin.megatron_lm_default_args.keys() - setting_names:
        near = closest(name, setting_names)
        raise SettingError(
            f"Cannot use other_megatron_args={{{name!r}: ...}}.",
            "Megatron-LM's configurations of models, optimizers and data parallelism do not have this setting.",
            f"Did you mean {near!r}?" if near else "Remove it.",
        )


def _instance_of(kind: Any, megatron_args: Mapping[str, Any], **more: Any) -> Any:
    """Create a configuration object of Megatron-LM from the settings that it has."""
    return kind(**{**{name: megatron_args[name] for name in _fields_of(kind) & megatron_args.keys()}, **more})


def _dtype(megatron_args: Mapping[str, Any]) -> torch.dtype:
    if megatron_args.get("bf16"):
        return torch.bfloat16
    return torch.float16 if megatron_args.get("fp16") else torch.float32


def transformer_config(plugin: MegatronLMPlugin) -> Any:
    """Megatron-LM's configuration of a model."""
    if plugin.sequence_parallelism:
        _demand_divided_norms()
    megatron_args = plugin.megatron_lm_default_args
    more: dict[str, Any] = {"params_dtype": _dtype(megatron_args), "pipeline_dtype": _dtype(megatron_args)}
    more["attention_backend"] = AttnBackend[str(megatron_args["attention_backend"])]
    if "activation" in megatron_args:
        more["activation_func"] = _ACTIVATIONS[megatron_args["activation"]]
    part = plugin.num_layers_per_virtual_pipeline_stage
    if part is not None:
        more["virtual_pipeline_model_parallel_size"] = _virtual_stages(plugin, megatron_args["num_layers"], part)
    return _instance_of(TransformerConfig, megatron_args, **more)


def _demand_divided_norms() -> None:
    """Raise without Transformer Engine or Apex: torch's norms do not support a sharded sequence."""
    if not (importable("transformer_engine") or importable("apex")):
        raise Missing(
            "Cannot use MegatronLMPlugin(sequence_parallelism=True).",
            "For a sharded sequence, Megatron-LM needs the norms of Transformer Engine or Apex; neither is installed.",
            "Install transformer-engine for this machine's CUDA, or remove sequence_parallelism.",
        )


def _virtual_stages(plugin: MegatronLMPlugin, layers: int, part: int) -> int:
    """The number of parts of each pipeline stage."""
    stages, left = divmod(layers, plugin.pp_degree * part)
    if left or plugin.pp_degree == 1:
        raise Conflict(
            f"Cannot use num_layers_per_virtual_pipeline_stage={part}.",
            f"{layers} layers in {plugin.pp_degree} stages cannot be divided into parts of that size.",
            "Choose a divisor of the layers of a stage, and pp_degree of at least 2.",
        )
    return stages


# ---------------------------------------------------------------------------- the model


def build_parts(plugin: MegatronLMPlugin, device: torch.device) -> list[Module]:
    """The wrapped parts of the model on this process; more than one with an interleaved pipeline."""
    config = None if plugin.custom_model_provider_function is not None else transformer_config(plugin)
    if _parts(config) > 1:
        parallel_state.set_virtual_pipeline_model_parallel_world_size(_parts(config))
    parts = [_part(plugin, config, index).to(device) for index in range(_parts(config))]
    if plugin.custom_prepare_model_function is not None:
        wrapped = plugin.custom_prepare_model_function(parts)
        return list(wrapped) if isinstance(wrapped, (list, tuple)) else [wrapped]
    return _wrapped(plugin, parts)


def _parts(config: Any) -> int:
    return getattr(config, "virtual_pipeline_model_parallel_size", None) or 1


def _part(plugin: MegatronLMPlugin, config: Any, index: int) -> Module:
    stage = {"ignore_virtual": False, "vp_stage": index} if _parts(config) > 1 else {}
    first = parallel_state.is_pipeline_first_stage(**stage)
    last = parallel_state.is_pipeline_last_stage(**stage)
    part: Module
    if plugin.custom_model_provider_function is not None:
        part = plugin.custom_model_provider_function(first, last)
    else:
        part = provide_model(plugin, config, first, last, index if stage else None)
    return part


def _wrapped(plugin: MegatronLMPlugin, parts: Iterable[Any]) -> list[Module]:
    """Wrap parts of a model for their precision and for gradient averaging."""
    megatron_args, wrapped = plugin.megatron_lm_default_args, list[Module]()
    for index, part in enumerate(parts):
        half = bool(megatron_args.get("fp16") or megatron_args.get("bf16"))
        inner = Float16Module(part.config, part) if half else part
        wrapping = _instance_of(DistributedDataParallelConfig, {"grad_reduce_in_fp32": half, **megatron_args})
        # Only the reduction of the first part's gradients can overlap with the computation of others.
        wrapped.append(_wrapper(megatron_args)(part.config, wrapping, inner, disable_bucketing=index > 0))
    return wrapped


def _wrapper(megatron_args: Mapping[str, Any]) -> Any:
    if megatron_args.get("use_megatron_fsdp"):
        from megatron.core.distributed.fsdp.mcore_fsdp_adapter import FullyShardedDataParallel

        return FullyShardedDataParallel
    return DistributedDataParallel


# ---------------------------------------------------------------------------- the optimizer


def build_optimizer(plugin: MegatronLMPlugin, parts: list[Any]) -> Any:
    """Megatron-LM's optimizer for the parts of a model; it also scales their losses."""
    megatron_args = plugin.megatron_lm_default_args
    config = _instance_of(OptimizerConfig, {**megatron_args, "params_dtype": _dtype(megatron_args)})
    optimizer = get_megatron_optimizer(config, parts, config_overrides=_overrides(plugin, config))
    for part in parts:
        part.config.grad_scale_func = optimizer.scale_loss
        part.config.finalize_model_grads_func = finalize_model_grads
    return optimizer


def _overrides(plugin: MegatronLMPlugin, config: Any) -> dict[Any, Any]:
    """The parameters with a different weight decay or learning rate."""
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
        SettingError: the length of training is unknown.
    """
    megatron_args = plugin.megatron_lm_default_args
    warmup, decay, whole = config.schedule_samples(plugin)
    return OptimizerParamScheduler(
        optimizer,
        init_lr=0.0,
        max_lr=megatron_args["lr"],
        min_lr=megatron_args["min_lr"],
        lr_warmup_steps=warmup,
        lr_decay_steps=decay,
        lr_decay_style=megatron_args["lr_decay_style"],
        start_wd=megatron_args["start_weight_decay"],
        end_wd=megatron_args["end_weight_decay"],
        wd_incr_steps=whole,
        wd_incr_style=megatron_args["weight_decay_incr_style"],
    )


# ---------------------------------------------------------------------------- the models of Megatron-LM

PADDING: Final = 128
"""Vocabulary sizes are padded to multiples of this, so that matrices can be sharded and are fast."""


def provide_model(
    plugin: MegatronLMPlugin, config: Any, first: bool, last: bool, vp_stage: int | None = None
) -> Module:
    """The part of a model on one pipeline stage.

    Args:
        plugin: the settings.
        config: Megatron-LM's configuration of the model.
        first, last: whether the stage has the embedding, and the head.
        vp_stage: index of the part in an interleaved stage.

    Raises:
        NotOffered: Megatron-LM has no such model, or cannot shard it in this way.
    """
    megatron_args = plugin.megatron_lm_default_args
    makers: dict[str, Callable[..., Module]] = {"gpt": _gpt, "bert": _bert, "t5": _t5}
    kind = str(megatron_args.get("model_type_name"))
    if kind not in makers:
        raise NotOffered(
            f"Cannot build a model of the kind {kind!r} with Megatron-LM.",
            f"The supported kinds are {', '.join(makers)}.",
            "Set model_type_name in the function that reads its configuration, or pass custom_model_provider_function.",
        )
    return makers[kind](plugin, config, {"pre_process": first, "post_process": last}, vp_stage)


def padded_vocabulary(plugin: MegatronLMPlugin) -> int:
    """The padded vocabulary size, which can be sharded over the tensor-parallel processes."""
    megatron_args = plugin.megatron_lm_default_args
    multiple = int(megatron_args.get("make_vocab_size_divisible_by", PADDING)) * plugin.tp_degree
    return -(-int(megatron_args["vocab_size"]) // multiple) * multiple


def _by_transformer_engine(config: Any) -> bool:
    """Whether to use the layers of Transformer Engine, which are faster, if it is installed."""
    return importable("transformer_engine") and config.attention_backend.name != "local"


def _usual(plugin: MegatronLMPlugin, stage: Mapping[str, bool]) -> dict[str, Any]:
    megatron_args = plugin.megatron_lm_default_args
    return {
        "vocab_size": padded_vocabulary(plugin),
        "max_sequence_length": megatron_args["max_position_embeddings"],
        "parallel_output": True,
        "share_embeddings_and_output_weights": megatron_args.get("share_embeddings_and_output_weights", True),
        "position_embedding_type": megatron_args.get("position_embedding_type", "learned_absolute"),
        "rotary_percent": megatron_args.get("rotary_percent", 1.0),
        **stage,
    }


def _gpt(plugin: MegatronLMPlugin, config: Any, stage: Mapping[str, bool], vp_stage: int | None) -> Module:
    fast = _by_transformer_engine(config)
    if config.num_moe_experts is not None:
        spec = get_gpt_decoder_block_spec(config, use_transformer_engine=fast, vp_stage=vp_stage)
    elif fast:
        spec = get_gpt_layer_with_transformer_engine_spec(qk_layernorm=config.qk_layernorm)
    else:
        spec = get_gpt_layer_local_spec(qk_layernorm=config.qk_layernorm, normalization=config.normalization)
    base = plugin.megatron_lm_default_args.get("rotary_base", 10000)
    model: Module = GPTModel(
        config=config, transformer_layer_spec=spec, rotary_base=base, vp_stage=vp_stage, **_usual(plugin, stage)
    )
    return model


def _bert(plugin: MegatronLMPlugin, config: Any, stage: Mapping[str, bool], vp_stage: int | None) -> Module:
    from megatron.core.models.bert import bert_layer_specs
    from megatron.core.transformer.utils import get_linear_layer

    megatron_args = plugin.megatron_lm_default_args
    spec = (
        bert_layer_specs.get_bert_layer_with_transformer_engine_spec()
        if _by_transformer_engine(config)
        else bert_layer_specs.bert_layer_local_spec
    )
    pretrains = megatron_args["pretraining_flag"]
    bert: Any = BertModel(
        config=config,
        num_tokentypes=megatron_args["num_tokentypes"],
        transformer_layer_spec=spec,
        add_binary_head=megatron_args["bert_binary_head"] or not pretrains,
        vp_stage=vp_stage,
        **_usual(plugin, stage),
    )
    if not pretrains and stage["post_process"]:
        # The next-sentence head has the name of a classifier's head, but another size.
        bert.binary_head = get_linear_layer(
            config.hidden_size, megatron_args["num_labels"], config.init_method, config.perform_initialization
        )
    model: Module = bert
    return model


def _t5(plugin: MegatronLMPlugin, config: Any, stage: Mapping[str, bool], vp_stage: int | None) -> Module:
    import copy

    if plugin.pp_degree > 1:
        raise NotOffered(
            f"Cannot split a T5 over pp_degree={plugin.pp_degree} stages.",
            "Megatron-LM supports T5 only with encoder and decoder in one stage.",
            "Use tp_degree.",
        )
    megatron_args = plugin.megatron_lm_default_args
    encoder_config = copy.deepcopy(config)
    encoder_config.num_layers = megatron_args["encoder_num_layers"]
    whose = "transformer_engine" if _by_transformer_engine(config) else "local"
    encoder_block = getattr(t5_spec, f"get_t5_encoder_with_{whose}_block_spec")
    decoder_block = getattr(t5_spec, f"get_t5_decoder_with_{whose}_block_spec")
    model: Module = T5Model(
        config=config,
        encoder_config=encoder_config,
        transformer_encoder_layer_spec=encoder_block(encoder_config.num_layers),
        transformer_decoder_layer_spec=decoder_block(config.num_layers),
        **_usual(plugin, stage),
    )
    return model
