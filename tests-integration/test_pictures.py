"""Pictures of real runs: each is drawn from the committed figures, says what it shows, and is shown on a page."""

from __future__ import annotations

import json
import re
from pathlib import Path
from xml.etree import ElementTree

import pytest

from documents import pages
from drawing.real_runs import account_of
from drawing.svg import Axes, Drawing, ticks
from drawing.terminal import recording
from pictures import FIGURES, PICTURES, STATIC, drawn

ROOT = Path(__file__).resolve().parents[1]
SVG = "{http://www.w3.org/2000/svg}"


@pytest.fixture(scope="module")
def pictures() -> dict[str, str]:
    return drawn(json.loads(FIGURES.read_text(encoding="utf-8")))


@pytest.mark.parametrize("name", PICTURES)
def test_a_picture_is_drawn_from_the_committed_figures(pictures: dict[str, str], name: str) -> None:
    assert (STATIC / name).read_text(encoding="utf-8") == pictures[name]


@pytest.mark.parametrize("name", PICTURES)
def test_a_picture_says_what_it_shows_and_needs_nothing_else(pictures: dict[str, str], name: str) -> None:
    root = ElementTree.fromstring(pictures[name])
    assert root.findtext(f"{SVG}title")
    assert len(root.findtext(f"{SVG}desc") or "") > 60
    assert root.find(f".//{SVG}script") is None
    assert not re.search(r"(href|src)=|url\(|@import", pictures[name])


@pytest.mark.parametrize("name", PICTURES)
def test_a_picture_is_shown_with_a_text_for_those_who_do_not_see_it(name: str) -> None:
    texts = [text for page in pages() for text in re.findall(rf"!\[([^\]]*)\]\([^)]*_static/{name}\)", page.text)]
    assert texts
    assert all(len(text) > 20 for text in texts)


def test_a_run_that_was_started_again_continues_exactly() -> None:
    assert json.loads(FIGURES.read_text(encoding="utf-8"))["killed run"]["largest_difference"] == 0


def test_plans_are_within_5_percent_of_what_was_allocated() -> None:
    for row in json.loads(FIGURES.read_text(encoding="utf-8"))["memory of plans"]:
        assert row["estimated"]["Total"] == pytest.approx(row["allocated"], rel=0.05), row["plan"]


def test_points_are_drawn_to_scale() -> None:
    axes = Axes(Drawing("a", "b", 100, 100), (10, 20, 80, 60), x=(0, 4), y=(1, 3))
    assert [axes.at(0, 1), axes.at(4, 3), axes.at(2, 2)] == [(10, 80), (90, 20), (50, 50)]


@pytest.mark.parametrize(
    ("low", "high", "most", "expected"),
    [(0, 47, 5, [0, 10, 20, 30, 40]), (0, 1, 4, [0, 0.5, 1]), (-3, 3, 3, [-2, 0, 2]), (0, 90, 2, [0, 50])],
)
def test_numbers_of_an_axis_are_round(low: float, high: float, most: int, expected: list[float]) -> None:
    assert ticks(low, high, most) == expected


def test_a_text_is_no_markup() -> None:
    drawing = Drawing("<a>", "&", 10, 10)
    drawing.text((0, 0), "<script>")
    assert ElementTree.fromstring(drawing.svg()).findtext(f"{SVG}text") == "<script>"


def test_a_recording_ends_within_five_seconds_with_every_line() -> None:
    text = recording("a", "b", [(0.0, "$ one"), (60.0, "two   <3>"), (90.0, f"# {'three' * 20}")])
    lines = ElementTree.fromstring(text).findall(f"{SVG}text")
    assert [line.text for line in lines] == ["$ one", "two   <3>", f"# {'three' * 19}t", "hree"]
    delays = [float(delay) for delay in re.findall(r"animation-delay: ([\d.]+)s", text)]
    assert (delays[0], max(delays) < 5) == (0, True)
    assert "@media (prefers-reduced-motion: no-preference) { .later { animation" in text
    assert text.count("animation: ") == 1


def test_the_account_of_two_starts_counts_the_time_between_them_as_down() -> None:
    line = {"began": 102.0, "time": 110.0, "seconds": {"step": 6.0, "start-up": 2.0}}
    again = {"began": 115.0, "time": 120.0, "seconds": {"step": 5.0}}
    times, seconds = account_of([again, line], 100.0)
    assert times == [0.0, 2.0, 10.0, 15.0, 20.0]
    assert seconds["down"] == [0, 0, 0, 5, 5]
    assert seconds["start-up"] == [0, 2, 4, 4, 4]
    assert seconds["step"] == [0, 0, 6, 6, 11]
