"""Check that everything that must start fast starts without torch and numpy.

    python tools/check_light.py [packages folder]

The launcher, the wizard and `accel --help` read settings, manifests, configurations and tracker names long before torch
is needed. The import linter does not see what a package's `__init__` imports, so each module is imported for real
in a fresh interpreter. The rules in `LIGHT` find the modules, so they cover a new backend or command without a change.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
HEAVY = ("numpy", "torch")

# Package folder, and the files in it that must be light.
LIGHT = (
    ("accel-state", "accel_state/__init__.py"),
    ("accel-state", "accel_state/choices.py"),
    ("accel-state", "accel_state/clusters/*.py"),
    ("accel-state", "accel_state/creation.py"),
    ("accel-state", "accel_state/errors.py"),
    ("accel-state", "accel_state/labels.py"),
    ("accel-state", "accel_state/lazy.py"),
    ("accel-state", "accel_state/library.py"),
    ("accel-state", "accel_state/network.py"),
    ("accel-state", "accel_state/plugins.py"),
    ("accel-state", "accel_state/proc.py"),
    ("accel-state", "accel_state/topology.py"),
    ("accel-state", "accel_state/settings/**/*.py"),
    *(
        ("accel-state", f"accel_state/watch/{module}.py")
        for module in (
            "calls",
            "goodput",
            "processes",
            "record",
            "report",
            "runs",
            "stacks",
            "status",
        )
    ),
    ("accel-plugins", "accel_plugins/__init__.py"),
    ("accel-plugins", "accel_plugins/**/manifest.py"),
    ("accel-plugins", "accel_plugins/commands/*.py"),
    ("accel-plugins", "accel_plugins/**/config.py"),
    ("accel-plugins", "accel_plugins/checkpoint/save_policy.py"),
    ("accel-plugins", "accel_plugins/shards.py"),
    ("accel-tracking", "accel_tracking/**/*.py"),
    ("accel-cli", "accel_cli/**/*.py"),
    *(("accel-check", f"accel_check/{module}.py") for module in ("__init__", "check_*", "report", "runs")),
    ("accel-megatron", "accel_megatron/__init__.py"),
    ("accel-megatron", "accel_megatron/config.py"),
    ("accel-megatron", "accel_megatron/manifest.py"),
    ("accel-ray", "accel_ray/**/*.py"),
    ("accel-torchft", "accel_torchft/__init__.py"),
    ("accel-torchft", "accel_torchft/*manifest.py"),
    ("accel-torchft", "accel_torchft/config.py"),
    ("accel-torchft", "accel_torchft/launcher.py"),
)

# Command lines that must not need torch either.
COMMANDS = (
    ("--help",),
    ("--version",),
    ("launch", "--help"),
    ("backends", "--no_probe"),
    ("runs", "status", "--help"),
)

# Run by a fresh interpreter: imports modules, runs command lines, and prints which files imported each heavy library.
PROBE = """
import contextlib, importlib, io, json, sys, traceback

class Watch:
    found = {}
    def find_spec(self, name, path=None, target=None):
        if name in HEAVY and name not in self.found:
            stack = [f for f in traceback.extract_stack()[:-1] if not f.filename.startswith("<")]
            self.found[name] = [f"{f.filename}:{f.lineno}" for f in stack if "importlib" not in f.filename]
        return None

HEAVY, modules, commands = json.loads(sys.argv[1])
sys.meta_path.insert(0, Watch())
for module in modules:
    importlib.import_module(module)
for command in commands:
    with contextlib.redirect_stdout(io.StringIO()):
        importlib.import_module("accel_cli.main").main(command)
print(json.dumps({name: stack for name, stack in Watch.found.items() if name in sys.modules}))
"""

# What one interpreter does: the modules it imports and the command lines it runs.
Work = tuple[Sequence[str], Sequence[Sequence[str]]]


def light_modules(packages: Path) -> list[str]:
    """Names of the modules that must be light.

    Raises:
        SystemExit: a rule matches no file, so it would prove nothing.
    """
    found: dict[str, None] = {}
    for package, pattern in LIGHT:
        source = packages / package / "src"
        paths = (path.relative_to(source) for path in sorted(source.glob(pattern)))
        files = [path for path in paths if path.name != "__main__.py"]
        if not files:
            sys.exit(f"light: the rule {package}/{pattern} matches no file; correct it in {Path(__file__).name}")
        found.update(dict.fromkeys(map(module_name, files)))
    return list(found)


def module_name(path: Path) -> str:
    """`a/b/__init__.py` to `a.b`, `a/c.py` to `a.c`."""
    return ".".join(path.with_suffix("").parts).removesuffix(".__init__")


def brought_by(work: Work, packages: Path) -> dict[str, list[str]]:
    """For each heavy library that this work loads: the files and lines that imported it.

    Raises:
        SystemExit: the work itself failed.
    """
    environment = dict(os.environ)
    environment["PYTHONPATH"] = os.pathsep.join(str(path) for path in sorted(packages.glob("*/src")))
    command = [sys.executable, "-c", PROBE, json.dumps([HEAVY, *work])]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        sys.exit(f"light: {name_of(work)} failed:\n{done.stderr}")
    found: dict[str, list[str]] = json.loads(done.stdout.splitlines()[-1])
    return found


def name_of(work: Work) -> str:
    """The name of a piece of work in a message."""
    modules, commands = work
    return ", ".join([*modules, *(" ".join(("accel", *command)) for command in commands)])


def main(arguments: list[str]) -> int:
    """Checks every light module and command line, and returns the exit code."""
    packages = Path(arguments[0]) if arguments else ROOT / "packages"
    modules = light_modules(packages)
    if not brought_by((modules, COMMANDS), packages):
        print(f"light: {len(modules)} modules and {len(COMMANDS)} commands start without {' and '.join(HEAVY)}")
        return 0
    # Only now one interpreter for each, to name every module at fault.
    pieces: list[Work] = [([module], []) for module in modules]
    pieces += [([], [command]) for command in COMMANDS]
    for work in pieces:
        for library, lines in brought_by(work, packages).items():
            way = " > ".join(lines[-3:]) or "a file without source"
            print(f"light: {name_of(work)} loads {library}, by way of {way}", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
