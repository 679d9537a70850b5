"""Asks torch for the devices of this machine, in a process of its own, and prints the answer as JSON.

python device_probe.py
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

__all__ = ("main", "probe_devices")


def probe_devices() -> dict[str, Any]:
    """Version of torch, the device families that are present with their numbers of devices, and the best of them."""
    import torch

    from accel_state.devices.select import best_family, failed_families, families

    best = best_family()
    present = [family for family in families() if family.present()]
    return {
        "torch": torch.__version__,
        "best": {"name": best.name, "count": best.count(), "label": best.label.value, "starter": best.starter},
        "families": {family.name: family.count() for family in present},
        "failed": {failure.name: repr(failure.error) for failure in failed_families()},
    }


def main() -> None:
    """Print what was found on the last line of the output."""
    print(json.dumps(probe_devices()))


if __name__ == "__main__":
    # The folder of this file came first; nothing may be imported from there by accident.
    if sys.path and os.path.abspath(sys.path[0]) == os.path.dirname(os.path.abspath(__file__)):
        del sys.path[0]
    main()
