"""`accel runs report`: one file that needs nothing else, of runs that are long, damaged or still going on."""

from __future__ import annotations

import html
import json
import re
import time
from argparse import ArgumentParser
from pathlib import Path
from typing import Any

import pytest

from accel_cli.commands.runs import COMMAND
from accel_cli.report import page as report_command
from accel_cli.report.collect import thinned
from accel_cli.report.page import LIMIT
from accel_state.errors import AccelError
from accel_state.watch.record import CATEGORIES
from accel_tracking import JSONLinesTracker
from accel_tracking.record import attempt_entry, write_run_record

PARTS = ("code", "command", "settings", "packages", "devices", "world", "seeds", "environment")
CHROMIUM = ("chromium", "chromium-browser", "google-chrome")


def stored_run(folder: Path, curves: int = 2, steps: int = 50, lr: float = 0.1, planted: str = "") -> Path:
    """A run with all that a report shows: curves, an account, each kind of event, settings."""
    now = time.time() - 100
    content: dict[str, Any] = {**{part: {} for part in PARTS}, "data": []}
    content["settings"] = {"mixed_precision": {"value": "bf16", "source": f"--mixed_precision{planted}"}}
    content["seeds"] = {"torch": 1}
    for restart in range(2):
        entry = {**attempt_entry("launch", restart, "node1"), "id": str(restart), "time": now + 40 * restart}
        assert write_run_record(folder, content, entry) == ""
    tracker = JSONLinesTracker(folder.name, folder)
    tracker.start()
    tracker.store_init_configuration({"lr": lr, "hub_token": "hunter2xyz"})
    for step in range(steps):
        value = float("nan") if step == 7 else 1 / (step + 1)
        tracker.log({f"curve {number}{planted}": value + number * lr for number in range(curves)}, step=step)
    tracker.finish()
    (folder / "goodput").mkdir()
    for rank in range(2):
        lines = []
        for at in range(1, 60):
            seconds = dict.fromkeys(CATEGORIES, 0.0) | {"step": at / 2, "start-up": at / 4}
            seconds["waiting for other processes"] = at / 4 * rank
            line = {"event": "so far", "time": now + at, "began": now, "doing": "step", "step": at, "begun": at}
            lines.append(json.dumps({**line, "seconds": seconds, "memory": 2**28 + at * 2**20}))
        (folder / "goodput" / f"rank_{rank}.jsonl").write_text("\n".join([*lines, "damaged"]))
    failure = {"time": now + 39, "kind": "killed", "message": f"was killed{planted}", "reason": "restart 1 of 2"}
    (folder / "failures.jsonl").write_text(json.dumps({**failure, "fingerprint": {"step": 30}}) + "\n{")
    guard = {"time": now + 20, "step": 15, "kind": "spike", "quantity": "norm", "value": 41.5, "action": "skip"}
    (folder / "events.jsonl").write_text(json.dumps({**guard, "ranks": [1], "cause": "data"}) + "\n[]\n")
    return folder


def report(output: Path, *runs: Path) -> str:
    parser = ArgumentParser()
    COMMAND.add_arguments(parser)
    assert COMMAND.run(parser.parse_args(["report", *map(str, runs), "-o", str(output)])) == 0
    return output.read_text(encoding="utf-8")


def test_a_page_has_all_parts_and_needs_nothing_else(tmp_path: Path) -> None:
    one, other = stored_run(tmp_path / "one"), stored_run(tmp_path / "other", lr=0.2)
    page = report(tmp_path / "report.html", one, other)
    assert not re.search(r"""(?:src|href)\s*=\s*["']?\s*(?:https?:)?//""", page)
    assert not re.search(r"<link|@import|url\(|<img|<script[^>]*src", page)
    for part in ("Curves", "Time of one", "Seconds of other", "Settings and record", "Differences"):
        assert f">{part}" in page
    # Readable without scripts: a picture of each curve, of two time lines and of the memory.
    assert page.count("<svg") == 2 + 2 * 2
    assert page.count('class="mark guard" d=') == 2
    for text in ("spike norm 41.5", "was killed", "Rank 0 waited least", "hyperparameters.lr", "--mixed_precision"):
        assert text in html.unescape(page), text
    assert "hunter2xyz" not in page
    data = json.loads(re.search(r'id="data">(.*?)</script>', page, re.DOTALL)[1])  # type: ignore[index]
    assert [mark["kind"] for mark in data["marks"][0]] == ["guard", "failure", "restart"]
    assert data["charts"][0]["lines"][0][1][7] is None


def test_the_page_of_a_long_run_stays_small(tmp_path: Path) -> None:
    long = stored_run(tmp_path / "long", curves=220, steps=2000)
    page = report(tmp_path / "report.html", long, stored_run(tmp_path / "short"))
    assert len(page) < LIMIT < 2_000_000
    assert "70 more curves are left out" in page


def test_texts_of_a_run_are_no_html(tmp_path: Path) -> None:
    planted = "</script><script>alert(1)</script><img src=x onerror=alert(1)>"
    page = report(tmp_path / "report.html", stored_run(tmp_path / "run", planted=planted))
    assert "<script>alert" not in page
    assert "<img" not in page
    assert page.count("</script>") == 3


def test_thinned_curves_keep_extremes_and_gaps() -> None:
    points: list[tuple[float, float | None]] = [(float(x), float(x % 10)) for x in range(10_000)]
    points[5003], points[7001] = (5003.0, 1e6), (7001.0, None)
    kept = thinned(points, 300)
    assert len(kept) <= 300
    assert (5003.0, 1e6) in kept
    assert (7001.0, None) in kept


def test_a_folder_without_a_run_is_a_typed_error(tmp_path: Path) -> None:
    with pytest.raises(AccelError):
        report(tmp_path / "report.html", tmp_path)
    assert not (tmp_path / "report.html").exists()


def test_watching_writes_again_until_the_run_has_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    states, written = [True, True, False], []

    def write(runs: Any, output: Path, refresh: float) -> bool:
        written.append(refresh > 0)
        return states.pop(0)

    monkeypatch.setattr(report_command, "write_report", write)
    monkeypatch.setattr(report_command, "_WATCH_INTERVAL_S", 0.001)
    assert report_command.show_report(["run"], tmp_path / "report.html", watch=True) == 0
    assert written == [True, True, True]
    monkeypatch.undo()
    assert report_command.show_report([str(stored_run(tmp_path / "run"))], tmp_path / "report.html", watch=True) == 0
    assert (tmp_path / "report.html").exists()


@pytest.mark.slow
@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [390, 1280])
def test_in_a_browser(tmp_path: Path, width: int, scheme: str) -> None:
    import shutil

    playwright = pytest.importorskip("playwright.sync_api", reason="needs playwright")
    program = next(filter(None, map(shutil.which, CHROMIUM)), None)
    if program is None:
        pytest.skip("needs Chromium")
    report(tmp_path / "report.html", stored_run(tmp_path / "one"), stored_run(tmp_path / "other", lr=0.2))
    said: list[str] = []
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=program, args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": width, "height": 900}, color_scheme=scheme)
        page.on("console", lambda message: said.append(message.text))
        page.on("pageerror", lambda error: said.append(str(error)))
        page.on("request", lambda request: said.append(request.url) if not request.url.startswith("file:") else None)
        page.goto((tmp_path / "report.html").as_uri())
        page.wait_for_selector(".uplot")
        assert page.locator(".uplot").count() == 6
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        # Smoothing, a logarithmic axis, both searches, and zooming by keyboard.
        page.locator("#smooth").fill("0.9")
        page.locator("#log").check()
        page.locator("#find").fill("curve 1")
        assert page.locator(".charts figure:visible").count() == 1
        page.locator("#search").fill("mixed_precision")
        assert page.locator("#settings tbody tr:visible").count() == 2
        chart = page.locator(".chart.timeline").first
        before = chart.screenshot()
        chart.focus()
        page.keyboard.press("+")
        page.keyboard.press("ArrowRight")
        assert chart.screenshot() != before
        assert said == []
        browser.close()
