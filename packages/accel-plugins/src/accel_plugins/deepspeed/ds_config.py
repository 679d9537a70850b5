"""DeepSpeed's configuration: a nested table with dotted keys, and the values that replace "auto" in it.

The configuration is read from a file or given. When something becomes known, because the settings are read or because
models, optimizers and loaders are prepared, `fill_auto` replaces "auto" by it, and refuses what contradicts it.
"""

from __future__ import annotations

import copy
import os
import sys
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final, NamedTuple

from accel_state.errors import Conflict, SettingError
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
"""Places off the device where states are kept between uses."""


class HfDeepSpeedConfig:
    """A DeepSpeed configuration that is asked by dotted keys such as "zero_optimization.stage".

    Args:
        config_file_or_dict: a table, the path of a JSON file, or a JSON text encoded in base64.

    Raises:
        SettingError: it cannot be read.

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
        """Note stage and offloading of the configuration as it is now."""
        self._stage = self.get_value("zero_optimization.stage", -1)
        devices = (self.get_value(f"zero_optimization.offload_{what}.device") for what in ("optimizer", "param"))
        self._offload = any(device in OFFLOADING for device in devices)

    def find_config_node(self, ds_key_long: str) -> tuple[dict[str, Any] | None, str]:
        """The table that contains a dotted key, or None, and the last component of the key."""
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
        """Give a dotted key a value; tables on the way are made."""
        *parents, last = ds_key_long.split(".")
        node = self.config
        for name in parents:
            node = node.setdefault(name, {})
        node[last] = value

    def del_config_sub_tree(self, ds_key_long: str, must_exist: bool = False) -> None:
        """Remove a value or a whole table.

        Raises:
            SettingError: it is not there and must be.
        """
        node, last = self.find_config_node(ds_key_long)
        if node is not None and last in node:
            del node[last]
        elif must_exist:
            raise SettingError(
                f"Cannot remove {ds_key_long!r} from the DeepSpeed configuration.",
                "There is no such entry.",
                "Look at the configuration, or leave must_exist out.",
            )

    def is_true(self, ds_key_long: str) -> bool:
        """Whether a dotted key is there with a true value."""
        return bool(self.get_value(ds_key_long, False))

    def is_false(self, ds_key_long: str) -> bool:
        """Whether a dotted key is there with a false value."""
        value = self.get_value(ds_key_long)
        return value is not None and not value

    def is_zero2(self) -> bool:
        """Whether optimizer states and gradients are sharded."""
        return bool(self._stage == 2)

    def is_zero3(self) -> bool:
        """Whether parameters are sharded as well."""
        return bool(self._stage == 3)

    def is_offload(self) -> bool:
        """Whether optimizer states or parameters are kept off the device between uses."""
        return self._offload


def read_ds_config(given: Any) -> dict[str, Any]:
    """A configuration as a table of its own.

    Args:
        given: a table, the path of a JSON file, a JSON text in base64, or an object with such a table as `config`.

    Raises:
        SettingError: it cannot be read.
    """
    given = getattr(given, "config", given)
    if isinstance(given, Mapping):
        return copy.deepcopy(dict(given))
    if not isinstance(given, (str, os.PathLike)):
        raise SettingError(
            f"Cannot read a DeepSpeed configuration of type {type(given).__name__}.",
            "A configuration is a dict or the path of a JSON file.",
            "Give a dict, or a path such as 'ds_config.json'.",
        )
    path = os.path.expanduser(os.fspath(given))
    if os.path.exists(path):
        return _parsed(_text_of(path), f"Cannot read the DeepSpeed configuration {path}.")
    return _parsed(_decoded(path), "Cannot read a DeepSpeed configuration in base64.")


def encoded(ds_config: HfDeepSpeedConfig | str | os.PathLike[str]) -> str:
    """A configuration as a variable carries it: the path that it was given as, or its JSON text in base64.

    JSON has no infinity: entries such as `steps_per_print` become the largest integer of 64 bits.

    Raises:
        SettingError: the configuration has a value that JSON has not.
    """
    if isinstance(ds_config, (str, os.PathLike)):
        return os.fspath(ds_config)
    import base64
    import json

    try:
        text = json.dumps(_finite(ds_config.config), allow_nan=False)
    except (TypeError, ValueError) as error:
        raise SettingError(
            "Cannot pass a DeepSpeed configuration on to another process.",
            f"It has a value that JSON has not: {error}.",
            "Replace the value by a number, a text, a list or a table.",
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
            "Name a JSON file that can be read.",
        ) from error


def _decoded(text: str) -> str:
    import base64
    import binascii

    try:
        return base64.urlsafe_b64decode(text).decode("utf-8")
    except (binascii.Error, ValueError):
        raise SettingError(
            f"Cannot read the DeepSpeed configuration {text!r}.",
            "There is no such file, and it is not JSON text in base64.",
            "Give the path of a JSON file, or a dict.",
        ) from None


def _parsed(text: str, asked: str) -> dict[str, Any]:
    try:
        table = parse_json(text)
    except ValueError as error:
        raise SettingError(asked, str(error), "Correct the text there.") from None
    if not isinstance(table, dict):
        raise SettingError(asked, f"It contains a {type(table).__name__}.", "Write a JSON object, in braces.")
    return table


AUTO_ENTRY: Final = "auto"


class AutoValue(NamedTuple):
    """A value that the run knows for one entry.

    Args:
        key: the dotted key of the entry.
        value: what is known.
        source: where it is known from, as users would name it: "DeepSpeedPlugin(zero_stage=2)".
        needed: add the entry where the configuration has none.
        binding: the configuration may not say something else; otherwise this is a suggestion.
    """

    key: str
    value: Any
    source: str
    needed: bool = False
    binding: bool = True


def fill_auto(ds_config: HfDeepSpeedConfig, auto_values: Iterable[AutoValue]) -> None:
    """Set the entries for which the configuration says "auto", or that it lacks and needs.

    Raises:
        Conflict: the configuration contradicts a value; all contradictions are named.
    """
    known = list(auto_values)
    refuse(contradictions(ds_config, known))
    for auto in known:
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
    """Raise for what `contradictions` found.

    Raises:
        Conflict: there is anything.
    """
    if lines:
        raise Conflict(
            "Cannot configure DeepSpeed from two sources.",
            f"They contradict each other: {'; '.join(lines)}.",
            'Let both say the same, or write "auto" in the configuration.',
        )


def refuse_auto(ds_config: HfDeepSpeedConfig) -> None:
    """Refuse a configuration that still says "auto" somewhere.

    Raises:
        SettingError: it does; all such entries are named.
    """
    left = sorted(_auto_keys(ds_config.config))
    if left:
        raise SettingError(
            "Cannot start DeepSpeed.",
            f"The value of {', '.join(left)} is not known.",
            'Replace "auto" by numbers. Sizes of ZeRO stage 3 follow from model.config.hidden_size, learning rates '
            "from a DummyOptim, schedules from a DummyScheduler.",
        )


def _auto_keys(table: Mapping[str, Any], before: str = "") -> Iterator[str]:
    for name, value in table.items():
        if isinstance(value, Mapping):
            yield from _auto_keys(value, f"{before}{name}.")
        elif value == AUTO_ENTRY:
            yield before + name


def _same(one: Any, other: Any) -> bool:
    """Whether two values say the same, be they numbers or texts of numbers."""
    if one == other:
        return True
    if isinstance(one, bool) or isinstance(other, bool):
        return str(one).lower() == str(other).lower()
    try:
        return float(one) == float(other)
    except (TypeError, ValueError):
        return False
