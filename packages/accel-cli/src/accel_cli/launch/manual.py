"""The help text of `accel launch`, which is cached in a file.

Its rows are generated from the settings of all launchers and backends, and loading these takes long for a help text.
The cache file contains the rows and the state of every module that they depend on. A change of one of these modules, of
the list of backends, or of the folders that contain them, invalidates it.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterable, Mapping
from typing import Any, Final

from accel_cli.terminal import render
from accel_state.plugins import plugins_of
from accel_state.settings.installed import folder_names

__all__ = ("ESSENTIAL", "OPTIONS", "cache_path", "launch_manual")

_PREFIX: Final = "accel_"
OPTIONS: Final = (
    ("-h, --help", "Show this help text."),
    ("--config_file PATH", "Config file; by default the one that `accel config` writes, if it exists."),
    ("-m, --module", "Run a Python module instead of a script, as python -m does."),
    ("--no_python", "Run an executable program instead of a Python script."),
    ("-q, --quiet", "Print nothing but the traceback of a failure."),
    ("--help-all", "Show every option."),
)
"""Options that are not settings, with their help."""

ESSENTIAL: Final = (
    *("--num_processes", "--num_machines", "--machine_rank", "--main_process_ip", "--main_process_port", "--gpu_ids"),
    *("--cpu", "--mixed_precision", "--gradient_accumulation_steps", "--backend"),
    *("--launcher", "--max_restarts", "--preflight", "--prefix_output", "--hang_timeout", "--grace_period"),
)
"""Flags of the short help text: those that most runs need."""

_KINDS: Final = "Kind of run"
"""Heading of the switches of the backends, which are also in the short help text."""

_SHORT_OF: Final = "accel launch"

Rows = Mapping[str, list[tuple[str, str]]]


def launch_manual(prog: str, everything: bool = False) -> str:
    """The help text of `accel launch`: the options that most runs need, or every option.

    Args:
        prog: the command as the user called it; with the name of the drop-in, the text contains every option.
        everything: whether every option is shown.
    """
    usage = f"{prog} [options] script [options of the script]"
    about = "Start a script on one or many processes. Options may also be written with dashes instead of underscores."
    if everything or prog != _SHORT_OF:
        return render(usage, about, {"options": OPTIONS, **_rows()})
    short = {
        heading: rows if heading == _KINDS else [row for row in rows if _flag(row[0]) in ESSENTIAL]
        for heading, rows in _rows().items()
    }
    shown = {heading: rows for heading, rows in short.items() if rows}
    end = f"`{prog} --help-all` shows every option, including those of further launchers, engines and backends."
    return render(usage, about, {"options": OPTIONS, **shown}, end)


def _flag(name: str) -> str:
    """The first flag of a row that starts with two dashes."""
    return next((word.rstrip(",") for word in name.split() if word.startswith("--")), "")


def cache_path(environ: Mapping[str, str]) -> str:
    """Path of the cache file."""
    home = environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    return os.path.join(home, "accel", f"launch-help-{sys.version_info[0]}.{sys.version_info[1]}.json")


def _rows() -> Rows:
    path = cache_path(os.environ)
    plugins = [list(plugin) for group in ("accel.backends", "accel.launchers") for plugin in plugins_of(group)]
    folders = _folders({target.partition(":")[0].partition(".")[0] for _, _, target, _ in plugins})
    try:
        with open(path, encoding="utf-8") as file:
            kept = json.load(file)
        same = kept["backends"] == plugins and kept["folders"] == folders
        if same and kept["modules"] == _states(kept["modules"]):
            rows: Rows = kept["rows"]
            return rows
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        # There is no cache file yet, or it has another format.
        pass
    rows = _made()
    _keep(path, {"backends": plugins, "folders": folders, "modules": _states(_files()), "rows": rows})
    return rows


def _folders(packages: Iterable[str]) -> list[str]:
    """Folders of `sys.path` that contain the packages: two environments can have other code of the same version."""
    files = {name for package in packages for name in (package, f"{package}.py")}
    return [os.path.abspath(folder) for folder in sys.path if not files.isdisjoint(folder_names(folder))]


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
        # Without a writable folder, the help text is only slower.
        return
