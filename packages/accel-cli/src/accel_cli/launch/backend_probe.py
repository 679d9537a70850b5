"""Asks every installed backend whether a process started here alone would be its own, and prints the answers as JSON.

python probe.py

It runs in a process of its own: backends may import torch and whatever else they need to answer.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import traceback
import warnings
from typing import Any

__all__ = ("main", "probe_backends")


def probe_backends() -> dict[str, Any]:
    """By name of backend: whether it is `present` (None when it has to be named), and a traceback of what `failed`."""
    from accel_plugins import resolve
    from accel_state import current

    process = current.process_or_start()
    # A name that two packages use selects neither.
    return {found.name: _ask(found.manifest, process) for found in resolve.available() if found.manifest is not None}


def _ask(manifest: Any, process: Any) -> dict[str, Any]:
    try:
        _imported(manifest.strategy)
        present = None if manifest.present is None else bool(_imported(manifest.present)(process))
    except Exception:
        return {"present": None, "failed": traceback.format_exc()}
    return {"present": present, "failed": ""}


def _imported(target: str) -> Any:
    module, _, attribute = target.partition(":")
    return getattr(importlib.import_module(module), attribute)


def main() -> None:
    """Print what was found on the last line of the output."""
    warnings.simplefilter("ignore")
    print(json.dumps(probe_backends()))


if __name__ == "__main__":
    # The folder of this file came first; nothing may be imported from there by accident.
    if sys.path and os.path.abspath(sys.path[0]) == os.path.dirname(os.path.abspath(__file__)):
        del sys.path[0]
    main()
