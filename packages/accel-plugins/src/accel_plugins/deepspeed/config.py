"""Settings of DeepSpeed: plain data, without torch.

All settings are combined in `deepspeed_config`, the dict that DeepSpeed reads: the user's configuration with the other
settings added, or a new dict.
"""

# ruff: noqa: RUF009 - `setting` makes the fields of every settings class

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, fields
from functools import partial
from typing import Any, Final, Literal

from accel_plugins.deepspeed.ds_config import (
    AUTO_ENTRY,
    AutoValue,
    HfDeepSpeedConfig,
    contradictions,
    encoded,
    fill_auto,
    refuse,
)
from accel_plugins.precision.config import FP8Settings, no_msamp
from accel_state.errors import NotOffered, SettingError
from accel_state.library import stack_level
from accel_state.settings.environ import read_setting
from accel_state.settings.schema import BOOLEAN, TEXT, ValueType, choice, int_at_least, setting, settings_of

__all__ = ("DeepSpeedPlugin",)

_GROUP: Final = "DeepSpeed"
_DEFAULT_STAGE: Final = 2
_FP8: Final = settings_of(FP8Settings)
_NARROW_PRECISIONS: Final = ("fp16", "bf16")
_PRECISION_BESIDE_FP8: Final = "bf16"
"""The precision of operations that do not compute in 8 bits."""
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
        type=ValueType("the path of a JSON file, or JSON text in base64", str, encoded, metavar="PATH"),
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
        sources = {name: source for name in _ENTRY_OF_SETTING if (source := self._from_environment(name))}
        for name in ("hf_ds_config", "zero3_init_flag", "transformer_moe_cls_names"):
            self._from_environment(name)
        if self.hf_ds_config in (None, "none"):
            self.hf_ds_config = HfDeepSpeedConfig(self._made_table())
        elif not isinstance(self.hf_ds_config, HfDeepSpeedConfig):
            self.hf_ds_config = HfDeepSpeedConfig(self.hf_ds_config)
        self._complete(sources)
        self._read_back()
        self._configure_msamp()

    # ------------------------------------------------------------------ building the configuration

    def _from_environment(self, name: str) -> str | None:
        """Read a setting that was not passed from the environment; return the source of its value, or None."""
        declared, value = settings_of(type(self))[name], getattr(self, name)
        if value is not None:
            if isinstance(value, str) and name != "hf_ds_config" and value != AUTO_ENTRY:
                setattr(self, name, declared.parse(value, "argument"))
            return f"DeepSpeedPlugin({name}={value!r})"
        variable = read_setting(declared)
        if variable is None:
            return None
        setattr(self, name, variable.value)
        return f"the variable {declared.variable}"

    def _made_table(self) -> dict[str, Any]:
        """The default configuration; the entries for settings are added later."""
        return {
            "train_batch_size": AUTO_ENTRY,
            "train_micro_batch_size_per_gpu": AUTO_ENTRY,
            "gradient_accumulation_steps": AUTO_ENTRY,
            "gradient_clipping": AUTO_ENTRY,
            "zero_optimization": {
                "stage": _DEFAULT_STAGE if self.zero_stage is None else self.zero_stage,
                "offload_optimizer": {"device": self.offload_optimizer_device or "none"},
                "offload_param": {"device": self.offload_param_device or "none"},
                "stage3_gather_16bit_weights_on_model_save": bool(self.zero3_save_16bit_model),
            },
            "steps_per_print": float("inf"),
            "zero_allow_untested_optimizer": True,
            **self._further,
        }

    def _complete(self, sources: Mapping[str, str]) -> None:
        """Add the passed settings to the configuration."""
        ds_config = self.hf_ds_config
        if not isinstance(ds_config.get_value("zero_optimization"), dict):
            raise SettingError(
                "Cannot use this DeepSpeed configuration.",
                'The configuration has no entry "zero_optimization".',
                'Add "zero_optimization": {"stage": 2}, or the stage you want.',
            )
        values = [
            AutoValue(_ENTRY_OF_SETTING[name], getattr(self, name), source, needed=True)
            for name, source in sources.items()
            if getattr(self, name) != AUTO_ENTRY
        ]
        values += [
            AutoValue(name, value, f"DeepSpeedPlugin({name}=...)", True) for name, value in self._further.items()
        ]
        fill_auto(ds_config, values)
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
            self._check_disk(what)
        if self.zero3_init_flag is None:
            self.zero3_init_flag = ds_config.is_zero3()
        if self.zero3_init_flag and not ds_config.is_zero3():
            warnings.warn(
                "DeepSpeed shards parameters while a model is created (zero3_init_flag) only with ZeRO stage 3.",
                UserWarning,
                stacklevel=stack_level(),
            )
            self.zero3_init_flag = False

    def _check_disk(self, what: str) -> None:
        """Raise for offloading to NVMe without a folder."""
        device, path = f"offload_{what}_device", f"offload_{what}_nvme_path"
        if getattr(self, device) == "nvme" and getattr(self, path) in (None, "none"):
            raise SettingError(
                f"Cannot use DeepSpeedPlugin({device}='nvme').",
                "The folder on the NVMe disk is missing.",
                f"Set {path}.",
            )

    def _configure_msamp(self) -> None:
        if self.enable_msamp is None:
            fp8_backend = read_setting(_FP8["backend"])
            self.enable_msamp = fp8_backend is not None and fp8_backend.value == "msamp"
        if not self.enable_msamp:
            return
        if self.msamp_opt_level is None:
            opt_level = read_setting(_FP8["opt_level"])
            self.msamp_opt_level = "O1" if opt_level is None else opt_level.value
        self.deepspeed_config["msamp"] = {"enabled": True, "opt_level": self.msamp_opt_level}

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
        self.hf_ds_config.set_stage_and_offload()
        if mismatches is None:
            refuse(collected)

    def set_mixed_precision(self, mixed_precision: str) -> None:
        """Set the precision in which DeepSpeed trains.

        Raises:
            Conflict: the configuration enables another one.
            NotOffered: the settings select MS-AMP.
        """
        if self.enable_msamp:
            raise no_msamp("Cannot use DeepSpeedPlugin(enable_msamp=True).")
        ds_config = self.hf_ds_config
        name = _PRECISION_BESIDE_FP8 if str(mixed_precision) == "fp8" else str(mixed_precision)
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
        from accel_plugins.deepspeed.zero_init import transformers_view

        self.dschf = transformers_view(self.deepspeed_config, self.is_zero3_init_enabled())

    def set_moe_leaf_modules(self, model: Any) -> None:
        """Make ZeRO stage 3 treat each mixture-of-experts layer of a model as one unit."""
        if self.transformer_moe_cls_names:
            from accel_plugins.deepspeed.zero_init import set_leaf_modules

            set_leaf_modules(model, self.transformer_moe_cls_names.split(","))

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
