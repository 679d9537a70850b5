"""Config files: the path of the user's default file, entries with line numbers, and the values of settings.

Scalars are read as text, which the setting of the entry then parses: `mixed_precision: no` means the word and not a
bool. A file of another program is read as far as it can be: what has no effect becomes a note, not an error.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from types import MappingProxyType
from typing import Any, Final, NamedTuple

from accel_cli.config.resolved import REPEATED, label
from accel_state.errors import NotFound, SettingError
from accel_state.settings.environ import Given
from accel_state.settings.schema import JSON, Setting, closest, settings_of

__all__ = (
    "DEFAULT_NAME",
    "PREFIXES",
    "ConfigEntry",
    "ConfigFile",
    "default_path",
    "is_default",
    "modern",
    "read_config",
    "read_document",
    "read_tables",
    "with_prefix",
)

_MAX_BYTES: Final = 100_000
"""Size in bytes of the largest file."""

_NULL_TAG: Final = "tag:yaml.org,2002:null"


class ConfigEntry(NamedTuple):
    """One value of a config file.

    Args:
        key: its key; keys of nested tables are joined by dots.
        value: text of a scalar, list of such texts, or None for null and for an empty table. A list may contain further
            lists and tables.
        line: line of its key, from 1.
        replaces: line of an earlier entry with the same key, which is not used; 0 without one.
    """

    key: str
    value: Any
    line: int
    replaces: int = 0


def read_document(path: str) -> tuple[ConfigEntry, ...]:
    """Entries of a config file; of two with the same key, the last.

    Raises:
        NotFound: there is no such file.
        SettingError: the file cannot be read, is not valid YAML or JSON, or is not a table of keys.
    """
    import yaml

    failure = f"Cannot read the config file {path}."
    text = _text(path, failure)
    try:
        loader = yaml.SafeLoader(text)
        root = loader.get_single_node()
        if root is None or root.tag == _NULL_TAG:
            return ()
        if not isinstance(root, yaml.MappingNode):
            where = f"{path}:{root.start_mark.line + 1} is not a `key: value` entry."
            raise SettingError(failure, where, "Write one `key: value` per line.")
        return tuple(_entries(loader, root, "", failure, path))
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f"{path}:{mark.line + 1}, column {mark.column + 1}" if mark is not None else path
        problem = getattr(error, "problem", None) or str(error).splitlines()[0]
        raise SettingError(failure, f"{where}: it is not valid YAML: {problem}.", "Correct that line.") from None
    except RecursionError:
        raise SettingError(failure, f"{path} has too many nested levels.", "Reduce the nesting.") from None


def read_tables(path: str) -> dict[str, Any]:
    """Read a config file as nested tables, with scalars parsed as YAML defines.

    Raises:
        SettingError: as `read_document`, or a scalar is invalid, such as the date 31 February.
    """
    import yaml

    read_document(path)
    failure = f"Cannot read the config file {path}."
    try:
        tables: dict[str, Any] = yaml.safe_load(_text(path, failure)) or {}
    except (yaml.YAMLError, ValueError, OverflowError, RecursionError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise SettingError(failure, f"A value cannot be parsed: {reason}.", "Put that value in quotes.") from None
    return tables


def _text(path: str, failure: str) -> str:
    from accel_state.untrusted import read_limited

    try:
        text = read_limited(path, _MAX_BYTES, from_shell=True).decode().replace("\r\n", "\n").replace("\r", "\n")
    except FileNotFoundError:
        remedy = "Check the path, or write a file with `accel config`."
        raise NotFound(failure, "There is no such file.", remedy) from None
    except (OSError, UnicodeDecodeError) as error:
        remedy = f"Give a readable text file of at most {_MAX_BYTES} bytes."
        raise SettingError(failure, f"It cannot be read: {error}.", remedy) from None
    if path.endswith(".json"):
        # JSON is YAML without tabs for indentation; its strings never contain tabs.
        text = text.replace("\t", " ")
    return text


def _entries(loader: Any, table: Any, prefix: str, failure: str, path: str) -> Iterator[ConfigEntry]:
    """The entries of a table, and of the tables in it."""
    # Entries that the table takes over from others (`<<: *base`) come first, so that its own replace them.
    loader.flatten_mapping(table)
    last: dict[str, tuple[Any, int, int]] = {}
    for key_node, value in table.value:
        line = key_node.start_mark.line + 1
        if key_node.id != "scalar":
            remedy = "Write one `key: value` per line."
            raise SettingError(failure, f"{path}:{line} has a key that is not a string.", remedy)
        earlier, first, _ = last.pop(key_node.value, (value, 0, 0))
        same = earlier.id == value.id == "scalar" and earlier.value == value.value
        last[key_node.value] = value, line, 0 if same else first
    for key, (value, line, replaces) in last.items():
        if value.id == "mapping" and value.value:
            for entry in _entries(loader, value, f"{prefix}{key}.", failure, path):
                yield entry._replace(replaces=entry.replaces or replaces)
                replaces = 0
        else:
            yield ConfigEntry(prefix + key, _value(value), line, replaces)


def _value(node: Any) -> Any:
    if node.id == "scalar":
        return None if node.tag == _NULL_TAG else node.value
    if node.id == "sequence":
        return [_value(item) for item in node.value]
    return {key.value: _value(value) for key, value in node.value} or None


PREFIXES: Final = {"dynamo_config": "dynamo_", "fp8_config": "fp8_", "fsdp_config": "fsdp_"}
"""Tables whose keys may be written without this prefix."""

_OLD_KEYS: Final = {
    "dynamo_backend": "dynamo_config.dynamo_backend",
    "fp8_config.fp8_amax_compute_algorithm": "fp8_config.fp8_amax_compute_algo",
    "fp8_config.fp8_amax_history_length": "fp8_config.fp8_amax_history_len",
    "fp8_config.fp8_optimization_level": "fp8_config.fp8_opt_level",
    "fsdp_config.fsdp_backward_prefetch_policy": "fsdp_config.fsdp_backward_prefetch",
}
"""Keys that earlier versions of Accelerate or its wizard wrote, with the current key."""

_KEYS_OF_OTHER_PACKAGES: Final = frozenset(
    [
        "additional_args",
        "base_job_name",
        "command_file",
        "commands",
        "deepspeed_config",
        "downcast_bf16",
        "dynamo_config",
        "ec2_instance_type",
        "fp8_config",
        "fsdp_config",
        "iam_role_name",
        "image_uri",
        "main_training_function",
        "megatron_lm_config",
        "mpirun_config",
        "parallelism_config",
        "profile",
        "py_version",
        "pytorch_version",
        "region",
        "sagemaker_inputs_file",
        "sagemaker_metrics_file",
        "same_network",
        "tpu_env",
        "tpu_name",
        "tpu_use_cluster",
        "tpu_use_sudo",
        "tpu_vm",
        "tpu_zone",
        "transformers_version",
    ]
)
"""Keys at the top of files of Accelerate that may belong to packages which are not installed."""

# Values that `accelerate config` writes into every file.
_VALUES_OF_THE_WIZARD: Final = {
    "downcast_bf16": ("no", "false"),
    "main_training_function": ("main",),
    "same_network": ("true", "false"),
    "tpu_use_cluster": ("false",),
    "tpu_use_sudo": ("false",),
    "dynamo_config.dynamo_backend": ("no", "NO"),
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


def is_default(key: str, value: object) -> bool:
    """Whether an entry only repeats a default, so that it can be removed."""
    return value in (None, []) or str(value) in _VALUES_OF_THE_WIZARD.get(key, ())


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


_ADDITIONAL_PREFIX: Final = "additional_args."


class ConfigFile(NamedTuple):
    """The content of a config file.

    Args:
        path: path of the file.
        values: values by the label of their setting; the origin is the file and line.
        unread: entries that no installed package reads and that are not just defaults. A table inside a table is one
            entry.
        refused: errors for values that cannot be parsed, by the label of their setting. Files of other programs have
            such values in settings without effect.
        replaced: entries that replace an earlier one with the same key.
        additional: entries below `additional_args`, by name, which the SageMaker launcher passes on.
    """

    path: str
    values: Mapping[str, Given]
    unread: tuple[ConfigEntry, ...] = ()
    refused: Mapping[str, SettingError] = MappingProxyType({})
    replaced: tuple[ConfigEntry, ...] = ()
    additional: Mapping[str, Any] = MappingProxyType({})


def read_config(path: str, classes: Iterable[type]) -> ConfigFile:
    """Read a config file.

    Args:
        path: the file.
        classes: settings classes that define the allowed keys.

    Raises:
        SettingError: the file cannot be read or is not valid, or a key at its top is unknown.
    """
    keys = _keys(classes)
    values: dict[str, Given] = {}
    refused: dict[str, SettingError] = {}
    unread: dict[str, ConfigEntry] = {}
    additional = {}
    entries = tuple(map(modern, read_document(path)))
    for entry in entries:
        for setting in keys.get(entry.key, ()):
            try:
                candidate = _candidate(setting, entry, path)
            except SettingError as error:
                refused[label(setting)] = error
            else:
                values.update({} if candidate is None else {label(setting): candidate})
        if entry.key.startswith(_ADDITIONAL_PREFIX):
            additional[entry.key.removeprefix(_ADDITIONAL_PREFIX)] = entry.value
        elif entry.key not in keys:
            _check_known(entry, path, keys)
            if not is_default(entry.key, entry.value):
                table = ".".join(entry.key.split(".")[:2])
                unread.setdefault(table, entry if table == entry.key else entry._replace(key=table, value="{...}"))
    replaced = tuple(entry for entry in entries if entry.replaces)
    return ConfigFile(path, values, tuple(unread.values()), refused, replaced, additional)


def _keys(classes: Iterable[type]) -> dict[str, list[Setting]]:
    """Settings by key; two settings may share a key, and both read it."""
    keys: dict[str, list[Setting]] = {}
    for settings_class in classes:
        for setting in settings_of(settings_class).values():
            if setting.key is not None:
                keys.setdefault(setting.key, []).append(setting)
    return keys


def modern(entry: ConfigEntry) -> ConfigEntry:
    """An entry with the current spelling of its key."""
    key = with_prefix(entry.key)
    if key == "fp16":
        return entry._replace(key="mixed_precision", value="fp16" if str(entry.value).lower() == "true" else None)
    return entry._replace(key=_OLD_KEYS.get(key, key))


def _candidate(setting: Setting, entry: ConfigEntry, path: str) -> Given | None:
    origin = f"{path}:{entry.line}"
    value: Any = entry.value
    if value is None or (setting.name == "num_processes" and value == "-1"):
        return None
    if isinstance(value, list):
        if any(isinstance(item, list | dict) for item in value):
            obstacle = f"{origin}: the list {entry.key!r} contains another list or table."
            raise SettingError(f"Cannot read the config file {path}.", obstacle, "Write plain values in the list.")
        if setting.type.parse is JSON.parse:
            return Given(value, origin)
        if setting.type is REPEATED:
            return Given(tuple(str(item) for item in value if item is not None), origin)
        value = ",".join(str(item) for item in value)
    return Given(setting.parse(value, origin), origin)


def _check_known(entry: ConfigEntry, path: str, keys: Iterable[str]) -> None:
    """Check that files of Accelerate have the key at the top of the file; tables have more keys than are known."""
    top = entry.key.partition(".")[0]
    if top in _KEYS_OF_OTHER_PACKAGES or any(key.startswith(f"{top}.") for key in keys):
        return
    near = closest(entry.key, {*keys, *_KEYS_OF_OTHER_PACKAGES})
    remedy = f"Did you mean {near!r}?" if near else "Remove the line, or update the package that defines the key."
    raise SettingError(
        f"Cannot read the config file {path}.", f"{path}:{entry.line} has the unknown key {entry.key!r}.", remedy
    )
