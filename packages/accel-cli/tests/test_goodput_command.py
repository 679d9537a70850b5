"""`accel runs goodput`: the table and the JSON of a run."""

from __future__ import annotations

import json
from argparse import ArgumentParser

import pytest

from accel_cli.commands.runs import COMMAND
from accel_state.errors import NotFound
from accel_state.watch.record import CATEGORIES


@pytest.fixture
def project(tmp_path):
    folder = tmp_path / "goodput"
    folder.mkdir()
    for rank, spent in (
        (0, {"step": 50.0, "start-up": 40.0}),
        (1, {"step": 30.0, "waiting for other processes": 60.0}),
    ):
        seconds = dict.fromkeys(CATEGORIES, 0.0) | spent
        ended = {"event": "end", "time": 200.0, "began": 100.0, "doing": "down", "step": 5, "begun": 5}
        (folder / f"rank_{rank}.jsonl").write_text(json.dumps(ended | {"seconds": seconds}) + "\n")
    return tmp_path


def run(*arguments):
    parser = ArgumentParser()
    COMMAND.add_arguments(parser)
    return COMMAND.run(parser.parse_args(["goodput", *map(str, arguments)]))


def test_the_table(project, capsys):
    assert run(project) == 0
    headline, heads, *rows = capsys.readouterr().out.splitlines()
    assert headline.endswith("2 processes ran for 100.0 s, 0 restarts; goodput 40.0%")
    assert heads.split() == ["seconds", "share", "rank", "0", "rank", "1"]
    table = {row[:27].strip(): row[27:].split() for row in rows}
    assert set(table) == {*CATEGORIES, "unattributed"}
    assert table["step"] == ["40.0", "40.0%", "50.0", "30.0", "########"]
    assert table["unattributed"] == ["10.0", "10.0%", "10.0", "10.0", "##"]
    assert table["down"] == ["0.0", "0.0%", "0.0", "0.0"]


def test_json(project, capsys):
    assert run(project, "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["wall"], found["goodput"], found["restarts"]) == (100.0, 0.4, 0)
    assert found["seconds"]["waiting for other processes"] == 30.0
    assert [one["step"] for one in found["ranks"]] == [5, 5]


def test_runs_without_accounts(tmp_path):
    with pytest.raises(NotFound, match="no goodput account"):
        run(tmp_path)
    with pytest.raises(NotFound, match="no such folder"):
        run(tmp_path / "none")
