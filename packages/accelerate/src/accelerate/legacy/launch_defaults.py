"""Parsed arguments of `accelerate launch` with what the config file and the machine say in addition."""

from __future__ import annotations

import os
from argparse import Namespace
from typing import Final

from accel_cli.config.resolved import label
from accel_cli.launch.backends import given_sizes, selection_of
from accel_cli.launch.check import check_launch
from accel_cli.launch.devices import count_devices
from accel_cli.launch.options import launch_classes, settings_by_flag
from accel_cli.launch.request import read_request
from accel_state.labels import DistributedType
from accel_state.settings.environ import Given
from accelerate.legacy.config_classes import BaseConfig, load_config_from_file
from accelerate.legacy.parsing import default_of, name_of, own_arguments

__all__ = ("validate_launch_command",)

_ABSENT: Final = ("compute_environment", "distributed_type")
_NOTHING: Final = Given(None, "")


def validate_launch_command(args: Namespace) -> tuple[Namespace, BaseConfig | None, bool]:
    """Fill in what the command line does not give, from the config file and then from the machine.

    Returns:
        The arguments, the config file or None, and whether that file gave the mixed precision.

    Raises:
        SettingError: a value or the config file cannot be used; `Conflict` when two settings contradict each other.
    """
    request = read_request(own_arguments(args), os.environ)
    check_launch(request.settings)
    given: set[str] = getattr(args, "nondefault", set())
    read = request.config.values if request.config is not None else {}
    for flag, known in settings_by_flag(launch_classes()).items():
        value = read.get(label(known), _NOTHING).value
        # What a file says of the CPU goes into `use_cpu`, so that `cpu` stays what the command line says.
        if name_of(flag) not in (*given, "cpu") and value not in (None, ()):
            as_text = isinstance(value, tuple) and default_of(known) is None
            setattr(args, name_of(flag), ",".join(value) if as_text else value)
    config = None if request.config is None else load_config_from_file(request.config.path)
    selection = selection_of(request.settings)
    if selection is not None and not (args.cpu and selection.on_devices):
        if selection.switch is not None:
            setattr(args, selection.switch.name, True)
        elif selection.label == DistributedType.MULTI_GPU.value:
            args.multi_gpu = True
    args.use_parallelism_config = args.use_parallelism_config or bool(given_sizes(request.settings))
    args.use_cpu = args.cpu or bool(config is not None and config.use_cpu)
    processes = request.settings["num_processes"].value
    fallback = {
        "mixed_precision": "no",
        "dynamo_backend": "no",
        "num_processes": count_devices() if processes is None else processes,
        "num_machines": 1,
        "num_cpu_threads_per_process": int(os.environ.get("OMP_NUM_THREADS") or 1),
        "debug": False,
    }
    written = {} if config is None else vars(config)
    if config is not None:
        fallback["gpu_ids"] = "all"
    for name, value in (*written.items(), *fallback.items()):
        if name not in _ABSENT and not isinstance(value, dict) and getattr(args, name, None) is None:
            setattr(args, name, value)
    by_file = "mixed_precision" in read and "mixed_precision" not in given
    return args, config, by_file
