"""`accel runs goodput`: the table, the bar, JSON and the picture of a run."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ElementTree
from argparse import ArgumentParser

import pytest

from accel_state.errors import NotFound, SettingError
from accel_state.watch.goodput import read_goodput
from accel_state.watch.record import CATEGORIES
from accel_tracking.commands.goodput import COLORS, bar, goodput_text
from accel_tracking.commands.runs import COMMAND


@pytest.fixture
def project(tmp_path):
    folder = tmp_path / "goodput"
    folder.mkdir()
    for rank, spent in (
        (0, {"step": 50.0, "start-up": 40.0}),
        (1, {"step": 30.0, "waiting for other processes": 60.0}),
    ):
        seconds = dict.fromkeys(CATEGORIES, 0.0) | spent
        begun = {"event": "start", "time": 101.0, "began": 100.0, "attempt": 0}
        ended = {"event": "end", "time": 200.0, "began": 100.0, "step": 5, "seconds": seconds}
        (folder / f"rank_{rank}.jsonl").write_text(f"{json.dumps(begun)}\n{json.dumps(ended)}\n")
    return tmp_path


def run(*arguments):
    parser = ArgumentParser()
    COMMAND.add_arguments(parser)
    return COMMAND.run(parser.parse_args(["goodput", *map(str, arguments)]))


def test_the_table(project, capsys):
    assert run(project) == 0
    headline, stacked, heads, *rows = capsys.readouterr().out.splitlines()
    assert headline.endswith("2 processes ran for 100.0 s, 0 restarts; goodput 40.0%")
    assert set(stacked) == set("s#w?")
    assert heads.split() == ["seconds", "share", "rank", "0", "rank", "1"]
    table = {" ".join(row.split()[1:-4]): row.split()[-4:] for row in rows}
    assert set(table) == set(COLORS)
    assert table["step"] == ["40.0", "40.0%", "50.0", "30.0"]
    assert table["unattributed"] == ["10.0", "10.0%", "10.0", "10.0"]


def test_a_bar_is_as_wide_as_the_terminal(project):
    summary = read_goodput(project)
    for width in (1, 10, 77, 100):
        assert len(bar(summary, width, colored=False)) == width
    assert bar(summary, 10, colored=False) == "ss####www?"
    assert "\x1b[38;2;44;162;95m████" in goodput_text(summary, 10, colored=True)


def test_json(project, capsys):
    assert run(project, "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["wall"], found["goodput"], found["restarts"]) == (100.0, 0.4, 0)
    assert found["seconds"]["waiting for other processes"] == 30.0
    assert [one["step"] for one in found["ranks"]] == [5, 5]


def test_the_picture(project, tmp_path, capsys):
    assert run(project, "--output", tmp_path / "run.svg") == 0
    root = ElementTree.fromstring((tmp_path / "run.svg").read_text())
    texts = [one.text for one in root.iter("{http://www.w3.org/2000/svg}text")]
    assert "step: 40.0 s (40.0%)" in texts
    assert {"average", "rank 0", "rank 1"} <= set(texts)
    with pytest.raises(SettingError, match=r"ends with \.svg"):
        run(project, "--output", tmp_path / "run.png")


def test_runs_without_accounts(tmp_path):
    with pytest.raises(NotFound, match="no goodput account"):
        run(tmp_path)
    with pytest.raises(NotFound, match="no such folder"):
        run(tmp_path / "none")
