"""The GPT, BERT and T5 of Megatron-LM, in the sizes that the settings say."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

from megatron.core.models.bert.bert_model import BertModel
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_decoder_block_spec,
    get_gpt_layer_local_spec,
    get_gpt_layer_with_transformer_engine_spec,
)
from megatron.core.models.T5 import T5Model, t5_spec
from torch.nn import Module

from accel_plugins.megatron.config import MegatronLMPlugin
from accel_state.errors import NotOffered
from accel_state.settings.installed import importable

__all__ = ("PADDING", "padded_vocabulary", "provide")

PADDING: Final = 128
"""Vocabularies are made multiples of this, so that matrices can be divided and are computed fast."""


def provide(plugin: MegatronLMPlugin, config: Any, first: bool, last: bool, vp_stage: int | None = None) -> Module:
    """The part of a model that one stage of the pipeline holds.

    Args:
        plugin: the settings.
        config: Megatron-LM's configuration of the model.
        first, last: whether the stage has the embedding and the head.
        vp_stage: which part of an interleaved stage.

    Raises:
        NotOffered: Megatron-LM has no such model, or cannot divide it so.
    """
    told = plugin.megatron_lm_default_args
    makers: dict[str, Callable[..., Module]] = {"gpt": _gpt, "bert": _bert, "t5": _t5}
    kind = str(told.get("model_type_name"))
    if kind not in makers:
        raise NotOffered(
            f"Cannot build a model of the kind {kind!r} with Megatron-LM.",
            f"Kinds that are built are {', '.join(makers)}.",
            "Set model_type_name in the function that reads its configuration, or give custom_model_provider_function.",
        )
    return makers[kind](plugin, config, {"pre_process": first, "post_process": last}, vp_stage)


def padded_vocabulary(plugin: MegatronLMPlugin) -> int:
    """Size of a vocabulary that can be divided over the processes that divide a tensor."""
    told = plugin.megatron_lm_default_args
    multiple = int(told.get("make_vocab_size_divisible_by", PADDING)) * plugin.tp_degree
    return -(-int(told["vocab_size"]) // multiple) * multiple


def _by_transformer_engine(config: Any) -> bool:
    """Whether layers are those of Transformer Engine, which has the faster ones where it is installed."""
    return importable("transformer_engine") and config.attention_backend.name != "local"


def _usual(plugin: MegatronLMPlugin, stage: Mapping[str, bool]) -> dict[str, Any]:
    told = plugin.megatron_lm_default_args
    return {
        "vocab_size": padded_vocabulary(plugin),
        "max_sequence_length": told["max_position_embeddings"],
        "parallel_output": True,
        "share_embeddings_and_output_weights": told.get("share_embeddings_and_output_weights", True),
        "position_embedding_type": told.get("position_embedding_type", "learned_absolute"),
        "rotary_percent": told.get("rotary_percent", 1.0),
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
    made: Module = GPTModel(
        config=config, transformer_layer_spec=spec, rotary_base=base, vp_stage=vp_stage, **_usual(plugin, stage)
    )
    return made


def _bert(plugin: MegatronLMPlugin, config: Any, stage: Mapping[str, bool], vp_stage: int | None) -> Module:
    from megatron.core.models.bert import bert_layer_specs
    from megatron.core.transformer.utils import get_linear_layer

    told = plugin.megatron_lm_default_args
    spec = (
        bert_layer_specs.get_bert_layer_with_transformer_engine_spec()
        if _by_transformer_engine(config)
        else bert_layer_specs.bert_layer_local_spec
    )
    pretrains = told["pretraining_flag"]
    made: Any = BertModel(
        config=config,
        num_tokentypes=told["num_tokentypes"],
        transformer_layer_spec=spec,
        add_binary_head=told["bert_binary_head"] or not pretrains,
        vp_stage=vp_stage,
        **_usual(plugin, stage),
    )
    if not pretrains and stage["post_process"]:
        # The head that tells of two sentences stands where that of a classifier does, and differs in its size.
        made.binary_head = get_linear_layer(
            config.hidden_size, told["num_labels"], config.init_method, config.perform_initialization
        )
    model: Module = made
    return model


def _t5(plugin: MegatronLMPlugin, config: Any, stage: Mapping[str, bool], vp_stage: int | None) -> Module:
    import copy

    if plugin.pp_degree > 1:
        raise NotOffered(
            f"Cannot divide a T5 over pp_degree={plugin.pp_degree} stages.",
            "Megatron-LM keeps encoder and decoder of a T5 in one stage.",
            "Use tp_degree.",
        )
    told = plugin.megatron_lm_default_args
    encoder_config = copy.deepcopy(config)
    encoder_config.num_layers = told["encoder_num_layers"]
    whose = "transformer_engine" if _by_transformer_engine(config) else "local"
    encoder_block = getattr(t5_spec, f"get_t5_encoder_with_{whose}_block_spec")
    decoder_block = getattr(t5_spec, f"get_t5_decoder_with_{whose}_block_spec")
    made: Module = T5Model(
        config=config,
        encoder_config=encoder_config,
        transformer_encoder_layer_spec=encoder_block(encoder_config.num_layers),
        transformer_decoder_layer_spec=decoder_block(config.num_layers),
        **_usual(plugin, stage),
    )
    return made
