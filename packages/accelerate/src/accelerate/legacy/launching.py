"""The functions by which scripts prepared launches of the original: command lines and variables from parsed arguments.

Each reads the arguments of `launch_command_parser` and answers from the plan that `accel launch` makes of them.
"""

from __future__ import annotations

import os
from argparse import Namespace
from collections.abc import Callable
from typing import Any

from accel_cli.commands.launch import this_machine
from accel_cli.launch.notebook import debug_launcher, notebook_launcher
from accel_cli.launch.options import carried_classes
from accel_cli.launch.plan import LaunchPlan, common_environment, make_plan
from accel_cli.launch.request import Request, read_request
from accel_cli.launch.sagemaker import describe_job
from accel_cli.launch.script import find_script
from accel_cli.launch.tpu import tpu_variables
from accel_state.labels import DistributedType
from accel_state.settings.environ import publish

__all__ = (
    "PrepareForLaunch",
    "check_place",
    "debug_launcher",
    "env_var_path_add",
    "notebook_launcher",
    "prepare_deepspeed_cmd_env",
    "prepare_extend_env_parallelism_config",
    "prepare_multi_gpu_env",
    "prepare_sagemager_args_inputs",
    "prepare_simple_launcher_cmd_env",
    "prepare_tpu",
    "setup_fp8_env",
)


class PrepareForLaunch:
    """A function that a process calls with its number, and that knows its place because of that.

    Args:
        launcher: the function.
        distributed_type: kind of the run; all kinds are prepared alike.
        debug: whether a test runs it; nothing depends on it.
    """

    def __init__(self, launcher: Callable[..., Any], distributed_type: str = "NO", debug: bool = False) -> None:
        self.launcher = launcher
        self.distributed_type = DistributedType(distributed_type.upper())
        self.debug = debug

    def __call__(self, index: int, *args: Any) -> None:
        """Take the place `index` of a run whose size the environment says, and call the function."""
        size = os.environ.get("WORLD_SIZE", "1")
        local = {"LOCAL_RANK": str(index), "RANK": str(index), "FORK_LAUNCHED": "1"}
        publish({"LOCAL_WORLD_SIZE": os.environ.get("LOCAL_WORLD_SIZE", size), **local})
        self.launcher(*args)


def prepare_simple_launcher_cmd_env(args: Namespace) -> tuple[list[str], dict[str, str]]:
    """Command line and variables of a launch of one process, or through mpirun."""
    plan, request = _plan(args)
    return list(plan.argv), {**request.environ, **plan.environment}


def prepare_multi_gpu_env(args: Namespace) -> dict[str, str]:
    """Variables of a launch of several processes."""
    plan, request = _plan(args)
    return {**request.environ, **plan.environment}


def prepare_deepspeed_cmd_env(args: Namespace) -> tuple[list[str] | None, dict[str, str]]:
    """Variables of a launch with DeepSpeed, and the command line of DeepSpeed's launcher where that one starts it."""
    plan, request = _plan(args)
    command = list(plan.argv) if plan.environment_file else None
    return command, {**request.environ, **plan.environment}


def prepare_tpu(args: Namespace, current_env: dict[str, str], pod: bool = False) -> tuple[Namespace, dict[str, str]]:
    """Arguments and variables of a launch on a TPU."""
    request = read_request(args, os.environ)
    current_env.update(tpu_variables(request.settings))
    if pod:
        current_env["ACCELERATE_IN_TPU_POD"] = "1"
    return args, current_env


def prepare_sagemager_args_inputs(
    sagemaker_config: Any, args: Namespace
) -> tuple[dict[str, Any], dict[str, str] | None]:
    """Arguments of SageMaker's estimator, and the places of its input data."""
    from accel_cli.config.effective import effective, label
    from accel_cli.launch.options import launch_classes
    from accel_state.settings.environ import Given
    from accel_state.settings.schema import settings_of

    request = read_request(args, os.environ)
    known = {str(one.key): label(one) for settings in launch_classes() for one in settings_of(settings).values()}
    file = {known[key]: Given(value, key) for key, value in sagemaker_config.to_dict().items() if key in known}
    settings = effective(launch_classes(), {}, request.environ, file)
    target, *arguments = args.script
    environment = common_environment(settings, carried_classes())
    job = describe_job(settings, target, arguments, environment, sagemaker_config.additional_args)
    return dict(job.estimator), None if job.inputs is None else dict(job.inputs)


def setup_fp8_env(args: Namespace, current_env: dict[str, str]) -> dict[str, str]:
    """The variables with those of training in 8 bits added."""
    return _extended(args, current_env, "ACCELERATE_FP8_")


def prepare_extend_env_parallelism_config(args: Namespace, current_env: dict[str, str]) -> dict[str, str]:
    """The variables with those of the arrangement of processes added."""
    return _extended(args, current_env, "PARALLELISM_CONFIG_", "ACCELERATE_USE_PARALLELISM_CONFIG")


def env_var_path_add(env_var_name: str, path_to_add: str) -> str:
    """A variable that holds paths, with one more at the end."""
    paths = [path for path in os.environ.get(env_var_name, "").split(os.pathsep) if path]
    return os.pathsep.join([*paths, str(path_to_add)])


def check_place() -> None:
    """Check that the process can find its place."""
    from accel_state.process import PartialState

    PartialState()


def _plan(args: Namespace) -> tuple[LaunchPlan, Request]:
    request = read_request(args, os.environ)
    target, *arguments = args.script or [""]
    script = find_script(target, arguments, args.module, args.no_python)
    machine = this_machine(request.environ)
    return make_plan(request.settings, script, machine, carried_classes(), request.backend), request


def _extended(args: Namespace, current_env: dict[str, str], *prefixes: str) -> dict[str, str]:
    variables = common_environment(read_request(args, os.environ).settings, carried_classes())
    current_env.update({name: value for name, value in variables.items() if name.startswith(prefixes)})
    return current_env
