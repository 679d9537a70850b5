"""Starts the processes of a TPU through torch_xla, or on every machine of a pod through torch_xla's own launcher."""

from __future__ import annotations

import os
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Final

from accel_cli.config.resolved import REPEATED
from accel_cli.launch.interface import LauncherManifest, LaunchPlan
from accel_cli.launch.program import ProgramLauncher
from accel_state.errors import NotOffered, SettingError
from accel_state.settings.run import XLASettings
from accel_state.settings.schema import BOOLEAN, field_of, setting, settings_of

if TYPE_CHECKING:
    from accel_cli.launch.interface import LaunchRequest

__all__ = ("MANIFEST", "RUNNER_OF_TPU", "TPUSettings", "Tpu")

_tpu: Final = partial(setting, flag="--{name}", key="{name}", group="TPU")


@dataclass
class TPUSettings:
    """Settings of a run on TPUs; see also `accel tpu-config`."""

    main_training_function: str = _tpu(
        "main",
        help="Function of the script that each TPU process runs.",
    )
    downcast_bf16: bool = field_of(settings_of(XLASettings)["downcast_bf16"])
    tpu_use_cluster: bool = _tpu(
        False,
        type=BOOLEAN,
        flag="--tpu_cluster",
        help="Run on a TPU pod.",
    )
    tpu_use_sudo: bool = _tpu(
        False,
        type=BOOLEAN,
        help="Run commands on the pod as root.",
    )
    tpu_vm: tuple[str, ...] = _tpu(
        (),
        type=REPEATED,
        flag="--vm",
        help="Address of a machine of the pod; may be repeated.",
    )
    tpu_env: tuple[str, ...] = _tpu(
        (),
        type=REPEATED,
        flag="--env",
        help="Environment variable for the machines of the pod, as NAME=value; may be repeated.",
    )
    tpu_name: str | None = _tpu(None, flag=None, help="Name of the TPU.")
    tpu_zone: str | None = _tpu(None, flag=None, help="Google Cloud zone of the TPU.")
    command_file: str | None = _tpu(None, flag=None, help="File with commands for `accel tpu-config`.")
    commands: tuple[str, ...] = _tpu((), flag=None, type=REPEATED, help="Commands for `accel tpu-config`.")


def _by_tpu(request: LaunchRequest) -> str | None:
    selection = request.selection
    return selection.source.text if selection is not None and "xla" in selection.names else None


MANIFEST: Final = LauncherManifest(
    "tpu",
    "accel_cli.launch.tpu:Tpu",
    "start the processes of a TPU or of a pod through torch_xla",
    "accel_cli.launch.tpu:TPUSettings",
    _by_tpu,
    priority=30,
)

RUNNER_OF_TPU: Final = os.path.join(os.path.dirname(os.path.abspath(__file__)), "tpu_runner.py")
"""The program in which torch_xla starts a function of the script."""

_POD_LAUNCHER: Final = "torch_xla.distributed.xla_dist"
_IN_POD: Final = "ACCELERATE_IN_TPU_POD"
_BFLOAT16: Final = "bf16"


_OPTIONS_OF_POD: Final = {"script": (), "module": ("--module",), "program": ("--no_python",)}
"""Options of `accel launch` on the machines of a pod, by the value of `Script.how`."""


class Tpu(ProgramLauncher):
    """Starts the processes of a TPU or of a pod through torch_xla; see `Launcher`."""

    def plan(self, request: LaunchRequest) -> LaunchPlan:
        """Plan one process, in which torch_xla starts the others.

        Raises:
            NotOffered: the target is not Python.
            SettingError: the pod has no name, or a variable for its machines has no value.
        """
        own = request.settings.instance(TPUSettings)
        variables = {}
        if request.settings["mixed_precision"].value == _BFLOAT16:
            variables["XLA_DOWNCAST_BF16" if own.downcast_bf16 else "XLA_USE_BF16"] = "1"
        argv = _pod_argv(request, own) if own.tpu_use_cluster else _argv(request, own)
        return request.plan_of_program((request.machine.python, *argv), 1, **variables)


def _argv(request: LaunchRequest, own: TPUSettings) -> tuple[str, ...]:
    """Arguments of the interpreter, to start the processes of this machine's TPU."""
    how, target, arguments = request.script
    if how == "program":
        raise NotOffered(
            "Cannot combine --tpu and --no_python.",
            "torch_xla can only start a function of a Python module.",
            "Give a Python script, and the name of its function as --main_training_function.",
        )
    return (RUNNER_OF_TPU, own.main_training_function, how, target, *arguments)


def _pod_argv(request: LaunchRequest, own: TPUSettings) -> tuple[str, ...]:
    """Arguments of the interpreter, to run `accel launch` on every machine of a pod."""
    if not own.tpu_name:
        raise SettingError(
            "Cannot launch on a TPU pod (tpu_use_cluster).",
            "The name of the TPU is missing.",
            "Add tpu_name to the config file.",
        )
    for variable in own.tpu_env:
        if "=" not in variable:
            raise SettingError(
                f"Cannot pass --env {variable}.", "The variable has no value.", "Write it as --env NAME=value"
            )
    how, target, arguments = request.script
    return (
        "-m",
        _POD_LAUNCHER,
        f"--tpu={own.tpu_name}",
        *(f"--vm={machine}" for machine in own.tpu_vm),
        *(f"--env={variable}" for variable in (*own.tpu_env, f"{_IN_POD}=1")),
        "--",
        *(("sudo",) if own.tpu_use_sudo else ()),
        *("python3", "-m", "accel_cli.main", "launch", "--tpu", "--no_tpu_cluster"),
        f"--mixed_precision={request.settings['mixed_precision'].value}",
        f"--main_training_function={own.main_training_function}",
        *_OPTIONS_OF_POD[how],
        target,
        *arguments,
    )
