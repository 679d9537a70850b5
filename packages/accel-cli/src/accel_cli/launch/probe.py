"""Asks torch for the devices of this machine, or every backend whether it works here, in a separate process.

    python probe.py devices
    python probe.py descriptions
    python probe.py backends

The answer is JSON, on the last line of the output. The caller imports neither torch nor the backends: their imports
take long, may fail, and may use a device.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
import warnings
from typing import Any

__all__ = ("describe_devices", "main", "probe_backends", "probe_devices")


def probe_devices() -> dict[str, Any]:
    """Version of torch, the device families that are present with their numbers of devices, and the best of them."""
    import torch

    from accel_state.devices.select import best_family, failed_families, families

    best = best_family()
    present = [family for family in families() if family.present()]
    return {
        "torch": torch.__version__,
        "best": {
            "name": best.name,
            "count": best.count(),
            "label": best.spec.label.value,
            "starter": best.spec.starter,
        },
        "families": {family.name: family.count() for family in present},
        "failed": {family.name: family.fault for family in failed_families()},
    }


def describe_devices() -> dict[str, Any]:
    """What `probe_devices` returns, with a description of each device, and the versions of what drives each family.

    `silent` contains the families whose devices did not answer, with their errors. The function initialises the
    devices, which takes seconds and memory; only counting them does not.
    """
    from accel_state.devices.select import families

    answer = probe_devices()
    answer["described"], answer["software"], answer["silent"] = {}, {}, {}
    for family in families():
        if family.name not in answer["families"]:
            continue
        try:
            descriptions = {f"{family.name}:{index}": family.description(index) for index in range(family.count())}
            answer["described"].update({name: text for name, text in descriptions.items() if text})
            answer["software"].update(family.software())
        except Exception as error:
            # A broken driver is what the report is for.
            answer["silent"][family.name] = repr(error)
    return answer


def probe_backends() -> dict[str, Any]:
    """For each backend: whether it would be selected for a single process on this machine, and its error.

    `present` is None for a backend that is never selected by default; `failed` is a traceback, or empty.
    """
    from accel_plugins.resolve import BACKENDS
    from accel_state import current

    process = current.process_or_start()
    # If two packages use the same name, it selects neither.
    return {manifest.name: _ask(manifest, process) for manifest in BACKENDS.values()}


def _ask(manifest: Any, process: Any) -> dict[str, Any]:
    from accel_plugins.resolve import BACKENDS
    from accel_state.plugins import contained

    strategy = BACKENDS.part(manifest.name, manifest.strategy)
    present = BACKENDS.part(manifest.name, manifest.present) if manifest.present else None
    failure = strategy.failure or (present.failure if present else "")
    if failure:
        return {"present": None, "failed": failure}
    try:
        with contained():
            answer = None if present is None else bool(present.get("Cannot probe.")(process))
        return {"present": answer, "failed": ""}
    except Exception:
        return {"present": None, "failed": traceback.format_exc()}


def main(what: str) -> None:
    """Print what was found on the last line of the output; anything else that is written to it goes to the errors."""
    # Torch, plugins and their C libraries may write at any time, also without ending the line.
    output = os.dup(1)
    os.dup2(2, 1)
    if what == "backends":
        warnings.simplefilter("ignore")
        answer = probe_backends()
    else:
        answer = describe_devices() if what == "descriptions" else probe_devices()
    with open(output, "w", encoding="utf-8") as file:
        print(json.dumps(answer), file=file)


if __name__ == "__main__":
    # Python puts the folder of this file first; nothing must be imported from there by accident.
    if sys.path and os.path.abspath(sys.path[0]) == os.path.dirname(os.path.abspath(__file__)):
        del sys.path[0]
    main(sys.argv[1])
