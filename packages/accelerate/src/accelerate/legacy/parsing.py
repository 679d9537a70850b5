"""The original parsers' namespaces: every option under the original's name, with the original's default."""

from __future__ import annotations

from argparse import SUPPRESS, ArgumentParser, Namespace
from collections.abc import Callable, Sequence
from typing import Any, Final

from accel_cli.config.resolved import REPEATED
from accel_cli.launch.launchers import launch_classes
from accel_cli.launch.options import destination, is_switch, settings_by_flag
from accel_cli.launch.settings import WITHOUT_EFFECT
from accel_state.settings.schema import Setting

_NAMES: Final = {"tpu_cluster": "tpu_use_cluster"}

_DEFAULTS: Final[dict[str, Any]] = {
    "debug": None,
    "dynamo_mode": "default",
    "fp8_amax_compute_algo": "most_recent",
    "fp8_amax_history_len": 1024,
    "fp8_enable_fsdp_float8_all_gather": 1,
    "fp8_format": "HYBRID",
    "fp8_interval": 1,
    "fp8_margin": 0,
    "fp8_opt_level": "O2",
    "fp8_override_linear_precision": (False, False, False),
    "fp8_pad_inner_dim": 1,
    "fsdp_activation_checkpointing": "false",
    "fsdp_activation_checkpointing_offload": "false",
    "fsdp_cpu_ram_efficient_loading": "true",
    "fsdp_forward_prefetch": "false",
    "fsdp_min_num_params": 100_000_000,
    "fsdp_offload_params": "false",
    "fsdp_reshard_after_forward": "true",
    "fsdp_sharding_strategy": "FULL_SHARD",
    "fsdp_sync_module_states": "true",
    "fsdp_use_orig_params": "true",
    "fsdp_version": "1",
    "max_restarts": 0,
    "megatron_lm_eod_mask_loss": False,
    "megatron_lm_gradient_clipping": 1.0,
    "megatron_lm_no_load_optim": False,
    "megatron_lm_no_save_optim": False,
    "megatron_lm_optimizer_cpu_offload": False,
    "megatron_lm_overlap_cpu_optimizer_d2h_h2d": False,
    "megatron_lm_pp_degree": 1,
    "megatron_lm_tp_degree": 1,
    "megatron_lm_use_custom_fsdp": False,
    "megatron_lm_use_precision_aware_optimizer": False,
    "monitor_interval": 0.1,
    "parallelism_config_cp_backend": "torch",
    "parallelism_config_cp_comm_strategy": "allgather",
    "parallelism_config_cp_size": 1,
    "parallelism_config_dp_replicate_size": 1,
    "parallelism_config_dp_shard_size": 1,
    "parallelism_config_sp_attn_implementation": "sdpa",
    "parallelism_config_sp_backend": "deepspeed",
    "parallelism_config_sp_seq_length": None,
    "parallelism_config_sp_seq_length_is_variable": True,
    "parallelism_config_sp_size": 1,
    "parallelism_config_tp_size": 1,
    "rdzv_backend": "static",
    "rdzv_conf": "",
    "role": "default",
    "tee": "0",
}
"""Values of options that are not on the command line. Switches not listed here are False, all other options None."""


class OldParser(ArgumentParser):
    """A parser that also accepts options spelled with dashes, and sets `nondefault` to the options that were given."""

    def parse_known_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: Namespace | None = None
    ) -> tuple[Namespace, list[str]]:
        """Parse; the namespace's `nondefault` is the set of the names of given options and arguments."""
        for flag, action in list(self._option_string_actions.items()):
            self._option_string_actions.setdefault(flag.replace("_", "-"), action)
        parsed, unset = Namespace() if namespace is None else namespace, object()
        names = {action.dest for action in self._actions if action.dest != SUPPRESS and action.default is not SUPPRESS}
        defaults = {name: self.get_default(name) for name in names if not hasattr(parsed, name)}
        # An option that may be repeated appends to the value in the namespace.
        vars(parsed).update({name: None if _appends(self, name) else unset for name in defaults})
        parsed, rest = super().parse_known_args(args, parsed)
        left = {name for name in defaults if getattr(parsed, name) is (None if _appends(self, name) else unset)}
        vars(parsed).update({name: defaults[name] for name in left})
        parsed.nondefault = defaults.keys() - left
        return parsed, rest


def _appends(parser: ArgumentParser, name: str) -> bool:
    return any(action.dest == name and type(action).__name__ == "_AppendAction" for action in parser._actions)


def name_of(flag: str) -> str:
    """The attribute name of a flag in the original's namespace."""
    name = flag.removeprefix("--")
    return _NAMES.get(name, name)


def default_of(setting: Setting) -> Any:
    """The value of a setting's attribute in the original's namespace if the flag is not given."""
    return _DEFAULTS.get(name_of(str(setting.flag)), False if is_switch(setting) else None)


def add_launch_arguments(parser: ArgumentParser) -> None:
    """Declare the options of `accelerate launch`, and the script with its arguments."""
    parser.add_argument("--config_file", help="Config file to read instead of the default one.")
    for flag, setting in settings_by_flag(launch_classes()).items():
        to: dict[str, Any] = {"dest": name_of(flag), "default": default_of(setting)}
        if is_switch(setting):
            parser.add_argument(flag, action="store_true", help=_escaped(setting.help), **to)
            parser.add_argument(f"--no_{flag.removeprefix('--')}", action="store_false", help=SUPPRESS, **to)
            continue
        names = ("-t", flag) if flag == "--tee" else (flag,)
        how: dict[str, Any] = {"action": "append"} if setting.type is REPEATED else {"type": _reader(setting)}
        parser.add_argument(*names, help=_escaped(setting.help), **to, **how)
    for flag in WITHOUT_EFFECT:
        parser.add_argument(flag, action="store_true", help="Has no effect.")
    for names, meaning in (
        (("-q", "--quiet"), "Do not print the launcher's messages."),
        (("-m", "--module"), "Run a module instead of a script."),
        (("--no_python",), "Run a program that is not a Python script."),
    ):
        parser.add_argument(*names, action="store_true", default=None, help=meaning)
    parser.add_argument("training_script", help="Script to run, followed by its arguments.")
    parser.add_argument("training_script_args", nargs="...", help="Arguments of the script.")


def own_arguments(args: Namespace) -> Namespace:
    """Convert a namespace of an original parser to one of `accel launch`.

    Attributes that were changed after parsing count as given.
    """
    script = getattr(args, "training_script", None)
    own = Namespace(
        config_file=getattr(args, "config_file", None),
        help_all=False,
        prog="accelerate launch",
        script=[] if script is None else [script, *(getattr(args, "training_script_args", None) or ())],
        **{name: bool(getattr(args, name, False)) for name in ("quiet", "module", "no_python")},
    )
    changed = getattr(args, "nondefault", ())
    for flag, setting in settings_by_flag(launch_classes()).items():
        name, default = name_of(flag), default_of(setting)
        value = getattr(args, name, default)
        if value is not None and (name in changed or (value or None) != (default or None)):
            setattr(own, destination(flag), list(value) if setting.type is REPEATED else _text(value))
    return own


def _reader(setting: Setting) -> Callable[[str], Any]:
    """The function that converts an option's text to the original's type."""
    default = default_of(setting)

    def read(text: str) -> Any:
        value = setting.type.parse(text)
        if default is not None and not isinstance(default, str):
            return type(default)(value)
        return value if default is None and type(value) in (int, float) else text

    read.__name__ = setting.type.name
    return read


def _text(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return ",".join(map(_text, value)) if isinstance(value, (list, tuple)) else str(value)


def _escaped(text: str) -> str:
    return text.replace("%", "%%")
