"""Settings of Megatron-LM: where they come from, what models, optimizers and schedules add, and what is refused."""

from __future__ import annotations

import importlib.util
import pickle
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from accel_megatron import config
from accel_megatron.config import MegatronLMPlugin
from accel_megatron.engine import micro_batches
from accel_megatron.manifest import MANIFEST
from accel_megatron.objects import MegatronLMDummyScheduler
from accel_megatron.train_steps import causal_mask, hidden_between, positions, shifted_left, shifted_right
from accel_state.errors import Conflict, DataError, Missing, NotOffered, SettingError
from accel_state.settings.schema import settings_of

VALUES = {
    "tp_degree": ("2", 2),
    "pp_degree": ("4", 4),
    "use_custom_fsdp": ("true", True),
    "overlap_cpu_optimizer_d2h_h2d": ("True", True),
    "no_load_optim": ("1", True),
    "eod_mask_loss": ("yes", True),
    "no_save_optim": ("true", True),
    "optimizer_cpu_offload": ("true", True),
    "use_precision_aware_optimizer": ("true", True),
    "decoder_last_pipeline_num_layers": ("3", 3),
    "recompute_granularity": ("full", "full"),
    "recompute_method": ("block", "block"),
    "recompute_num_layers": ("2", 2),
    "attention_backend": ("false", "unfused"),
    "expert_model_parallel_size": ("2", 2),
    "context_parallel_size": ("2", 2),
    "attention_dropout": ("0.1", 0.1),
    "hidden_dropout": ("0.2", 0.2),
    "attention_softmax_in_fp32": ("false", False),
    "expert_tensor_parallel_size": ("2", 2),
    "calculate_per_token_loss": ("false", False),
    "use_rotary_position_embeddings": ("true", True),
    "num_micro_batches": ("8", 8),
    "gradient_clipping": ("0.5", 0.5),
    "sequence_parallelism": ("true", True),
    "recompute_activations": ("true", True),
    "use_distributed_optimizer": ("true", True),
}


class Configured:
    """A model of which only the configuration counts."""

    def __init__(self, **config: Any) -> None:
        self.config = SimpleNamespace(**config)


GPT2 = {
    "model_type": "gpt2",
    "n_layer": 2,
    "n_embd": 32,
    "n_inner": None,
    "n_head": 4,
    "n_positions": 64,
    "vocab_size": 100,
    "layer_norm_epsilon": 1e-5,
    "activation_function": "gelu_new",
    "tie_word_embeddings": True,
}


def test_every_variable_of_megatron_is_a_setting() -> None:
    assert {known.variable for known in settings_of(MegatronLMPlugin).values()} == {
        f"MEGATRON_LM_{name.upper()}" for name in VALUES
    }


@pytest.mark.parametrize("name", VALUES)
def test_a_variable_sets_what_was_not_given(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    text, value = VALUES[name]
    monkeypatch.setenv(f"MEGATRON_LM_{name.upper()}", text)
    more = {"tp_degree": 2} if name == "sequence_parallelism" else {}
    assert getattr(MegatronLMPlugin(**more), name) == value


def test_an_argument_goes_before_a_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MEGATRON_LM_TP_DEGREE", "8")
    assert MegatronLMPlugin(tp_degree=2).tp_degree == 2


@pytest.mark.parametrize(
    ("given", "error", "said"),
    [
        ({"tp_degree": 0}, SettingError, "at least 1"),
        ({"recompute_method": "all"}, SettingError, "uniform, block"),
        ({"attention_backend": "quick"}, SettingError, "flash"),
        ({"pipeline_model_parallel_split_rank": 1}, NotOffered, "no longer splits"),
        ({"train_iters": 1, "train_samples": 1}, Conflict, "Both set the length"),
        ({"sequence_parallelism": True}, Conflict, "tp_degree is 1"),
        ({"consumed_samples": [1]}, SettingError, "three numbers"),
    ],
)
def test_what_cannot_be_is_refused(given: dict[str, Any], error: type[Exception], said: str) -> None:
    with pytest.raises(error, match=said):
        MegatronLMPlugin(**given)


def test_settings_stand_under_the_names_of_megatron() -> None:
    plugin = MegatronLMPlugin(tp_degree=2, recompute_granularity="full", other_megatron_args={"seed": 7})
    told = plugin.megatron_lm_default_args
    assert (told["tensor_model_parallel_size"], told["recompute_method"], told["recompute_num_layers"]) == (
        2,
        "uniform",
        1,
    )
    assert (told["clip_grad"], told["seed"]) == (1.0, 7)
    assert MegatronLMPlugin(recompute_activations=True).megatron_lm_default_args["recompute_granularity"] == "selective"
    assert "recompute_granularity" not in MegatronLMPlugin().megatron_lm_default_args


@pytest.mark.parametrize(
    ("precision", "halves"), [("no", (False, False)), ("fp16", (True, False)), ("bf16", (False, True))]
)
def test_a_precision_is_taken_over(precision: str, halves: tuple[bool, bool]) -> None:
    plugin = MegatronLMPlugin()
    plugin.set_mixed_precision(precision)
    told = plugin.megatron_lm_default_args
    assert (told["fp16"], told["bf16"]) == halves


def test_megatron_refuses_fp8_as_mixed_precision() -> None:
    with pytest.raises(NotOffered, match="other_megatron_args"):
        MegatronLMPlugin().set_mixed_precision("fp8")


# ---------------------------------------------------------------------------- models


def test_gpt2_gives_its_sizes() -> None:
    plugin = MegatronLMPlugin()
    plugin.set_network_size_args(Configured(**GPT2), {"input_ids": torch.zeros(2, 16)})
    told = plugin.megatron_lm_default_args
    assert {name: told[name] for name in ("num_layers", "hidden_size", "ffn_hidden_size", "num_attention_heads")} == {
        "num_layers": 2,
        "hidden_size": 32,
        "ffn_hidden_size": 128,
        "num_attention_heads": 4,
    }
    assert (told["seq_length"], told["max_position_embeddings"], told["activation"]) == (16, 64, "gelu_tanh")


def test_what_the_user_says_goes_before_the_model() -> None:
    plugin = MegatronLMPlugin(use_rotary_position_embeddings=True, other_megatron_args={"num_layers": 6})
    plugin.set_network_size_args(Configured(**GPT2))
    told = plugin.megatron_lm_default_args
    assert (told["num_layers"], told["position_embedding_type"]) == (6, "rope")


LLAMA = {
    "num_hidden_layers": 3,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "vocab_size": 100,
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
    "max_position_embeddings": 128,
    "rope_theta": 500000.0,
    "tie_word_embeddings": False,
}


def test_llama_has_grouped_queries_and_gates() -> None:
    plugin = MegatronLMPlugin()
    plugin.set_network_size_args(Configured(model_type="llama", **LLAMA))
    told = plugin.megatron_lm_default_args
    assert (told["num_query_groups"], told["gated_linear_unit"], told["normalization"]) == (2, True, "RMSNorm")
    assert (told["rotary_base"], told["share_embeddings_and_output_weights"]) == (500000, False)


def test_glm4_moe_has_experts_after_its_dense_layers() -> None:
    more = {
        "first_k_dense_replace": 1,
        "moe_intermediate_size": 16,
        "attention_bias": True,
        "use_qk_norm": True,
        "partial_rotary_factor": 0.5,
        "n_routed_experts": 8,
        "num_experts_per_tok": 2,
        "n_shared_experts": 1,
        "n_group": 1,
        "topk_group": 1,
        "routed_scaling_factor": 2.5,
    }
    plugin = MegatronLMPlugin()
    plugin.set_network_size_args(Configured(model_type="glm4_moe", **LLAMA, **more))
    told = plugin.megatron_lm_default_args
    assert (told["num_moe_experts"], told["moe_layer_freq"], told["rotary_percent"]) == (8, [0, 1, 1], 0.5)
    assert "moe_router_num_groups" not in told


def test_a_model_without_sizes_and_one_that_nobody_reads_are_refused() -> None:
    with pytest.raises(SettingError, match="custom_model_provider_function"):
        MegatronLMPlugin().set_network_size_args(torch.nn.Linear(1, 1))
    with pytest.raises(NotOffered, match="Did you mean 'llama'"):
        MegatronLMPlugin().set_network_size_args(Configured(model_type="lama"))


def test_a_function_for_another_model_can_be_registered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(config, "MODEL_CONFIGS_TO_MEGATRON_PARSERS", dict(config.MODEL_CONFIGS_TO_MEGATRON_PARSERS))

    @config.add_model_config_to_megatron_parser("mistral")
    def parse(plugin: Any, model: Any, batch: Any) -> None:
        plugin.megatron_lm_default_args["num_layers"] = model.config.depth

    plugin = MegatronLMPlugin()
    plugin.set_network_size_args(Configured(model_type="mistral", depth=5))
    assert plugin.megatron_lm_default_args["num_layers"] == 5


# ---------------------------------------------------------------------------- optimizers and schedules


@pytest.mark.parametrize(
    ("kind", "more", "expected"),
    [
        ("AdamW", {"weight_decay": 0.1}, {"optimizer": "adam", "decoupled_weight_decay": True, "adam_beta1": 0.9}),
        ("Adam", {}, {"optimizer": "adam", "decoupled_weight_decay": False}),
        ("SGD", {"momentum": 0.8}, {"optimizer": "sgd", "sgd_momentum": 0.8}),
    ],
)
def test_an_optimizer_gives_its_numbers(kind: str, more: dict[str, Any], expected: dict[str, Any]) -> None:
    plugin = MegatronLMPlugin(end_weight_decay=0.5)
    optimizer = getattr(torch.optim, kind)([torch.nn.Parameter(torch.zeros(1))], lr=0.25, **more)
    plugin.set_optimizer_type(optimizer)
    told = plugin.megatron_lm_default_args
    assert expected.items() <= told.items()
    assert (told["lr"], told["end_weight_decay"]) == (0.25, 0.5)


def test_an_optimizer_that_megatron_lacks_is_refused() -> None:
    with pytest.raises(NotOffered, match="Adam or SGD"):
        MegatronLMPlugin().set_optimizer_type(torch.optim.RMSprop([torch.nn.Parameter(torch.zeros(1))]))


def test_batches_and_schedules_are_counted_in_samples() -> None:
    plugin = MegatronLMPlugin(num_micro_batches=4)
    plugin.set_training_args(micro_batch_size=2, dp_degree=3)
    assert plugin.global_batch_size == 24
    plugin.set_scheduler_args(MegatronLMDummyScheduler(None, total_num_steps=30, warmup_num_steps=6))
    assert (plugin.train_iters, plugin.lr_warmup_iters) == (10, 2)
    assert config.schedule_samples(plugin) == (48, 240, 240)


def test_a_schedule_says_its_length_once() -> None:
    with pytest.raises(SettingError, match="number of training steps"):
        config.schedule_samples(MegatronLMPlugin())
    with pytest.raises(Conflict, match="train_samples=10"):
        MegatronLMPlugin(train_samples=10).set_scheduler_args(MegatronLMDummyScheduler(None, total_num_steps=3))
    fraction = MegatronLMPlugin(train_samples=100, lr_warmup_fraction=0.1)
    assert config.schedule_samples(fraction) == (10, 100, 100)


# ---------------------------------------------------------------------------- sequences


def test_labels_are_shifted() -> None:
    labels = torch.tensor([[5, 6, -100]])
    assert shifted_left(labels).tolist() == [[6, -100, -100]]
    assert shifted_right(labels, 0).tolist() == [[0, 5, 6]]


def test_a_decoder_sees_neither_later_tokens_nor_padding_nor_other_documents() -> None:
    seen, ends = torch.tensor([[1, 1, 1, 0]]), torch.tensor([[False, True, False, False]])
    rows = [[0, 1, 1, 1], [0, 0, 1, 1], [0, 0, 0, 1], [0, 0, 0, 0]]
    assert causal_mask(seen)[0, 0].int().tolist() == rows
    documents = causal_mask(torch.ones(1, 4), ends)[0, 0].int().tolist()
    assert documents == [[0, 1, 1, 1], [0, 0, 1, 1], [1, 1, 0, 1], [1, 1, 0, 0]]
    assert positions(torch.zeros(1, 4), ends).tolist() == [[0, 1, 0, 1]]


def test_padding_is_hidden_between_an_encoder_and_a_decoder() -> None:
    assert hidden_between(torch.ones(1, 2), torch.tensor([[1, 0, 1]])).int().tolist() == [[[0, 1, 0], [0, 1, 0]]]


@pytest.mark.parametrize(
    ("batch", "said"),
    [
        ({}, "It has no tensors"),
        ({"names": ["a", "b"]}, "It has no tensors"),
        ({"input_ids": torch.zeros(4, 3), "labels": torch.zeros(2)}, "different numbers of samples"),
        ({"input_ids": torch.zeros(3, 3)}, "divided into micro-batches of 2 samples"),
        ({"input_ids": torch.zeros(0, 3)}, "divided into micro-batches of 2 samples"),
        ({"input_ids": torch.zeros(())}, "divided into micro-batches of 2 samples"),
    ],
)
def test_a_batch_that_cannot_be_cut_is_refused(batch: dict[str, Any], said: str) -> None:
    with pytest.raises(DataError, match=said):
        micro_batches(batch, 2)


def test_a_batch_is_cut_into_micro_batches() -> None:
    cut = micro_batches({"input_ids": torch.arange(4), "names": ["a"] * 4}, 2)
    assert [{name: value.tolist() for name, value in part.items()} for part in cut] == [
        {"input_ids": [0, 1]},
        {"input_ids": [2, 3]},
    ]


# ---------------------------------------------------------------------------- where it is not installed


@pytest.mark.skipif(importlib.util.find_spec("megatron") is not None, reason="Megatron-LM is installed here")
def test_names_can_be_imported_without_megatron_and_say_what_is_missing() -> None:
    from accel_megatron.parallel import avg_losses_across_data_parallel_group

    with pytest.raises(Missing, match="megatron-core"):
        avg_losses_across_data_parallel_group([torch.zeros(())])
    with pytest.raises(Missing, match="megatron-core"):
        MANIFEST.requires[0].demand("Cannot use the backend 'megatron'.")


def test_the_manifest_says_what_the_engine_does_by_itself() -> None:
    does = MANIFEST.capabilities
    assert (does.own_accumulation, does.own_precision, does.own_clipping) == (True, True, True)
    assert MANIFEST.tier == 3


def test_the_manifest_travels_to_other_processes() -> None:
    assert pickle.loads(pickle.dumps(MANIFEST)) == MANIFEST
