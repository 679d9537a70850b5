"""A plugin of pytest that `session.py` loads: it runs the planned tests in their order, and tells how each one goes.

It takes its orders from variables, because the process that runs tests may be ended and started again:

- GPU_SESSION_DEVICE: the kind of device whose tests are meant, "cuda" unless the session itself is tried.
- GPU_SESSION_ORDERS: JSON with "order" (modules of tests, the first ones first), "words" (all of which the name of a
  test must contain), "several" (run only tests that share GPUs), "done" (tests not to run again) and "only_list".
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
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tell what is meant for the device, the most important first, and keep what is to be run."""
    orders = json.loads(os.environ["GPU_SESSION_ORDERS"])
    rank = {module: place for place, module in enumerate(orders["order"])}
    found = [(item, facts) for item in items if (facts := _meant(item)) is not None]
    found.sort(key=lambda pair: rank.get(pair[0].path.stem, len(rank)))
    items[:] = []
    for item, facts in found:
        gpus = facts.get("gpus", 1)
        shared = gpus > 1 or "gpus" in getattr(item, "fixturenames", ()) or "OnCUDA" in item.nodeid
        if (shared or not orders["several"]) and all(word in item.nodeid for word in orders["words"]):
            _tell(event="found", test=item.nodeid, differs=facts["differs"], gpus=gpus)
            if item.nodeid not in orders["done"] and not orders["only_list"]:
                items.append(item)


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
