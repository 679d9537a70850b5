"""Settings of sharding; plain data, without torch.

Fields hold names. Objects of torch that the interface allows in their place are taken by their name where they have
one, and kept as they are otherwise.
"""

# ruff: noqa: RUF009 - `setting` makes the fields of every settings class

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Final

from accel_state.errors import SettingError
from accel_state.settings.environ import read
from accel_state.settings.schema import BOOLEAN, choice, listing, setting, settings_of, whole

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


def _named(*names: str) -> Any:
    return choice(*names, fold=str.upper)


@dataclass
class FullyShardedDataParallelPlugin:
    """How models are sharded. What is None comes from the environment, else it is the default of its version.

    Args:
        fsdp_version: 2 for `fully_shard`, 1 for `FullyShardedDataParallel`. A sharding strategy in this place is taken
            as `sharding_strategy`.
        sharding_strategy: version 1: name of a `ShardingStrategy`.
        reshard_after_forward: version 2: free the gathered parameters of a block after its forward.
        backward_prefetch: version 1: when the next parameters are gathered in backward.
        mixed_precision_policy: a policy of torch, its arguments in a dict, or the name of a dtype for parameters.
        auto_wrap_policy: which blocks are sharded by themselves: by class, by size, or none. A function gets a module
            and answers whether it is a block.
        cpu_offload: keep parameters on the host between uses.
        ignored_modules: modules that stay whole, or a regular expression for their names.
        state_dict_type: how checkpoints hold the model: FULL_STATE_DICT or SHARDED_STATE_DICT.
        state_dict_config: version 1: torch's configuration of state dicts.
        optim_state_dict_config: version 1: the same for the optimizer.
        limit_all_gathers: version 1: wait before too much is gathered ahead.
        use_orig_params: version 1: show the user's parameters.
        param_init_fn: version 1: how modules on the meta device are initialised.
        sync_module_states: version 1: start from the weights of the first process.
        forward_prefetch: version 1: gather the next parameters in forward.
        activation_checkpointing: recompute the activations of the blocks in backward.
        activation_checkpointing_offload: keep them on the host instead.
        cpu_ram_efficient_loading: only the first process needs to have loaded the weights; the others get theirs from
            it.
        transformer_cls_names_to_wrap: names of the classes of blocks, for TRANSFORMER_BASED_WRAP.
        min_num_params: parameters that make a block, for SIZE_BASED_WRAP.

    Raises:
        SettingError: a name or number cannot be used.
    """

    fsdp_version: int = setting(
        None,
        kind=whole(1),
        variable="FSDP_VERSION",
        flag="--fsdp_version",
        key="fsdp_config.fsdp_version",
        question="Which version of FSDP do you want to use?",
        help="Version of FSDP.",
        group=_GROUP,
    )
    sharding_strategy: Any = setting(
        None,
        kind=_named(*SHARDING_STRATEGIES),
        variable="FSDP_SHARDING_STRATEGY",
        flag="--fsdp_sharding_strategy",
        key="fsdp_config.fsdp_sharding_strategy",
        help="Sharding strategy of FSDP version 1.",
        group=_GROUP,
    )
    reshard_after_forward: Any = setting(
        None,
        kind=BOOLEAN,
        variable="FSDP_RESHARD_AFTER_FORWARD",
        flag="--fsdp_reshard_after_forward",
        key="fsdp_config.fsdp_reshard_after_forward",
        help="Free gathered parameters after forward; with version 2, which does so by default.",
        group=_GROUP,
    )
    backward_prefetch: Any = setting(
        None,
        kind=_named(*BACKWARD_PREFETCHES),
        variable="FSDP_BACKWARD_PREFETCH",
        flag="--fsdp_backward_prefetch",
        key="fsdp_config.fsdp_backward_prefetch",
        help="When FSDP version 1 gathers the next parameters in backward.",
        group=_GROUP,
    )
    mixed_precision_policy: Any = None
    auto_wrap_policy: str | Callable[..., Any] | None = setting(
        None,
        kind=_named(*WRAP_POLICIES),
        variable="FSDP_AUTO_WRAP_POLICY",
        flag="--fsdp_auto_wrap_policy",
        key="fsdp_config.fsdp_auto_wrap_policy",
        question="How should blocks be found that are sharded by themselves?",
        help="How blocks are found that are sharded by themselves.",
        group=_GROUP,
    )
    cpu_offload: Any = setting(
        None,
        kind=BOOLEAN,
        variable="FSDP_OFFLOAD_PARAMS",
        flag="--fsdp_offload_params",
        key="fsdp_config.fsdp_offload_params",
        help="Keep parameters on the host between uses.",
        group=_GROUP,
    )
    ignored_modules: Iterable[Any] | str | None = setting(
        None, variable="FSDP_IGNORED_MODULES", help="Regular expression for names of modules that stay whole."
    )
    state_dict_type: Any = setting(
        None,
        kind=_named(*STATE_DICT_TYPES),
        variable="FSDP_STATE_DICT_TYPE",
        flag="--fsdp_state_dict_type",
        key="fsdp_config.fsdp_state_dict_type",
        help="How checkpoints hold the model; SHARDED_STATE_DICT is the default of version 2.",
        group=_GROUP,
    )
    state_dict_config: Any = None
    optim_state_dict_config: Any = None
    limit_all_gathers: bool = True
    use_orig_params: bool | None = setting(
        None,
        kind=BOOLEAN,
        variable="FSDP_USE_ORIG_PARAMS",
        flag="--fsdp_use_orig_params",
        key="fsdp_config.fsdp_use_orig_params",
        help="Let FSDP version 1 show the user's parameters.",
        group=_GROUP,
    )
    param_init_fn: Callable[[Any], None] | None = None
    sync_module_states: bool | None = setting(
        None,
        kind=BOOLEAN,
        variable="FSDP_SYNC_MODULE_STATES",
        flag="--fsdp_sync_module_states",
        key="fsdp_config.fsdp_sync_module_states",
        help="Let FSDP version 1 start from the weights of the first process.",
        group=_GROUP,
    )
    forward_prefetch: bool | None = setting(
        None,
        kind=BOOLEAN,
        variable="FSDP_FORWARD_PREFETCH",
        flag="--fsdp_forward_prefetch",
        key="fsdp_config.fsdp_forward_prefetch",
        help="Let FSDP version 1 gather the next parameters in forward.",
        group=_GROUP,
    )
    activation_checkpointing: bool | None = setting(
        None,
        kind=BOOLEAN,
        variable="FSDP_ACTIVATION_CHECKPOINTING",
        flag="--fsdp_activation_checkpointing",
        key="fsdp_config.fsdp_activation_checkpointing",
        help="Recompute activations of the blocks in backward.",
        group=_GROUP,
    )
    activation_checkpointing_offload: bool | None = setting(
        None,
        kind=BOOLEAN,
        variable="FSDP_ACTIVATION_CHECKPOINTING_OFFLOAD",
        flag="--fsdp_activation_checkpointing_offload",
        key="fsdp_config.fsdp_activation_checkpointing_offload",
        help="Keep activations of the blocks on the host.",
        group=_GROUP,
    )
    cpu_ram_efficient_loading: bool | None = setting(
        None,
        kind=BOOLEAN,
        variable="FSDP_CPU_RAM_EFFICIENT_LOADING",
        flag="--fsdp_cpu_ram_efficient_loading",
        key="fsdp_config.fsdp_cpu_ram_efficient_loading",
        help="Only the first process loads the weights.",
        group=_GROUP,
    )
    transformer_cls_names_to_wrap: Any = setting(
        None,
        kind=listing(),
        variable="FSDP_TRANSFORMER_CLS_TO_WRAP",
        flag="--fsdp_transformer_layer_cls_to_wrap",
        key="fsdp_config.fsdp_transformer_layer_cls_to_wrap",
        help="Classes of the blocks, for TRANSFORMER_BASED_WRAP.",
        group=_GROUP,
    )
    min_num_params: int | None = setting(
        None,
        kind=whole(0),
        variable="FSDP_MIN_NUM_PARAMS",
        flag="--fsdp_min_num_params",
        key="fsdp_config.fsdp_min_num_params",
        help="Parameters that make a block, for SIZE_BASED_WRAP.",
        group=_GROUP,
    )

    def __post_init__(self) -> None:
        if _name_of(self.fsdp_version) in SHARDING_STRATEGIES:
            self.fsdp_version, self.sharding_strategy = None, self.fsdp_version  # type: ignore[assignment]
        for name in settings_of(type(self)):
            self._settle(name)
        if self.reshard_after_forward is None and self.fsdp_version >= 2:
            self.reshard_after_forward = True
        self.set_state_dict_type()
        self.validate_mixed_precision_policy()
        self.validate_cpu_offload()

    def _settle(self, name: str) -> None:
        """Put the value of one field in its final form: given, from the environment, or the default."""
        known, given = settings_of(type(self))[name], getattr(self, name)
        if given is None:
            found = read(known)
            setattr(self, name, _DEFAULTS.get(name) if found is None else found.value)
        elif isinstance(_name_of(given), str) and name != "ignored_modules":
            setattr(self, name, known.parse(_name_of(given), "argument"))
        elif name == "transformer_cls_names_to_wrap":
            setattr(self, name, tuple(given))

    @property
    def backend_name(self) -> str:
        """Name of the backend that these settings are for."""
        return f"fsdp{self.fsdp_version}"

    def set_state_dict_type(self, state_dict_type: Any = None) -> None:
        """How checkpoints hold the model; by default full with version 1 and sharded with version 2."""
        if state_dict_type is not None:
            self.state_dict_type = state_dict_type
            self._settle("state_dict_type")
        if self.state_dict_type is None:
            self.state_dict_type = "FULL_STATE_DICT" if self.fsdp_version == 1 else "SHARDED_STATE_DICT"

    def set_auto_wrap_policy(self, model: Any) -> None:
        """Take the names of block classes from a model that knows them, where they are needed and not given."""
        wanted = self.auto_wrap_policy == "TRANSFORMER_BASED_WRAP" and self.transformer_cls_names_to_wrap is None
        if wanted:
            self.transformer_cls_names_to_wrap = tuple(getattr(model, "_no_split_modules", None) or ()) or None

    def set_mixed_precision(self, mixed_precision: Any, buffer_autocast: bool = False, override: bool = False) -> None:
        """Gather parameters in the dtype of a precision ("bf16" or "fp16"), where no policy was given."""
        if self.mixed_precision_policy is None or override:
            dtype = {"fp16": "float16", "bf16": "bfloat16"}.get(str(mixed_precision), "float32")
            self.mixed_precision_policy = {"param_dtype": dtype, "reduce_dtype": dtype}
            if self.fsdp_version == 1:
                self.mixed_precision_policy["buffer_dtype"] = "float32" if buffer_autocast else dtype

    def validate_mixed_precision_policy(self) -> None:
        """Refuse a policy that is neither a dict, a name, nor one of torch's."""
        policy = self.mixed_precision_policy
        if policy is not None and not isinstance(policy, (dict, str)) and not hasattr(policy, "param_dtype"):
            raise SettingError(
                f"FullyShardedDataParallelPlugin(mixed_precision_policy={policy!r}) was asked for.",
                "A policy says in which dtype parameters are gathered.",
                "Give the name of a dtype, a dict with param_dtype and reduce_dtype, or a policy of torch.",
            )

    def set_cpu_offload(self) -> None:
        """Take torch's offload objects as what they say."""
        if not isinstance(self.cpu_offload, bool):
            by_default = type(self.cpu_offload).__name__ == "CPUOffloadPolicy"
            self.cpu_offload = bool(getattr(self.cpu_offload, "offload_params", by_default))

    def validate_cpu_offload(self) -> None:
        """Refuse an offload that is neither a truth value nor one of torch's objects."""
        known = ("CPUOffload", "CPUOffloadPolicy", "OffloadPolicy")
        if not isinstance(self.cpu_offload, bool) and type(self.cpu_offload).__name__ not in known:
            raise SettingError(
                f"FullyShardedDataParallelPlugin(cpu_offload={self.cpu_offload!r}) was asked for.",
                "It has to be True, False or an offload object of torch.",
                "Give True or False.",
            )
        self.set_cpu_offload()


def _name_of(given: Any) -> Any:
    """The name of a member of one of torch's enums; anything else as it is."""
    name = getattr(given, "name", None)
    return name if isinstance(name, str) and hasattr(given, "value") else given
