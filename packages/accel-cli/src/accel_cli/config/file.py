"""Config files: the path of the user's default file, entries with line numbers, and the values of settings.

Scalars are read as text, which the setting of the entry then parses: `mixed_precision: no` means the word and not a
bool. Files in the form that `accel config` writes are read without the YAML library, because importing it takes longer
than everything else in `accel explain`.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Mapping
from types import MappingProxyType
from typing import Any, Final, NamedTuple

from accel_cli.config.resolved import REPEATED, label
from accel_state.errors import NotFound, SettingError
from accel_state.settings.environ import Given
from accel_state.settings.schema import JSON, Setting, closest, settings_of

__all__ = (
    "DEFAULT_NAME",
    "KNOWN",
    "PREFIXES",
    "ConfigEntry",
    "ConfigFile",
    "default_path",
    "is_known",
    "modern",
    "plain_entries",
    "read_config",
    "read_document",
    "read_tables",
    "says_nothing",
    "with_prefix",
)

_LINE: Final = re.compile(
    r"(?P<indent> {0,20})(?P<key>[A-Za-z_][A-Za-z0-9_]{0,99}):"
    r"(?: (?P<said>(?P<plain>-?[A-Za-z0-9_./][A-Za-z0-9_./-]*)|'(?P<quoted>[ -&(-~]*)'|\{\}))?"
)
_NOTHING: Final = re.compile(r" *(?:#[ -~]*)?")
_PLAIN_NULL: Final = frozenset({"null", "Null", "NULL"})


class ConfigEntry(NamedTuple):
    """One value of a config file.

    Args:
        key: its key; keys of nested tables are joined by dots.
        value: text of a scalar, list of such texts, or None for null and for an empty table.
        line: line of its key, from 1.
    """

    key: str
    value: Any
    line: int


def plain_entries(text: str) -> tuple[ConfigEntry, ...] | None:
    """Entries of a file, or None if it contains anything but plain entries, such as an error."""
    entries: list[ConfigEntry] = []
    seen: set[str] = set()
    table: ConfigEntry | None = None
    depth = 0
    for number, line in enumerate(text.split("\n"), start=1):
        if _NOTHING.fullmatch(line):
            continue
        found = _LINE.fullmatch(line)
        if found is None:
            return None
        entry = ConfigEntry(found["key"], _plain_value(found), number)
        if not found["indent"]:
            table, depth = (entry if found["said"] is None else None), 0
        elif table is None or depth not in (0, len(found["indent"])):
            return None
        else:
            if entries[-1] is table:
                entries.pop()
            depth = len(found["indent"])
            entry = entry._replace(key=f"{table.key}.{entry.key}")
        if entry.key in seen:
            return None
        seen.add(entry.key)
        entries.append(entry)
    return tuple(entries)


def _plain_value(found: re.Match[str]) -> str | None:
    if found["quoted"] is not None:
        return found["quoted"]
    return None if found["plain"] in _PLAIN_NULL else found["plain"]


PREFIXES: Final = {"dynamo_config": "dynamo_", "fp8_config": "fp8_", "fsdp_config": "fsdp_"}
"""Tables whose keys may be written without this prefix."""


def _table(name: str, keys: str, prefix: str = "") -> frozenset[str]:
    return frozenset(f"{name}.{prefix}{key}".lstrip(".") for key in keys.split())


_TOP_LEVEL: Final = _table(
    "",
    """
    additional_args base_job_name command_file commands deepspeed_config downcast_bf16 dynamo_backend dynamo_config
    ec2_instance_type fp16 fp8_config fsdp_config iam_role_name image_uri main_training_function
    megatron_lm_config mpirun_config parallelism_config profile py_version pytorch_version region sagemaker_inputs_file
    sagemaker_metrics_file same_network tpu_env tpu_name tpu_use_cluster tpu_use_sudo tpu_vm tpu_zone
    transformers_version
    """,
)

_DEEPSPEED: Final = _table(
    "deepspeed_config",
    """
    deepspeed_config_file deepspeed_exclusion_filter deepspeed_hostfile deepspeed_inclusion_filter
    deepspeed_moe_layer_cls_names deepspeed_multinode_launcher gradient_accumulation_steps gradient_clipping
    offload_optimizer_device offload_optimizer_nvme_path offload_param_device offload_param_nvme_path zero3_init_flag
    zero3_save_16bit_model zero_stage
    """,
)

_DYNAMO: Final = _table("dynamo_config", "backend mode use_dynamic use_fullgraph use_regional_compilation", "dynamo_")

_FP8: Final = _table(
    "fp8_config",
    """
    amax_compute_algo amax_compute_algorithm amax_history_len amax_history_length backend
    enable_fsdp_float8_all_gather format interval margin opt_level optimization_level
    override_linear_precision pad_inner_dim use_autocast_during_eval
    """,
    "fp8_",
)

_FSDP: Final = _table(
    "fsdp_config",
    """
    activation_checkpointing activation_checkpointing_offload auto_wrap_policy backward_prefetch
    cpu_ram_efficient_loading forward_prefetch ignored_modules min_num_params offload_params reshard_after_forward
    sharding_strategy state_dict_type sync_module_states transformer_layer_cls_to_wrap use_orig_params version
    """,
    "fsdp_",
)

_MEGATRON: Final = _table(
    "megatron_lm_config",
    """
    attention_backend attention_dropout attention_softmax_in_fp32 calculate_per_token_loss context_parallel_size
    decoder_last_pipeline_num_layers eod_mask_loss expert_model_parallel_size expert_tensor_parallel_size
    gradient_clipping hidden_dropout no_load_optim no_save_optim num_micro_batches optimizer_cpu_offload
    overlap_cpu_optimizer_d2h_h2d pp_degree recompute_activations recompute_granularity recompute_method
    recompute_num_layers sequence_parallelism tp_degree use_custom_fsdp use_distributed_optimizer
    use_precision_aware_optimizer use_rotary_position_embeddings
    """,
    "megatron_lm_",
)

_PARALLELISM: Final = _table(
    "parallelism_config",
    """
    cp_backend cp_comm_strategy cp_size dp_replicate_size dp_shard_size sp_attn_implementation sp_backend sp_seq_length
    sp_seq_length_is_variable sp_size tp_size
    """,
    "parallelism_config_",
)

KNOWN: Final = (
    _TOP_LEVEL | _DEEPSPEED | _DYNAMO | _FP8 | _FSDP | _MEGATRON | _PARALLELISM | {"mpirun_config.mpirun_hostfile"}
)

# Values that `accelerate config` writes into every file.
_USUAL: Final = {
    "downcast_bf16": ("no", "false"),
    "main_training_function": ("main",),
    "same_network": ("true", "false"),
    "tpu_use_cluster": ("false",),
    "tpu_use_sudo": ("false",),
    "dynamo_config.dynamo_backend": ("no", "NO"),
    "dynamo_backend": ("no", "NO"),
    "mpirun_config.mpirun_hostfile": ("",),
}


def with_prefix(key: str) -> str:
    """The full form of a key.

    Example:
        >>> with_prefix("fsdp_config.version")
        'fsdp_config.fsdp_version'
    """
    table, dot, name = key.partition(".")
    prefix = PREFIXES.get(table, "")
    return key if not dot or name.startswith(prefix) else f"{table}.{prefix}{name}"


def is_known(key: str) -> bool:
    """Whether a key may occur in files of Accelerate; any key below `additional_args` is allowed."""
    return key in KNOWN or key.startswith("additional_args.")


def says_nothing(key: str, value: object) -> bool:
    """Whether an entry only repeats a default, so that it can be removed."""
    return value in (None, []) or str(value) in _USUAL.get(key, ())


# The YAML library's time for a bracket grows with its depth; every other character takes 10 µs.
_DEEPEST: Final = 20
_LARGEST: Final = 100_000
_NULL: Final = "tag:yaml.org,2002:null"


def read_document(path: str) -> tuple[ConfigEntry, ...]:
    """Entries of a config file, in the order of their lines.

    Raises:
        NotFound: there is no such file.
        SettingError: the file cannot be read, is not valid YAML or JSON, has two values for a key, or is not
            a table of keys.
    """
    asked = f"Cannot read the config file {path}."
    try:
        text = _text(path)
    except FileNotFoundError:
        remedy = "Check the path, or write a file with `accel config`."
        raise NotFound(asked, "There is no such file.", remedy) from None
    except (OSError, UnicodeDecodeError) as error:
        remedy = f"Give a readable text file of at most {_LARGEST} bytes."
        raise SettingError(asked, f"It cannot be read: {error}.", remedy) from None
    if _depth(text) > _DEEPEST:
        raise SettingError(asked, f"{path} has too many nested levels.", "Reduce the nesting.")
    entries = None if path.endswith(".json") else plain_entries(text)
    return tuple(_from_library(text, asked, path)) if entries is None else entries


def read_tables(path: str) -> dict[str, Any]:
    """Read a config file as nested tables, with scalars parsed as YAML defines.

    Raises:
        SettingError: as `read_document`, or a scalar is invalid, such as the date 31 February.
    """
    import yaml

    read_document(path)
    try:
        found: dict[str, Any] = yaml.safe_load(_text(path).replace("\t", " ")) or {}
    except (yaml.YAMLError, ValueError, OverflowError, RecursionError, OSError) as error:
        asked = f"Cannot read the config file {path}."
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise SettingError(asked, f"A value cannot be parsed: {reason}.", "Put that value in quotes.") from None
    return found


def _from_library(text: str, asked: str, path: str) -> Iterator[ConfigEntry]:
    if path.endswith(".json"):
        _check_json(text, asked, path)
        # YAML forbids tabs, and JSON never has them inside a string.
        text = text.replace("\t", " ")
    root = _compose(text, asked, path)
    if root is None or root.tag == _NULL:
        return
    if root.id != "mapping":
        obstacle = f"{path}:{root.start_mark.line + 1} is not a `key: value` entry."
        raise SettingError(asked, obstacle, "Write one `key: value` per line.")
    yield from _entries(root, "", asked, path)


def _depth(text: str) -> int:
    """Depth of nested brackets; brackets inside strings count as well."""
    depth = deepest = 0
    for bracket in re.findall(r"[\[\]{}]", text):
        depth = depth + 1 if bracket in "[{" else max(depth - 1, 0)
        deepest = max(deepest, depth)
    return deepest


def _text(path: str) -> str:
    from accel_state.untrusted import read_limited

    found = read_limited(path, _LARGEST, from_shell=True)
    return found.decode().replace("\r\n", "\n").replace("\r", "\n")


def _check_json(text: str, asked: str, path: str) -> None:
    import json

    try:
        json.loads(text)
    except json.JSONDecodeError as error:
        obstacle = f"{path}:{error.lineno}, column {error.colno}: it is not valid JSON: {error.msg}."
        raise SettingError(asked, obstacle, "Correct that line.") from None
    except ValueError as error:
        raise SettingError(asked, f"{path} is not valid JSON: {error}.", "Correct it.") from None


def _compose(text: str, asked: str, path: str) -> Any:
    """The tree of YAML nodes, or None for an empty file."""
    import yaml

    try:
        # An alias can expand to a table of any size, or contain itself.
        events = yaml.parse(text) if "*" in text else ()
        alias = next((event for event in events if isinstance(event, yaml.AliasEvent)), None)
        if alias is None:
            return yaml.compose(text, Loader=yaml.SafeLoader)
        line = "?" if alias.start_mark is None else alias.start_mark.line + 1
        obstacle = f"{path}:{line} uses the alias *{alias.anchor}."
        raise SettingError(asked, obstacle, "Write the values in full instead.")
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f"{path}:{mark.line + 1}, column {mark.column + 1}" if mark is not None else str(path)
        problem = getattr(error, "problem", None) or str(error).splitlines()[0]
        raise SettingError(asked, f"{where}: it is not valid YAML: {problem}.", "Correct that line.") from None
    except RecursionError:
        raise SettingError(asked, f"{path} has too many nested levels.", "Reduce the nesting.") from None


def _entries(table: Any, prefix: str, asked: str, path: str) -> Iterator[ConfigEntry]:
    seen: dict[str, tuple[int, Any]] = {}
    for key_node, value_node in table.value:
        line = key_node.start_mark.line + 1
        if key_node.id != "scalar":
            raise SettingError(
                asked, f"{path}:{line} has a key that is not a string.", "Write one `key: value` per line."
            )
        key = prefix + key_node.value
        first = seen.setdefault(key, (line, value_node))
        if first[1] is not value_node:
            if value_node.id == "scalar" == first[1].id and value_node.value == first[1].value:
                continue
            obstacle = f"Line {line} repeats the key {key!r} of line {first[0]}."
            raise SettingError(asked, obstacle, "Remove one of the two lines.")
        yield from _entry(key, value_node, line, asked, path)


def _entry(key: str, node: Any, line: int, asked: str, path: str) -> Iterator[ConfigEntry]:
    if node.id == "mapping" and node.value:
        if key.count(".") >= 8:
            raise SettingError(asked, f"{path}:{line} has too many nested levels.", "Reduce the nesting.")
        yield from _entries(node, key + ".", asked, path)
    elif node.id == "mapping":
        yield ConfigEntry(key, None, line)
    elif node.id == "sequence":
        yield ConfigEntry(key, [_scalar(item, key, asked, path) for item in node.value], line)
    else:
        yield ConfigEntry(key, _scalar(node, key, asked, path), line)


def _scalar(node: Any, key: str, asked: str, path: str) -> str | None:
    if node.id != "scalar":
        obstacle = f"{path}:{node.start_mark.line + 1}: the list {key!r} contains another list or table."
        raise SettingError(asked, obstacle, "Write plain values in the list.")
    if node.tag == _NULL:
        return None
    text: str = node.value
    return text


DEFAULT_NAME: Final = "default_config.yaml"


def default_path(environ: Mapping[str, str]) -> str:
    """The config file that is read by default, in the cache folder of the Hugging Face libraries.

    Example:
        >>> default_path({"HF_HOME": "/data/hf"})
        '/data/hf/accelerate/default_config.yaml'
    """
    home = environ.get("HF_HOME")
    if not home:
        home = os.path.join(environ.get("XDG_CACHE_HOME") or os.path.join("~", ".cache"), "huggingface")
    return os.path.join(os.path.expanduser(home), "accelerate", DEFAULT_NAME)


_ADDITIONAL: Final = "additional_args."


class ConfigFile(NamedTuple):
    """The content of a config file.

    Args:
        path: path of the file.
        values: values by the label of their setting; the origin is the file and line.
        unread: entries that no installed package reads and that are not just defaults.
        additional: entries below `additional_args`, by name, which the SageMaker launcher passes on.
    """

    path: str
    values: Mapping[str, Given]
    unread: tuple[ConfigEntry, ...] = ()
    additional: Mapping[str, Any] = MappingProxyType({})


def read_config(path: str, classes: Iterable[type]) -> ConfigFile:
    """Read a config file.

    Args:
        path: the file.
        classes: settings classes that define the allowed keys.

    Raises:
        SettingError: the file cannot be read or is not valid, a key is unknown, or a setting cannot parse its value.
    """
    keys = _keys(classes)
    values: dict[str, Given] = {}
    unread = []
    additional = {}
    for entry in map(modern, read_document(path)):
        if entry.key in keys:
            for known in keys[entry.key]:
                given = _given(known, entry, path)
                if given is not None:
                    values[label(known)] = given
        elif entry.key.startswith(_ADDITIONAL):
            additional[entry.key.removeprefix(_ADDITIONAL)] = entry.value
        elif not is_known(entry.key):
            raise _unknown(entry, path, keys)
        elif not says_nothing(entry.key, entry.value):
            unread.append(entry)
    return ConfigFile(path, values, tuple(unread), additional)


def _keys(classes: Iterable[type]) -> dict[str, list[Setting]]:
    """Settings by key; two settings may share a key, and both read it."""
    keys: dict[str, list[Setting]] = {}
    for settings_class in classes:
        for known in settings_of(settings_class).values():
            if known.key is not None:
                keys.setdefault(known.key, []).append(known)
    return keys


def modern(entry: ConfigEntry) -> ConfigEntry:
    """An entry with the current spelling of its key."""
    key = with_prefix(entry.key)
    if key == "fp16":
        return entry._replace(key="mixed_precision", value="fp16" if str(entry.value).lower() == "true" else None)
    return entry._replace(key="dynamo_config.dynamo_backend" if key == "dynamo_backend" else key)


def _given(known: Setting, entry: ConfigEntry, path: str) -> Given | None:
    origin = f"{path}:{entry.line}"
    value: Any = entry.value
    if value is None or (known.name == "num_processes" and value == "-1"):
        return None
    if isinstance(value, list):
        if known.type.parse is JSON.parse:
            return Given(value, origin)
        if known.type is REPEATED:
            return Given(tuple(str(item) for item in value if item is not None), origin)
        value = ",".join(str(item) for item in value)
    return Given(known.parse(value, origin), origin)


def _unknown(entry: ConfigEntry, path: str, keys: Iterable[str]) -> SettingError:
    near = closest(entry.key, {*keys, *KNOWN})
    remedy = f"Did you mean {near!r}?" if near else "Remove the line, or update the package that defines the key."
    return SettingError(
        f"Cannot read the config file {path}.", f"{path}:{entry.line} has the unknown key {entry.key!r}.", remedy
    )
