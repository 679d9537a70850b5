"""`accel runs report RUN [RUN ...]`: one HTML file about runs, and the same again while a run goes on."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from accel_cli.report.collect import collect_run
from accel_cli.report.page import report_page
from accel_state.errors import AccelError, SettingError
from accel_state.untrusted import printable
from accel_tracking.difference import differences_of

__all__ = ("show_report", "write_report")

_PAUSE: Final = 5


def write_report(runs: Sequence[str], output: Path, refresh: int = 0) -> bool:
    """Write the report of runs, and return whether one of them still runs.

    Raises:
        AccelError: a folder has no run.
        SettingError: the file cannot be written.
    """
    collected = [collect_run(run) for run in runs]
    difference = None
    if len(runs) == 2:
        try:
            difference = differences_of(runs[0], runs[1])
        except AccelError:
            # A run from before there were records has curves to compare.
            difference = None
    running = any((run["goodput"] or {}).get("running") for run in collected)
    page = report_page(collected, difference, refresh if running else 0)
    partial = output.with_name(f".{output.name}.{os.getpid()}")
    try:
        partial.write_text(page, encoding="utf-8")
        os.replace(partial, output)
    except OSError as error:
        failed = f"Cannot write the report {str(output)!r}."
        raise SettingError(failed, f"The system reports: {error}.", "Choose another file with -o.") from error
    return running


def show_report(runs: Sequence[str], output: Path, watch: bool) -> int:
    """Write the report, and write it again every few seconds while a run goes on; return the exit code."""
    running = write_report(runs, output, _PAUSE if watch else 0)
    print(printable(f"Report written to {output}"), flush=True)
    while watch and running:
        time.sleep(_PAUSE)
        running = write_report(runs, output, _PAUSE)
    return 0
