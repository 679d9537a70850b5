"""What the launcher reads starts without torch."""

from __future__ import annotations

import json
import subprocess
import sys

LIGHT = (
    "accel_state",
    "accel_state.choices",
    "accel_state.current",
    "accel_state.devices.specs",
    "accel_state.errors",
    "accel_state.gradient",
    "accel_state.identity",
    "accel_state.kwargs",
    "accel_state.labels",
    "accel_state.library",
    "accel_state.logging",
    "accel_state.mesh",
    "accel_state.network",
    "accel_state.plugins",
    "accel_state.processors",
    "accel_state.settings.environ",
    "accel_state.settings.installed",
    "accel_state.settings.run",
    "accel_state.topology",
)

PROGRAM = """
import importlib, json, sys
found = {}
for name in json.loads(sys.argv[1]):
    importlib.import_module(name)
    found[name] = [heavy for heavy in ("torch", "numpy") if heavy in sys.modules]
from accel_state.mesh import ParallelismConfig
ParallelismConfig(tp_size=2)
found["a configuration of the mesh"] = [heavy for heavy in ("torch", "numpy") if heavy in sys.modules]
print(json.dumps(found))
"""


def test_light_modules_start_without_torch() -> None:
    command = [sys.executable, "-c", PROGRAM, json.dumps(LIGHT)]
    found = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    assert len(found) == len(LIGHT) + 1
    assert {name: heavy for name, heavy in found.items() if heavy} == {}
