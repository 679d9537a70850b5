"""Install torch_xla in a Google Colab notebook, which has torch but may have no matching torch_xla."""

from __future__ import annotations

import subprocess
import sys
from importlib.metadata import version
from typing import Final

from accel_state.errors import Missing, NotOffered
from accel_state.settings.installed import installed_version, look_again

__all__ = ("install_xla",)

_COLAB_MODULE: Final = "google.colab"
"""The module that every Colab notebook has imported before its first cell."""


def install_xla(upgrade: bool = False) -> None:
    """Install the torch_xla that matches torch, with its TPU dependencies, in a Google Colab notebook.

    Args:
        upgrade: install the newest torch_xla, and the torch that it was built for; restart the notebook afterwards if
            it had imported torch.

    Raises:
        NotOffered: this is not a notebook of Google Colab.
        Missing: pip could not install it; the message contains pip's output.
    """
    if _COLAB_MODULE not in sys.modules:
        raise NotOffered(
            "Cannot install torch_xla with install_xla() here.",
            "The function works only in a Google Colab notebook.",
            "Run once: pip install torch_xla, in the same version as torch.",
        )
    _install(f"torch_xla[tpu]{'' if upgrade else _same_series('torch')}")
    if upgrade:
        _install(f"torch{_same_series('torch_xla')}")


def _same_series(distribution: str) -> str:
    """A version specifier for the major and minor version of an installed package, such as that of 2.9.0 and 2.9.1."""
    from packaging.version import Version

    return "=={}.{}.*".format(*Version(version(distribution)).release)


def _install(requirement: str) -> None:
    command = (sys.executable, "-m", "pip", "install", "--quiet", "--upgrade", requirement)
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    look_again()
    installed_version.cache_clear()
    if done.returncode != 0:
        raise Missing(
            "Cannot install torch_xla with install_xla().",
            f"pip could not install {requirement}: {done.stderr.strip() or done.stdout.strip()}",
            "Use install_xla(upgrade=True), which installs the newest torch_xla and a matching torch.",
        )
