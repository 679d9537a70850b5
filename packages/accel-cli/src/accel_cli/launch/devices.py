"""Counts the devices of this machine, without importing torch if possible.

The launcher starts one process for each device. The absence of device files shows quickly that a machine has no
accelerator. Otherwise a separate process asks torch, because only torch knows which devices it can use.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from typing import Any, Final

from accel_state.devices.specs import SPECS
from accel_state.errors import LaunchError
from accel_state.plugins import plugins_of

__all__ = (
    "ask_probe",
    "best_devices",
    "count_device_files",
    "count_devices",
    "describe_devices",
    "usual_variables",
    "visible",
)

_DEVICE_FOLDER: Final = "/dev"
_GPU_FILES: Final = "nvidia[0-9]*"
"""One file for each GPU of NVIDIA."""

_OTHER_DEVICE_FILES: Final = (
    "dxg",
    "kfd",
    "dri/renderD*",
    "davinci[0-9]*",
    "accel*",
    "cambricon*",
    "mtgpu*",
    "neuron[0-9]*",
    "sdaa*",
    "tcaicard*",
    "vfio/[0-9]*",
)
"""Files of other drivers, from which the number of devices is not known."""

_PROBE: Final = os.path.join(os.path.dirname(os.path.abspath(__file__)), "probe.py")

# This is enough even if torch is on a network file system.
_PROBE_TIMEOUT_S: Final = 120.0


def count_devices() -> int:
    """Number of devices of the best device family, 1 on a machine without accelerators.

    Raises:
        LaunchError: the query of torch failed.
    """
    return 1 if count_device_files({}) == 0 else max(int(best_devices()["count"]), 1)


def best_devices() -> dict[str, Any]:
    """Name, number of devices, `distributed_type` and `starter` of the best device family.

    Raises:
        LaunchError: the query of torch failed.
    """
    best: dict[str, Any] = ask_torch("Cannot count the devices of this machine.")["best"]
    return best


def describe_devices(failure: str) -> dict[str, Any]:
    """The result of `probe.describe_devices`, with `undescribed`: the reason why there are no descriptions, or "".

    To describe a device, torch initialises it. If that fails, hangs or ends the process, the result has what torch
    knows without it: its version, and the number of devices of each family.

    Args:
        failure: the first sentence of an error message.

    Raises:
        LaunchError: torch does not answer without initialising a device either.
    """
    try:
        return {**ask_torch(failure, describe=True), "undescribed": ""}
    except LaunchError as error:
        counted = ask_torch(failure)
        return {**counted, "described": {}, "software": {}, "silent": {}, "undescribed": error.obstacle}


def visible(device_ids: str) -> Mapping[str, str]:
    """Variables that make only some devices visible, such as "0,2"; none for "all". Each vendor has its own."""
    names = [spec.visible_variable for spec in SPECS.values() if spec.visible_variable is not None]
    return {} if device_ids.strip().lower() == "all" else dict.fromkeys(names, device_ids)


def usual_variables() -> Mapping[str, str]:
    """Variables that processes on some device families need, and others ignore."""
    return {name: value for spec in SPECS.values() for name, value in spec.launching.items()}


def ask_torch(failure: str, describe: bool = False) -> dict[str, Any]:
    """The result of `probe.probe_devices`, from a separate process.

    Args:
        failure: the first sentence of an error message.
        describe: return the result of `probe.describe_devices`, which takes longer.

    Raises:
        LaunchError: torch could not be imported or did not answer.
    """
    answer, obstacle = ask_probe("descriptions" if describe else "devices", os.environ)
    if obstacle:
        remedy = "Set --num_processes, or repair the installation of torch (test: python -c 'import torch')."
        raise LaunchError(failure, f"The query of torch failed: {obstacle}", remedy)
    return answer


def ask_probe(what: str, environ: Mapping[str, str]) -> tuple[dict[str, Any], str]:
    """Ask torch or the backends in a separate process.

    Args:
        what: argument of `probe.py`.
        environ: variables of the process.

    Returns:
        The answer, and the reason if there is none, else "".
    """
    import json
    import subprocess

    try:
        done = subprocess.run(
            [sys.executable, _PROBE, what],
            capture_output=True,
            text=True,
            timeout=_PROBE_TIMEOUT_S,
            stdin=subprocess.DEVNULL,
            env={**environ, "TORCH_CPP_LOG_LEVEL": "ERROR"},
        )
    except subprocess.TimeoutExpired:
        return {}, f"It took longer than {_PROBE_TIMEOUT_S:.0f} s."
    if done.returncode:
        return {}, (done.stderr.strip().splitlines() or [f"Exit code {done.returncode}."])[-1]
    try:
        answer: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    except (IndexError, ValueError):
        return {}, f"It printed {done.stdout[-200:]!r}."
    return answer, ""


def count_device_files(environ: Mapping[str, str], device_ids: str = "all") -> int | None:
    """Number of accelerators that processes see, by their device files: 0 without any, None if only torch knows it.

    Args:
        environ: variables that may hide devices.
        device_ids: numbers of the devices to use, separated by commas, or "all".
    """
    if not sys.platform.startswith("linux") or any(not family.is_own for family in plugins_of("accel.devices")):
        return None
    import glob

    def files(pattern: str) -> list[str]:
        return glob.glob(os.path.join(_DEVICE_FOLDER, pattern))

    count = len(files(_GPU_FILES))
    if not count:
        return None if any(map(files, _OTHER_DEVICE_FILES)) else 0
    chosen = (
        environ.get(str(SPECS["cuda"].visible_variable), "all") if device_ids.strip().lower() == "all" else device_ids
    )
    return count if chosen == "all" else len([one for one in chosen.split(",") if one.strip()])
