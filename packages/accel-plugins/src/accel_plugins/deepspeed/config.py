"""Settings of DeepSpeed: plain data, without torch and DeepSpeed.

`DeepSpeedPlugin` combines all settings in its `deepspeed_config`, the dict that DeepSpeed reads: the user's
configuration with the other settings added, or a new dict. "auto" in it means a value that follows from the settings
or from prepared models, optimizers and loaders; `fill_auto` replaces it, and raises for contradictions. `DummyOptim`
and `DummyScheduler` stand for objects that the configuration describes.
"""

# ruff: noqa: RUF009 - `setting` makes the fields of every settings class

from __future__ import annotations

import copy
import os
import re
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, fields
from functools import partial
from typing import Any, ClassVar, Final, Literal, NamedTuple

from accel_plugins.manifest import ObjectKind
from accel_plugins.precision.config import FP8Settings, no_msamp
from accel_state.errors import Conflict, NotOffered, SettingError
from accel_state.library import stack_level
from accel_state.settings.environ import DEFAULT, read_setting, resolve
from accel_state.settings.installed import importable, installed_version
from accel_state.settings.integers import as_int
from accel_state.settings.schema import BOOLEAN, TEXT, ValueType, choice, int_at_least, setting, settings_of
from accel_state.untrusted import parse_json, read_limited

__all__ = (
    "AUTO_ENTRY",
    "OFFLOADING",
    "AutoValue",
    "DeepSpeedPlugin",
    "DummyOptim",
    "DummyScheduler",
    "HfDeepSpeedConfig",
    "contradictions",
    "fill_auto",
    "refuse_auto",
    "transformers_view",
)


_BASE64: Final = re.compile(r"[A-Za-z0-9_-]+={0,2}")

AUTO_ENTRY: Final = "auto"

OFFLOADING: Final = ("cpu", "nvme")
"""The targets of offloading."""


# ---------------------------------------------------------------- the configuration
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
        self.config: dict[str, Any] = _read(config_file_or_dict)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.config!r})"

    def __eq__(self, other: object) -> bool:
        return self.config == other.config if isinstance(other, HfDeepSpeedConfig) else NotImplemented

    def set_stage_and_offload(self) -> None:
        """Do nothing: the stage and offloading are read from the configuration at each question."""

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
        return bool(self.get_value("zero_optimization.stage") == 2)

    def is_zero3(self) -> bool:
        """Whether parameters are sharded too."""
        return bool(self.get_value("zero_optimization.stage") == 3)

    def is_offload(self) -> bool:
        """Whether optimizer states or parameters are offloaded."""
        entries = (self.get_value(f"zero_optimization.offload_{what}.device") for what in ("optimizer", "param"))
        return any(device in OFFLOADING for device in entries)


def _read(source: Any) -> dict[str, Any]:
    """A configuration as a new dict, from a dict, a file, JSON in base64, or an object with such a dict as `config`.

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
    import base64

    name = os.path.expanduser(os.fspath(source))
    is_file = os.path.exists(name)
    if not is_file and not _BASE64.fullmatch(name):
        raise SettingError(
            f"Cannot read the DeepSpeed configuration {name!r}.",
            "There is no such file, and the value is not base64-encoded JSON.",
            "Pass the path of a JSON file, or a dict.",
        )
    try:
        table = parse_json(read_limited(name) if is_file else base64.urlsafe_b64decode(name))
        if not isinstance(table, dict):
            raise ValueError(f"It contains a {type(table).__name__}.")
    except (OSError, ValueError) as error:
        raise SettingError(
            f"Cannot read the DeepSpeed configuration {name if is_file else 'in base64'}.",
            str(error) if isinstance(error, ValueError) else f"{type(error).__name__}: {error}",
            "Use a readable file with a JSON object, in braces.",
        ) from None
    return table


def _encoded(ds_config: HfDeepSpeedConfig | str | os.PathLike[str]) -> str:
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
    _refuse(contradictions(ds_config, values))
    for auto in values:
        present = ds_config.get_value(auto.key)
        if present == AUTO_ENTRY or (present is None and auto.needed):
            ds_config.set_value(auto.key, auto.value)


def contradictions(ds_config: HfDeepSpeedConfig, auto_values: Iterable[AutoValue]) -> list[str]:
    """One line for each value that the configuration contradicts."""
    return [
        f"{auto.key} is {present!r} in the DeepSpeed configuration, and {auto.value!r} by {auto.source}"
        for auto in auto_values
        if auto.binding
        and (present := ds_config.get_value(auto.key)) not in (None, AUTO_ENTRY)
        and not _same(present, auto.value)
    ]


def _refuse(lines: list[str]) -> None:
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


# ---------------------------------------------------------------- the settings
_GROUP: Final = "DeepSpeed"
_NARROW_PRECISIONS: Final = ("fp16", "bf16")
_DEFAULT_TABLE: Final = {
    "train_batch_size": AUTO_ENTRY,
    "train_micro_batch_size_per_gpu": AUTO_ENTRY,
    "gradient_accumulation_steps": AUTO_ENTRY,
    "gradient_clipping": AUTO_ENTRY,
    "steps_per_print": float("inf"),
    "zero_allow_untested_optimizer": True,
}
_DEFAULT_ZERO: Final = {
    "zero_optimization.stage": 2,
    "zero_optimization.offload_optimizer.device": "none",
    "zero_optimization.offload_param.device": "none",
    "zero_optimization.stage3_gather_16bit_weights_on_model_save": False,
}
"""The default configuration; settings come first."""
_ENTRY_OF_SETTING: Final = {
    "gradient_accumulation_steps": "gradient_accumulation_steps",
    "gradient_clipping": "gradient_clipping",
    "zero_stage": "zero_optimization.stage",
    "offload_optimizer_device": "zero_optimization.offload_optimizer.device",
    "offload_param_device": "zero_optimization.offload_param.device",
    "offload_optimizer_nvme_path": "zero_optimization.offload_optimizer.nvme_path",
    "offload_param_nvme_path": "zero_optimization.offload_param.nvme_path",
    "zero3_save_16bit_model": "zero_optimization.stage3_gather_16bit_weights_on_model_save",
}
"""The keys of the settings in DeepSpeed's configuration."""


def _in_table(kind: ValueType) -> ValueType:
    """The type of a setting in DeepSpeed's configuration; unset values are written as an empty string."""
    return kind._replace(format=lambda value: "" if value in (AUTO_ENTRY, "none") else kind.format(value))


_NO_ACTIVE_CONFIGURATION: Final = (
    "The run must know its active configuration.",
    "Call AcceleratorState().select_deepspeed_plugin(name).",
)


def _stage(text: str) -> int:
    stage = int(text.strip().lower().removeprefix("zero"))
    if not 0 <= stage <= 3:
        raise ValueError(text)
    return stage


_FOLDER_TYPE: Final = _in_table(TEXT)
_DEVICE_TYPE: Final = _in_table(choice("none", "cpu", "nvme"))


def _norm(text: str) -> float | str | None:
    word = text.strip().lower()
    return None if word == "none" else word if word == AUTO_ENTRY else float(word)


_carried: Final = partial(
    setting, variable="ACCELERATE_DEEPSPEED_{NAME}", flag="--{name}", key="deepspeed_config.{name}", group=_GROUP
)
"""A setting; its variable, flag and key are derived from the field name."""


@dataclass(init=False)
class DeepSpeedPlugin:
    """How DeepSpeed trains. A field that is None is read from the environment, else from the configuration.

    Args:
        hf_ds_config: DeepSpeed's configuration: a dict, the path of a JSON file, or an object with the attribute
            `config`.
        gradient_accumulation_steps: micro-batches per optimizer step.
        gradient_clipping: maximum norm of the gradients; 1.0 by default.
        zero_stage: what is sharded: 0: nothing; 1: optimizer states; 2: also gradients; 3: also parameters.
        is_train_batch_min: with several loaders, use the smallest batch size; False: the largest.
        offload_optimizer_device: where to store optimizer states between uses: "none", "cpu" or "nvme".
        offload_param_device: the same for parameters, with stage 3.
        offload_optimizer_nvme_path: folder on the NVMe disk.
        offload_param_nvme_path: folder on the NVMe disk.
        zero3_init_flag: shard parameters while transformers creates a model; the default with stage 3.
        zero3_save_16bit_model: gather 16-bit weights when the model is saved, with stage 3.
        transformer_moe_cls_names: classes of mixture-of-experts layers, separated by commas.
        enable_msamp: train in fp8 with MS-AMP; such a run raises an error, because MS-AMP is not on any package index.
        msamp_opt_level: "O1" or "O2".
        auto_wrap_policy: has no effect.
        config: further top-level entries of DeepSpeed's configuration.

    Attributes:
        deepspeed_config: the dict that DeepSpeed reads.
        dschf: the configuration object for transformers, after it was selected.

    Raises:
        SettingError: a value or the configuration is invalid.
        Conflict: the configuration and another setting contradict each other.

    Example:
        >>> plugin = DeepSpeedPlugin(zero_stage=3, offload_param_device="cpu")
        >>> accelerator = Accelerator(mixed_precision="bf16", deepspeed_plugin=plugin)
    """

    hf_ds_config: Any = setting(
        None,
        type=ValueType("the path of a JSON file, or JSON text in base64", str, _encoded, metavar="PATH"),
        variable="ACCELERATE_DEEPSPEED_CONFIG_FILE",
        flag="--deepspeed_config_file",
        key="deepspeed_config.deepspeed_config_file",
        help="JSON file with DeepSpeed's own configuration.",
        group=_GROUP,
    )
    gradient_accumulation_steps: int = _carried(
        type=_in_table(int_at_least(1)),
        variable="ACCELERATE_{NAME}",
        help="Micro-batches in each optimizer step.",
    )
    gradient_clipping: float = _carried(
        help="Maximum norm of gradients, or auto.",
        type=_in_table(ValueType("a number, auto or none", _norm, metavar="N")),
        variable="ACCELERATE_{NAME}",
    )
    zero_stage: int = _carried(
        help="ZeRO stage: 0 shards nothing, 1 optimizer states, 2 also gradients, 3 also parameters.",
        type=_in_table(ValueType("a stage from 0 to 3", _stage, metavar="N")),
        question="Which stage of ZeRO do you want to use? (0, 1, 2 or 3)",
    )
    is_train_batch_min: bool = True
    offload_optimizer_device: str = _carried(help="Device for offloaded optimizer states.", type=_DEVICE_TYPE)
    offload_param_device: str = _carried(help="Device for offloaded parameters.", type=_DEVICE_TYPE)
    offload_optimizer_nvme_path: str = _carried(help="Folder on the NVMe disk for optimizer states.", type=_FOLDER_TYPE)
    offload_param_nvme_path: str = _carried(help="Folder on the NVMe disk for parameters.", type=_FOLDER_TYPE)
    zero3_init_flag: bool = _carried(
        help="Shard parameters while the model is created.", type=BOOLEAN, variable="ACCELERATE_DEEPSPEED_ZERO3_INIT"
    )
    zero3_save_16bit_model: bool = _carried(
        help="Gather 16-bit weights when the model is saved.",
        type=BOOLEAN._replace(format=lambda value: "true" if value is True else ""),
    )
    transformer_moe_cls_names: str = setting(
        None,
        variable="ACCELERATE_DEEPSPEED_MOE_LAYER_CLS_NAMES",
        flag="--deepspeed_moe_layer_cls_names",
        key="deepspeed_config.deepspeed_moe_layer_cls_names",
        help="Classes of mixture-of-experts layers, separated by commas.",
        group=_GROUP,
    )
    enable_msamp: bool | None = None
    msamp_opt_level: Literal["O1", "O2"] | None = None

    def __init__(
        self,
        hf_ds_config: Any = None,
        gradient_accumulation_steps: int | None = None,
        gradient_clipping: float | None = None,
        zero_stage: int | None = None,
        is_train_batch_min: bool = True,
        offload_optimizer_device: str | None = None,
        offload_param_device: str | None = None,
        offload_optimizer_nvme_path: str | None = None,
        offload_param_nvme_path: str | None = None,
        zero3_init_flag: bool | None = None,
        zero3_save_16bit_model: bool | None = None,
        transformer_moe_cls_names: str | None = None,
        enable_msamp: bool | None = None,
        msamp_opt_level: Literal["O1", "O2"] | None = None,
        *,
        auto_wrap_policy: Any = None,
        **config: Any,
    ) -> None:
        arguments = dict(locals())
        for field in fields(self):
            setattr(self, field.name, arguments[field.name])
        self._further = config
        self._selected = False
        self._leaves_steps_open = False
        self.dschf: Any = None
        if auto_wrap_policy is not None:
            warnings.warn("DeepSpeedPlugin(auto_wrap_policy=...) has no effect.", UserWarning, stacklevel=stack_level())
        self.__post_init__()

    def __post_init__(self) -> None:
        resolved = resolve(type(self), {name: self._parsed(name) for name in settings_of(type(self))})
        for name, (value, _) in resolved.items():
            setattr(self, name, value)
        table = self.hf_ds_config
        is_default = table in (None, "none")
        if is_default:
            table = {**copy.deepcopy(_DEFAULT_TABLE), "zero_optimization": {}, **self._further}
        self.hf_ds_config = table if isinstance(table, HfDeepSpeedConfig) else HfDeepSpeedConfig(table)
        self._complete(
            [
                AutoValue(_ENTRY_OF_SETTING[name], value, self._source(name, origin), needed=True)
                for name, (value, origin) in resolved.items()
                if name in _ENTRY_OF_SETTING and origin != DEFAULT and value != AUTO_ENTRY
            ]
        )
        if is_default:
            fill_auto(self.hf_ds_config, [AutoValue(*row, "default", True, False) for row in _DEFAULT_ZERO.items()])
        self._read_back()
        if self.enable_msamp is None:
            fp8_backend = read_setting(settings_of(FP8Settings)["backend"])
            self.enable_msamp = fp8_backend is not None and fp8_backend.value == "msamp"
        if self.enable_msamp:
            if self.msamp_opt_level is None:
                opt_level = read_setting(settings_of(FP8Settings)["opt_level"])
                self.msamp_opt_level = "O1" if opt_level is None else opt_level.value
            self.deepspeed_config["msamp"] = {"enabled": True, "opt_level": self.msamp_opt_level}

    # ------------------------------------------------------------------ building the configuration

    def _parsed(self, name: str) -> Any:
        """An argument; text is parsed as in a variable."""
        value = getattr(self, name)
        if isinstance(value, str) and name != "hf_ds_config" and value != AUTO_ENTRY:
            return settings_of(type(self))[name].parse(value, "argument")
        return value

    def _source(self, name: str, origin: str) -> str:
        return f"DeepSpeedPlugin({name}={getattr(self, name)!r})" if origin == "argument" else origin

    def _complete(self, values: Iterable[AutoValue]) -> None:
        """Add settings to the configuration."""
        ds_config = self.hf_ds_config
        if not isinstance(ds_config.get_value("zero_optimization"), dict):
            raise SettingError(
                "Cannot use this DeepSpeed configuration.",
                'The configuration has no entry "zero_optimization".',
                'Add "zero_optimization": {"stage": 2}, or the stage you want.',
            )
        further = [
            AutoValue(name, value, f"DeepSpeedPlugin({name}=...)", True) for name, value in self._further.items()
        ]
        fill_auto(ds_config, (*values, *further))
        if ds_config.get_value("gradient_accumulation_steps") is None:
            # DeepSpeed's default.
            self._leaves_steps_open = True
            ds_config.set_value("gradient_accumulation_steps", 1)

    def _read_back(self) -> None:
        """Set the fields from the configuration."""
        ds_config = self.hf_ds_config
        defaults: dict[str, Any] = {name: "none" for name in _ENTRY_OF_SETTING if name.startswith("offload_")}
        defaults |= {"gradient_clipping": AUTO_ENTRY, "zero3_save_16bit_model": False}
        for name, key in _ENTRY_OF_SETTING.items():
            setattr(self, name, ds_config.get_value(key, defaults.get(name)))
        for what in ("optimizer", "param"):
            device, path = f"offload_{what}_device", f"offload_{what}_nvme_path"
            if getattr(self, device) == "nvme" and getattr(self, path) in (None, "none"):
                raise SettingError(
                    f"Cannot use DeepSpeedPlugin({device}='nvme').",
                    "The folder on the NVMe disk is missing.",
                    f"Set {path}.",
                )
        if self.zero3_init_flag is None:
            self.zero3_init_flag = ds_config.is_zero3()
        if self.zero3_init_flag and not ds_config.is_zero3():
            warnings.warn(
                "DeepSpeed shards parameters while a model is created (zero3_init_flag) only with ZeRO stage 3.",
                UserWarning,
                stacklevel=stack_level(),
            )
            self.zero3_init_flag = False

    # ------------------------------------------------------------------ reading it

    @property
    def deepspeed_config(self) -> dict[str, Any]:
        """The dict that DeepSpeed reads."""
        table: dict[str, Any] = self.hf_ds_config.config
        return table

    @deepspeed_config.setter
    def deepspeed_config(self, table: dict[str, Any]) -> None:
        self.hf_ds_config.config = table

    def get_value(self, ds_key_long: str, default: Any = None) -> Any:
        """The value of a dotted key of the configuration."""
        return self.hf_ds_config.get_value(ds_key_long, default)

    def is_auto(self, ds_key_long: str) -> bool:
        """Whether an entry is "auto"."""
        return bool(self.get_value(ds_key_long) == AUTO_ENTRY)

    def fill_match(
        self, ds_key_long: str, mismatches: list[str] | None = None, must_match: bool = True, **kwargs: Any
    ) -> None:
        """Replace "auto" by `kwargs[ds_key_long]`; record a contradiction.

        Args:
            ds_key_long: the dotted key.
            mismatches: a line is appended for a contradiction.
            must_match: record contradictions.
            kwargs: values by dotted key.
        """
        if ds_key_long not in kwargs:
            return
        auto = AutoValue(ds_key_long, kwargs[ds_key_long], "argument")
        if must_match and mismatches is not None:
            mismatches += contradictions(self.hf_ds_config, [auto])
        if self.is_auto(ds_key_long):
            self.hf_ds_config.set_value(ds_key_long, auto.value)

    def deepspeed_config_process(
        self,
        prefix: str = "",
        mismatches: list[str] | None = None,
        config: Mapping[str, Any] | None = None,
        must_match: bool = True,
        **kwargs: Any,
    ) -> None:
        """Replace every "auto" in the configuration that has a value in `kwargs`.

        Args:
            prefix: prefix of the keys to fill, with its dot.
            mismatches: a line is appended for each contradiction; no error is raised then.
            config: the dict at `prefix`; None: the whole configuration.
            must_match: raise for contradictions.
            kwargs: values by dotted key.

        Raises:
            Conflict: the configuration has a different value.
        """
        collected: list[str] = [] if mismatches is None else mismatches
        for key in kwargs:
            if key.startswith(prefix):
                self.fill_match(key, collected, must_match, **kwargs)
        if mismatches is None:
            _refuse(collected)

    def set_mixed_precision(self, mixed_precision: str) -> None:
        """Set the precision in which DeepSpeed trains.

        Raises:
            Conflict: the configuration enables another one.
            NotOffered: the settings select MS-AMP.
        """
        if self.enable_msamp:
            raise no_msamp("Cannot use DeepSpeedPlugin(enable_msamp=True).")
        ds_config = self.hf_ds_config
        # Operations that do not compute in 8 bits compute in bf16.
        name = "bf16" if str(mixed_precision) == "fp8" else str(mixed_precision)
        if name == "fp16" and ds_config.get_value("fp16") is None:
            ds_config.set_value("fp16", {"enabled": True, "auto_cast": True})
        source = f"mixed_precision={str(mixed_precision)!r}"
        fill_auto(
            ds_config, [AutoValue(f"{own}.enabled", name == own, source, needed=True) for own in _NARROW_PRECISIONS]
        )

    @property
    def configured_precision(self) -> str | None:
        """The precision that the configuration enables, for a run without mixed_precision."""
        return next((name for name in _NARROW_PRECISIONS if self.get_value(f"{name}.enabled") is True), None)

    def agree_on_steps(self, steps: int) -> int | None:
        """The number of micro-batches in the configuration, or None if it follows the run; called by the backend.

        Args:
            steps: the number that the run accumulates.
        """
        if self._leaves_steps_open and steps != 1:
            self._leaves_steps_open = False
            self.hf_ds_config.set_value("gradient_accumulation_steps", steps)
            self.gradient_accumulation_steps = steps
        configured = self.get_value("gradient_accumulation_steps", AUTO_ENTRY)
        return None if configured == AUTO_ENTRY else int(configured)

    # ------------------------------------------------------------------ sharding models while they are created

    def is_zero3_init_enabled(self) -> bool:
        """Whether transformers shards parameters while it creates a model."""
        return bool(self.zero3_init_flag)

    @contextmanager
    def zero3_init_context_manager(self, enable: bool = False) -> Iterator[None]:
        """A context that switches the sharding of models during their creation on or off."""
        before = self.zero3_init_flag
        try:
            self.zero3_init_flag = enable
            self.set_deepspeed_weakref()
            yield
        finally:
            self.zero3_init_flag = before
            self.set_deepspeed_weakref()

    def set_deepspeed_weakref(self) -> None:
        """Pass the configuration to transformers, which then shards models while it creates them, or not."""
        self.dschf = transformers_view(self.deepspeed_config, self.is_zero3_init_enabled())

    def set_moe_leaf_modules(self, model: Any) -> None:
        """Make ZeRO stage 3 treat each mixture-of-experts layer of a model as one unit.

        Raises:
            SettingError: the model has no layer of one of the classes.
        """
        wanted = [name.strip() for name in (self.transformer_moe_cls_names or "").split(",") if name.strip()]
        if not wanted:
            return
        from deepspeed.utils import set_z3_leaf_modules

        by_name = {type(module).__name__: type(module) for module in model.modules()}
        missing = [name for name in wanted if name not in by_name]
        if missing:
            raise SettingError(
                f"Cannot use transformer_moe_cls_names={','.join(wanted)!r}.",
                f"{type(model).__name__} has no layer of the class {', '.join(missing)}.",
                "Set the class names of its mixture-of-experts layers.",
            )
        set_z3_leaf_modules(model, [by_name[name] for name in wanted])

    # ------------------------------------------------------------------ several configurations

    @property
    def selected(self) -> bool:
        """Whether this is the active configuration."""
        return self._selected

    @selected.setter
    def selected(self, value: bool) -> None:
        raise NotOffered(f"Cannot set DeepSpeedPlugin.selected to {value!r}.", *_NO_ACTIVE_CONFIGURATION)

    def deselect(self) -> None:
        """Deactivate this configuration; called by `AcceleratorState.select_deepspeed_plugin`."""
        self._selected = False

    def select(self, _from_accelerator_state: bool = False) -> None:
        """Make this the active configuration; called by `AcceleratorState.select_deepspeed_plugin`.

        Raises:
            SettingError: the call comes from elsewhere.
        """
        if not _from_accelerator_state:
            raise SettingError("Cannot call DeepSpeedPlugin.select().", *_NO_ACTIVE_CONFIGURATION)
        self._selected = True
        self.set_deepspeed_weakref()


# ---------------------------------------------------------------- transformers, which creates models
_ENTRIES_WHILE_BUILDING: Final = {
    "train_micro_batch_size_per_gpu": 1,
    "gradient_accumulation_steps": 1,
    "zero_optimization.reduce_bucket_size": 1,
    "zero_optimization.stage3_prefetch_bucket_size": 0,
    "zero_optimization.stage3_param_persistence_threshold": 0,
}
"""Entries that DeepSpeed reads as numbers while a model is created; their values have no effect there."""


def transformers_view(table: Mapping[str, Any], sharded: bool) -> Any:
    """The object through which transformers reads the configuration; None if it is not available.

    transformers uses it while it exists and no other is created. It is not available without transformers, or without a
    distribution named `accelerate`, which transformers requires; models are then created unsharded, and sharded by
    `prepare`.

    Args:
        table: DeepSpeed's configuration, as a dict.
        sharded: whether parameters of stage 3 are sharded while models are created, and in `generate`.
    """
    if not importable("transformers"):
        return None
    if installed_version("accelerate") is None:
        if sharded:
            # The launcher reads these settings before it starts processes, and logs nothing.
            import logging

            logging.getLogger(__name__).warning(
                "transformers creates unsharded models: it shards them only if the package accelerate is installed."
            )
        return None
    ds_config = HfDeepSpeedConfig(table)
    ds_config.del_config_sub_tree("train_batch_size")
    for key, value in _ENTRIES_WHILE_BUILDING.items():
        if ds_config.get_value(key) == AUTO_ENTRY:
            ds_config.set_value(key, value)
    for own in _NARROW_PRECISIONS:
        if ds_config.get_value(f"{own}.enabled") == AUTO_ENTRY:
            ds_config.set_value(f"{own}.enabled", False)
    from transformers.integrations import HfDeepSpeedConfig as View

    if ds_config.is_zero3() and not sharded:
        ds_config.set_value("zero_optimization.stage", 0)
    return View(ds_config.config)


# ---------------------------------------------------------------- placeholders
class DummyOptim:
    """A placeholder for the optimizer that the entry "optimizer" of the DeepSpeed configuration describes.

    Args:
        params: parameters, or groups of them as for torch's optimizers.
        lr: learning rate, if the configuration has "auto".
        weight_decay: weight decay, if the configuration has "auto".
        kwargs: stored for code that reads them.

    Example:
        >>> optimizer = DummyOptim(model.parameters(), lr=3e-4)
        >>> model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    """

    placeholder_for: ClassVar[ObjectKind] = ObjectKind.OPTIMIZER

    def __init__(self, params: Iterable[Any], lr: float = 0.001, weight_decay: float = 0, **kwargs: Any) -> None:
        self.params = list(params)
        self.lr = lr
        self.weight_decay = weight_decay
        self.kwargs = kwargs
        self.state: dict[Any, Any] = {}
        grouped = bool(self.params) and isinstance(self.params[0], dict)
        self.param_groups: list[dict[str, Any]] = self.params if grouped else [{"params": self.params}]


class DummyScheduler:
    """A placeholder for the scheduler that the entry "scheduler" of the DeepSpeed configuration describes.

    Args:
        optimizer: its optimizer, or the placeholder for it.
        total_num_steps: number of steps of the schedule, if the configuration has "auto".
        warmup_num_steps: number of warm-up steps, if the configuration has "auto".
        lr_scheduler_callable: receives the optimizer and returns the scheduler, if the configuration describes none.
        kwargs: stored for code that reads them.
    """

    placeholder_for: ClassVar[ObjectKind] = ObjectKind.SCHEDULER

    def __init__(
        self,
        optimizer: Any,
        total_num_steps: int | None = None,
        warmup_num_steps: int = 0,
        lr_scheduler_callable: Callable[[Any], Any] | None = None,
        **kwargs: Any,
    ) -> None:
        self.optimizer = optimizer
        self.total_num_steps = total_num_steps
        self.warmup_num_steps = warmup_num_steps
        self.lr_scheduler_callable = lr_scheduler_callable
        self.kwargs = kwargs
