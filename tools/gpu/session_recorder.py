"""A plugin of pytest that `session.py` loads: it runs the planned tests in their order, and tells how each one goes.

It takes its orders from variables, because the process that runs tests may be ended and started again:

- GPU_SESSION_DEVICE: the kind of device whose tests are meant, "cuda" unless the session itself is tried.
- GPU_SESSION_PLAN: a JSON list of the tests to run, in order; without it all are listed and none is run.
- GPU_SESSION_EVENTS: the file that gets one line of JSON for each thing that happened.
"""

from __future__ import annotations

import gc
import json
import os
import time
from pathlib import Path
from typing import Any

import pytest

__all__: tuple[str, ...] = ()

_DEVICE = os.environ.get("GPU_SESSION_DEVICE", "cuda")
_EVENTS = Path(os.environ["GPU_SESSION_EVENTS"])
_MOST_TEXT = 6000
"""Characters of a failure that are kept: the last ones, which have the error."""


def _tell(**event: Any) -> None:
    with _EVENTS.open("a", encoding="utf-8") as file:
        file.write(json.dumps(event) + "\n")


def _meant(item: Any) -> dict[str, Any] | None:
    """What the mark of a test says, if the test is meant for the device; None otherwise."""
    mark = next(item.iter_markers("cuda"), None)
    if _DEVICE == "cuda":
        return None if mark is None else dict(mark.kwargs)
    callspec = getattr(item, "callspec", None)
    return {"differs": "(the same body on another device)"} if callspec and _kind(callspec) == _DEVICE else None


def _kind(callspec: Any) -> Any:
    return callspec.params.get("device")


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Keep what is planned; without a plan, tell what there is."""
    found = {item.nodeid: (item, facts) for item in items if (facts := _meant(item)) is not None}
    planned = os.environ.get("GPU_SESSION_PLAN")
    if planned is None:
        for name, (item, facts) in found.items():
            shared = "gpus" in getattr(item, "fixturenames", ()) or "OnCUDA" in name
            _tell(event="found", test=name, differs=facts["differs"], gpus=facts.get("gpus", 1), shared=shared)
        items[:] = []
        return
    items[:] = [found[name][0] for name in json.loads(Path(planned).read_text(encoding="utf-8")) if name in found]


def pytest_collectreport(report: pytest.CollectReport) -> None:
    """Tell of modules that cannot be imported here."""
    if report.failed:
        _tell(event="unreadable", test=report.nodeid, text=report.longreprtext[-_MOST_TEXT:])


class _Running:
    """What is known of the test that runs."""

    outcome = "passed"
    text = ""
    begun = 0.0


def pytest_runtest_logstart(nodeid: str) -> None:
    """Tell that a test begins."""
    _Running.outcome, _Running.text, _Running.begun = "passed", "", time.monotonic()
    _tell(event="start", test=nodeid)


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Remember the first thing that went wrong, or why the test was skipped."""
    if _Running.outcome != "passed" or report.passed:
        return
    expected = hasattr(report, "wasxfail")
    _Running.outcome = "expected failure" if expected else "skipped" if report.skipped else "failed"
    place: Any = report.longrepr
    skipped = report.skipped and isinstance(place, tuple)
    _Running.text = str(place[2]) if skipped else report.longreprtext[-_MOST_TEXT:]


def pytest_runtest_logfinish(nodeid: str) -> None:
    """Tell how the test ended; end this process when the device is of no use to it any more."""
    seconds = round(time.monotonic() - _Running.begun, 2)
    _tell(event="end", test=nodeid, outcome=_Running.outcome, seconds=seconds, text=_Running.text)
    trouble = _trouble()
    if trouble:
        _tell(event="broken", test=nodeid, text=trouble)
        # An error of the device stays with its process, and leaving in order would wait for it.
        os._exit(3)


def _trouble() -> str:
    """What the device says after a test: a kernel that failed spoils every later call of its process."""
    import torch

    cuda: Any = torch.cuda
    gc.collect()
    if not cuda.is_initialized():
        return ""
    try:
        cuda.synchronize()
        cuda.empty_cache()
        cuda.set_per_process_memory_fraction(1.0)
    except RuntimeError as error:
        return str(error)
    return ""
