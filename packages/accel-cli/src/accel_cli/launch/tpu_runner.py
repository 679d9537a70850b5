"""Starts a function of a script on every core of a TPU, through torch_xla.

    python tpu_runner.py main script train.py --lr 1e-3
    python tpu_runner.py main module package.train --lr 1e-3

The script is imported, not run as a program: code under `if __name__ == "__main__"` does not run, and each process
calls the given function.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
from types import ModuleType
from typing import Any

__all__ = ("call", "load_script", "main")


def main() -> None:
    """Start the processes, and wait until they have ended."""
    import torch_xla  # type: ignore[import-not-found, unused-ignore]

    function, how, target, *arguments = sys.argv[1:]
    torch_xla.launch(call, args=(function, how, target, tuple(arguments)), start_method="fork")


def call(index: int, function: str, how: str, target: str, arguments: tuple[str, ...]) -> Any:
    """Call the script's function in one of the processes."""
    del index
    sys.argv = [target, *arguments]
    return getattr(load_script(how, target), function)()


def load_script(how: str, target: str) -> ModuleType:
    """Import the script as a module."""
    if how == "module":
        sys.path.insert(0, os.getcwd())
        return importlib.import_module(target)
    path = os.path.abspath(target)
    sys.path.insert(0, os.path.dirname(path))
    return importlib.import_module(os.path.splitext(os.path.basename(path))[0])


if __name__ == "__main__":
    # The started program is not the module from which the processes import `call`.
    from accel_cli.launch.tpu_runner import main as _main

    if sys.path and os.path.abspath(sys.path[0]) == os.path.dirname(os.path.abspath(__file__)):
        del sys.path[0]
    _main()
