"""Functions with which scripts prepared launches of the original: command lines and variables from parsed arguments.

Each reads the arguments of `launch_command_parser`, and computes the result from the plan of `accel launch` for them.
"""

from __future__ import annotations

import os
from argparse import Namespace
from collections.abc import Callable
from typing import Any, Final

from accel_cli.config.resolved import label
from accel_cli.launch.devices import count_devices
from accel_cli.launch.interface import LaunchRequest
from accel_cli.launch.launchers import launch_classes
from accel_cli.launch.mpi import find_mpi, placement
from accel_cli.launch.options import settings_by_flag
from accel_cli.launch.request import check_request, read_request
from accel_cli.launch.settings import MachineSettings
from accel_state.labels import DistributedType
from accel_state.network import DEFAULT_PORT, get_free_port
from accel_state.settings.environ import Given, publish
from accelerate.legacy.config_classes import BaseConfig, load_config_from_file
from accelerate.legacy.parsing import default_of, name_of, own_arguments

_OF_PYTHON: Final = {"script": ("python",), "module": ("python", "-m"), "program": ()}
"""Words of the command line before the target, by kind of target."""

_ABSENT: Final = ("compute_environment", "distributed_type")
_NOTHING: Final = Given(None, "")


class PrepareForLaunch:
    """A function that a started process calls with its index; sets the rank variables first.

    Args:
        launcher: the function.
        distributed_type: kind of the run; the preparation is the same for all kinds.
        debug: ignored.
    """

    def __init__(self, launcher: Callable[..., Any], distributed_type: str = "NO", debug: bool = False) -> None:
        self.launcher = launcher
        self.distributed_type = DistributedType(distributed_type.upper())
        self.debug = debug

    def __call__(self, index: int, *args: Any) -> None:
        """Set the variables of process `index`, with the world size from the environment, and call the function."""
        size = os.environ.get("WORLD_SIZE", "1")
        local = {"LOCAL_RANK": str(index), "RANK": str(index), "FORK_LAUNCHED": "1"}
        publish({"LOCAL_WORLD_SIZE": os.environ.get("LOCAL_WORLD_SIZE", size), **local})
        self.launcher(*args)


def prepare_simple_launcher_cmd_env(args: Namespace) -> tuple[list[str], dict[str, str]]:
    """Command line and variables of a launch of one process, or through mpirun.

    Raises:
        SettingError: the settings select mpirun, which is not installed.
        Conflict: the arguments contain both `--module` and `--no_python`.
    """
    launch = _launch(args)
    how, target, arguments = launch.script
    command = [*(launch.machine.python if word == "python" else word for word in _OF_PYTHON[how]), target, *arguments]
    hosts = launch.settings["mpirun_config.mpirun_hostfile"].value
    if hosts:
        processes, machines = _sizes(launch)
        place = placement(find_mpi(), hosts, max(processes // machines, 1))
        command = ["mpirun", *place, "-n", str(processes), *command]
    own = launch.settings.instance(MachineSettings)
    store = {"MASTER_ADDR": own.main_process_ip, "MASTER_PORT": own.main_process_port}
    return command, {
        **launch.machine.environ,
        **launch.environment(1),
        **{name: str(value) for name, value in store.items() if value is not None},
    }


def prepare_multi_gpu_env(args: Namespace) -> dict[str, str]:
    """Variables of a launch of several processes; arguments of torch.distributed.run are set in `args`."""
    launch = _launch(args)
    processes, machines = _sizes(launch)
    own = launch.settings.instance(MachineSettings)
    args.nproc_per_node = str(processes // machines)
    if machines > 1:
        args.nnodes, args.node_rank = str(machines), own.machine_rank
        args.rdzv_endpoint = f"{own.main_process_ip}:{own.main_process_port or DEFAULT_PORT}"
    else:
        wanted = DEFAULT_PORT if own.main_process_port is None else own.main_process_port
        args.master_port = str(wanted or get_free_port())
    return {**launch.machine.environ, **launch.environment(processes // machines)}


def validate_launch_command(args: Namespace) -> tuple[Namespace, BaseConfig | None, bool]:
    """Fill in what the command line does not give, from the config file and then from the machine.

    Returns:
        The arguments, the config file or None, and whether that file gave the mixed precision.

    Raises:
        SettingError: a value or the config file cannot be used; `Conflict` when two settings contradict each other.
    """
    request = _launch(args)
    check_request(request)
    on_command_line: set[str] = getattr(args, "nondefault", set())
    read = request.config.values if request.config is not None else {}
    for flag, setting in settings_by_flag(launch_classes()).items():
        value = read.get(label(setting), _NOTHING).value
        # What a file says of the CPU goes into `use_cpu`, so that `cpu` stays what the command line says.
        if name_of(flag) not in (*on_command_line, "cpu") and value not in (None, ()):
            as_text = isinstance(value, tuple) and default_of(setting) is None
            setattr(args, name_of(flag), ",".join(value) if as_text else value)
    config = None if request.config is None else load_config_from_file(request.config.path)
    selection = request.selection
    if selection is not None and not (args.cpu and selection.on_devices):
        if selection.switch is not None:
            setattr(args, selection.switch.name, True)
        elif selection.label == DistributedType.MULTI_GPU.value:
            args.multi_gpu = True
    args.use_parallelism_config = args.use_parallelism_config or bool(request.axes)
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
    by_file = "mixed_precision" in read and "mixed_precision" not in on_command_line
    return args, config, by_file


def _launch(args: Namespace) -> LaunchRequest:
    return read_request(own_arguments(args), os.environ, allocations=False)


def _sizes(launch: LaunchRequest) -> tuple[int, int]:
    """Number of processes in total, and number of machines."""
    processes = launch.settings["num_processes"].value
    return launch.machine.devices() if processes is None else processes, launch.settings["num_machines"].value
