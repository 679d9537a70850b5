"""DeepSpeed's own configuration: a nested table, read from a file or given, and asked by dotted keys."""

from __future__ import annotations

import copy
import os
from collections.abc import Mapping
from typing import Any, Final

from accel_state.errors import SettingError
from accel_state.untrusted import parse_json, read_limited

__all__ = ("OFFLOADING", "HfDeepSpeedConfig", "read_document")

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
        self.config: dict[str, Any] = read_document(config_file_or_dict)
        self.set_stage_and_offload()

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.config!r})"

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
        """Whether optimizer states and gradients are divided."""
        return bool(self._stage == 2)

    def is_zero3(self) -> bool:
        """Whether parameters are divided as well."""
        return bool(self._stage == 3)

    def is_offload(self) -> bool:
        """Whether optimizer states or parameters are kept off the device between uses."""
        return self._offload


def read_document(given: Any) -> dict[str, Any]:
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
            f"A DeepSpeed configuration of type {type(given).__name__} was given.",
            "It has to be a table or the path of a JSON file.",
            "Give a dict, or a path such as 'ds_config.json'.",
        )
    path = os.path.expanduser(os.fspath(given))
    if os.path.exists(path):
        return _parsed(_text_of(path), f"Cannot read the DeepSpeed configuration {path}.")
    return _parsed(_decoded(path), "Cannot read a DeepSpeed configuration in base64.")


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
        raise SettingError(asked, f"It holds a {type(table).__name__}.", "Write a table in braces.")
    return table
