"""Functions with which scripts prepared launches of the original: command lines and variables from parsed arguments.

Each reads the arguments of `launch_command_parser`, and computes the result from the plan of `accel launch` for them.
"""

from __future__ import annotations

import os
from argparse import Namespace
from collections.abc import Callable
from typing import Any, Final

from accel_cli.commands.launch import this_machine
from accel_cli.launch.deepspeed import check_deepspeed, deepspeed_argv, own_launcher
from accel_cli.launch.interface import LaunchRequest, Script, common_environment
from accel_cli.launch.mpi import find_mpi, placement
from accel_cli.launch.options import carried_classes, flag_values
from accel_cli.launch.request import read_request
from accel_cli.launch.sagemaker import describe_job
from accel_cli.launch.script import how_to_run
from accel_cli.launch.settings import MachineSettings
from accel_cli.launch.tpu import tpu_variables
from accel_state.labels import DistributedType
from accel_state.network import DEFAULT_PORT, get_free_port
from accel_state.settings.environ import publish
from accelerate.legacy.parsing import own_arguments

__all__ = (
    "PrepareForLaunch",
    "check_place",
    "env_var_path_add",
    "prepare_deepspeed_cmd_env",
    "prepare_extend_env_parallelism_config",
    "prepare_multi_gpu_env",
    "prepare_sagemager_args_inputs",
    "prepare_simple_launcher_cmd_env",
    "prepare_tpu",
    "setup_fp8_env",
)

_OF_PYTHON: Final = {"script": ("python",), "module": ("python", "-m"), "program": ()}
_OF_DEEPSPEED: Final = {"script": (), "module": ("--module",), "program": ("--no_python",)}
"""Words of the command line before the target, by kind of target."""


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


def prepare_deepspeed_cmd_env(args: Namespace) -> tuple[list[str] | None, dict[str, str]]:
    """Variables of a launch with DeepSpeed, and the command line of DeepSpeed's launcher if that launcher is used.

    Raises:
        SettingError: DeepSpeed's launcher does not support the arguments.
    """
    path = {"PYTHONPATH": env_var_path_add("PYTHONPATH", os.getcwd())}
    launch = _launch(args)
    if own_launcher(launch.settings) is None:
        return None, {**prepare_multi_gpu_env(args), **path}
    check_deepspeed(launch.settings)
    processes, machines = _sizes(launch)
    each = processes // machines
    how, target, arguments = launch.script
    command = deepspeed_argv(launch.settings, each, (*_OF_DEEPSPEED[how], target, *arguments))
    return list(command), {**launch.machine.environ, **launch.environment(each), **path}


def prepare_tpu(args: Namespace, current_env: dict[str, str], pod: bool = False) -> tuple[Namespace, dict[str, str]]:
    """Arguments and variables of a launch on a TPU."""
    request = read_request(own_arguments(args), os.environ)
    current_env.update(tpu_variables(request.settings))
    if pod:
        current_env["ACCELERATE_IN_TPU_POD"] = "1"
    return args, current_env


def prepare_sagemager_args_inputs(
    sagemaker_config: Any, args: Namespace
) -> tuple[dict[str, Any], dict[str, str] | None]:
    """Arguments of SageMaker's estimator, and the locations of its input data."""
    from accel_cli.config.resolved import label, resolve_settings
    from accel_cli.launch.options import launch_classes
    from accel_state.settings.environ import Given
    from accel_state.settings.schema import settings_of

    own = own_arguments(args)
    request = read_request(own, os.environ)
    known = {str(one.key): label(one) for settings in launch_classes() for one in settings_of(settings).values()}
    file = {known[key]: Given(value, key) for key, value in sagemaker_config.to_dict().items() if key in known}
    settings = resolve_settings(launch_classes(), flag_values(own, launch_classes()), request.environ, file)
    target, *arguments = own.script
    environment = common_environment(settings, carried_classes())
    job = describe_job(settings, target, arguments, environment, sagemaker_config.additional_args)
    return dict(job.estimator), None if job.inputs is None else dict(job.inputs)


def setup_fp8_env(args: Namespace, current_env: dict[str, str]) -> dict[str, str]:
    """Add the variables for FP8 training to `current_env` and return it."""
    return _extended(args, current_env, "ACCELERATE_FP8_")


def prepare_extend_env_parallelism_config(args: Namespace, current_env: dict[str, str]) -> dict[str, str]:
    """Add the variables of the `ParallelismConfig` to `current_env` and return it."""
    return _extended(args, current_env, "PARALLELISM_CONFIG_", "ACCELERATE_USE_PARALLELISM_CONFIG")


def env_var_path_add(env_var_name: str, path_to_add: str) -> str:
    """The value of a variable that contains paths, with one path appended."""
    paths = [path for path in os.environ.get(env_var_name, "").split(os.pathsep) if path]
    return os.pathsep.join([*paths, str(path_to_add)])


def check_place() -> None:
    """Check that this process can determine its rank."""
    from accel_state.process import PartialState

    PartialState()


def _launch(args: Namespace) -> LaunchRequest:
    own = own_arguments(args)
    request = read_request(own, os.environ)
    target, *arguments = own.script or [""]
    script = Script(how_to_run(own.module, own.no_python), target, tuple(arguments))
    return LaunchRequest(request.settings, script, this_machine(request.environ), carried_classes(), request.backend)


def _sizes(launch: LaunchRequest) -> tuple[int, int]:
    """Number of processes in total, and number of machines."""
    processes = launch.settings["num_processes"].value
    return launch.machine.devices() if processes is None else processes, launch.settings["num_machines"].value


def _extended(args: Namespace, current_env: dict[str, str], *prefixes: str) -> dict[str, str]:
    variables = common_environment(read_request(own_arguments(args), os.environ).settings, carried_classes())
    current_env.update({name: value for name, value in variables.items() if name.startswith(prefixes)})
    return current_env
