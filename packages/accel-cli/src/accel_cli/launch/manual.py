"""The help text of `accel launch`, remembered between calls.

Its rows follow from the settings of the launcher and of every installed backend, and reading all of those takes long
for a help text. A file caches the rows with the state of every module that they depend on; a change of one of these
modules, or of the list of backends, invalidates it.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterable, Mapping
from typing import Any, Final

from accel_cli.terminal import render
from accel_state.settings.extension import extensions

__all__ = ("ESSENTIAL", "OPTIONS", "cache_path", "launch_manual")

_PREFIX: Final = "accel_"
OPTIONS: Final = (
    ("--config_file PATH", "Config file; by default the one that `accel config` wrote, if there is one."),
    ("-m, --module", "Run the script as a Python module, by its module name."),
    ("--no_python", "Run the script as a program, without Python."),
    ("-q, --quiet", "Print only the traceback of a failure."),
    ("--help-all", "Show every option."),
)
"""Options that are not settings, with their help."""

ESSENTIAL: Final = (
    *("--num_processes", "--num_machines", "--machine_rank", "--main_process_ip", "--main_process_port", "--gpu_ids"),
    *("--cpu", "--mixed_precision", "--gradient_accumulation_steps", "--backend"),
    *("--launcher", "--max_restarts", "--preflight", "--prefix_output", "--hang_timeout", "--grace_period"),
)
"""Flags that the short help text shows: those that most runs need."""

_KINDS: Final = "Kind of run"
"""Heading of the switches of the backends, which the short help text shows too."""

_SHORT_OF: Final = "accel launch"

Rows = Mapping[str, list[tuple[str, str]]]


def launch_manual(prog: str, everything: bool = False) -> str:
    """The help text of `accel launch`: the options that most runs need, or every option.

    Args:
        prog: how the command was called; under the name of the drop-in it has every option.
        everything: whether every option is shown.
    """
    usage = f"{prog} [options] script [options of the script]"
    about = "Start a script on one or many processes. Every option may also be written with dashes for underscores."
    if everything or prog != _SHORT_OF:
        return render(usage, about, {"options": OPTIONS, **_rows()})
    short = {
        heading: rows if heading == _KINDS else [row for row in rows if _flag(row[0]) in ESSENTIAL]
        for heading, rows in _rows().items()
    }
    shown = {heading: rows for heading, rows in short.items() if rows}
    end = f"`{prog} --help-all` shows every option: those of further launchers, engines and backends."
    return render(usage, about, {"options": OPTIONS, **shown}, end)


def _flag(name: str) -> str:
    """The first flag of a row that has two dashes."""
    return next((word.rstrip(",") for word in name.split() if word.startswith("--")), "")


def cache_path(environ: Mapping[str, str]) -> str:
    """Where the rows are remembered."""
    home = environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    return os.path.join(home, "accel", f"launch-help-{sys.version_info[0]}.{sys.version_info[1]}.json")


def _rows() -> Rows:
    path, offered = (
        cache_path(os.environ),
        [list(extension) for group in ("accel.backends", "accel.launchers") for extension in extensions(group)],
    )
    try:
        with open(path, encoding="utf-8") as file:
            kept = json.load(file)
        if kept["backends"] == offered and kept["modules"] == _states(kept["modules"]):
            rows: Rows = kept["rows"]
            return rows
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        # There is none yet, or somebody else's.
        pass
    rows = _made()
    _keep(path, {"backends": offered, "modules": _states(_files()), "rows": rows})
    return rows


def _made() -> Rows:
    from accel_cli.launch.options import flag_rows, launch_classes

    return flag_rows(launch_classes())


def _files() -> list[str]:
    """The modules that define the settings, and the modules of accel that they import."""
    from accel_cli.launch.options import launch_classes

    names = {settings_class.__module__ for settings_class in launch_classes()}
    names.update(name for name in sys.modules if name.startswith(_PREFIX))
    files = (getattr(sys.modules[name], "__file__", None) for name in names)
    return sorted({file for file in files if file})


def _states(files: Iterable[str]) -> dict[str, list[int]]:
    states = {}
    for file in files:
        state = os.stat(file)
        states[file] = [state.st_mtime_ns, state.st_size]
    return states


def _keep(path: str, content: Mapping[str, Any]) -> None:
    partial = f"{path}.{os.urandom(8).hex()}.tmp"
    try:
        os.makedirs(os.path.dirname(path), exist_ok=True)
        with open(partial, "w", encoding="utf-8") as file:
            json.dump(content, file)
        os.replace(partial, path)
    except OSError:
        # A folder that cannot be written costs time and nothing else.
        return
