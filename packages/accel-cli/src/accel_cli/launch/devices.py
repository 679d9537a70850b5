"""How many devices this machine has, found without importing torch where that is certain.

The launcher starts one process for each device. Device files tell quickly that a machine has none; where one may be
there, a process with torch is asked, because only torch knows what it can use.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from typing import Any, Final

from accel_state.devices.specs import SPECS
from accel_state.errors import LaunchError
from accel_state.settings.extension import extensions

__all__ = ("ask_torch", "best_devices", "count_devices", "usual_variables", "visible")

_DEVICE_FILES: Final = (
    "/dev/nvidia[0-9]*",
    "/dev/dxg",
    "/dev/kfd",
    "/dev/dri/renderD*",
    "/dev/davinci[0-9]*",
    "/dev/accel*",
    "/dev/cambricon*",
    "/dev/mtgpu*",
    "/dev/neuron[0-9]*",
    "/dev/sdaa*",
    "/dev/tcaicard*",
    "/dev/vfio/[0-9]*",
)

_PROBE: Final = os.path.join(os.path.dirname(os.path.abspath(__file__)), "probe.py")
_OWN_FAMILIES: Final = "accel-state "

# Plenty even where torch comes from a network file system.
_TIMEOUT: Final = 120.0


def count_devices() -> int:
    """Devices of the best family that is present, 1 for a machine with a CPU only.

    Raises:
        LaunchError: torch, asked for its devices, failed.
    """
    return max(int(best_devices()["count"]), 1) if _may_have_devices() else 1


def best_devices() -> dict[str, Any]:
    """Name, number of devices, `distributed_type` and `starter` of the best family that is present.

    Raises:
        LaunchError: torch, asked for its devices, failed.
    """
    best: dict[str, Any] = ask_torch("Cannot count the devices of this machine.")["best"]
    return best


def visible(device_ids: str) -> Mapping[str, str]:
    """Variables that show only some devices, such as "0,2"; none for "all". Each vendor's driver looks at its own."""
    names = [spec.visible_variable for spec in SPECS.values() if spec.visible_variable is not None]
    return {} if device_ids.strip().lower() == "all" else dict.fromkeys(names, device_ids)


def usual_variables() -> Mapping[str, str]:
    """Variables that processes on some device need, and that mean nothing to the others."""
    return {name: value for spec in SPECS.values() for name, value in spec.launching.items()}


def ask_torch(asked: str) -> dict[str, Any]:
    """What `probe.probe_devices` finds, in a process of its own.

    Args:
        asked: for what it is needed, for the message.

    Raises:
        LaunchError: torch could not be imported or did not answer.
    """
    import json
    import subprocess

    remedy = "Give --num_processes, or repair the installation of torch (`python -c 'import torch'`)."
    try:
        answer = subprocess.run(
            [sys.executable, _PROBE, "devices"],
            capture_output=True,
            text=True,
            timeout=_TIMEOUT,
            stdin=subprocess.DEVNULL,
            env={**os.environ, "TORCH_CPP_LOG_LEVEL": "ERROR"},
        )
    except subprocess.TimeoutExpired:
        raise LaunchError(asked, f"torch did not answer within {_TIMEOUT:.0f} s.", remedy) from None
    if answer.returncode:
        last = (answer.stderr.strip().splitlines() or [f"exit code {answer.returncode}"])[-1]
        raise LaunchError(asked, f"The query of torch failed: {last}", remedy)
    try:
        found: dict[str, Any] = json.loads(answer.stdout.strip().splitlines()[-1])
    except (IndexError, ValueError):
        raise LaunchError(asked, f"The query of torch printed {answer.stdout[-200:]!r}.", remedy) from None
    return found


def _may_have_devices() -> bool:
    if any(not extension.origin.startswith(_OWN_FAMILIES) for extension in extensions("accel.devices")):
        return True
    if not sys.platform.startswith("linux"):
        return True
    import glob

    return any(glob.glob(pattern) for pattern in _DEVICE_FILES)
