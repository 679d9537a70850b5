"""What the driver's own program, nvidia-smi, tells about NVIDIA GPUs; for the launcher, which never loads torch."""

from __future__ import annotations

import shutil
import subprocess
from typing import Final

from accel_state.errors import NotOffered

__all__ = ("WITHOUT_P2P", "check_cuda_p2p_ib_support", "get_driver_version", "get_gpu_info", "lacks_p2p")

WITHOUT_P2P: Final = ("NCCL_P2P_DISABLE", "NCCL_IB_DISABLE")
"""Variables that forbid NCCL what `check_cuda_p2p_ib_support` says it may not try."""

_SERIES: Final = "RTX 40"
"""Cards of this series cannot reach each other's memory."""

_KNOWS_P2P: Final = (550, 40, 7)
"""First driver that knows of it; with older ones NCCL has to be told not to try."""

_TIMEOUT: Final = 30.0


def _ask(question: str) -> list[str] | None:
    """One line for each GPU, or None when there is no driver."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return None
    command = [program, f"--query-gpu={question}", "--format=csv,noheader"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT, check=False)
    return done.stdout.splitlines() if done.returncode == 0 else None


def get_gpu_info() -> tuple[list[str], int]:
    """Names and number of the NVIDIA GPUs of this machine."""
    names = [name.strip() for name in _ask("name") or []]
    return names, len(names)


def get_driver_version() -> str:
    """Version of NVIDIA's driver.

    Raises:
        NotOffered: there is none.
    """
    versions = _ask("driver_version")
    if not versions:
        raise NotOffered(
            "The version of NVIDIA's driver was asked for.",
            "nvidia-smi is not there, or found no GPU.",
            "Install the driver.",
        )
    return versions[0].strip()


def lacks_p2p(name: str) -> bool:
    """Whether GPUs of this name cannot reach each other's memory."""
    return _SERIES in name


def check_cuda_p2p_ib_support() -> bool:
    """Whether NCCL may try to let GPUs reach each other directly, or over InfiniBand; False asks to forbid it."""
    names, count = get_gpu_info()
    if count < 2 or not any(map(lacks_p2p, names)):
        return True
    return tuple(int(part) for part in get_driver_version().split(".")) >= _KNOWS_P2P
