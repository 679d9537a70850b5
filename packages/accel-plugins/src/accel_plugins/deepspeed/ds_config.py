"""DeepSpeed's configuration: a nested dict with dotted keys, and the values that replace "auto" in it.

The configuration is read from a file or passed by the user. When a value becomes known from the settings or from
prepared models, optimizers and loaders, `fill_auto` replaces "auto" by it, and raises for contradictions.
"""

from __future__ import annotations

import copy
import os
import sys
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final, NamedTuple

from accel_state.errors import Conflict, SettingError
from accel_state.settings.integers import as_int
from accel_state.untrusted import parse_json, read_limited

__all__ = (
    "AUTO_ENTRY",
    "OFFLOADING",
    "AutoValue",
    "HfDeepSpeedConfig",
    "contradictions",
    "encoded",
    "fill_auto",
    "read_ds_config",
    "refuse",
    "refuse_auto",
)

OFFLOADING: Final = ("cpu", "nvme")
"""The targets of offloading."""


class HfDeepSpeedConfig:
    """A DeepSpeed configuration with access by dotted keys such as "zero_optimization.stage".

    Args:
        config_file_or_dict: a dict, the path of a JSON file, or base64-encoded JSON.

    Raises:
        SettingError: the configuration cannot be read.

    Example:
        >>> HfDeepSpeedConfig({"zero_optimization": {"stage": 3}}).is_zero3()
        True
    """

    def __init__(self, config_file_or_dict: Mapping[str, Any] | str | os.PathLike[str]) -> None:
        self.config: dict[str, Any] = read_ds_config(config_file_or_dict)
        self.set_stage_and_offload()

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.config!r})"

    def __eq__(self, other: object) -> bool:
        return self.config == other.config if isinstance(other, HfDeepSpeedConfig) else NotImplemented

    def set_stage_and_offload(self) -> None:
        """Store the stage and offloading of the current configuration."""
        self._stage = self.get_value("zero_optimization.stage", -1)
        devices = (self.get_value(f"zero_optimization.offload_{what}.device") for what in ("optimizer", "param"))
        self._offload = any(device in OFFLOADING for device in devices)

    def find_config_node(self, ds_key_long: str) -> tuple[dict[str, Any] | None, str]:
        """The dict that contains a dotted key, or None, and the last component of the key."""
        *parents, last = ds_key_long.split(".")
        node: Any = self.config
        for name in parents:
            node = node.get(name)
            if not isinstance(node, dict):
                return None, last
        return node, last

    def get_value(self, ds_key_long: str, default: Any = None) -> Any:
        """The value of a dotted key."""
        node, last = self.find_config_node(ds_key_long)
        return default if node is None else node.get(last, default)

    def set_value(self, ds_key_long: str, value: Any) -> None:
        """Set the value of a dotted key; create missing dicts."""
        *parents, last = ds_key_long.split(".")
        node = self.config
        for name in parents:
            node = node.setdefault(name, {})
        # The configuration is JSON, which has no integers of numpy.
        node[last] = value if (number := as_int(value)) is None else number

    def del_config_sub_tree(self, ds_key_long: str, must_exist: bool = False) -> None:
        """Remove a value or a whole dict.

        Raises:
            SettingError: the entry does not exist, and `must_exist` is set.
        """
        node, last = self.find_config_node(ds_key_long)
        if node is not None and last in node:
            del node[last]
        elif must_exist:
            raise SettingError(
                f"Cannot remove {ds_key_long!r} from the DeepSpeed configuration.",
                "The configuration has no such entry.",
                "Correct the key, or remove must_exist.",
            )

    def is_true(self, ds_key_long: str) -> bool:
        """Whether a dotted key exists with a true value."""
        return bool(self.get_value(ds_key_long, False))

    def is_false(self, ds_key_long: str) -> bool:
        """Whether a dotted key exists with a false value."""
        value = self.get_value(ds_key_long)
        return value is not None and not value

    def is_zero2(self) -> bool:
        """Whether optimizer states and gradients are sharded."""
        return bool(self._stage == 2)

    def is_zero3(self) -> bool:
        """Whether parameters are sharded too."""
        return bool(self._stage == 3)

    def is_offload(self) -> bool:
        """Whether optimizer states or parameters are offloaded."""
        return self._offload


def read_ds_config(source: Any) -> dict[str, Any]:
    """A configuration as a new dict.

    Args:
        source: a dict, the path of a JSON file, base64-encoded JSON, or an object with such a dict as `config`.

    Raises:
        SettingError: the configuration cannot be read.
    """
    source = getattr(source, "config", source)
    if isinstance(source, Mapping):
        return copy.deepcopy(dict(source))
    if not isinstance(source, (str, os.PathLike)):
        raise SettingError(
            f"Cannot read a DeepSpeed configuration of type {type(source).__name__}.",
            "The configuration must be a dict or the path of a JSON file.",
            "Pass a dict, or a path such as 'ds_config.json'.",
        )
    path = os.path.expanduser(os.fspath(source))
    if os.path.exists(path):
        return _parsed(_text_of(path), f"Cannot read the DeepSpeed configuration {path}.")
    return _parsed(_decoded(path), "Cannot read a DeepSpeed configuration in base64.")


def encoded(ds_config: HfDeepSpeedConfig | str | os.PathLike[str]) -> str:
    """A configuration as the value of an environment variable: its path, or base64-encoded JSON.

    JSON has no infinity: in entries such as `steps_per_print` it becomes the largest 64-bit integer.

    Raises:
        SettingError: the configuration has a value that JSON cannot represent.
    """
    if isinstance(ds_config, (str, os.PathLike)):
        return os.fspath(ds_config)
    import base64
    import json

    try:
        text = json.dumps(_finite(ds_config.config), allow_nan=False)
    except (TypeError, ValueError) as error:
        raise SettingError(
            "Cannot pass a DeepSpeed configuration to another process.",
            f"It has a value that JSON cannot represent: {error}.",
            "Replace the value by a number, a string, a list or a dict.",
        ) from error
    return base64.urlsafe_b64encode(text.encode()).decode()


def _finite(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _finite(entry) for key, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(entry) for entry in value]
    return sys.maxsize if value == float("inf") else value


def _text_of(path: str) -> str:
    try:
        return read_limited(path).decode()
    except (OSError, UnicodeDecodeError) as error:
        raise SettingError(
            f"Cannot read the DeepSpeed configuration {path}.",
            f"{type(error).__name__}: {error}",
            "Use a readable JSON file.",
        ) from error


def _decoded(text: str) -> str:
    import base64
    import binascii

    try:
        return base64.urlsafe_b64decode(text).decode("utf-8")
    except (binascii.Error, ValueError):
        raise SettingError(
            f"Cannot read the DeepSpeed configuration {text!r}.",
            "There is no such file, and the value is not base64-encoded JSON.",
            "Pass the path of a JSON file, or a dict.",
        ) from None


def _parsed(text: str, failure: str) -> dict[str, Any]:
    try:
        table = parse_json(text)
    except ValueError as error:
        raise SettingError(failure, str(error), "Correct the JSON there.") from None
    if not isinstance(table, dict):
        raise SettingError(failure, f"It contains a {type(table).__name__}.", "Write a JSON object, in braces.")
    return table


AUTO_ENTRY: Final = "auto"


class AutoValue(NamedTuple):
    """A known value of an entry.

    Args:
        key: the dotted key of the entry.
        value: the known value.
        source: its source, in the user's terms, such as "DeepSpeedPlugin(zero_stage=2)".
        needed: add the entry if the configuration has none.
        binding: the configuration must not have another value; False: this is a suggestion.
    """

    key: str
    value: Any
    source: str
    needed: bool = False
    binding: bool = True


def fill_auto(ds_config: HfDeepSpeedConfig, auto_values: Iterable[AutoValue]) -> None:
    """Set the entries that are "auto" in the configuration, or missing and needed.

    Raises:
        Conflict: the configuration contradicts values; the message lists all.
    """
    values = list(auto_values)
    refuse(contradictions(ds_config, values))
    for auto in values:
        present = ds_config.get_value(auto.key)
        if present == AUTO_ENTRY or (present is None and auto.needed):
            ds_config.set_value(auto.key, auto.value)
    ds_config.set_stage_and_offload()


def contradictions(ds_config: HfDeepSpeedConfig, auto_values: Iterable[AutoValue]) -> list[str]:
    """One line for each value that the configuration contradicts."""
    return [
        f"{auto.key} is {present!r} in the DeepSpeed configuration, and {auto.value!r} by {auto.source}"
        for auto in auto_values
        if auto.binding
        and (present := ds_config.get_value(auto.key)) not in (None, AUTO_ENTRY)
        and not _same(present, auto.value)
    ]


def refuse(lines: list[str]) -> None:
    """Raise for the results of `contradictions`.

    Raises:
        Conflict: there are contradictions.
    """
    if lines:
        raise Conflict(
            "Cannot configure DeepSpeed from two sources.",
            f"They contradict each other: {'; '.join(lines)}.",
            'Set the same value in both, or "auto" in the configuration.',
        )


def refuse_auto(ds_config: HfDeepSpeedConfig) -> None:
    """Raise for a configuration that still contains "auto".

    Raises:
        SettingError: it does; the message lists all such entries.
    """
    left = sorted(_auto_keys(ds_config.config))
    if left:
        raise SettingError(
            "Cannot start DeepSpeed.",
            f"The value of {', '.join(left)} is not known.",
            'Replace "auto" by numbers. Sizes of ZeRO stage 3 are derived from model.config.hidden_size, learning '
            "rates from a DummyOptim, schedules from a DummyScheduler.",
        )


def _auto_keys(table: Mapping[str, Any], before: str = "") -> Iterator[str]:
    for name, value in table.items():
        if isinstance(value, Mapping):
            yield from _auto_keys(value, f"{before}{name}.")
        elif value == AUTO_ENTRY:
            yield before + name


def _same(one: Any, other: Any) -> bool:
    """Whether two values are equal, as numbers or strings of numbers."""
    if one == other:
        return True
    if isinstance(one, bool) or isinstance(other, bool):
        return str(one).lower() == str(other).lower()
    try:
        return float(one) == float(other)
    except (TypeError, ValueError):
        return False
