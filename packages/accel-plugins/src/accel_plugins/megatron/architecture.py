"""Sizes of a model under the names of Megatron-LM, from the configuration that models of transformers carry.

Megatron-LM builds the model anew in its divided form; all that is taken from the one given is its configuration.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any, Final

from accel_state.errors import NotOffered, SettingError
from accel_state.settings.schema import closest

__all__ = (
    "MODEL_CONFIGS_TO_MEGATRON_PARSERS",
    "add_model_config_to_megatron_parser",
    "parse_bert_config",
    "parse_glm4_moe_config",
    "parse_gpt2_config",
    "parse_llama_config",
    "parse_t5_config",
    "set_sizes",
)

Parser = Callable[[Any, Any, Any], None]

MODEL_CONFIGS_TO_MEGATRON_PARSERS: Final[dict[str, Parser]] = {}
"""By `model_type` of a configuration, the function that reads it."""


def add_model_config_to_megatron_parser(model_type: str) -> Callable[[Parser], Parser]:
    """Register the function that reads configurations of a type.

    Args:
        model_type: a part of the configuration's `model_type`.

    Example:
        >>> @add_model_config_to_megatron_parser("mistral")
        ... def parse_mistral_config(megatron_lm_plugin, model, batch_data):
        ...     parse_llama_config(megatron_lm_plugin, model, batch_data)
    """

    def register(parser: Parser) -> Parser:
        @functools.wraps(parser)
        def registered(megatron_lm_plugin: Any, model: Any, batch_data: Any) -> None:
            parser(megatron_lm_plugin, model, batch_data)

        MODEL_CONFIGS_TO_MEGATRON_PARSERS[model_type] = registered
        return registered

    return register


def set_sizes(plugin: Any, model: Any, batch_data: Any = None) -> None:
    """Bring the sizes of a model into the settings.

    Raises:
        SettingError: the model carries no configuration.
        NotOffered: no function reads configurations of its type.
    """
    asked = f"Cannot train {type(model).__name__} with Megatron-LM."
    kind = getattr(getattr(model, "config", None), "model_type", None)
    if kind is None:
        raise SettingError(
            asked,
            "Megatron-LM builds the model anew, and this one has no `config.model_type` that tells its sizes.",
            "Give a model of transformers, or MegatronLMPlugin(custom_model_provider_function=...).",
        )
    known = MODEL_CONFIGS_TO_MEGATRON_PARSERS
    # "t5" also reads "mt5", and an exact name goes before a part of one.
    name = kind if kind in known else next((part for part in known if part in str(kind).lower()), None)
    if name is None:
        near = closest(str(kind), known)
        raise NotOffered(
            asked,
            f"Its configuration is of the type {kind!r}; those that are read are {', '.join(known)}.",
            (f"Did you mean {near!r}? " if near else "")
            + "Register a function for it with add_model_config_to_megatron_parser.",
        )
    known[name](plugin, model, batch_data)


def _take(plugin: Any, found: Mapping[str, Any]) -> None:
    """Add what a model says; what the user said under the names of Megatron-LM stays."""
    said = plugin.other_megatron_args or {}
    kept = {"use_rotary_position_embeddings": plugin.use_rotary_position_embeddings}
    arguments = plugin.megatron_lm_default_args
    arguments.update({name: value for name, value in found.items() if value is not None and name not in said})
    if kept["use_rotary_position_embeddings"] is not None and "position_embedding_type" not in said:
        arguments["position_embedding_type"] = "rope" if kept["use_rotary_position_embeddings"] else "learned_absolute"


def _lengths(plugin: Any, longest: int, batch_data: Any) -> dict[str, Any]:
    """Tokens of a sample: as was said, else as a batch shows, else the longest that the model has positions for."""
    ids = None if batch_data is None else batch_data.get("input_ids")
    shown = longest if ids is None else int(ids.shape[1])
    return {"seq_length": plugin.seq_length or shown, "max_position_embeddings": longest}


@add_model_config_to_megatron_parser("megatron-bert")
def parse_bert_config(megatron_lm_plugin: Any, model: Any, batch_data: Any) -> None:
    """Read the configuration of a BERT; a model for pretraining has a head that tells whether sentences follow."""
    config = model.config
    pretrains = "PreTraining" in type(model).__name__
    _take(
        megatron_lm_plugin,
        {
            "model_type_name": "bert",
            "num_layers": config.num_hidden_layers,
            "hidden_size": config.hidden_size,
            "ffn_hidden_size": config.intermediate_size,
            "num_attention_heads": config.num_attention_heads,
            "vocab_size": config.vocab_size,
            "layernorm_epsilon": config.layer_norm_eps,
            "activation": _activation(config.hidden_act),
            "position_embedding_type": "learned_absolute",
            "share_embeddings_and_output_weights": True,
            "num_tokentypes": config.type_vocab_size,
            "num_labels": config.num_labels,
            "pretraining_flag": pretrains,
            "bert_binary_head": pretrains,
            **_lengths(megatron_lm_plugin, config.max_position_embeddings, batch_data),
        },
    )


@add_model_config_to_megatron_parser("gpt2")
def parse_gpt2_config(megatron_lm_plugin: Any, model: Any, batch_data: Any) -> None:
    """Read the configuration of a GPT-2."""
    config = model.config
    _take(
        megatron_lm_plugin,
        {
            "model_type_name": "gpt",
            "num_layers": config.n_layer,
            "hidden_size": config.n_embd,
            "ffn_hidden_size": config.n_inner or 4 * config.n_embd,
            "num_attention_heads": config.n_head,
            "vocab_size": config.vocab_size,
            "layernorm_epsilon": config.layer_norm_epsilon,
            "activation": _activation(config.activation_function),
            "position_embedding_type": "learned_absolute",
            "share_embeddings_and_output_weights": config.tie_word_embeddings,
            **_lengths(megatron_lm_plugin, config.n_positions, batch_data),
        },
    )


@add_model_config_to_megatron_parser("t5")
def parse_t5_config(megatron_lm_plugin: Any, model: Any, batch_data: Any) -> None:
    """Read the configuration of a T5; Megatron's has learned positions and norms with a bias."""
    config, plugin = model.config, megatron_lm_plugin
    longest = getattr(config, "n_positions", None) or 512
    lengths = _lengths(plugin, longest, batch_data)
    encoder = plugin.encoder_seq_length or lengths["seq_length"]
    labels = None if batch_data is None else batch_data.get("labels")
    decoder = plugin.decoder_seq_length or (encoder if labels is None else int(labels.shape[1]))
    _take(
        plugin,
        {
            "model_type_name": "t5",
            "num_layers": config.num_decoder_layers or config.num_layers,
            "encoder_num_layers": config.num_layers,
            "hidden_size": config.d_model,
            "ffn_hidden_size": config.d_ff,
            "num_attention_heads": config.num_heads,
            "kv_channels": config.d_kv,
            "vocab_size": config.vocab_size,
            "layernorm_epsilon": config.layer_norm_epsilon,
            "activation": _activation(config.dense_act_fn),
            "gated_linear_unit": config.is_gated_act,
            "position_embedding_type": "learned_absolute",
            "share_embeddings_and_output_weights": True,
            "decoder_start_token_id": config.decoder_start_token_id,
            "encoder_seq_length": encoder,
            "decoder_seq_length": decoder,
            "seq_length": encoder,
            "max_position_embeddings": max(longest, encoder, decoder),
        },
    )


def _decoder(plugin: Any, config: Any, batch_data: Any) -> dict[str, Any]:
    """What decoders with rotary positions, gated layers and grouped queries have in common."""
    rope = getattr(config, "rope_parameters", None) or {}
    theta = rope.get("rope_theta") or getattr(config, "rope_theta", None) or 10000
    return {
        "model_type_name": "gpt",
        "num_layers": config.num_hidden_layers,
        "hidden_size": config.hidden_size,
        "ffn_hidden_size": config.intermediate_size,
        "num_attention_heads": config.num_attention_heads,
        "num_query_groups": config.num_key_value_heads,
        "kv_channels": getattr(config, "head_dim", None),
        "vocab_size": config.vocab_size,
        "layernorm_epsilon": config.rms_norm_eps,
        "normalization": "RMSNorm",
        "activation": _activation(config.hidden_act),
        "gated_linear_unit": True,
        "add_bias_linear": False,
        "position_embedding_type": "rope",
        "rotary_base": int(theta),
        "share_embeddings_and_output_weights": bool(getattr(config, "tie_word_embeddings", False)),
        **_lengths(plugin, config.max_position_embeddings, batch_data),
    }


@add_model_config_to_megatron_parser("llama")
def parse_llama_config(megatron_lm_plugin: Any, model: Any, batch_data: Any) -> None:
    """Read the configuration of a Llama."""
    found = _decoder(megatron_lm_plugin, model.config, batch_data)
    _take(megatron_lm_plugin, {**found, "add_qkv_bias": bool(getattr(model.config, "attention_bias", False))})


@add_model_config_to_megatron_parser("glm4_moe")
def parse_glm4_moe_config(megatron_lm_plugin: Any, model: Any, batch_data: Any) -> None:
    """Read the configuration of a GLM 4 with a mixture of experts."""
    config = model.config
    dense, expert = config.first_k_dense_replace, config.moe_intermediate_size
    rope = getattr(config, "rope_parameters", None) or {}
    part = rope.get("partial_rotary_factor") or getattr(config, "partial_rotary_factor", None) or 1.0
    _take(
        megatron_lm_plugin,
        {
            **_decoder(megatron_lm_plugin, config, batch_data),
            "add_qkv_bias": config.attention_bias,
            "qk_layernorm": config.use_qk_norm,
            "rotary_percent": part,
            "num_moe_experts": config.n_routed_experts,
            "moe_router_topk": config.num_experts_per_tok,
            "moe_ffn_hidden_size": expert,
            "moe_shared_expert_intermediate_size": config.n_shared_experts * expert,
            "moe_layer_freq": [0] * dense + [1] * (config.num_hidden_layers - dense),
            "moe_router_num_groups": config.n_group if config.n_group > 1 else None,
            "moe_router_group_topk": config.topk_group if config.n_group > 1 else None,
            "moe_router_topk_scaling_factor": config.routed_scaling_factor,
            "moe_router_score_function": "sigmoid",
            "moe_router_enable_expert_bias": True,
        },
    )


def _activation(name: str) -> str:
    """One name for an activation that configurations name in several ways.

    Raises:
        NotOffered: Megatron-LM is not known to have it.
    """
    names = {
        "gelu": "gelu",
        "gelu_new": "gelu_tanh",
        "gelu_fast": "gelu_tanh",
        "gelu_pytorch_tanh": "gelu_tanh",
        "relu": "relu",
        "silu": "silu",
        "swish": "silu",
    }
    if name not in names:
        raise NotOffered(
            f"Cannot train a model with the activation {name!r} with Megatron-LM.",
            f"Those that are known here are {', '.join(names)}.",
            "Give MegatronLMPlugin(custom_model_provider_function=...).",
        )
    return names[name]
