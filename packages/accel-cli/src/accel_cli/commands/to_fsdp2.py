"""`accel to-fsdp2`: convert a config file from FSDP version 1 to version 2."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from accel_cli.command import spelled
from accel_cli.config.file import is_known, with_prefix
from accel_state.errors import AlreadyExists, NotFound, SettingError

if TYPE_CHECKING:
    from argparse import ArgumentParser, Namespace

__all__ = (
    "COMMAND",
    "Conversion",
    "ToFSDP2",
    "convert",
    "target_of",
)

_TABLE: Final = "fsdp_config"
_STRATEGY: Final = "fsdp_sharding_strategy"
_RESHARD: Final = "fsdp_reshard_after_forward"
_VERSION: Final = "fsdp_version"

# What version 1 numbers from 1, in this order; whether blocks are freed again after forward.
_RESHARDS: Final = {
    "FULL_SHARD": True,
    "SHARD_GRAD_OP": False,
    "NO_SHARD": False,
    "HYBRID_SHARD": True,
    "HYBRID_SHARD_ZERO2": False,
}
_GONE: Final = {
    "fsdp_backward_prefetch": "version 2 prefetches by itself",
    "fsdp_forward_prefetch": "version 2 prefetches by itself",
    "fsdp_sync_module_states": "version 2 always starts from the weights of the first process when it loads them",
    "fsdp_use_orig_params": "version 2 always keeps the parameters of the model",
}
_BY_MESH: Final = ("HYBRID_SHARD", "HYBRID_SHARD_ZERO2")


class Conversion(NamedTuple):
    """A converted config.

    Args:
        values: the whole file; None when it is for version 2 already.
        notes: what a user should know, one sentence each.
    """

    values: dict[str, Any] | None
    notes: tuple[str, ...] = ()


def convert(config: Mapping[str, Any]) -> Conversion:
    """The same run with FSDP version 2.

    Raises:
        SettingError: it is not for FSDP, or has a sharding strategy that does not exist.
    """
    table = config.get(_TABLE)
    if not isinstance(table, dict) or not table:
        raise SettingError(
            "Cannot convert a config file to FSDP version 2.",
            f"It has no table {_TABLE!r}.",
            "Give a config file of a run with FSDP.",
        )
    given = {_today(key): value for key, value in table.items()}
    if str(given.get(_VERSION, 1)) == "2":
        return Conversion(None)
    kept = {key: value for key, value in given.items() if key not in (_STRATEGY, *_GONE)}
    notes = [f"{key} is left out: {_GONE[key]}." for key in given if key in _GONE]
    # Files of version 1 may have the strategy under the newer name as well.
    strategy = given.get(_RESHARD, given.get(_STRATEGY))
    if strategy is not None:
        kept[_RESHARD] = strategy if isinstance(strategy, bool) else _reshards(str(strategy), notes)
    return Conversion({**config, _TABLE: {**kept, _VERSION: 2}}, tuple(notes))


def _today(key: str) -> str:
    """A key with its prefix; one that nobody knows as it is."""
    found = with_prefix(f"{_TABLE}.{key}")
    return found.partition(".")[2] if is_known(found) else key


def _reshards(strategy: str, notes: list[str]) -> bool:
    """Whether blocks are freed after forward under a strategy that is named or numbered."""
    names = list(_RESHARDS)
    name = names[int(strategy) - 1] if strategy in "12345" and strategy else strategy.upper()
    if name in ("TRUE", "FALSE"):
        return name == "TRUE"
    if name not in _RESHARDS:
        raise SettingError(
            f"Cannot convert {_STRATEGY}={strategy}.",
            "There is no such sharding strategy.",
            f"It has to be one of {', '.join(names)}, or its number from 1.",
        )
    if name in _BY_MESH:
        notes.append(f"{name} needs parallelism_config with dp_replicate_size and dp_shard_size in version 2.")
    if name == "NO_SHARD":
        notes.append("NO_SHARD does not exist in version 2: parameters are sharded and stay whole after forward.")
    return _RESHARDS[name]


class ToFSDP2:
    """The command; see `accel_cli.command.Command`."""

    help = "convert a config file from FSDP version 1 to version 2"

    def add_arguments(self, parser: ArgumentParser) -> None:
        """Which file, and where the converted one goes."""
        parser.add_argument(*spelled("--config_file"), required=True, metavar="PATH", help="The file to convert.")
        parser.add_argument("--overwrite", action="store_true", help="Write over a file that is there.")
        parser.add_argument(
            *spelled("--output_file"),
            metavar="PATH",
            help="The file to write; the same with --overwrite when not given.",
        )

    def run(self, arguments: Namespace) -> int:
        """Write the converted file."""
        from accel_cli.config.file import read_tables
        from accel_cli.config.write import write_config

        target = target_of(arguments)
        converted = convert(read_tables(arguments.config_file))
        if converted.values is None:
            print(f"{arguments.config_file} is for FSDP version 2 already; nothing was written.")
            return 0
        for note in converted.notes:
            print(f"accel to-fsdp2: {note}", file=sys.stderr)
        write_config(target, converted.values)
        print(f"Written to {target}.")
        return 0


def target_of(arguments: Namespace) -> str:
    """The file to write.

    Raises:
        NotFound: the file to convert is not there.
        AlreadyExists: writing would lose a file that nobody said may be lost.
        SettingError: no file to write is named.
    """
    asked = f"Cannot convert {arguments.config_file} to FSDP version 2."
    if not Path(arguments.config_file).exists():
        raise NotFound(asked, "There is no such file.", "Check the path.")
    target: str = arguments.output_file or arguments.config_file
    if arguments.overwrite or (arguments.output_file and not Path(target).exists()):
        return target
    if arguments.output_file:
        raise AlreadyExists(asked, f"{target} is there already.", "Give another --output_file, or --overwrite.")
    raise SettingError(asked, "No file to write was named.", "Give --output_file, or --overwrite to replace it.")


COMMAND: Final = ToFSDP2()
