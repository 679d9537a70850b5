"""What the fields of the sharding settings keep, and the objects of torch that users read from them.

Nothing here imports torch before a field is read: the objects of torch are recognised by the names of their classes.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from accel_state.errors import SettingError
from accel_state.settings.schema import ObjectField, enum_field, import_object, member_name, plain_value, settings_of

__all__ = (
    "BACKWARD_PREFETCHES",
    "SHARDING_STRATEGIES",
    "STATE_DICT_TYPES",
    "WRAP_POLICIES",
    "auto_wrap_policy",
    "backward_prefetch",
    "check_policy",
    "cpu_offload",
    "dtype_name",
    "mixed_precision_policy",
    "policy_of",
    "sharding_strategy",
    "state_dict_config",
    "state_dict_type",
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
"""Names of precisions and dtypes; what computes in 8 bits keeps and reduces in bfloat16."""
_OFFLOADS: Final = ("CPUOffload", "CPUOffloadPolicy", "OffloadPolicy")
_POLICIES: Final = {1: "MixedPrecision", 2: "MixedPrecisionPolicy"}
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
    """The strategy of version 1 that follows from `reshard_after_forward` where none was given."""
    if _version(settings) != 1:
        return None
    freed = member_name(settings.reshard_after_forward)
    if isinstance(freed, str) and freed.upper() in SHARDING_STRATEGIES:
        return freed.upper()
    return "SHARD_GRAD_OP" if freed is False else "FULL_SHARD"


def sharding_strategy() -> ObjectField:
    """Kept as a name, read as a `ShardingStrategy`."""
    return enum_field(f"{_FSDP}:ShardingStrategy", {"HYBRID_SHARD_ZERO2": "_HYBRID_SHARD_ZERO2"}, fallback=_strategy_of)


def backward_prefetch() -> ObjectField:
    """Kept as a name, read as a `BackwardPrefetch` or None."""
    return enum_field(f"{_FSDP}:BackwardPrefetch", {"NO_PREFETCH": None})


def state_dict_type() -> ObjectField:
    """Kept as a name, read as a `StateDictType`; where none was given, full with version 1 and sharded with 2."""
    return enum_field(
        f"{_FSDP}:StateDictType",
        fallback=lambda settings: "FULL_STATE_DICT" if _version(settings) == 1 else "SHARDED_STATE_DICT",
    )


# ---------------------------------------------------------------------- objects


def state_dict_config(name: str) -> ObjectField:
    """Read as the configuration of state dicts that goes with the type of state dict, where none was given.

    Args:
        name: "" for that of models, "Optim" for that of optimizers.
    """

    def keep(settings: Any, given: Any) -> Any:
        if not hasattr(given, "offload_to_cpu"):
            raise SettingError(
                f"FullyShardedDataParallelPlugin({'optim_' if name else ''}state_dict_config={given!r}).",
                "A configuration of state dicts says whether they are moved to the CPU.",
                f"Give a Full{name}StateDictConfig or a Sharded{name}StateDictConfig of {_FSDP}, or leave it out.",
            )
        return given

    def make(settings: Any, kept: Any) -> Any:
        if not isinstance(kept, str):
            return kept
        if kept == "LOCAL_STATE_DICT":
            return None
        if kept == "FULL_STATE_DICT":
            return import_object(f"{_FSDP}:Full{name}StateDictConfig")(offload_to_cpu=True, rank0_only=True)
        return import_object(f"{_FSDP}:Sharded{name}StateDictConfig")(offload_to_cpu=True)

    return ObjectField(keep, make, lambda settings: plain_value(settings, "state_dict_type"))


def cpu_offload() -> ObjectField:
    """Kept as a bool, or as the policy that does not pin memory; read as the object that the version takes."""

    def keep(settings: Any, given: Any) -> Any:
        if isinstance(given, str):
            return settings_of(type(settings))["cpu_offload"].parse(given, "argument")
        if not isinstance(given, bool) and type(given).__name__ not in (
            "CPUOffload",
            "CPUOffloadPolicy",
            "OffloadPolicy",
        ):
            raise SettingError(
                f"FullyShardedDataParallelPlugin(cpu_offload={given!r}).",
                "It has to be True, False or an offload object of torch.",
                "Give True or False.",
            )
        pins = type(given).__name__ == "CPUOffloadPolicy" and given.pin_memory
        says_more = type(given).__name__ == "CPUOffloadPolicy" and not pins
        return given if says_more or isinstance(given, bool) else bool(getattr(given, "offload_params", pins))

    def make(settings: Any, kept: Any) -> Any:
        if _version(settings) == 1:
            return import_object(f"{_FSDP}:CPUOffload")(offload_params=bool(kept))
        if not isinstance(kept, bool):
            return kept
        return import_object(f"{_FSDP}:{'CPUOffloadPolicy' if kept else 'OffloadPolicy'}")()

    return ObjectField(keep, make)


def auto_wrap_policy() -> ObjectField:
    """Kept as a name or as the policy that was given, and read as a policy: what torch's functions are, or None."""

    def keep(settings: Any, given: Any) -> Any:
        if isinstance(given, str):
            return settings_of(type(settings))["auto_wrap_policy"].parse(given, "argument")
        for name, function in _WRAP_FUNCTIONS.items():
            if (getattr(given, "__module__", None), getattr(given, "__name__", None)) == (_WRAP, function):
                return name
        if not callable(given) and not hasattr(given, "_run_policy"):
            raise SettingError(
                f"FullyShardedDataParallelPlugin(auto_wrap_policy={given!r}).",
                "It says which blocks are sharded by themselves.",
                f"Give one of {', '.join(WRAP_POLICIES)}, a policy of {_WRAP}, or a function of a module.",
            )
        return given

    def make(settings: Any, kept: Any) -> Any:
        if not isinstance(kept, str):
            return kept
        return import_object(f"{_WRAP}:{_WRAP_FUNCTIONS[kept]}") if kept in _WRAP_FUNCTIONS else None

    return ObjectField(keep, make)


# ---------------------------------------------------------------------- mixed precision


def dtype_name(given: Any) -> str | None:
    """Name of the dtype that a precision ("bf16"), the name of a dtype or a dtype of torch stands for; None for None.

    Raises:
        SettingError: it stands for none.
    """
    if given is None:
        return None
    text = str(given).removeprefix("torch.")
    if text not in _DTYPES:
        raise SettingError(
            f"FullyShardedDataParallelPlugin: the precision {given!r} in a mixed-precision policy.",
            f"It is none of {', '.join(_DTYPES)}.",
            "Use a name such as 'bf16', or a dtype such as torch.bfloat16.",
        )
    return _DTYPES[text]


def policy_of(settings: Any, precision: Any, *, buffers: Any = None) -> dict[str, Any]:
    """A policy with one dtype for everything.

    Args:
        settings: of the version that the policy is for.
        precision: as for `dtype_name`.
        buffers: dtype of buffers where it is another one.

    Raises:
        SettingError: there is no such precision.
    """
    policy: dict[str, Any] = dict.fromkeys(_POLICY_DTYPES[_version(settings)], dtype_name(precision))
    if buffers is not None and "buffer_dtype" in policy:
        policy["buffer_dtype"] = dtype_name(buffers)
    return policy


def mixed_precision_policy() -> ObjectField:
    """Kept as a name or a table of names of dtypes; read as the policy that the version takes."""

    def keep(settings: Any, given: Any) -> Any:
        if isinstance(given, str) or type(given).__name__ == "dtype":
            return dtype_name(given)
        if isinstance(given, Mapping):
            return {name: dtype_name(value) if name.endswith("_dtype") else value for name, value in given.items()}
        if not hasattr(given, "param_dtype"):
            raise SettingError(
                f"FullyShardedDataParallelPlugin(mixed_precision_policy={given!r}).",
                "A policy says in which dtype parameters are gathered.",
                "Give a precision such as 'bf16', a dict with param_dtype and reduce_dtype, or a policy of torch.",
            )
        return given

    def make(settings: Any, kept: Any) -> Any:
        check_policy(settings, kept)
        if not isinstance(kept, (str, dict)):
            return kept
        policy = policy_of(settings, kept) if isinstance(kept, str) else kept
        torch_dtypes = {
            name: import_object(f"torch:{value}") if name.endswith("_dtype") and value is not None else value
            for name, value in policy.items()
        }
        return import_object(f"{_FSDP}:{_POLICIES[_version(settings)]}")(**torch_dtypes)

    return ObjectField(keep, make, lambda settings: settings._policy_of_run())


def check_policy(settings: Any, kept: Any) -> None:
    """Refuse a policy that the version of FSDP does not take.

    Raises:
        SettingError: it is one of the other version, or has an entry that is not known.
    """
    version = _version(settings)
    if isinstance(kept, dict):
        known = (*_POLICY_DTYPES[version], *_POLICY_OPTIONS[version])
        unknown = [name for name in kept if name not in known]
        if unknown:
            raise SettingError(
                f"FullyShardedDataParallelPlugin(mixed_precision_policy={kept!r}).",
                f"A policy of FSDP version {version} has no entry {', '.join(map(repr, unknown))}.",
                f"Use entries among {', '.join(known)}.",
            )
    elif kept is not None and not isinstance(kept, str) and type(kept).__name__ == _POLICIES[3 - version]:
        raise SettingError(
            f"FullyShardedDataParallelPlugin(mixed_precision_policy={type(kept).__name__}(...)).",
            f"It is a policy of FSDP version {3 - version}, and these settings are for version {version}.",
            f"Give a {_POLICIES[version]} of {_FSDP}.",
        )
