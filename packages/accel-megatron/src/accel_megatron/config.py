"""Settings of Megatron-LM: plain data, without torch.

All settings are combined in `megatron_lm_default_args`, a dict with Megatron-LM's names; `prepare` adds values from its
objects. Megatron-LM builds a new, sharded model: of the user's model it uses only the sizes, from the configuration
that models of transformers have.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial, wraps
from typing import Any, Final

from accel_state.errors import Conflict, NotOffered, SettingError
from accel_state.settings.environ import fill_from_environment
from accel_state.settings.schema import BOOLEAN, FLOAT, ValueType, choice, closest, int_at_least, setting, settings_of

__all__ = (
    "MODEL_CONFIGS_TO_MEGATRON_PARSERS",
    "MegatronLMPlugin",
    "add_model_config_to_megatron_parser",
    "parse_bert_config",
    "parse_glm4_moe_config",
    "parse_gpt2_config",
    "parse_llama_config",
    "parse_t5_config",
    "schedule_samples",
    "set_sizes",
)

_MEGATRON_NAMES: Final = {
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
"""Megatron-LM's name for each setting."""

_OPTIMIZER_NAMES: Final = {"adam": "adam", "adamw": "adam", "fusedadam": "adam", "sgd": "sgd", "fusedsgd": "sgd"}


def _own_args(plugin: Any) -> dict[str, Any]:
    """The settings, then `other_megatron_args`; None means Megatron-LM's default."""
    own_args = {theirs: getattr(plugin, ours) for ours, theirs in _MEGATRON_NAMES.items()}
    if plugin.recompute_activations and plugin.recompute_granularity is None:
        own_args["recompute_granularity"] = "selective"
    if own_args["recompute_granularity"] == "full":
        own_args["recompute_method"] = own_args["recompute_method"] or "uniform"
        own_args["recompute_num_layers"] = own_args["recompute_num_layers"] or 1
    # The precision-aware optimizer is an option of the distributed optimizer.
    own_args["use_distributed_optimizer"] = bool(
        plugin.use_distributed_optimizer or plugin.use_precision_aware_optimizer
    )
    megatron_args = {name: value for name, value in own_args.items() if value is not None}
    return {**megatron_args, **(plugin.other_megatron_args or {})}


def _optimizer_args(plugin: Any, optimizer: Any) -> dict[str, Any]:
    """The kind, learning rate, weight decay and momenta of an optimizer.

    Raises:
        NotOffered: Megatron-LM has no such optimizer.
    """
    name = type(optimizer).__name__
    kind = _OPTIMIZER_NAMES.get(name.lower())
    if kind is None:
        raise NotOffered(
            f"Cannot use {name} with Megatron-LM.",
            "Megatron-LM creates its own optimizer, which is Adam or SGD.",
            "Use torch.optim.AdamW, Adam or SGD.",
        )
    numbers = optimizer.defaults
    decay = numbers.get("weight_decay", 0.0)
    optimizer_args = {"optimizer": kind, "lr": float(numbers["lr"]), "weight_decay": decay}
    optimizer_args["start_weight_decay"] = decay if plugin.start_weight_decay is None else plugin.start_weight_decay
    optimizer_args["end_weight_decay"] = decay if plugin.end_weight_decay is None else plugin.end_weight_decay
    if kind == "adam":
        optimizer_args["adam_beta1"], optimizer_args["adam_beta2"] = numbers["betas"]
        optimizer_args["adam_eps"] = numbers["eps"]
        optimizer_args["decoupled_weight_decay"] = name.lower() != "adam"
    else:
        optimizer_args["sgd_momentum"] = numbers["momentum"]
    return optimizer_args


def _precision_args(name: str) -> dict[str, Any]:
    """Megatron-LM's settings for a precision.

    Raises:
        NotOffered: Megatron-LM does not support the precision.
    """
    if name not in ("no", "fp16", "bf16"):
        raise NotOffered(
            f"Cannot use mixed_precision={name!r} with Megatron-LM.",
            "The backend supports 'no', 'fp16' and 'bf16'; Megatron-LM has separate settings for 8 bits.",
            "Use mixed_precision='bf16', and other_megatron_args={'fp8': 'hybrid'} on devices that support it.",
        )
    return {"fp16": name == "fp16", "bf16": name == "bf16"}


def _take_schedule(plugin: Any, scheduler: Any) -> None:
    """Set the length of a schedule, in steps summed over data-parallel processes, in the settings.

    Raises:
        Conflict: the settings have a length too.
    """
    shared = plugin.data_parallel_size or 1
    if scheduler.total_num_steps is not None:
        if plugin.train_samples is not None:
            raise Conflict(
                f"Cannot prepare a schedule of {scheduler.total_num_steps} steps.",
                f"MegatronLMPlugin(train_samples={plugin.train_samples}) sets the length of training too.",
                "Remove one of the two.",
            )
        if plugin.train_iters is None:
            plugin.train_iters = max(1, scheduler.total_num_steps // shared)
    if plugin.lr_warmup_iters is None and plugin.lr_warmup_samples is None and plugin.lr_warmup_fraction is None:
        plugin.lr_warmup_iters = scheduler.warmup_num_steps // shared


def schedule_samples(plugin: Any) -> tuple[int, int, int]:
    """Numbers of samples of the learning rate's warm-up and decay, and of the whole training.

    Raises:
        SettingError: the length of training is unknown.
    """
    batch = plugin.global_batch_size or 1
    whole = plugin.train_samples or (plugin.train_iters or 0) * batch
    decay = plugin.lr_decay_samples or (plugin.lr_decay_iters or 0) * batch or whole
    if not decay:
        raise SettingError(
            "Cannot create a learning-rate schedule for Megatron-LM.",
            "Neither the scheduler nor the settings specify the number of training steps.",
            "Pass MegatronLMDummyScheduler(optimizer, total_num_steps=...), or MegatronLMPlugin(train_iters=...).",
        )
    if plugin.lr_warmup_fraction is not None:
        warmup = int(plugin.lr_warmup_fraction * decay)
    else:
        warmup = plugin.lr_warmup_samples or (plugin.lr_warmup_iters or 0) * batch
    return warmup, decay, whole or decay


_COUNT_TYPE: Final = int_at_least(1)
_ATTENTION_BACKENDS: Final = ("flash", "fused", "unfused", "local", "auto")


def _attention(text: str) -> str:
    """The name of an implementation; older scripts pass a bool, and True means "auto"."""
    word = text.strip().lower()
    if word in _ATTENTION_BACKENDS:
        return word
    return "auto" if BOOLEAN.parse(word) else "unfused"


_megatron: Final = partial(
    setting,
    variable="MEGATRON_LM_{NAME}",
    flag="--megatron_lm_{name}",
    key="megatron_lm_config.megatron_lm_{name}",
    group="Megatron-LM",
)
"""A setting; its variable, flag and key are derived from the field name."""
_switch: Final = partial(_megatron, type=BOOLEAN, unset=False)
_number: Final = partial(_megatron, type=_COUNT_TYPE)


@dataclass
class MegatronLMPlugin:
    """How Megatron-LM shards, trains and optimizes a model. A field that is None is read from the environment.

    Args:
        tp_degree: number of processes over which each tensor is sharded.
        pp_degree: number of pipeline stages.
        use_custom_fsdp: shard parameters with Megatron's own FSDP.
        overlap_cpu_optimizer_d2h_h2d: copy optimizer states while the device computes.
        no_load_optim: do not load optimizer states.
        eod_mask_loss: exclude end-of-document tokens from the loss.
        no_save_optim: do not save optimizer states.
        optimizer_cpu_offload: store optimizer states in host memory.
        use_precision_aware_optimizer: store optimizer states in lower precision.
        decoder_last_pipeline_num_layers: number of layers of the last stage, if it differs from the other stages.
        recompute_granularity: what to recompute in backward: "full" layers or "selective" parts.
        recompute_method: with "full", which layers: "uniform" or "block".
        recompute_num_layers: with "full", number of layers that are recomputed at once; 1 by default.
        attention_backend: "flash", "fused", "unfused", "local" or "auto"; True is "auto", False is "unfused".
        expert_model_parallel_size: number of processes over which experts are sharded.
        context_parallel_size: number of processes over which the sequence is sharded; 1 by default.
        attention_dropout, hidden_dropout: 0 by default.
        attention_softmax_in_fp32: compute the softmax of attention in 32 bits; the default.
        expert_tensor_parallel_size: number of processes over which each tensor of an expert is sharded.
        calculate_per_token_loss: average the loss over the tokens of the global batch; the default.
        use_rotary_position_embeddings: use rotary positions; None: as in the model's configuration.
        num_micro_batches: number of micro-batches of one step; replaces gradient accumulation.
        gradient_clipping: maximum norm of the gradients; 1.0 by default, 0: no clipping.
        sequence_parallelism: shard the sequence where tensors are not sharded.
        recompute_activations: recompute cheap activations, the same as `recompute_granularity="selective"`.
        use_distributed_optimizer: shard optimizer states over the data-parallel processes.
        pipeline_model_parallel_split_rank: raises an error: Megatron-LM no longer splits a pipeline between encoder and
            decoder.
        num_layers_per_virtual_pipeline_stage: number of layers of each part of a stage (interleaved pipeline).
        is_train_batch_min: with several loaders, use the smallest batch as size of a micro-batch; False: the largest.
        train_iters, train_samples: length of training in steps or in samples; set only one.
        weight_decay_incr_style: how weight decay changes from its start to its end value: "constant", "linear" or
            "cosine".
        start_weight_decay, end_weight_decay: these values; None: that of the optimizer.
        lr_decay_style: how the learning rate decays: "constant", "linear", "cosine" or "inverse-square-root".
        lr_decay_iters, lr_decay_samples: length of the decay in steps or samples; None: the whole training.
        lr_warmup_iters, lr_warmup_samples, lr_warmup_fraction: length of the warm-up from zero, in steps, samples, or
            as a fraction of the decay.
        min_lr: the final learning rate.
        consumed_samples: numbers of training, validation and test samples that earlier runs have used.
        no_wd_decay_cond: receives a parameter's name and the parameter; returns whether it has no weight decay.
        scale_lr_cond: receives the same; returns whether to multiply its learning rate by `lr_mult`.
        lr_mult: that factor.
        megatron_dataset_flag: use Megatron's own datasets, through `MegatronLMDummyDataLoader`.
        seq_length: number of tokens of a sample; with encoder and decoder, that of the encoder.
        encoder_seq_length, decoder_seq_length: number of tokens of a sample, for models with an encoder and a decoder.
        tensorboard_dir: folder to which losses and learning rates are written for TensorBoard.
        set_all_logging_options: write the norm of the gradients and the scale of the loss too.
        eval_iters: number of steps of each evaluation; determines the size of validation data.
        eval_interval: number of steps between two evaluations; determines the size of validation data.
        return_logits: include logits in the engine's outputs, with only one pipeline stage.
        custom_train_step_class: a user-defined train step class.
        custom_train_step_kwargs: arguments of its constructor.
        custom_model_provider_function: receives `(pre_process, post_process)` and returns the model, instead of
            Megatron-LM's.
        custom_prepare_model_function: receives the parts of the model on this process, and wraps them instead of DDP.
        custom_megatron_datasets_provider_function: returns the three datasets for their three lengths.
        custom_get_batch_function: receives `(accelerator, megatron_dataset_flag)`; returns the function that reads a
            batch.
        custom_loss_function: receives `(accelerator)`; returns the loss function.
        other_megatron_args: further settings under the names of Megatron-LM.

    Attributes:
        megatron_lm_default_args: all settings by the names of Megatron-LM.
        micro_batch_size, data_parallel_size, global_batch_size: known after `prepare`.

    Raises:
        SettingError: a value is invalid.
        Conflict: two settings contradict each other.
        NotOffered: Megatron-LM no longer supports a setting.

    Example:
        >>> plugin = MegatronLMPlugin(tp_degree=2, pp_degree=2, num_micro_batches=4, use_distributed_optimizer=True)
        >>> accelerator = Accelerator(mixed_precision="bf16", megatron_lm_plugin=plugin)
    """

    tp_degree: int = _number(
        help="Degree of tensor parallelism.",
        unset=1,
        question="Over how many processes is each tensor sharded?",
    )
    pp_degree: int = _number(
        help="Degree of pipeline parallelism.", unset=1, question="How many stages does the pipeline have?"
    )
    use_custom_fsdp: bool = _switch(help="Use Megatron's own FSDP.")
    overlap_cpu_optimizer_d2h_h2d: bool = _switch(help="Copy optimizer states while the device computes.")
    no_load_optim: bool = _switch(help="Do not load optimizer states.")
    eod_mask_loss: bool = _switch(help="Exclude end-of-document tokens from the loss.")
    no_save_optim: bool = _switch(help="Do not save optimizer states.")
    optimizer_cpu_offload: bool = _switch(help="Offload optimizer states to the CPU.")
    use_precision_aware_optimizer: bool = _switch(
        help="Use Megatron's precision-aware optimizer, which stores states in lower precision."
    )
    decoder_last_pipeline_num_layers: int | None = _number(help="Layers of the last pipeline stage of the decoder.")
    recompute_granularity: str | None = _megatron(
        help="Granularity of activation recomputation.", type=choice("full", "selective")
    )
    recompute_method: str | None = _megatron(
        help="Method that selects the layers to recompute.", type=choice("uniform", "block")
    )
    recompute_num_layers: int | None = _number(help="Number of layers to recompute at once.")
    attention_backend: str | bool = _megatron(
        help="Implementation of attention.",
        type=ValueType("one of flash, fused, unfused, local, auto, or true or false", _attention),
        unset="auto",
    )
    expert_model_parallel_size: int = _number(help="Degree of expert parallelism.", unset=1)
    context_parallel_size: int = _number(help="Degree of context parallelism.", unset=1)
    attention_dropout: float = _megatron(help="Dropout probability in attention.", type=FLOAT, unset=0.0)
    hidden_dropout: float = _megatron(help="Dropout probability of hidden states.", type=FLOAT, unset=0.0)
    attention_softmax_in_fp32: bool = _switch(help="Compute the softmax of attention in 32 bits.", unset=True)
    expert_tensor_parallel_size: int = _number(help="Degree of tensor parallelism of experts.")
    calculate_per_token_loss: bool = _switch(help="Compute the loss per token.", unset=True)
    use_rotary_position_embeddings: bool | None = _switch(help="Use rotary position embeddings.", unset=None)
    num_micro_batches: int = _number(help="Number of micro-batches in the pipeline.", unset=1)
    gradient_clipping: float = _megatron(help="Norm to which gradients are clipped.", type=FLOAT, unset=1.0)
    sequence_parallelism: bool = _switch(help="Shard the sequence dimension outside tensor-parallel layers.")
    recompute_activations: bool = _switch(help="Recompute activations in backward.")
    use_distributed_optimizer: bool = _switch(help="Shard optimizer states.")
    pipeline_model_parallel_split_rank: int | None = None
    num_layers_per_virtual_pipeline_stage: int | None = None
    is_train_batch_min: bool | str = True
    train_iters: int | None = None
    train_samples: int | None = None
    weight_decay_incr_style: str = "constant"
    start_weight_decay: float | None = None
    end_weight_decay: float | None = None
    lr_decay_style: str = "linear"
    lr_decay_iters: int | None = None
    lr_decay_samples: int | None = None
    lr_warmup_iters: int | None = None
    lr_warmup_samples: int | None = None
    lr_warmup_fraction: float | None = None
    min_lr: float = 0
    consumed_samples: list[int] | None = None
    no_wd_decay_cond: Callable[..., bool] | None = None
    scale_lr_cond: Callable[..., bool] | None = None
    lr_mult: float = 1.0
    megatron_dataset_flag: bool = False
    seq_length: int | None = None
    encoder_seq_length: int | None = None
    decoder_seq_length: int | None = None
    tensorboard_dir: str | None = None
    set_all_logging_options: bool = False
    eval_iters: int = 100
    eval_interval: int = 1000
    return_logits: bool = False
    custom_train_step_class: Any | None = None
    custom_train_step_kwargs: dict[str, Any] | None = None
    custom_model_provider_function: Callable[..., Any] | None = None
    custom_prepare_model_function: Callable[..., Any] | None = None
    custom_megatron_datasets_provider_function: Callable[..., Any] | None = None
    custom_get_batch_function: Callable[..., Any] | None = None
    custom_loss_function: Callable[..., Any] | None = None
    other_megatron_args: dict[str, Any] | None = None

    def __post_init__(self) -> None:
        fill_from_environment(self)
        for name, declared in settings_of(type(self)).items():
            if getattr(self, name) is not None:
                setattr(self, name, declared.parse(str(getattr(self, name)), "argument"))
        self.is_train_batch_min = BOOLEAN.parse(str(self.is_train_batch_min))
        self._check()
        self.DDP_impl = "custom" if self.custom_prepare_model_function is not None else "local"
        self.micro_batch_size: int | None = None
        self.data_parallel_size: int | None = None
        self.global_batch_size: int | None = None
        self.dataset_args: dict[str, Any] = {}
        self.consumed_samples = list(self.consumed_samples or (0, 0, 0))
        self.megatron_lm_default_args: dict[str, Any] = _own_args(self)
        if self.tensorboard_dir is not None:
            self.set_tensorboard_logging_options()

    def _check(self) -> None:
        if self.pipeline_model_parallel_split_rank is not None:
            raise NotOffered(
                "Cannot use MegatronLMPlugin(pipeline_model_parallel_split_rank=...).",
                "Megatron-LM no longer splits a pipeline between an encoder and a decoder.",
                "Remove it; both are in one stage.",
            )
        if self.train_iters is not None and self.train_samples is not None:
            raise Conflict(
                f"Cannot combine train_iters={self.train_iters} and train_samples={self.train_samples}.",
                "Both set the length of training.",
                "Pass only one of them.",
            )
        if self.sequence_parallelism and self.tp_degree == 1:
            raise Conflict(
                "Cannot use MegatronLMPlugin(sequence_parallelism=True).",
                "It shards the sequence over the tensor-parallel processes, and tp_degree is 1.",
                "Set tp_degree, or use context_parallel_size.",
            )
        if self.consumed_samples is not None and len(self.consumed_samples) != 3:
            raise SettingError(
                f"Cannot use consumed_samples={self.consumed_samples!r}.",
                "The value must be three numbers: of training, validation and test samples.",
                "Pass a list such as [1000, 0, 0].",
            )

    # ------------------------------------------------------------------ values that `prepare` determines

    def set_network_size_args(self, model: Any, batch_data: Any = None) -> None:
        """Read the sizes of a model from its configuration.

        Args:
            model: a model with a `config` like models of transformers.
            batch_data: a batch, which determines the length of samples.

        Raises:
            NotOffered: the model is not supported.
        """
        set_sizes(self, model, batch_data)

    def set_training_args(self, micro_batch_size: int, dp_degree: int) -> None:
        """Set the batch sizes.

        Args:
            micro_batch_size: number of samples of a micro-batch on one process.
            dp_degree: number of data-parallel groups.
        """
        self.data_parallel_size = dp_degree
        self.micro_batch_size = micro_batch_size
        self.global_batch_size = dp_degree * micro_batch_size * self.num_micro_batches
        self.megatron_lm_default_args.update(
            data_parallel_size=dp_degree, micro_batch_size=micro_batch_size, global_batch_size=self.global_batch_size
        )

    def set_optimizer_type(self, optimizer: Any) -> None:
        """Set the kind and options of the optimizer.

        Raises:
            NotOffered: Megatron-LM has no such optimizer.
        """
        self.megatron_lm_default_args.update(_optimizer_args(self, optimizer))

    def set_scheduler_args(self, scheduler: Any) -> None:
        """Set the length of a schedule from a `MegatronLMDummyScheduler`.

        Raises:
            Conflict: the settings have a length too.
        """
        _take_schedule(self, scheduler)

    def set_mixed_precision(self, mixed_precision: str) -> None:
        """Set the precision: "no", "fp16" or "bf16".

        Raises:
            NotOffered: another precision.
        """
        self.megatron_lm_default_args.update(_precision_args(mixed_precision))

    def set_tensorboard_logging_options(self) -> None:
        """Write all available metrics of a step for TensorBoard."""
        self.megatron_lm_default_args.update(
            tensorboard_dir=self.tensorboard_dir, log_all=bool(self.set_all_logging_options)
        )


# ---------------------------------------------------------------------------- sizes of a model

Parser = Callable[[Any, Any, Any], None]

MODEL_CONFIGS_TO_MEGATRON_PARSERS: Final[dict[str, Parser]] = {}
"""The function that reads a configuration, for each `model_type`."""


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
        @wraps(parser)
        def registered(megatron_lm_plugin: Any, model: Any, batch_data: Any) -> None:
            parser(megatron_lm_plugin, model, batch_data)

        MODEL_CONFIGS_TO_MEGATRON_PARSERS[model_type] = registered
        return registered

    return register


def set_sizes(plugin: Any, model: Any, batch_data: Any = None) -> None:
    """Add the sizes of a model to the settings.

    Raises:
        SettingError: the model has no configuration.
        NotOffered: no function reads configurations of its type.
    """
    failure = f"Cannot train {type(model).__name__} with Megatron-LM."
    kind = getattr(getattr(model, "config", None), "model_type", None)
    if kind is None:
        raise SettingError(
            failure,
            "Megatron-LM builds a new model and reads its sizes from `config.model_type`, which this model lacks.",
            "Use a model of transformers, or MegatronLMPlugin(custom_model_provider_function=...).",
        )
    parsers = MODEL_CONFIGS_TO_MEGATRON_PARSERS
    # "t5" also matches "mt5"; an exact name has priority over a part of one.
    name = kind if kind in parsers else next((part for part in parsers if part in str(kind).lower()), None)
    if name is None:
        near = closest(str(kind), parsers)
        raise NotOffered(
            failure,
            f"Its configuration is of the type {kind!r}; the supported types are {', '.join(parsers)}.",
            (f"Did you mean {near!r}? " if near else "")
            + "Register a function for it with add_model_config_to_megatron_parser.",
        )
    parsers[name](plugin, model, batch_data)


def _take(plugin: Any, values: Mapping[str, Any]) -> None:
    """Add values of a model; values that the user set by Megatron-LM's names have priority."""
    said = plugin.other_megatron_args or {}
    kept = {"use_rotary_position_embeddings": plugin.use_rotary_position_embeddings}
    arguments = plugin.megatron_lm_default_args
    arguments.update({name: value for name, value in values.items() if value is not None and name not in said})
    if kept["use_rotary_position_embeddings"] is not None and "position_embedding_type" not in said:
        arguments["position_embedding_type"] = "rope" if kept["use_rotary_position_embeddings"] else "learned_absolute"


def _lengths(plugin: Any, longest: int, batch_data: Any) -> dict[str, Any]:
    """Number of tokens of a sample: that of the settings, else of a batch, else the model's maximum."""
    ids = None if batch_data is None else batch_data.get("input_ids")
    shown = longest if ids is None else int(ids.shape[1])
    return {"seq_length": plugin.seq_length or shown, "max_position_embeddings": longest}


@add_model_config_to_megatron_parser("megatron-bert")
def parse_bert_config(megatron_lm_plugin: Any, model: Any, batch_data: Any) -> None:
    """Read the configuration of a BERT; a model for pretraining has a next-sentence head."""
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
    """Read settings that decoders with rotary positions, gated layers and grouped queries have in common."""
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
    sizes = _decoder(megatron_lm_plugin, model.config, batch_data)
    _take(megatron_lm_plugin, {**sizes, "add_qkv_bias": bool(getattr(model.config, "attention_bias", False))})


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
    """The normalised name of an activation, which has several names in configurations.

    Raises:
        NotOffered: the activation is not supported.
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
            f"The supported activations are {', '.join(names)}.",
            "Pass MegatronLMPlugin(custom_model_provider_function=...).",
        )
    return names[name]
