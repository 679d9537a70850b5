"""Settings of FSDP; the module does not import torch.

Fields that accept torch objects store plain values and return torch objects when they are read.
"""

# ruff: noqa: RUF009 - `setting` makes the fields of every settings class

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

from accel_state.errors import Conflict, SettingError
from accel_state.settings.environ import read_setting
from accel_state.settings.schema import (
    BOOLEAN,
    ObjectField,
    choice,
    enum_field,
    given_value,
    import_object,
    int_at_least,
    listing,
    member_name,
    object_fields,
    plain_value,
    setting,
    settings_of,
)

__all__ = (
    "BACKWARD_PREFETCHES",
    "SHARDING_STRATEGIES",
    "STATE_DICT_TYPES",
    "WRAP_POLICIES",
    "FullyShardedDataParallelPlugin",
)

SHARDING_STRATEGIES: Final = ("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD", "HYBRID_SHARD_ZERO2")
BACKWARD_PREFETCHES: Final = ("BACKWARD_PRE", "BACKWARD_POST", "NO_PREFETCH")
WRAP_POLICIES: Final = ("TRANSFORMER_BASED_WRAP", "SIZE_BASED_WRAP", "NO_WRAP")
STATE_DICT_TYPES: Final = ("FULL_STATE_DICT", "LOCAL_STATE_DICT", "SHARDED_STATE_DICT")

_FSDP: Final = "torch.distributed.fsdp"
_WRAP: Final = "torch.distributed.fsdp.wrap"
_WRAP_FUNCTIONS: Final = {
    "TRANSFORMER_BASED_WRAP": "transformer_auto_wrap_policy",
    "SIZE_BASED_WRAP": "size_based_auto_wrap_policy",
}
_DTYPES: Final = {
    "bf16": "bfloat16",
    "fp16": "float16",
    "fp32": "float32",
    "fp8": "bfloat16",
    "bfloat16": "bfloat16",
    "float16": "float16",
    "float32": "float32",
    "float64": "float64",
}
"""Names of precisions and dtypes; 8-bit training stores and reduces in bfloat16."""
_OFFLOAD_CLASSES: Final = ("CPUOffload", "CPUOffloadPolicy", "OffloadPolicy")
_POLICY_CLASSES: Final = {1: "MixedPrecision", 2: "MixedPrecisionPolicy"}
_POLICY_DTYPES: Final = {
    1: ("param_dtype", "reduce_dtype", "buffer_dtype"),
    2: ("param_dtype", "reduce_dtype", "output_dtype"),
}
_POLICY_OPTIONS: Final = {
    1: ("keep_low_precision_grads", "cast_forward_inputs", "cast_root_forward_inputs", "_module_classes_to_ignore"),
    2: ("cast_forward_inputs",),
}


def _version(settings: Any) -> int:
    return 1 if settings.fsdp_version == 1 else 2


# ---------------------------------------------------------------------- members of enums


def _strategy_of(settings: Any) -> str | None:
    """The sharding strategy of version 1 that `reshard_after_forward` implies if none is set."""
    if _version(settings) != 1:
        return None
    freed = member_name(settings.reshard_after_forward)
    if isinstance(freed, str) and freed.upper() in SHARDING_STRATEGIES:
        return freed.upper()
    return "SHARD_GRAD_OP" if freed is False else "FULL_SHARD"


def _sharding_strategy_field() -> ObjectField:
    """Stored as a name, read as a `ShardingStrategy`."""
    return enum_field(f"{_FSDP}:ShardingStrategy", {"HYBRID_SHARD_ZERO2": "_HYBRID_SHARD_ZERO2"}, fallback=_strategy_of)


def _backward_prefetch_field() -> ObjectField:
    """Stored as a name, read as a `BackwardPrefetch` or None."""
    return enum_field(f"{_FSDP}:BackwardPrefetch", {"NO_PREFETCH": None})


def _state_dict_type_field() -> ObjectField:
    """Stored as a name, read as a `StateDictType`; the default is full for version 1 and sharded for 2."""
    return enum_field(
        f"{_FSDP}:StateDictType",
        fallback=lambda settings: "FULL_STATE_DICT" if _version(settings) == 1 else "SHARDED_STATE_DICT",
    )


# ---------------------------------------------------------------------- objects


def _state_dict_config_field(name: str) -> ObjectField:
    """Read as the state-dict configuration; the default matches the type of state dict.

    Args:
        name: "" for models, "Optim" for optimizers.
    """

    def keep(settings: Any, value: Any) -> Any:
        if not hasattr(value, "offload_to_cpu"):
            raise SettingError(
                f"Cannot use FullyShardedDataParallelPlugin({'optim_' if name else ''}state_dict_config={value!r}).",
                "The value has no attribute offload_to_cpu.",
                f"Pass a Full{name}StateDictConfig or a Sharded{name}StateDictConfig of {_FSDP}, or remove it.",
            )
        return value

    def make(settings: Any, kept: Any) -> Any:
        if not isinstance(kept, str):
            return kept
        if kept == "LOCAL_STATE_DICT":
            return None
        if kept == "FULL_STATE_DICT":
            return import_object(f"{_FSDP}:Full{name}StateDictConfig")(offload_to_cpu=True, rank0_only=True)
        return import_object(f"{_FSDP}:Sharded{name}StateDictConfig")(offload_to_cpu=True)

    return ObjectField(keep, make, lambda settings: plain_value(settings, "state_dict_type"))


def _cpu_offload_field() -> ObjectField:
    """Stored as a bool, or as a policy without pinned memory; read as the object that the FSDP version needs."""

    def keep(settings: Any, value: Any) -> Any:
        if isinstance(value, str):
            return settings_of(type(settings))["cpu_offload"].parse(value, "argument")
        if not isinstance(value, bool) and type(value).__name__ not in (
            "CPUOffload",
            "CPUOffloadPolicy",
            "OffloadPolicy",
        ):
            raise SettingError(
                f"Cannot use FullyShardedDataParallelPlugin(cpu_offload={value!r}).",
                "The value must be True, False or an offload policy of torch.",
                "Pass True or False.",
            )
        pins = type(value).__name__ == "CPUOffloadPolicy" and value.pin_memory
        says_more = type(value).__name__ == "CPUOffloadPolicy" and not pins
        return value if says_more or isinstance(value, bool) else bool(getattr(value, "offload_params", pins))

    def make(settings: Any, kept: Any) -> Any:
        if _version(settings) == 1:
            return import_object(f"{_FSDP}:CPUOffload")(offload_params=bool(kept))
        if not isinstance(kept, bool):
            return kept
        return import_object(f"{_FSDP}:{'CPUOffloadPolicy' if kept else 'OffloadPolicy'}")()

    return ObjectField(keep, make)


def _auto_wrap_policy_field() -> ObjectField:
    """Stored as a name or a policy; read as a policy, such as torch's functions, or None."""

    def keep(settings: Any, value: Any) -> Any:
        if isinstance(value, str):
            return settings_of(type(settings))["auto_wrap_policy"].parse(value, "argument")
        for name, function in _WRAP_FUNCTIONS.items():
            if (getattr(value, "__module__", None), getattr(value, "__name__", None)) == (_WRAP, function):
                return name
        if not callable(value) and not hasattr(value, "_run_policy"):
            raise SettingError(
                f"Cannot use FullyShardedDataParallelPlugin(auto_wrap_policy={value!r}).",
                "The value does not select the blocks to shard separately.",
                f"Pass one of {', '.join(WRAP_POLICIES)}, a policy of {_WRAP}, or a function that accepts a module.",
            )
        return value

    def make(settings: Any, kept: Any) -> Any:
        if not isinstance(kept, str):
            return kept
        return import_object(f"{_WRAP}:{_WRAP_FUNCTIONS[kept]}") if kept in _WRAP_FUNCTIONS else None

    return ObjectField(keep, make)


# ---------------------------------------------------------------------- mixed precision


def _dtype_name(dtype: Any) -> str | None:
    """The name of the dtype for a precision ("bf16"), a dtype's name or a torch dtype; None for None.

    Raises:
        SettingError: the value is not a precision or dtype.
    """
    if dtype is None:
        return None
    text = str(dtype).removeprefix("torch.")
    if text not in _DTYPES:
        raise SettingError(
            f"Cannot use the precision {dtype!r} in a mixed-precision policy of FSDP.",
            f"The known precisions are {', '.join(_DTYPES)}.",
            "Use a name such as 'bf16', or a dtype such as torch.bfloat16.",
        )
    return _DTYPES[text]


def _policy_of(settings: Any, precision: Any, *, buffers: Any = None) -> dict[str, Any]:
    """A mixed-precision policy with one dtype for all fields.

    Args:
        settings: settings with the FSDP version of the policy.
        precision: as for `_dtype_name`.
        buffers: the dtype of buffers, if it differs.

    Raises:
        SettingError: no such precision exists.
    """
    policy: dict[str, Any] = dict.fromkeys(_POLICY_DTYPES[_version(settings)], _dtype_name(precision))
    if buffers is not None and "buffer_dtype" in policy:
        policy["buffer_dtype"] = _dtype_name(buffers)
    return policy


def _mixed_precision_policy_field() -> ObjectField:
    """Stored as a name or a dict of dtype names; read as the policy object of the FSDP version."""

    def keep(settings: Any, value: Any) -> Any:
        if isinstance(value, str) or type(value).__name__ == "dtype":
            return _dtype_name(value)
        if isinstance(value, Mapping):
            return {name: _dtype_name(entry) if name.endswith("_dtype") else entry for name, entry in value.items()}
        if not hasattr(value, "param_dtype"):
            raise SettingError(
                f"Cannot use FullyShardedDataParallelPlugin(mixed_precision_policy={value!r}).",
                "The value has no attribute param_dtype, the dtype in which parameters are gathered.",
                "Pass a precision such as 'bf16', a dict with param_dtype and reduce_dtype, or a policy of torch.",
            )
        return value

    def make(settings: Any, kept: Any) -> Any:
        _check_policy(settings, kept)
        if not isinstance(kept, (str, dict)):
            return kept
        policy = _policy_of(settings, kept) if isinstance(kept, str) else kept
        torch_dtypes = {
            name: import_object(f"torch:{value}") if name.endswith("_dtype") and value is not None else value
            for name, value in policy.items()
        }
        return import_object(f"{_FSDP}:{_POLICY_CLASSES[_version(settings)]}")(**torch_dtypes)

    return ObjectField(keep, make, lambda settings: settings._policy_of_run())


def _check_policy(settings: Any, kept: Any) -> None:
    """Raise for a policy that the FSDP version does not accept.

    Raises:
        SettingError: the policy is of the other version, or has an unknown entry.
    """
    version = _version(settings)
    if isinstance(kept, dict):
        entries = (*_POLICY_DTYPES[version], *_POLICY_OPTIONS[version])
        unknown = [name for name in kept if name not in entries]
        if unknown:
            raise SettingError(
                f"Cannot use FullyShardedDataParallelPlugin(mixed_precision_policy={kept!r}).",
                f"A policy of FSDP version {version} has no entry {', '.join(map(repr, unknown))}.",
                f"Use entries among {', '.join(entries)}.",
            )
    elif kept is not None and not isinstance(kept, str) and type(kept).__name__ == _POLICY_CLASSES[3 - version]:
        raise SettingError(
            f"Cannot use FullyShardedDataParallelPlugin(mixed_precision_policy={type(kept).__name__}(...)).",
            f"It is a policy of FSDP version {3 - version}, and fsdp_version is {version}.",
            f"Pass a {_POLICY_CLASSES[version]} of {_FSDP}.",
        )


# ---------------------------------------------------------------------- the settings

_GROUP: Final = "FSDP"
_DEFAULTS: Final[dict[str, Any]] = {
    "fsdp_version": 1,
    "cpu_offload": False,
    "activation_checkpointing": False,
    "activation_checkpointing_offload": False,
    "cpu_ram_efficient_loading": False,
    "use_orig_params": True,
    "sync_module_states": True,
    "forward_prefetch": False,
}
_VERSION_1_SETTINGS: Final = ("backward_prefetch", "use_orig_params", "sync_module_states", "forward_prefetch")
"""Settings of version 1 that version 2 does not use."""


def _named(*names: str, numbered: int = 0) -> Any:
    return choice(*names, fold=str.upper, numbered=numbered)


def _parse_resharding(text: str) -> bool | str:
    strategy = text.strip().upper()
    return strategy if strategy in SHARDING_STRATEGIES else bool(BOOLEAN.parse(text))


_RESHARDING: Final = BOOLEAN._replace(
    name="true, false or, with version 1, a sharding strategy",
    parse=_parse_resharding,
    format=lambda value: value if isinstance(value, str) else BOOLEAN.format(value),
    metavar="{true,false}",
)
"""Config files of Accelerate for version 1 have the strategy under the key of version 2."""


_fsdp: Final = partial(
    setting, variable="FSDP_{NAME}", flag="--fsdp_{name}", key="fsdp_config.fsdp_{name}", group=_GROUP
)
"""A setting; its variable, flag and key are derived from the field name."""


@object_fields(
    sharding_strategy=_sharding_strategy_field(),
    backward_prefetch=_backward_prefetch_field(),
    mixed_precision_policy=_mixed_precision_policy_field(),
    auto_wrap_policy=_auto_wrap_policy_field(),
    cpu_offload=_cpu_offload_field(),
    state_dict_type=_state_dict_type_field(),
    state_dict_config=_state_dict_config_field(""),
    optim_state_dict_config=_state_dict_config_field("Optim"),
)
@dataclass
class FullyShardedDataParallelPlugin:
    """How models are sharded. A field that is None is read from the environment, else it has its version's default.

    Names, members of torch's enums, their numbers and torch's objects are accepted; fields are read as torch's objects.

    Args:
        fsdp_version: 2 for `fully_shard`, 1 for `FullyShardedDataParallel`. A sharding strategy here sets
            `sharding_strategy`.
        sharding_strategy: version 1: a `ShardingStrategy`.
        reshard_after_forward: version 2: free the gathered parameters of a block after its forward. With version 1 this
            may be a sharding strategy.
        backward_prefetch: version 1: when the next parameters are gathered in backward, a `BackwardPrefetch`.
        mixed_precision_policy: a policy of torch (`MixedPrecision` with version 1, `MixedPrecisionPolicy` with version
            2), its arguments in a dict, or a precision such as "bf16" for all of them. By default, parameters are
            gathered in the run's precision, and gradients are reduced in fp32.
        auto_wrap_policy: which blocks are sharded separately: by class, by size, or none; a policy of
            `torch.distributed.fsdp.wrap`; or a function that receives a module and returns whether it is a block.
        cpu_offload: keep parameters in host memory between uses: a bool, or an offload object of torch.
        ignored_modules: modules that are not sharded, or a regular expression for their names.
        state_dict_type: format of the model in checkpoints: FULL_STATE_DICT or SHARDED_STATE_DICT.
        state_dict_config: version 1: torch's configuration of state dicts. On a CPU, every process assembles full
            states.
        optim_state_dict_config: version 1: the same for the optimizer.
        limit_all_gathers: version 1: limit the number of parameters that are gathered ahead.
        use_orig_params: version 1: keep the user's parameters visible.
        param_init_fn: how modules on the meta device are initialised.
        sync_module_states: version 1: broadcast the weights of the first process at the start.
        forward_prefetch: version 1: gather the next parameters in forward.
        activation_checkpointing: recompute the activations of the blocks in backward.
        activation_checkpointing_offload: move them to host memory instead.
        cpu_ram_efficient_loading: only the first process must load the weights; the others receive them from it.
        transformer_cls_names_to_wrap: class names of blocks, for TRANSFORMER_BASED_WRAP.
        min_num_params: minimum number of parameters of a block, for SIZE_BASED_WRAP; 0: no blocks.

    Raises:
        SettingError: a value is invalid.
        Conflict: the FSDP version does not support a value.
    """

    fsdp_version: int = _fsdp(
        type=int_at_least(1),
        variable="{NAME}",
        flag="--{name}",
        key="fsdp_config.{name}",
        question="Which version of FSDP do you want to use?",
        help="Version of FSDP.",
        launched="1",
    )
    sharding_strategy: Any = _fsdp(
        type=_named(*SHARDING_STRATEGIES, numbered=5),
        help="Sharding strategy of FSDP version 1.",
    )
    reshard_after_forward: Any = _fsdp(
        type=_RESHARDING,
        help="Free gathered parameters after forward (default of version 2).",
    )
    backward_prefetch: Any = _fsdp(
        type=_named(*BACKWARD_PREFETCHES, numbered=2),
        help="Time at which FSDP version 1 gathers the next parameters in backward.",
    )
    mixed_precision_policy: Any = None
    auto_wrap_policy: str | Callable[..., Any] | None = _fsdp(
        type=_named(*WRAP_POLICIES),
        question="How should the blocks to shard separately be selected?",
        help="Policy that selects the blocks to shard separately.",
    )
    cpu_offload: Any = _fsdp(
        type=BOOLEAN,
        variable="FSDP_OFFLOAD_PARAMS",
        flag="--fsdp_offload_params",
        key="fsdp_config.fsdp_offload_params",
        help="Offload parameters to the CPU.",
        launched="false",
    )
    ignored_modules: Iterable[Any] | str | None = _fsdp(
        flag=None, key=None, help="Regular expression for names of modules that are not sharded."
    )
    state_dict_type: Any = _fsdp(
        type=_named(*STATE_DICT_TYPES, numbered=3),
        help="Format of the model in checkpoints (default of version 2: SHARDED_STATE_DICT).",
    )
    state_dict_config: Any = None
    optim_state_dict_config: Any = None
    limit_all_gathers: bool = True
    use_orig_params: bool | None = _fsdp(
        type=BOOLEAN,
        help="Keep the original parameters visible in FSDP version 1.",
    )
    param_init_fn: Callable[[Any], None] | None = None
    sync_module_states: bool | None = _fsdp(
        type=BOOLEAN,
        help="Broadcast the weights of the first process (FSDP version 1).",
    )
    forward_prefetch: bool | None = _fsdp(
        type=BOOLEAN,
        help="Gather the next parameters during forward (FSDP version 1).",
    )
    activation_checkpointing: bool | None = _fsdp(
        type=BOOLEAN,
        help="Recompute activations of the blocks in backward.",
        launched="false",
    )
    activation_checkpointing_offload: bool | None = _fsdp(
        type=BOOLEAN,
        help="Offload activations of the blocks to the CPU.",
    )
    cpu_ram_efficient_loading: bool | None = _fsdp(
        type=BOOLEAN,
        help="Load weights on the first process only, and send them to the others.",
        launched="true",
    )
    transformer_cls_names_to_wrap: Any = _fsdp(
        type=listing(),
        variable="FSDP_TRANSFORMER_CLS_TO_WRAP",
        flag="--fsdp_transformer_layer_cls_to_wrap",
        key="fsdp_config.fsdp_transformer_layer_cls_to_wrap",
        help="Classes of the blocks, for TRANSFORMER_BASED_WRAP.",
    )
    min_num_params: int | None = _fsdp(
        type=int_at_least(0),
        help="Smallest number of parameters of a block, for SIZE_BASED_WRAP.",
        launched="100000000",
    )

    def __post_init__(self) -> None:
        self._compute: Any = None
        if member_name(self.fsdp_version) in SHARDING_STRATEGIES:
            self.fsdp_version, self.sharding_strategy = None, self.fsdp_version  # type: ignore[assignment]
        chosen = [name for name in (*_VERSION_1_SETTINGS, "sharding_strategy") if given_value(self, name) is not None]
        for name in settings_of(type(self)):
            self._configure(name)
        if self.fsdp_version >= 2:
            self._configure_second(chosen)
        elif isinstance(self.reshard_after_forward, str) and self.reshard_after_forward != "FULL_SHARD":
            import logging

            logging.getLogger(__name__).warning(
                "%s: reshard_after_forward=%s is the sharding strategy with version 1; Accelerate uses FULL_SHARD.",
                type(self).__name__,
                self.reshard_after_forward,
            )
        self.validate_mixed_precision_policy()

    def _configure(self, name: str) -> None:
        """Set the final value of a field: the passed value, that of the environment, or the default."""
        declared, value = settings_of(type(self))[name], given_value(self, name)
        if value is None:
            variable = read_setting(declared)
            value = _DEFAULTS.get(name) if variable is None else variable.value
        elif isinstance(value, str) and name not in ("ignored_modules", "auto_wrap_policy"):
            value = declared.parse(value, "argument")
        if name == "transformer_cls_names_to_wrap" and value is not None:
            value = list(value)
        setattr(self, name, value)

    def _configure_second(self, chosen: list[str]) -> None:
        """Remove settings that version 2 does not support, and log a warning for those that were set."""
        if "sharding_strategy" in chosen:
            raise Conflict(
                "Cannot use FullyShardedDataParallelPlugin(sharding_strategy="
                f"{given_value(self, 'sharding_strategy')!r}) with fsdp_version={self.fsdp_version}.",
                "Only version 1 has sharding strategies.",
                "Use reshard_after_forward=True instead of FULL_SHARD, False instead of SHARD_GRAD_OP, and "
                "dp_replicate_size of a ParallelismConfig instead of a hybrid strategy.",
            )
        if not isinstance(self.reshard_after_forward, bool | None):
            raise Conflict(
                f"Cannot use FullyShardedDataParallelPlugin(reshard_after_forward={self.reshard_after_forward!r}) with "
                f"fsdp_version={self.fsdp_version}.",
                "Version 2 accepts only True or False.",
                "Use reshard_after_forward=True instead of FULL_SHARD and False instead of SHARD_GRAD_OP.",
            )
        self._refuse_flat_shards()
        if given_value(self, "backward_prefetch") not in (None, "NO_PREFETCH"):
            chosen = [*chosen, "backward_prefetch"]
        unused = [name for name in _VERSION_1_SETTINGS if name in chosen]
        if unused:
            import logging

            logging.getLogger(__name__).warning(
                "%s: only version 1 of FSDP has %s; version 2 ignores it.",
                type(self).__name__,
                ", ".join(unused),
            )
        for name in ("sharding_strategy", *_VERSION_1_SETTINGS):
            setattr(self, name, None)
        if self.reshard_after_forward is None:
            self.reshard_after_forward = True

    def _refuse_flat_shards(self) -> None:
        if self.fsdp_version >= 2 and plain_value(self, "state_dict_type") == "LOCAL_STATE_DICT":
            raise Conflict(
                "Cannot use FullyShardedDataParallelPlugin(state_dict_type='LOCAL_STATE_DICT') with fsdp_version=2.",
                "Version 2 has no flat shards, which this type stores.",
                "Use 'SHARDED_STATE_DICT', which loads on any number of processes.",
            )

    def __eq__(self, other: object) -> bool:
        if type(other) is not type(self):
            return NotImplemented
        names = type(self).__dataclass_fields__
        return all(given_value(self, name) == given_value(other, name) for name in names)

    @property
    def backend_name(self) -> str:
        """The name of the backend of these settings."""
        return f"fsdp{self.fsdp_version}"

    def set_state_dict_type(self, state_dict_type: Any = None) -> None:
        """The format of the model in checkpoints; by default full with version 1 and sharded with version 2.

        Raises:
            SettingError: no such type exists.
            Conflict: version 2 does not support it.
        """
        self.state_dict_type = state_dict_type
        if state_dict_type is None:
            self._configure("state_dict_type")
        self._refuse_flat_shards()

    def policy_for(self, model: Any) -> Any:
        """The policy that selects the blocks of a model: a policy of torch or a function of a module, or None.

        Raises:
            SettingError: the block classes are unknown, or the model has none of them.
        """
        policy = plain_value(self, "auto_wrap_policy")
        if not isinstance(policy, str):
            return policy
        from accel_plugins.fsdp.sharding import named_policy

        return named_policy(model, policy, self.min_num_params, self.transformer_cls_names_to_wrap)

    def set_auto_wrap_policy(self, model: Any) -> None:
        """Convert a policy name to a policy for a model: by its block classes, or by size.

        Raises:
            SettingError: the block classes are unknown, or the model has none of them.
        """
        name = plain_value(self, "auto_wrap_policy")
        if name == WRAP_POLICIES[0] and self.transformer_cls_names_to_wrap is None:
            from accel_plugins.fsdp.sharding import block_classes

            self.transformer_cls_names_to_wrap = sorted(kind.__name__ for kind in block_classes(model, None))
        if isinstance(name, str):
            self.auto_wrap_policy = self.policy_for(model)

    def set_mixed_precision(self, mixed_precision: Any, buffer_autocast: bool = False, override: bool = False) -> None:
        """Set a policy with one precision for all fields, if none is set.

        Args:
            mixed_precision: "bf16", "fp16", "fp32", "fp8" (here the same as bf16), a dtype or its name; None changes no
                dtype.
            buffer_autocast: version 1: keep buffers in fp32.
            override: replace a policy that is set.

        Raises:
            SettingError: no such precision exists.
        """
        policy = _policy_of(self, mixed_precision, buffers="fp32" if buffer_autocast else None)
        if override or given_value(self, "mixed_precision_policy") is None:
            self.mixed_precision_policy = policy

    def compute_in(self, dtype: Any) -> None:
        """Set the policy from the dtype of forward, if none is set; called by the backend."""
        self._compute = dtype

    def _policy_of_run(self) -> dict[str, Any] | None:
        # Gradients are reduced in fp32, so that the scale of an fp16 loss cannot make their sum overflow.
        name = _dtype_name(self._compute)
        return None if name is None else {"param_dtype": name, "reduce_dtype": "float32"}

    def validate_mixed_precision_policy(self) -> None:
        """Raise for a policy that this FSDP version does not accept.

        Raises:
            SettingError: the policy is of the other version, or has an unknown entry.
        """
        _check_policy(self, given_value(self, "mixed_precision_policy"))

    def set_cpu_offload(self) -> None:
        """Convert a bool to the torch object that reading `cpu_offload` returns."""
        self.cpu_offload = self.cpu_offload

    def validate_cpu_offload(self) -> None:
        """Raise for an offload that is not a bool or a torch object; the assignment raises too."""
        self.cpu_offload = given_value(self, "cpu_offload")
