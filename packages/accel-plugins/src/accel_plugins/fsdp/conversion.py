"""Convert a launch config from FSDP version 1 to version 2; `accel to-fsdp2` reads and writes the file."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final, NamedTuple

from accel_state.errors import SettingError

__all__ = ("CONVERSION", "Conversion", "ToFSDP2", "convert")

_SECTION: Final = "fsdp_config"
_STRATEGY_KEY: Final = "fsdp_sharding_strategy"
_RESHARD_KEY: Final = "fsdp_reshard_after_forward"
_VERSION_KEY: Final = "fsdp_version"

# Strategies of version 1, which numbers them from 1 in this order; True: blocks are freed after forward.
_RESHARD_OF_STRATEGY: Final = {
    "FULL_SHARD": True,
    "SHARD_GRAD_OP": False,
    "NO_SHARD": False,
    "HYBRID_SHARD": True,
    "HYBRID_SHARD_ZERO2": False,
}
_REMOVED_KEYS: Final = {
    "fsdp_backward_prefetch": "version 2 prefetches automatically",
    "fsdp_forward_prefetch": "version 2 prefetches automatically",
    "fsdp_sync_module_states": "version 2 always broadcasts the weights of the first process",
    "fsdp_use_orig_params": "version 2 always keeps the original parameters",
}
_HYBRID_STRATEGIES: Final = ("HYBRID_SHARD", "HYBRID_SHARD_ZERO2")


class Conversion(NamedTuple):
    """A converted config.

    Args:
        values: the content of the file; None if it is already for version 2.
        notes: notes for the user, one sentence each.
    """

    values: dict[str, Any] | None
    notes: tuple[str, ...] = ()


def convert(config: Mapping[str, Any], key_of: Callable[[str], str]) -> Conversion:
    """Convert a config to FSDP version 2.

    Args:
        config: the content of the file.
        key_of: returns the current spelling of a key, such as "fsdp_config.offload_params".

    Raises:
        SettingError: the config is not for FSDP, or has an unknown sharding strategy.
    """
    table = config.get(_SECTION)
    if not isinstance(table, dict) or not table:
        raise SettingError(
            "Cannot convert a config file to FSDP version 2.",
            f"The file has no section {_SECTION!r}.",
            "Use the config file of a run with FSDP.",
        )
    settings = {key_of(f"{_SECTION}.{key}").partition(".")[2]: value for key, value in table.items()}
    if str(settings.get(_VERSION_KEY, 1)) == "2":
        return Conversion(None)
    kept = {key: value for key, value in settings.items() if key not in (_STRATEGY_KEY, *_REMOVED_KEYS)}
    notes = [f"{key} is removed: {_REMOVED_KEYS[key]}." for key in settings if key in _REMOVED_KEYS]
    # Files of version 1 may have the strategy under the newer key.
    strategy = settings.get(_RESHARD_KEY, settings.get(_STRATEGY_KEY))
    if strategy is not None:
        kept[_RESHARD_KEY] = strategy if isinstance(strategy, bool) else _reshards(str(strategy), notes)
    return Conversion({**config, _SECTION: {**kept, _VERSION_KEY: 2}}, tuple(notes))


def _reshards(strategy: str, notes: list[str]) -> bool:
    """Whether blocks are freed after forward with a strategy, by its name or number."""
    names = list(_RESHARD_OF_STRATEGY)
    name = names[int(strategy) - 1] if strategy in "12345" and strategy else strategy.upper()
    if name in ("TRUE", "FALSE"):
        return name == "TRUE"
    if name not in _RESHARD_OF_STRATEGY:
        raise SettingError(
            f"Cannot convert {_STRATEGY_KEY}={strategy}.",
            "No such sharding strategy exists.",
            f"The value must be one of {', '.join(names)}, or its number from 1.",
        )
    if name in _HYBRID_STRATEGIES:
        notes.append(f"{name} needs parallelism_config with dp_replicate_size and dp_shard_size in version 2.")
    if name == "NO_SHARD":
        notes.append("NO_SHARD does not exist in version 2: parameters are sharded and kept gathered after forward.")
    return _RESHARD_OF_STRATEGY[name]


class ToFSDP2:
    """The entry point of the conversion in the group `accel.conversions`."""

    help = "convert a config file from FSDP version 1 to version 2"
    result = "FSDP version 2"

    def convert(self, config: Mapping[str, Any], key_of: Callable[[str], str]) -> Conversion:
        """As `convert`."""
        return convert(config, key_of)


CONVERSION: Final = ToFSDP2()
