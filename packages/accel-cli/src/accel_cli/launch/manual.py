"""The help text of `accel launch`; its rows are generated from the settings of all launchers and backends."""

from __future__ import annotations

from typing import Final

from accel_cli.launch.options import flag_rows, launch_classes
from accel_cli.terminal import render

__all__ = ("ESSENTIAL", "OPTIONS", "launch_manual")

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


def launch_manual(prog: str, everything: bool = False) -> str:
    """The help text of `accel launch`: the options that most runs need, or every option.

    Args:
        prog: the command as the user called it; with the name of the drop-in, the text contains every option.
        everything: whether every option is shown.
    """
    all_rows = flag_rows(launch_classes())
    usage = f"{prog} [options] script [options of the script]"
    about = "Start a script on one or many processes. Options may also be written with dashes instead of underscores."
    if everything or prog != _SHORT_OF:
        return render(usage, about, {"options": OPTIONS, **all_rows})
    short = {
        heading: rows if heading == _KINDS else [row for row in rows if _flag(row[0]) in ESSENTIAL]
        for heading, rows in all_rows.items()
    }
    shown = {heading: rows for heading, rows in short.items() if rows}
    end = f"`{prog} --help-all` shows every option, including those of further launchers, engines and backends."
    return render(usage, about, {"options": OPTIONS, **shown}, end)


def _flag(name: str) -> str:
    """The first flag of a row that starts with two dashes."""
    return next((word.rstrip(",") for word in name.split() if word.startswith("--")), "")
